"""Small and quick: does each method predict retraining on scikit-learn's digits?

    python -m experiments.digits_retraining [--work DIR] [--record FILE]

Logistic regression (650 weights) and an MLP (64-32-10, 2,410 weights) on 600 digits, 200 test digits as queries, 100
random halves. Logistic regression is trained to its optimum, so one seed is enough; the MLP, 30 epochs of AdamW, is
trained with two. BIF, gradient similarity, exact influence, EK-FAC at three dampings, TRAK with one and with five
checkpoints, and the controls. The settings of the BIF were not chosen by these numbers: for the regression they are the
posterior of the trained objective itself, for the MLP those of `jostle demo images`, found by the LDS on another split.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.environment import write_record
from torch import Tensor, nn

import jostle
from jostle.attributors import ekfac, exact_influence, gradient_similarity, trak
from jostle.evaluate import Bank, Trainer, compare, random_subsets, retrain
from jostle.evaluate.report import draw_rows
from jostle.scores import Scores

HERE = Path(__file__).parent
TRAIN, QUERIES, SUBSETS = 600, 200, 100
DECAY = 0.01
"""Of the regression: mean loss + DECAY/2·‖w‖²."""

MLP_EPOCHS, MLP_BATCH, MLP_RATE, MLP_DECAY = 30, 64, 3e-3, 1e-2


def digits(train: int = TRAIN, queries: int = QUERIES) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    X, y = torch.tensor(pixels[order] / 16, dtype=torch.float32), torch.tensor(labels[order])
    return (X[:train], y[:train]), (X[train : train + queries], y[train : train + queries])


class Regression:
    """Trains to the optimum; from zero, so that there is no seed."""

    name = "logistic regression"
    seeds = 1

    def __init__(self, train: tuple[Tensor, Tensor]) -> None:
        self.train = train

    def __call__(self, indices: np.ndarray, seed: int) -> nn.Module:
        X, y = self.train[0][indices], self.train[1][indices]
        model = nn.Sequential(nn.Linear(64, 10))
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=100, line_search_fn="strong_wolfe")

        def objective() -> Tensor:
            optimizer.zero_grad()
            squares = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
            value = F.cross_entropy(model(X), y) + DECAY / 2 * squares
            value.backward()
            return value

        optimizer.step(lambda: objective().item())
        return model

    def posterior(self) -> jostle.Posterior:
        # n·(mean loss + decay/2·‖w‖²): around the optimum, localization is n·decay.
        n = len(self.train[1])
        return jostle.Posterior(n_beta=n, localization=n * DECAY)

    sampler = jostle.SGLD(step_size=2e-3)


class Perceptron(Trainer):
    """A hidden layer of 32, trained by AdamW; many of them at once."""

    name = "MLP"
    seeds = 2

    def __init__(self, train: tuple[Tensor, Tensor]) -> None:
        super().__init__(
            lambda seed: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
            train,
            lambda parameters: torch.optim.AdamW(parameters, lr=MLP_RATE, weight_decay=MLP_DECAY),
            epochs=MLP_EPOCHS,
            batch_size=MLP_BATCH,
        )

    def posterior(self) -> jostle.Posterior:
        return jostle.Posterior(n_beta=1000, localization=100)

    sampler = jostle.SGLD(step_size=3e-4)


def methods(
    task: Any, train: Any, query: Any, *, draws: int, with_ekfac: bool = True
) -> tuple[dict[str, Scores], dict[str, float]]:
    """Every method's scores and seconds; all see the same model, data and weights."""
    everything = np.arange(len(train[1]))
    model = task(everything, 0)
    posterior = task.posterior()
    scores: dict[str, Scores] = {}
    seconds: dict[str, float] = {}

    def add(name: str, make: Callable[[], Scores]) -> None:
        started = time.perf_counter()
        scores[name] = make()
        seconds[name] = time.perf_counter() - started

    with tempfile.TemporaryDirectory() as directory:
        blind = jostle.Posterior(n_beta=0, localization=posterior.localization)
        for label, sampler, at, burn_in, thin in (
            ("BIF", task.sampler, posterior, 200, 10),
            ("BIF without gradients", jostle.Gaussian(), blind, 1, 1),  # every step is a new draw
        ):
            started = time.perf_counter()
            run = jostle.attribute(
                model, train, query, posterior=at, sampler=sampler, chains=8, draws=draws, burn_in=burn_in, thin=thin,
                batch_size=256, progress=False, out=Path(directory) / label,
            )  # fmt: skip
            for kind in ("covariance", "correlation"):
                scores[f"{label}, {kind}"] = run.influence(normalize=kind == "correlation")
                seconds[f"{label}, {kind}"] = time.perf_counter() - started
    add("exact influence", lambda: exact_influence(model, train, query, posterior=posterior))
    if with_ekfac:
        chosen = posterior.localization / posterior.n_beta  # what the exact method is damped by
        for label, damping in (("default damping", None), ("damping 1e-8", 1e-8), (f"damping {chosen:g}", chosen)):
            add(f"EK-FAC, {label}", lambda damping=damping: ekfac(model, train, query, damping=damping, batch_size=100))
    add("TRAK", lambda: trak(model, train, query))
    several = [model, *(task(everything, seed) for seed in range(1, 5))] if task.seeds > 1 else [model]
    if len(several) > 1:
        add("TRAK, 5 checkpoints", lambda: trak(several, train, query))
    add("GradSim", lambda: gradient_similarity(model, train, query))
    add("gradient cosine", lambda: gradient_similarity(model, train, query, cosine=True))
    return scores, seconds


def bank_of(task: Any, train: Any, query: Any, out: Path, subsets: int) -> Bank:
    return retrain(task, train, query, subsets=random_subsets(len(train[1]), subsets), out=out, seeds=task.seeds)


def main() -> None:
    parser = argparse.ArgumentParser(description="LDS of every method on scikit-learn's digits.")
    parser.add_argument("--work", type=Path, help="keep the banks here; they are not made again")
    parser.add_argument("--record", type=Path, default=HERE / "records" / "digits_retraining.json")
    arguments = parser.parse_args()
    from matplotlib.figure import Figure

    torch.set_num_threads(1)
    train, query = digits()
    record: dict[str, Any] = {"train": TRAIN, "queries": QUERIES, "subsets": SUBSETS, "share": 0.5, "tasks": {}}
    figure = Figure(figsize=(11, 10), layout="constrained")
    parts: Any = figure.subfigures(2, 1)
    with tempfile.TemporaryDirectory() as temporary:
        for part, kind in zip(parts, (Regression, Perceptron), strict=True):
            task = kind(train)
            started = time.perf_counter()
            bank = bank_of(task, train, query, (arguments.work or Path(temporary)) / task.name, SUBSETS)
            retraining = time.perf_counter() - started
            scores, seconds = methods(task, train, query, draws=100)
            report = compare(bank, scores, seconds=seconds)
            record["tasks"][task.name] = {"seeds": task.seeds, "retraining_seconds": retraining, **report.to_dict()}
            for row in report.rows:
                print(f"{task.name:20} {row.method:34} {row.per_query}   {row.per_subset}   {row.seconds or 0:6.1f} s")
            print(f"{task.name}: repeatability {report.repeatability}, retraining {retraining:.0f} s", flush=True)
            draw_rows(part, report.rows)
            part.suptitle(task.name, fontweight="bold")
    write_record(arguments.record, record)
    figure.savefig(arguments.record.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main()

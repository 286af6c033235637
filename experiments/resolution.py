"""At which resolution should influence be read, and how much should the losses count?

    python -m experiments.resolution [--only mlp,cnn]      samples what the record lacks
    python -m experiments.resolution --only "" --figure docs/images/resolution.png

For small models that are trained here, from nothing or by fine-tuning: a bank of retrainings on random halves of the
training set, and the linear datamodeling score (LDS; Spearman over subsets for each query, then the mean over queries)
of the BIF over a grid of rises of the mean loss (in nats; they set the localization) and of κ = nβ·λmax/γ.
κ = 0 is the control without a gradient. Gradient similarity stands beside them. `jostle.calibration` takes its defaults
from here; models on which results are reported elsewhere are not among these.

The record grows with each setting, and a later call goes on with those it lacks.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import json
import math
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.environment import write_record
from sklearn.datasets import load_digits
from torch import Tensor, nn

import jostle
from jostle.attributors import gradient_similarity
from jostle.calibration import calibrate
from jostle.data.datasets import Data
from jostle.demo import bilingual
from jostle.evaluate import Bank, Measure, Subsets, lds, repeatability
from jostle.losses import Loss
from jostle.models.functional import FunctionalModel, SideBySide
from jostle.models.weights import MovingWeights
from jostle.scores import Scores

RECORD = Path(__file__).parent / "records" / "resolution.json"
RISES = (0.01, 0.03, 0.1, 0.3, 1.0)
KAPPAS = (0.0, 1.0, 3.0, 10.0)
SUBSETS, SHARE = 48, 0.5
TOGETHER = 12
"""So many models are retrained side by side."""

CHAINS = 4


@dataclass
class Problem:
    """A way to train a small model, and what its influence is asked for."""

    make: Callable[[], nn.Module]
    train: Any
    query: Any
    loss: Loss
    epochs: int
    batch_size: int
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    seeds: tuple[int, ...] = (1, 2)
    """Of the initial weights of every retraining; the model itself has seed 0."""
    pretrain: Any = None
    """What every model has read before, where it is fine-tuned."""
    draws: int = 150
    sampling_batch_size: int = 100


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images.unflatten(1, (1, 8, 8)))


class Transformer(nn.Module):
    """A decoder of two layers; tokens in, logits out."""

    def __init__(self, vocabulary: int, longest: int, width: int = 32, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        nn.init.normal_(self.tokens.weight, std=0.1)
        nn.init.normal_(self.places.weight, std=0.1)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "norm_1": nn.LayerNorm(width), "attention": nn.Linear(width, 3 * width),
                "output": nn.Linear(width, width), "norm_2": nn.LayerNorm(width),
                "mlp": nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
            })
            for _ in range(layers)
        )  # fmt: skip
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        # Padding comes after every token, where nothing looks.
        hidden = self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]
        later = torch.ones(input_ids.shape[1], input_ids.shape[1], dtype=torch.bool).triu(1)
        block: Any
        for block in self.blocks:
            parts = block["attention"](block["norm_1"](hidden)).unflatten(-1, (3, self.heads, -1))
            q, k, v = (part.transpose(-3, -2) for part in parts.unbind(-3))
            weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(later, -torch.inf).softmax(-1)
            hidden = hidden + block["output"]((weights @ v).transpose(-3, -2).flatten(-2))
            hidden = hidden + block["mlp"](block["norm_2"](hidden))
        return self.norm(hidden) @ self.tokens.weight.T


def digits(make: Callable[[], nn.Module], first: int = 0, **settings: Any) -> Problem:
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))[first:]
    X, y = torch.tensor(pixels[order], dtype=torch.float32) / 16, torch.tensor(labels[order])
    return Problem(
        make=make, train=(X[:400], y[:400]), query=(X[400:500], y[400:500]), loss=jostle.losses.classification(),
        **{"epochs": 60, "batch_size": 50, **settings},
    )  # fmt: skip


def padded(rows: list[list[int]]) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    return {
        "input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
    }


def words() -> Problem:
    """The bilingual language of the demo, with other texts; a word is a token."""
    number = {word: 1 + place for place, word in enumerate([*bilingual.MARKS, *bilingual.LEXICON])}
    texts = bilingual.write(360, seed=11)
    rows = [[0, *(number[word] for word in text.sentence + text.answer)] for text in texts]
    longest = max(map(len, rows))
    return Problem(
        make=lambda: Transformer(len(number) + 1, longest), train=padded(rows[:300]), query=padded(rows[300:]),
        loss=jostle.losses.next_token(), epochs=25, batch_size=15, draws=100, sampling_batch_size=50, seeds=(1,),
    )  # fmt: skip


READ_BEFORE = "argparse asyncio collections decimal email heapq json logging tarfile unittest"
READ_AFTER = "statistics threading typing zipfile"


def characters(
    train: int = 240, queries: int = 60, longest: int = 40, before: int | None = None, **shape: int
) -> Problem:
    """Lines of the standard library's own documentation; a model that has read modules is fine-tuned on others."""

    def lines(modules: str) -> list[str]:
        found = []
        for module in map(importlib.import_module, modules.split()):
            for _, thing in sorted(inspect.getmembers(module), key=lambda pair: pair[0]):
                text = inspect.getdoc(thing) if callable(thing) else None
                found += [line.strip()[:longest] for line in (text or "").splitlines() if len(line.strip()) >= 25]
        return sorted(set(found))

    earlier, later = lines(READ_BEFORE), lines(READ_AFTER)
    random.Random(0).shuffle(earlier)
    random.Random(0).shuffle(later)
    alphabet = {letter: 1 + place for place, letter in enumerate(sorted(set("".join(earlier + later))))}

    def rows(some: list[str]) -> dict[str, Tensor]:
        return padded([[0, *(alphabet[letter] for letter in line)] for line in some])

    later = [line for line in later if line not in set(earlier)]
    return Problem(
        make=lambda: Transformer(len(alphabet) + 1, longest + 1, **shape), train=rows(later[:train]),
        query=rows(later[train : train + queries]), loss=jostle.losses.next_token(), epochs=6, batch_size=15,
        learning_rate=2e-3, draws=100, sampling_batch_size=40, pretrain=rows(earlier[:before]), seeds=(1,),
    )  # fmt: skip


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "logistic regression": lambda: digits(lambda: nn.Linear(64, 10), learning_rate=1e-2, weight_decay=0.1, draws=100),
    "mlp": lambda: digits(lambda: nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))),
    "cnn": lambda: digits(Convolutional, epochs=40, draws=100),
    "words": words,
    "characters": characters,
}


def fit(
    model: FunctionalModel, problem: Problem, data: Data, starts: Tensor, subsets: list[np.ndarray], epochs: int
) -> Tensor:
    """AdamW from each row of weights on its own subset (all of one size), with a learning rate that falls to 0."""
    weights = nn.Parameter(starts.clone())
    optimizer = torch.optim.AdamW([weights], lr=problem.learning_rate, weight_decay=problem.weight_decay)
    per_epoch = math.ceil(len(subsets[0]) / problem.batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * step / (epochs * per_epoch))) / 2
    )
    generator = np.random.default_rng(0)
    for _ in range(epochs):
        orders = [generator.permutation(subset) for subset in subsets]
        for batch in range(per_epoch):
            indices = [order[batch * problem.batch_size :][: problem.batch_size] for order in orders]
            weights.grad = model.mean_loss_gradient(problem.loss, weights.detach(), data, indices)
            optimizer.step()
            schedule.step()
    return weights.detach()


def training_of(problem: Problem, examples: int) -> dict[str, float]:
    """What `fit` does with so many examples, in the words of `FirstOrder.kappa_of_training`."""
    steps = problem.epochs * math.ceil(examples / problem.batch_size)
    # The mean of a cosine schedule is a half.
    return {
        "total_rate": problem.learning_rate * steps / 2, "weight_decay": problem.weight_decay,
        "batch_size": problem.batch_size,
    }  # fmt: skip


class Trainer:
    """Trains the model of a problem on all examples, or on many subsets side by side."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._template = problem.make().eval()
        self._moving = MovingWeights(self._template, "all")
        self._one = FunctionalModel(self._template, self._moving)
        self._many = SideBySide(self._template, self._moving)
        self._data = Data(problem.train, "train")
        self._starts = {seed: self._start(seed) for seed in (0, *problem.seeds)}
        self._one.evaluate(problem.loss, self._starts[0][None], self._data.batch([0, 1]))  # tried once for each model
        if problem.pretrain is not None:
            before = Data(problem.pretrain, "pretrain")
            read = fit(self._one, problem, before, self._starts[0][None], [np.arange(len(before))], 12)[0]
            self._starts = dict.fromkeys(self._starts, read)

    def _start(self, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return MovingWeights(self.problem.make(), "all").center

    def model(self) -> nn.Module:
        """The model that is analysed: trained on all examples."""
        everything = [np.arange(len(self._data))]
        return model_at(
            fit(self._one, self.problem, self._data, self._starts[0][None], everything, self.problem.epochs)[0],
            self._template,
            self._moving,
        )

    def bank(self, directory: Path, subsets: Subsets) -> Bank:
        """The bank of retrainings on these subsets, all seeds of the problem; what is there is not done again."""
        problem = self.problem
        query = Data(problem.query, "query")
        bank = Bank.create(
            directory, subsets, queries=len(query),
            fingerprints={"train": self._data.fingerprint(), "query": query.fingerprint()},
        )  # fmt: skip
        measure = Measure(problem.query, problem.loss, {}, batch_size=len(query))
        todo = set(bank.todo(len(problem.seeds)))
        for place, seed in enumerate(problem.seeds):
            for first in range(0, len(subsets), TOGETHER):
                some = range(first, min(first + TOGETHER, len(subsets)))
                if not any((subset, place) in todo for subset in some):
                    continue
                starts = self._starts[seed].repeat(len(some), 1)
                members = [subsets.indices(subset) for subset in some]
                fitted = fit(self._many, problem, self._data, starts, members, problem.epochs)
                for subset, weights in zip(some, fitted, strict=True):
                    bank.store(subset, place, measure(model_at(weights, self._template, self._moving)))
        return bank


def model_at(weights: Tensor, template: nn.Module, moving: MovingWeights) -> nn.Module:
    """A model of its own with these weights, all of which move."""
    model = copy.deepcopy(template)
    named = moving.unflatten(weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(named[name])
    return model


def halves(count: int) -> Subsets:
    """The subsets of this experiment."""
    generator = np.random.default_rng(1)
    members = np.zeros((SUBSETS, count), bool)
    for row in members:
        row[generator.permutation(count)[: round(SHARE * count)]] = True
    return Subsets(members, "random")


def about(problem: Problem, model: nn.Module, bank: Bank) -> dict[str, Any]:
    """Losses of the model, and how well one seed's retrainings are predicted by the other's, which no attribution of a
    single model can pass by far."""
    losses = {
        name: float(Measure(data, problem.loss, {})(model)["loss"].mean())
        for name, data in (("train_loss", problem.train), ("query_loss", problem.query))
    }
    between = repeatability(bank)
    return {
        "weights": sum(parameter.numel() for parameter in model.parameters()),
        **losses,
        "retrained_query_loss": float(bank.values().mean()),
        **({} if between is None else {"lds_between_seeds": between}),
    }


def lds_over_queries(bank: Bank, scores: Scores) -> dict[str, float]:
    """With its standard error over queries: retrainings are shared by all settings that are compared here."""
    values = lds(bank, scores, bootstrap=0).each
    return {"lds": float(values.mean()), "standard_error": float(values.std(ddof=1) / math.sqrt(len(values)))}


def settings_of(name: str) -> list[tuple[float, float]]:
    """What tells most comes first; the larger κ, the longer the chains."""
    rises = RISES if name == "mlp" else RISES[1:]
    kappas = KAPPAS if name == "mlp" else (0.0, 1.0, 10.0)
    cells = [(rise, kappa) for rise in rises for kappa in kappas]
    return sorted(cells, key=lambda cell: (abs(math.log(cell[0] / 0.3)), -cell[1]))


def measure(name: str, record: dict[str, Any], seeds: int, work: Path, save: Callable[[], None]) -> None:
    problem = PROBLEMS[name]()
    started = time.perf_counter()
    trainer = Trainer(problem)
    model = trainer.model()
    bank = trainer.bank(work / name, halves(len(Data(problem.train, "train"))))
    kept = record.setdefault(name, {"cells": []})
    kept |= about(problem, model, bank) | {"subsets": SUBSETS, "chains": CHAINS, "draws": problem.draws}
    kept |= {"train": bank.about["train"], "queries": bank.about["queries"]}
    shown = {key: value for key, value in kept.items() if key != "cells"}
    print(name, shown, f"{time.perf_counter() - started:.0f} s", flush=True)
    for cosine in (False, True):
        scores = gradient_similarity(model, problem.train, problem.query, loss=problem.loss, cosine=cosine)
        kept["gradient cosine" if cosine else "gradient similarity"] = lds_over_queries(bank, scores)
    print({key: kept[key] for key in ("gradient similarity", "gradient cosine")}, flush=True)
    done = {(cell["rise"], cell["kappa"], cell["seed"]) for cell in kept["cells"]}
    for seed in range(seeds):
        for rise, kappa in settings_of(name):
            if (rise, kappa, seed) in done:
                continue
            started = time.perf_counter()
            cell: dict[str, Any] = {"rise": rise, "kappa": kappa, "seed": seed}
            try:
                chosen = calibrate(
                    model, problem.train, loss=problem.loss, rise=rise, kappa=kappa, pilot=False,
                    batch_size=problem.sampling_batch_size, seed=seed,
                )  # fmt: skip
                run = jostle.attribute(
                    model, problem.train, problem.query, loss=problem.loss, chains=CHAINS, draws=problem.draws,
                    seed=seed, progress=False, **chosen.settings,
                )  # fmt: skip
                found = run.diagnostics()
                cell |= {
                    "localization": chosen.posterior.localization, "n_beta": chosen.posterior.n_beta,
                    "curvature": chosen.curvature and chosen.curvature.largest,
                    "curvature_nearby": chosen.curvature_nearby,
                    "thin": chosen.thin, "rise_of_draws": found["rise"], "effective_draws": found["effective_draws"],
                    "failed_chains": len(run.failed_chains),
                    "correlation": lds_over_queries(bank, run.influence(normalize=True)),
                    "covariance": lds_over_queries(bank, run.influence()),
                }  # fmt: skip
            except (jostle.InputError, jostle.ChainsFailedError) as error:
                cell["fault"] = str(error)
            cell["seconds"] = round(time.perf_counter() - started, 1)
            kept["cells"].append(cell)
            save()
            print(name, json.dumps(cell), flush=True)


def draw(record: dict[str, Any], path: Path) -> None:
    """LDS against the rise, a line for each κ."""
    from matplotlib.figure import Figure

    names = [name for name in PROBLEMS if name in record and record[name]["cells"]]
    figure = Figure(figsize=(3.4 * len(names), 6.2), layout="constrained")
    panels = figure.subplots(2, len(names), squeeze=False, sharex=True, sharey="col")
    colours = {0.0: "black", 1.0: "#E69F00", 3.0: "#009E73", 10.0: "#0072B2"}
    for column, name in enumerate(names):
        for row, (kind, baseline) in enumerate(
            (("correlation", "gradient cosine"), ("covariance", "gradient similarity"))
        ):
            axes = panels[row][column]
            for kappa, colour in colours.items():
                cells = [cell for cell in record[name]["cells"] if cell["kappa"] == kappa and kind in cell]
                cells.sort(key=lambda cell: cell["rise"])
                if cells:
                    label = "κ = 0: no gradient" if kappa == 0 else f"κ = {kappa:g}"
                    values = [cell[kind]["lds"] for cell in cells]
                    errors = [cell[kind]["standard_error"] for cell in cells]
                    axes.errorbar(
                        [cell["rise"] for cell in cells], values, errors, color=colour, label=label, marker="o",
                        markersize=4, linewidth=1.5, elinewidth=0.8, linestyle="--" if kappa == 0 else "-",
                    )  # fmt: skip
            axes.axhline(
                record[name][baseline]["lds"], color="0.5", linestyle=":", label="gradients (cosine; dot product)"
            )
            axes.set_xscale("log")
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
            if row == 0:
                axes.set_title(f"{name}\n{record[name]['weights']:,} weights", fontsize=11)
            else:
                axes.set_xlabel("rise of the mean loss\nwithout a gradient (nats)")
            if column == 0:
                axes.set_ylabel(f"LDS, {kind}")
    labelled = {
        label: line for axes in panels[0] for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        labelled.values(), labelled.keys(), loc="outside lower center", ncols=len(labelled), frameon=False, fontsize=10
    )
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="LDS against the rise of the mean loss and κ, on small models.")
    parser.add_argument("--only", default=",".join(PROBLEMS))
    parser.add_argument("--seeds", type=int, default=1, help="of the sampler")
    parser.add_argument("--work", type=Path, help="keep the banks here; they are not made again")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--figure", type=Path, help="draw what the record has")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = json.loads(arguments.record.read_text()) if arguments.record.exists() else {}
    record.pop("environment", None)
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        for name in filter(None, arguments.only.split(",")):
            measure(name, record, arguments.seeds, work, lambda: write_record(arguments.record, record))
    if arguments.figure:
        draw(record, arguments.figure)


if __name__ == "__main__":
    main()

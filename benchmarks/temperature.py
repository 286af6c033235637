"""What heat does to scores, and whether a run of the usual length notices it.

    python -m benchmarks.temperature

An MLP on 400 digits, trained for long and for a short time, is sampled by BAOAB with what `calibrate` chooses, and with
steps and batches that heat its chains. Long runs tell what a setting does: its temperature, how far the mean loss
rises, how large covariances are, and how well scores rank the training examples, against another, longer run of the
calibrated setting (its own agreement with that one, in the first row, is the most that so many draws allow). Five runs
of 4 × 100 draws tell what a user is told.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from torch import nn

import jostle
from benchmarks.environment import write_record

RECORD = Path(__file__).parent / "records" / "temperature.json"
CHAINS, REFERENCE_DRAWS, LONG_DRAWS, DRAWS, SEEDS = 4, 4000, 1000, 100, 5
TRAINED = {"long": 1000, "short": 100}
"""Steps of Adam, on batches of 64."""
GRID = ((400, 1), (400, 4), (400, 8), (400, 10), (128, 8), (32, 1), (32, 4), (32, 6), (32, 8))
"""Batch sizes, and steps in units of the calibrated one."""


def digits(steps: int) -> tuple[nn.Module, Any, Any]:
    """A trained model, its 400 training examples, and 50 queries."""
    found: Any = load_digits()
    order = torch.randperm(len(found.data), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(found.data / 16, dtype=torch.float32)[order], torch.tensor(found.target)[order]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        batch = torch.randint(0, 400, (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return model, (images[:400], labels[:400]), (images[400:450], labels[400:450])


def compared(run: jostle.Run, reference: jostle.Run) -> dict[str, Any]:
    """What a long run's chains and scores are like, beside those of the reference."""
    ours, theirs = (np.asarray(one.influence(normalize=False).values) for one in (run, reference))
    ranks = [float(np.asarray(spearmanr(a, b))[0]) for a, b in zip(ours.T, theirs.T, strict=True)]
    found, usual = run.diagnostics(support=False), reference.diagnostics(support=False)
    return {
        "temperature": found["temperature"],
        "rise_ratio": found["rise"] / usual["rise"],
        "covariances_ratio": float(np.median((ours * theirs).sum(1) / (theirs**2).sum(1))),
        "spearman": float(np.median(ranks)),
    }


def measured(steps: int) -> dict[str, Any]:
    """Every setting, on the model that was trained for so many steps."""
    model, train, query = digits(steps)
    chosen = jostle.calibrate(model, train, query, progress=False).settings
    posterior, lengths = chosen["posterior"], {name: chosen[name] for name in ("burn_in", "thin")}

    def sample(times: float, batch_size: int, draws: int, seed: int) -> jostle.Run:
        return jostle.attribute(
            model, train, query, posterior=posterior, batch_size=batch_size, chains=CHAINS, draws=draws, seed=seed,
            sampler=jostle.BAOAB(step_size=times * chosen["sampler"].step_size), progress=False, **lengths,
        )  # fmt: skip

    reference, rows = sample(1, 400, REFERENCE_DRAWS, SEEDS + 1), []
    for batch_size, times in GRID:
        told = [sample(times, batch_size, DRAWS, seed).diagnostics(support=False) for seed in range(SEEDS)]
        hot = [[r["level"] for r in one["verdict"]["reasons"] if r["kind"] == "too hot"] for one in told]
        row = {
            "batch_size": batch_size,
            "times_the_step": times,
            **compared(sample(times, batch_size, LONG_DRAWS, SEEDS), reference),
            "called_hot": [levels[0] if levels else None for levels in hot],
            "temperatures": [one["temperature"] for one in told],
        }
        rows.append(row)
        print(steps, row, flush=True)
    return {
        "step_size": chosen["sampler"].step_size, "n_beta": posterior.n_beta, "localization": posterior.localization,
        **lengths, "settings": rows,
    }  # fmt: skip


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "").parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    models = {name: measured(steps) for name, steps in TRAINED.items()}
    record = {
        "workload": f"MLP of 2,410 weights on 400 digits × 50 queries, BAOAB, {CHAINS} chains; {LONG_DRAWS} draws a "
        f"chain (reference {REFERENCE_DRAWS}), and {SEEDS} runs of {DRAWS}",
        "seconds": round(time.perf_counter() - started, 1),
        "models": models,
    }
    write_record(RECORD, record)


if __name__ == "__main__":
    main()

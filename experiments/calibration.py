"""Does calibration from a cold start find what a full sweep finds, at a tenth of its cost?

    python -m experiments.calibration --work work [--only diabetes,characters] [--minutes 30] [--figure FILE]

Three small models on which the defaults of `jostle.calibrate` were not fixed (those are in `experiments.resolution`): a
regression with a network, a classifier with three hidden layers on digits that are not there, and a language model of
characters that is fine-tuned. For each, `jostle sweep` samples a grid of n_beta, localization and step size, and a bank
of retrainings picks its best cell by the LDS; `jostle.calibrate` sees no bank. Both settings are then sampled with five
seeds that neither has seen, and scored on a fresh bank. Chains and draws are the same everywhere; the rule is
`LeimkuhlerMatthews` in the sweep, and what calibration takes by default in its own run. Costs are seconds of this
process on a CPU, whatever else the machine does. Called again it goes on where it stood.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

import jostle
from experiments import resolution
from experiments.resolution import Problem, Trainer
from experiments.retraining import Budget, Record, measure_each
from jostle.asking import requests
from jostle.attributors import gradient_similarity
from jostle.data.datasets import Data
from jostle.evaluate import Bank, lds, random_subsets
from jostle.sweep import AXES, sweep

HERE = Path(__file__)
GRID = {
    "n_beta": (10.0, 100.0, 1_000.0, 10_000.0),
    "localization": (1.0, 10.0, 100.0, 1_000.0),
    "step_size": (1e-4, 1e-3, 1e-2),
}
"""Wide enough for somebody who knows nothing of the model: the calibrated values of the models in
`experiments.resolution` lie inside it."""

CHAINS, DRAWS, THIN, BURN_IN = 4, 50, 10, 100
SUBSETS, SEEDS = 48, 5


def diabetes(train: int = 300, queries: int = 100) -> Problem:
    """Progression of a disease; a network of tanh. Targets are in units of a linear fit's residual, so that the loss is
    in nats."""
    from sklearn.datasets import load_diabetes

    X, y = cast(Any, load_diabetes(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(y))
    X, y = (X / X.std(0))[order], (y - y.mean())[order]
    rest = y - X @ np.linalg.lstsq(X, y, rcond=None)[0]
    inputs = torch.tensor(X, dtype=torch.float32)
    targets = torch.tensor(y / rest.std(), dtype=torch.float32)[:, None]
    return Problem(
        make=lambda: nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1)),
        train=(inputs[:train], targets[:train]), query=(inputs[train:][:queries], targets[train:][:queries]),
        loss=jostle.losses.regression(), epochs=40, batch_size=50, learning_rate=1e-2,
    )  # fmt: skip


def digits() -> Problem:
    """Three hidden layers, on digits that `experiments.resolution` does not have."""
    return resolution.digits(
        lambda: nn.Sequential(
            nn.Linear(64, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 10)
        ),
        first=500, epochs=40,
    )  # fmt: skip


def characters() -> Problem:
    """The language model of `experiments.resolution`, on which nothing was measured there, in a smaller size."""
    return resolution.characters(train=120, queries=40, longest=20, before=600, width=16, layers=1, heads=2)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "diabetes": diabetes,
    "digits": digits,
    "characters": characters,
}


def build(name: str) -> dict[str, Any]:
    problem = PROBLEMS[name]()
    return {"model": Trainer(problem).model(), "train": problem.train, "query": problem.query, "loss": problem.loss}


# What `jostle sweep` calls by name.
build_diabetes, build_digits, build_characters = (functools.partial(build, name) for name in PROBLEMS)


@contextlib.contextmanager
def charged(record: Record, key: str) -> Iterator[None]:
    """Add what this process computes to the record, also where it is interrupted."""
    started = time.process_time()
    try:
        yield
    finally:
        record.add_seconds(key, time.process_time() - started)
        record.write()


def measure(
    name: str, work: Path, record: Record, budget: Budget, *, grid: Mapping[str, Any] = GRID, draws: int = DRAWS,
    subsets: int = SUBSETS, seeds: int = SEEDS,
) -> None:  # fmt: skip
    """One model: the sweep and its choice, the calibration, and both on a fresh bank."""
    kept = record.content["measured"].setdefault(name, {})
    problem = PROBLEMS[name]()
    budget.check()
    trainer = Trainer(problem)
    model, count = trainer.model(), len(Data(problem.train, "train"))
    with charged(record, f"{name}: retraining"):
        banks = [
            trainer.bank(work / name / f"bank-{purpose}", random_subsets(count, subsets, seed=seed))
            for seed, purpose in enumerate(("choosing", "judging"))
        ]
    kept |= resolution.about(problem, model, banks[1]) | {"train": count, "queries": banks[0].about["queries"]}
    batch_size = problem.sampling_batch_size
    if "sweep" not in kept:
        request = requests.resolve(
            {
                "task": f"{HERE}:build_{name}", "device": "cpu", "sampler": "leimkuhler-matthews", "chains": CHAINS,
                "draws": draws, "burn_in": BURN_IN, "thin": THIN, "batch_size": batch_size, "seed": 0,
            }
        )  # fmt: skip
        with charged(record, f"{name}: sweep"), budget.interrupting():
            cells = sweep(request, grid, work / name / "sweep", bank=banks[0])
        # The best there is in hindsight, whatever its own diagnostics say: a sweep is given every advantage.
        sound = [(cell.value, cell) for cell in cells if cell.fault is None and cell.value is not None]
        best = max(sound, key=lambda one: one[0])[1]
        keys = ("settings", "fault", "value", "rise", "failed_chains", "verdict", "effective_draws")
        kept["sweep"] = {
            "best": best.settings,
            "cells": [{key: cell.to_dict()[key] for key in keys} for cell in cells],
        }
        record.write()
    if "calibration" not in kept:
        with charged(record, f"{name}: calibration"), budget.interrupting():
            chosen = jostle.calibrate(
                model, problem.train, problem.query, loss=problem.loss, batch_size=batch_size, say=print
            )
        kept["calibration"] = {
            "n_beta": chosen.posterior.n_beta, "localization": chosen.posterior.localization,
            "step_size": vars(chosen.sampler)["step_size"], "burn_in": chosen.burn_in, "thin": chosen.thin,
            "sampler": next(name for name, rule in requests.SAMPLERS.items() if rule is type(chosen.sampler)),
            **chosen.to_dict(),
        }  # fmt: skip
        record.write()
    settings = {
        "best cell": {**kept["sweep"]["best"], "thin": THIN, "sampler": "leimkuhler-matthews"},
        "calibrated": {key: kept["calibration"][key] for key in (*AXES, "thin", "sampler")},
    }
    judged = kept.setdefault("judged", {})
    for seed in range(1, seeds + 1):  # 0 is the one with which settings were chosen
        for which, options in settings.items():
            if str(seed) in judged.setdefault(which, {}):
                continue
            with charged(record, f"{name}: {which}, run"), budget.interrupting():
                run = jostle.attribute(
                    model, problem.train, problem.query, loss=problem.loss, chains=CHAINS, draws=draws, seed=seed,
                    posterior=jostle.Posterior(n_beta=options["n_beta"], localization=options["localization"]),
                    sampler=requests.SAMPLERS[options["sampler"]](step_size=options["step_size"]),
                    batch_size=batch_size,
                    burn_in=int(options["burn_in"]), thin=options["thin"], progress=False,
                )  # fmt: skip
            judged[which][str(seed)] = judge(banks[1], run)
            record.write()
            print(f"  {name}: {which}, seed {seed}: {judged[which][str(seed)]['correlation']}", flush=True)
    if "gradient cosine" not in judged:
        scores = gradient_similarity(model, problem.train, problem.query, loss=problem.loss, cosine=True)
        judged["gradient cosine"] = {"0": {"correlation": lds(banks[1], scores).to_dict()}}
    kept["summary"] = summary(kept, {key.partition(": ")[2]: value for key, value in
                                     record.content["seconds"].items() if key.startswith(f"{name}: ")})  # fmt: skip
    record.write()
    print(name, kept["summary"], flush=True)


def judge(bank: Bank, run: jostle.Run) -> dict[str, Any]:
    found = run.diagnostics()
    return {
        "failed_chains": len(run.failed_chains),
        "runaway_chains": len(found["runaway"]["chains"]),
        "rise": found["rise"],
        "effective_draws": found["effective_draws"],
        "verdict": found["verdict"]["level"],
        "correlation": lds(bank, run.influence(normalize=True)).to_dict(),
        "covariance": lds(bank, run.influence()).to_dict(),
    }


def summary(kept: Mapping[str, Any], seconds: Mapping[str, Any]) -> dict[str, Any]:
    """Means over seeds with their standard errors; the error of the bank is that of the best cell's LDS, by bootstrap
    over queries, subsets and retrainings."""
    found: dict[str, Any] = {}
    for which in ("best cell", "calibrated"):
        for kind in ("correlation", "covariance"):
            values = np.array([one[kind]["value"] for one in kept["judged"][which].values()])
            error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
            found.setdefault(which, {})[kind] = {"lds": float(values.mean()), "standard_error_over_seeds": error}
        found[which]["bad_chains"] = sum(
            one["failed_chains"] + one["runaway_chains"] for one in kept["judged"][which].values()
        )
    judged = kept["judged"]["best cell"].values()
    error = float(np.mean([one["correlation"]["standard_error"] for one in judged]))
    difference = found["calibrated"]["correlation"]["lds"] - found["best cell"]["correlation"]["lds"]
    run = seconds["calibrated, run"]["seconds"] / seconds["calibrated, run"]["count"]
    costs = {"calibration": seconds["calibration"]["seconds"], "its run": run, "sweep": seconds["sweep"]["seconds"]}
    return {
        **found,
        "difference": difference,
        "standard_error_of_the_bank": error,
        "within_one_standard_error": bool(difference >= -error),
        "cpu_seconds": costs,
        "share_of_the_sweep": costs["calibration"] / costs["sweep"],
        "share_with_its_run": (costs["calibration"] + run) / costs["sweep"],
        "cells_that_failed": sum(cell["fault"] is not None or cell["failed_chains"] > 0
                                 for cell in kept["sweep"]["cells"]),
    }  # fmt: skip


def draw(measured: Mapping[str, Any], path: Path) -> None:
    """Every cell of the sweep on the bank that chose, and on the fresh bank the best of them beside calibration."""
    from matplotlib.figure import Figure

    names = [name for name in measured if "summary" in measured[name]]
    figure = Figure(figsize=(4.2 * len(names), 4.2), layout="constrained")
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names, strict=True):
        found = measured[name]
        values = sorted((cell["value"] for cell in found["sweep"]["cells"] if cell["fault"] is None), reverse=True)
        axes.plot(
            np.linspace(0, 1, len(values)), values, ".", color="0.6", label="cells of the sweep, bank that chooses"
        )
        for place, (which, colour) in enumerate((("best cell", "#D55E00"), ("calibrated", "#0072B2"))):
            each = [one["correlation"]["value"] for one in found["judged"][which].values()]
            axes.plot(
                [1.25 + 0.25 * place] * len(each), each, "o", color=colour, label=f"{which}, fresh bank, each seed"
            )
        cosine = found["judged"]["gradient cosine"]["0"]["correlation"]["value"]
        axes.axhline(cosine, color="0.3", linestyle=":", label="gradient cosine, fresh bank")
        share = found["summary"]["share_of_the_sweep"]
        title = f"{name.replace('_', ' ')}\ncalibration cost {100 * share:.1f} % of the sweep"
        axes.set_title(title, fontsize=11)
        axes.set(xticks=[], ylabel="LDS per query, correlation")
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    about = {"grid": GRID, "chains": CHAINS, "draws": DRAWS, "thin": THIN, "burn_in": BURN_IN, "subsets": SUBSETS}
    parser = argparse.ArgumentParser(description="Calibration from a cold start against a full sweep.")
    measure_each(
        parser, "calibration", PROBLEMS, about, lambda name, given, *kept: measure(name, given.work, *kept), draw
    )


if __name__ == "__main__":
    main()

"""Small networks: does the closed form predict what leaving examples out of training does?

    python -m experiments.solve_small banks --work DIR --data DIR [--only NAME ...] [--purpose choosing]
    python -m experiments.solve_small methods --data DIR --record FILE [--only NAME ...] [--purpose choosing]
    python -m experiments.solve_small figure --record FILE

Models are those of `experiments/small_models.py`. `banks` trains each once with all examples and once without each of
100 random sets of 2 % of them (same seed, batches, order and denominators), and those for choosing also on 100 random
halves from two other seeds; it keeps the queries' losses in `experiments/banks/NAME.npz`, and goes on where it stood.
`methods` repeats the first training, asks each method for the effect of every example on every query, and compares
that with the banks. --data is a directory with `cifar-10-batches-bin/` and `wikitext-2/valid.txt.xz`; digits need none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.environment import environment, write_record
from jaxtyping import Float
from torch import Tensor, nn

import jostle
from experiments.small_models import HALF_SEEDS, MODELS, Model
from jostle.attributors import ekfac, gradient_similarity
from jostle.curvature.response import Filter
from jostle.evaluate import Measure, Measured, retrain
from jostle.evaluate.metrics import lds_of, slopes_of
from jostle.training.description import built_up

HERE = Path(__file__).parent
BANKS = HERE / "banks"
DAMPINGS = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Tried for EK-FAC beside its own, a tenth of each layer's mean eigenvalue; others are compared with the best."""
BOOTSTRAP = 1000
EKFAC = "EK-FAC"


@dataclass(frozen=True)
class Trained:
    """A model as its training ended, and what a method may know of it.

    Attributes:
        model: in eval mode.
        about: how it was trained.
        second_moments: v̂ of AdamW, bias-corrected, by parameter; None of SGD.
        directory: where what several methods share is kept for a while.
    """

    model: nn.Module
    about: Model
    second_moments: Mapping[str, Tensor] | None
    directory: Path


Method = Callable[[Trained, Any, Any], Float[np.ndarray, "train query"]]
"""The effect of each training example on each query: positive helps, in nats or in a unit of its own."""


def trained(about: Model, train: Any, directory: Path) -> Trained:
    """Train with all examples, and keep what the optimizer ends with."""
    optimizers: list[torch.optim.Optimizer] = []

    def new_optimizer(parameters: Any) -> torch.optim.Optimizer:
        optimizers.append(about.new_optimizer(parameters))
        return optimizers[-1]

    model = about.trainer(train, optimizer=new_optimizer)(np.arange(about.train), 0)
    moments = None
    if about.optimizer == "adamw":
        state, settings = optimizers[-1].state, optimizers[-1].defaults
        unbiased = 1 - settings["betas"][1] ** about.steps
        moments = {name: state[value]["exp_avg_sq"] / unbiased for name, value in model.named_parameters()}
    return Trained(model, about, moments, directory)


def make_bank(about: Model, train: Any, query: Any, work: Path, minutes: float | None) -> None:
    """Fill the banks of a model, and keep their losses."""
    path = BANKS / f"{about.name}.npz"
    if path.exists() and json.loads(str(np.load(path)["about"]))["model"] == asdict(about):
        print(f"{about.name}: there", flush=True)
        return
    given: dict[str, Any] = {"loss": about.loss, "progress": False, "minutes": minutes}
    # Halves have weights and batches of other seeds than the model's own.
    asked = {"drops": (about.trainer(train), about.drops(), 1)}
    if about.purpose == "choosing":
        asked["halves"] = about.trainer(train, first_seed=1), about.halves(), HALF_SEEDS
    kept: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    for kind, (trainer, subsets, seeds) in asked.items():
        started = time.perf_counter()
        bank = retrain(trainer, train, query, subsets=subsets, seeds=seeds, out=work / f"{about.name}-{kind}", **given)
        if bank.summary()["finished"] < len(subsets) * seeds:
            print(f"{about.name}: {kind}: {bank.summary()['text']}: not finished", flush=True)
            return
        kept[kind], seconds[kind] = bank.values(), time.perf_counter() - started
    kept["drops"] = kept["drops"][:, 0]
    with tempfile.TemporaryDirectory() as temporary:
        again = Measure(query, about.loss, {})(trained(about, train, Path(temporary)).model)["loss"]
    changes = kept["drops"][1:] - kept["drops"][0]
    told = {
        "model": asdict(about),
        "environment": environment(),
        "seconds": seconds,
        # Trained alone, not beside others: what is due to rounding, and what the drops change.
        "repeated": float(np.abs(again - kept["drops"][0]).max()),
        "spread": float(changes.std(0).mean()),
    }
    BANKS.mkdir(exist_ok=True)
    kept["about"] = np.array(json.dumps(told))
    np.savez_compressed(path, **kept)
    print(f"{about.name}: {json.dumps({name: told[name] for name in ('seconds', 'repeated', 'spread')})}", flush=True)


def gradients(of: Trained, train: Any, query: Any) -> Float[np.ndarray, "train query"]:
    """The dot product of gradients."""
    return -gradient_similarity(of.model, train, query, loss=of.about.loss).values / of.about.train


def ekfac_at(damping: float | None) -> Method:
    """EK-FAC in nats: the inverse of the mean loss's curvature, of 1/n of an example's loss."""

    def method(of: Trained, train: Any, query: Any) -> Float[np.ndarray, "train query"]:
        given: dict[str, Any] = {"loss": of.about.loss, "damping": damping, "batch_size": 100}
        return -ekfac(of.model, train, query, directory=of.directory / "ekfac", **given).values / of.about.train

    return method


def solve_by(filter: Filter) -> Method:
    """The closed form, as the training was."""

    def method(of: Trained, train: Any, query: Any) -> Float[np.ndarray, "train query"]:
        about, sgd = of.about, of.about.optimizer == "sgd"
        training = jostle.Training(
            optimizer=about.optimizer, total_rate=about.steps * about.rate, weight_decay=about.weight_decay,
            batch_size=about.batch_size, momentum=about.momentum if sgd else 0.0,
            momentum_factor=built_up([about.rate] * about.steps, about.momentum) if sgd else 1.0,
            second_moments=of.second_moments, count_alike="sequences",
        )  # fmt: skip
        return jostle.solve(of.model, train, query, training=training, loss=about.loss, filter=filter).effects

    return method


MINIMUM = "solve, at a minimum"
METHODS: dict[str, Method] = {
    "solve": solve_by("descent"),
    MINIMUM: solve_by("minimum"),
    "gradient dot product": gradients,
    f"{EKFAC}, its own damping": ekfac_at(None),
    **{f"{EKFAC}, damping {damping:g}": ekfac_at(damping) for damping in DAMPINGS},
}


def measured(
    effects: Mapping[str, Float[np.ndarray, "train query"]], about: Model, bank: Mapping[str, np.ndarray]
) -> dict[str, dict[str, Measured]]:
    """Every method on the drops and, where there are any, on the halves; what is resampled is the same for all."""
    left_out = ~about.drops().members[1:]
    changes = (bank["drops"][1:] - bank["drops"][0].astype(np.float64))[:, None]
    predicted = [left_out @ effect.astype(np.float64) for effect in effects.values()]
    alike: dict[str, Any] = {"bootstrap": BOOTSTRAP, "seed": 0}
    found = {
        "LDS": lds_of(predicted, changes, per="query", **alike),
        "slope": slopes_of(predicted, changes, pooled=False, **alike),
        "pooled slope": slopes_of(predicted, changes, pooled=True, **alike),
    }
    if "halves" in bank:
        sums = [-(about.halves().members @ effect.astype(np.float64)) for effect in effects.values()]
        found["LDS of halves"] = lds_of(sums, bank["halves"], per="query", **alike)
    names, rows = list(effects), zip(*found.values(), strict=True)
    table = {name: dict(zip(found, row, strict=True)) for name, row in zip(names, rows, strict=True)}
    for metric in [metric for metric in found if metric.startswith("LDS")]:
        best = max((name for name in names if name.startswith(EKFAC)), key=lambda name: table[name][metric].value)
        for name in names:
            if name != best:
                table[name][f"{metric}, less {EKFAC}'s best"] = table[name][metric] - table[best][metric]
    return table


def compare(about: Model, train: Any, query: Any) -> dict[str, Any]:
    """What each method says and takes; all see the same model, one after another."""
    bank = dict(np.load(BANKS / f"{about.name}.npz"))
    effects, seconds = {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        started = time.perf_counter()
        of = trained(about, train, Path(temporary))
        training = time.perf_counter() - started
        for name, method in METHODS.items():
            if name == MINIMUM and about.purpose == "reporting":
                continue  # the filter was chosen by then
            started = time.perf_counter()
            effects[name] = method(of, train, query)
            seconds[name] = time.perf_counter() - started
    told = json.loads(str(bank.pop("about")))
    table = {}
    for name, row in measured(effects, about, bank).items():
        table[name] = {metric: one.to_dict() for metric, one in row.items()} | {"seconds": seconds[name]}
        print(f"{about.name:24} {name:28} {'   '.join(f'{metric} {one}' for metric, one in row.items())}", flush=True)
    return {
        **asdict(about), "steps": about.steps, "total_rate": about.total_rate,
        "weights": sum(value.numel() for value in of.model.parameters()), "seconds_of_training": training,
        "spread_of_drops": told["spread"], "largest_difference_of_a_repeated_training": told["repeated"],
        "environment": environment(), "methods": table,
    }  # fmt: skip


def draw(record: Mapping[str, Any], path: Path) -> None:
    """LDS and slope of each model: the closed form, EK-FAC as it ships, and at the best of its dampings."""
    from matplotlib.figure import Figure

    models = [name for name in MODELS if name in record["models"]]
    figure = Figure(figsize=(9, 0.32 * len(models) + 1.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    shown = ("solve", "tab:blue", "o"), ("best", "tab:orange", "s"), (f"{EKFAC}, its own damping", "tab:orange", "x")
    for (method, colour, marker), metric in itertools.product(shown, ("LDS", "slope")):
        found = []
        for name in models:
            table = record["models"][name]["methods"]
            tried = [one for one in table if one.startswith(EKFAC)]
            chosen = max(tried, key=lambda one: table[one]["LDS"]["value"]) if method == "best" else method
            found.append(table[chosen][metric])
        label = f"{EKFAC}, the best of {len(DAMPINGS) + 1} dampings" if method == "best" else method
        panels[int(metric == "slope")].errorbar(
            [one["value"] for one in found], range(len(models)),
            xerr=[1.96 * one["standard_error"] for one in found], fmt=marker, color=colour, label=label, capsize=2,
        )  # fmt: skip
    panels[0].set_yticks(range(len(models)), [f"{name} ({MODELS[name].purpose})" for name in models], fontsize=8)
    panels[0].invert_yaxis()
    panels[0].set_xlabel("LDS over drops, 95 %")
    panels[1].axvspan(0.85, 1.2, color="tab:green", alpha=0.12)
    panels[1].set_xscale("log")
    panels[1].set_xlim(0.005, 20)
    panels[1].set_xlabel("slope of real on predicted, 95 %")
    for panel in panels:
        panel.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["banks", "methods", "figure"])
    parser.add_argument("--work", type=Path, help="of banks: they go on from what is there")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(MODELS))
    parser.add_argument("--purpose", choices=["choosing", "reporting"], default="choosing")
    parser.add_argument("--minutes", type=float, help="begin no training of a bank after so long")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--record", type=Path, default=HERE / "records" / "solve_small.json")
    arguments = parser.parse_args()
    if arguments.what == "banks" and arguments.work is None:
        parser.error("banks needs --work")
    if arguments.what == "figure":
        draw(json.loads(arguments.record.read_text()), arguments.record.with_suffix(".png"))
        return
    torch.set_num_threads(arguments.threads)
    names = arguments.only or [name for name, about in MODELS.items() if about.purpose == arguments.purpose]
    for name in names:
        about = MODELS[name]
        train, query = about.examples(arguments.data)
        if arguments.what == "banks":
            make_bank(about, train, query, arguments.work, arguments.minutes)
        else:
            compared = compare(about, train, query)
            record = json.loads(arguments.record.read_text()) if arguments.record.exists() else {}
            models = record.get("models", {}) | {name: compared}
            write_record(arguments.record, {"threads": arguments.threads, "bootstrap": BOOTSTRAP, "models": models})


if __name__ == "__main__":
    main()

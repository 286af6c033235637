"""Linear and logistic regression: where does the closed form predict what trainings do, and where not?

    python -m experiments.solve_regression --record experiments/records/solve_regression.json

200 of scikit-learn's digits, 650 weights from a small random start. Gradient descent with momentum (all examples in a
step) and AdamW (20 in a step), without weight decay and with it, at constant rates: the weights after some steps are
those of a training of that length. Beside each training there are 24 without 2 % of the examples (same batches, order
and denominators), and 24 in which these weigh a tenth less, whose effects are of first order but for a tenth.

The length of a training is hτ: the largest curvature in the metric of training, i.e. the largest eigenvalue of
reach^½·H·reach^½ with the Gauss–Newton matrix H at its end. Beside `jostle.solve` with both filters, an example's
gradient at the end is replaced by what it was along the way (which a checkpoint does not tell): by its mean, and by
each of them, damped by what was left of the training. AdamW is also run with the second moments of the whole training
in all of them: the theory takes these as given, though they are of gradients, too.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.environment import write_record
from torch import Tensor, nn
from torch.func import jacrev, vmap

import jostle
from jostle import Training, losses
from jostle.curvature.gauss_newton import GaussNewton
from jostle.curvature.response import Filter
from jostle.data.datasets import Data
from jostle.evaluate.metrics import lds_of, slopes_of
from jostle.models.weights import MovingWeights

HERE = Path(__file__).parent
TRAIN, QUERIES, DROPS, LEFT_OUT, BATCH = 200, 50, 24, 4, 20
LOWERED = 0.1
ALONG = 60
"""Steps at which gradients along the way are looked at, and those between them taken for the same."""
BOOTSTRAP = 200
BAND = (0.85, 1.2)

FILTERS: tuple[Filter, ...] = ("descent", "minimum")
MEAN, DAMPED = "descent, mean gradient along the way", "descent, each gradient along the way"

Rows = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Course:
    """Trainings at one rate, looked at after so many steps."""

    rate: float
    steps: tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """A loss, an optimizer, and how long it trains.

    Attributes:
        shared: all trainings divide by the second moments of the whole one, as the theory has it.
    """

    loss: str
    optimizer: str
    decay: float
    shared: bool = False

    @property
    def name(self) -> str:
        kind = f"{self.optimizer} with shared moments" if self.shared else self.optimizer
        return f"{self.loss}, {kind}, {'decay' if self.decay else 'no decay'}"

    @property
    def courses(self) -> list[Course]:
        if self.optimizer == "adamw":
            return [Course(1e-6, (300, 1000)), Course(1e-5, (300, 1000)), Course(1e-4, (300, 1000, 3000)),
                    Course(1e-3, (1000, 3000))]  # fmt: skip
        # The largest at the start, about.
        curvature = 14.0 if self.loss == "linear" else 1.4
        found = [(3e-4, (333, 1000)), (3e-3, (333, 1000)), (3e-2, (333, 1000)), (0.5, (200, 600, 2000))]
        return [Course(0.1 * share / curvature, steps) for share, steps in found]


SETTINGS = [
    Setting(loss, optimizer, decay if decayed else 0.0)
    for loss, decays in (("linear", (0.05, 1.0)), ("logistic", (0.005, 1.0)))
    for optimizer, decay in zip(("sgd", "adamw"), decays, strict=True)
    for decayed in (False, True)
]
SHARED = [Setting(loss, "adamw", 0.0, shared=True) for loss in ("linear", "logistic")]
LOSSES = {"linear": losses.regression(), "logistic": losses.classification()}


def digits(loss: str) -> tuple[Rows, Rows]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))[: TRAIN + QUERIES]
    X, y = torch.tensor(pixels[order] / 16), torch.tensor(labels[order])
    y = F.one_hot(y, 10).double() if loss == "linear" else y
    return (X[:TRAIN], y[:TRAIN]), (X[TRAIN:], y[TRAIN:])


def new_model() -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(64, 10).double()
    for parameter in model.parameters():
        parameter.data *= 0.3
    return model


def flat_of(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def losses_of(setting: Setting, flat: Tensor, rows: Rows) -> Tensor:
    weight, bias = flat[:640].view(10, 64), flat[640:]
    predictions = rows[0] @ weight.T + bias
    if setting.loss == "linear":
        return (predictions - rows[1]).square().sum(1) / 2
    return F.cross_entropy(predictions, rows[1], reduction="none")


@dataclass(frozen=True)
class End:
    """Where trainings stand after some steps.

    Attributes:
        flats: the weights of all of them; of the whole one, last.
        way: those of the whole one along the way, and the share of the training that was over then.
        moments: v̂ of the whole one, by weight.
    """

    course: Course
    steps: int
    flats: Tensor
    way: list[tuple[float, Tensor]]
    moments: Tensor | None


def train(setting: Setting, course: Course, rows: Rows, weights: Tensor) -> list[End]:
    """Train with each row of weights, side by side: an optimizer treats every number by itself."""
    flats = nn.Parameter(flat_of(new_model()).expand(len(weights), -1).clone())
    if setting.optimizer == "sgd":
        optimizer: Any = torch.optim.SGD([flats], lr=course.rate, momentum=0.9, weight_decay=setting.decay)
    else:
        optimizer = torch.optim.AdamW([flats], lr=course.rate, weight_decay=setting.decay)

    size, count = TRAIN if setting.optimizer == "sgd" else BATCH, len(weights)
    targets = rows[1] if setting.loss == "linear" else F.one_hot(rows[1], 10).double()

    def slopes(flats: Tensor, batch: Tensor) -> Tensor:
        """By hand: one product for all trainings."""
        X = rows[0][batch]
        outputs = (X @ flats[:, :640].reshape(-1, 64).T).view(len(X), count, 10) + flats[:, 640:]
        outputs = outputs if setting.loss == "linear" else outputs.softmax(2)
        slopes = (outputs - targets[batch, None]) * weights.T[batch, :, None] / len(X)
        return torch.cat([(slopes.flatten(1).T @ X).view(count, 640), slopes.sum(0)], dim=1)

    random, ends, seen = torch.Generator().manual_seed(0), [], []
    left, mean, square = torch.empty(0, dtype=torch.long), torch.zeros(()), torch.zeros(())
    for step in range(1, max(course.steps) + 1):
        if len(left) < size:
            left = torch.randperm(TRAIN, generator=random)
        seen.append(flats[-1].detach().clone())
        flats.grad = slopes(flats.detach(), left[:size])
        left = left[size:]
        if setting.shared:
            slope = flats.grad
            mean = 0.9 * mean + 0.1 * slope
            square = 0.999 * square + 0.001 * slope[-1].square()
            flats.data -= course.rate * mean / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
        else:
            optimizer.step()
        if step in course.steps:
            places = np.unique(np.linspace(0, step - 1, ALONG).astype(int))
            moments = None
            if setting.optimizer == "adamw":
                moments = square if setting.shared else optimizer.state[flats]["exp_avg_sq"][-1]
                moments = moments / (1 - 0.999**step)
            way = [(place / step, seen[place]) for place in places]
            ends.append(End(course, step, flats.detach().clone(), way, moments))
    return ends


def training_of(setting: Setting, end: End) -> Training:
    total = end.course.rate * end.steps
    if end.moments is None:
        return Training(optimizer="sgd", total_rate=total, momentum=0.9, weight_decay=setting.decay)
    moments = {"weight": end.moments[:640].view(10, 64), "bias": end.moments[640:]}
    return Training(
        optimizer="adamw", total_rate=total, weight_decay=setting.decay, batch_size=BATCH, second_moments=moments
    )


def along(
    setting: Setting, end: End, model: nn.Module, training: Training, rows: Rows, query: Rows
) -> tuple[float, float, dict[str, np.ndarray]]:
    """hτ, the largest hold·reach, and effects by gradients along the way."""
    moving = MovingWeights(model, "all")
    diagonals = training.diagonals(moving)
    root = diagonals.reach.double().sqrt()
    curvature = GaussNewton(model, "all", LOSSES[setting.loss], Data(rows, "train"))
    with curvature:
        H = curvature.dense()
    a, vectors = torch.linalg.eigh(root[:, None] * (H + torch.diag(diagonals.hold)) * root)
    a = a.clamp(min=1e-9)
    largest = float(torch.linalg.eigvalsh(root[:, None] * H * root)[-1])

    def gradients(flat: Tensor, rows: Rows) -> Tensor:
        found = jacrev(lambda flat: losses_of(setting, flat, rows))(flat)
        assert isinstance(found, Tensor)
        return (found * root) @ vectors

    asked = gradients(end.flats[-1], query)
    mean, damped = torch.zeros(TRAIN, len(root)).double(), torch.zeros(TRAIN, len(root)).double()
    bounds = [*(share for share, _ in end.way), 1.0]
    for (start, flat), stop in zip(end.way, bounds[1:], strict=True):
        each = gradients(flat, rows)
        mean += (stop - start) * each
        damped += torch.exp(-a * (1 - stop)) * -torch.expm1(-a * (stop - start)) / a * each
    effects = {MEAN: mean * (-torch.expm1(-a) / a) @ asked.T, DAMPED: damped @ asked.T}
    return (
        largest,
        float((diagonals.hold * diagonals.reach).max()),
        {name: (found / TRAIN).numpy() for name, found in effects.items()},
    )


def measure(setting: Setting) -> list[dict[str, Any]]:
    rows, query = digits(setting.loss)
    random = np.random.default_rng(1)
    drops = np.array([random.permutation(TRAIN)[:LEFT_OUT] for _ in range(DROPS)])
    weights = torch.ones(2 * DROPS + 1, TRAIN, dtype=torch.float64)
    for number, drop in enumerate(drops):
        weights[number, drop] = 0.0
        weights[DROPS + number, drop] = 1 - LOWERED
    measured = []
    for course in setting.courses:
        for end in train(setting, course, rows, weights):
            model = new_model()
            nn.utils.vector_to_parameters(end.flats[-1], model.parameters())
            training = training_of(setting, end)
            length, forgotten, by_way = along(setting, end, model, training, rows, query)
            effects: dict[str, np.ndarray] = {}
            for filter in FILTERS:
                solution = jostle.solve(model, rows, query, training=training, loss=LOSSES[setting.loss], filter=filter)
                effects[filter] = solution.effects.astype(np.float64)
            effects |= by_way
            after = vmap(lambda flat: losses_of(setting, flat, query))(end.flats).numpy()
            change = after[:-1] - after[-1]
            row: dict[str, Any] = {
                "steps": end.steps, "rate": course.rate, "length": length, "hold_times_reach": forgotten,
                "loss": float(losses_of(setting, end.flats[-1], rows).mean()), "methods": {},
            }  # fmt: skip
            for name, found in effects.items():
                predicted = [np.stack([found[drop].sum(0) for drop in drops])]
                whole, lowered = change[:DROPS, None], change[DROPS:, None] / LOWERED
                slope = slopes_of(predicted, whole, pooled=False, bootstrap=BOOTSTRAP, seed=0)[0]
                rank = lds_of(predicted, whole, per="query", bootstrap=BOOTSTRAP, seed=0)[0]
                first = slopes_of(predicted, lowered, pooled=False, bootstrap=BOOTSTRAP, seed=0)[0]
                row["methods"][name] = {
                    "slope": slope.to_dict(), "lds": rank.to_dict(), "slope_of_a_tenth": first.to_dict()
                }  # fmt: skip
            measured.append(row)
            columns = [[one[key]["value"] for key in MEASURES] for one in row["methods"].values()]
            found = "   ".join("{:.2f} ({:.2f}) {:.2f}".format(*numbers) for numbers in columns)
            print(f"{setting.name:28} hτ {length:8.2f} wd·τ {forgotten:6.2f}   {found}", flush=True)
    return measured


MEASURES = ("slope", "slope_of_a_tenth", "lds")

LOOKS = {
    "descent": {"color": "tab:blue", "marker": "o"},
    "minimum": {"color": "tab:orange", "marker": "s"},
    MEAN: {"color": "0.6", "marker": ".", "linestyle": ":"},
    DAMPED: {"color": "0.2", "marker": ".", "linestyle": "--"},
}
SHARED_MOMENTS = "descent, of trainings that share second moments"
TITLES = {
    "linear": "linear regression",
    "logistic": "logistic regression",
    "sgd": "gradient descent, momentum",
    "adamw": "AdamW",
}


def draw(path: Path, record: Mapping[str, Any]) -> None:
    """Slope over hτ: a row for each decay, a panel for each loss and optimizer."""
    from matplotlib.figure import Figure

    pairs = list(dict.fromkeys((one.loss, one.optimizer) for one in SETTINGS))
    figure = Figure(figsize=(4.2 * len(pairs), 7), layout="constrained")
    panels = figure.subplots(2, len(pairs), sharex=True, sharey=True)
    for setting in (*SETTINGS, *SHARED):
        panel = panels[int(setting.decay > 0), pairs.index((setting.loss, setting.optimizer))]
        rows = sorted(record["measured"][setting.name], key=lambda row: row["length"])
        if setting.shared:
            slopes = [row["methods"]["descent"]["slope"]["value"] for row in rows]
            lengths = [row["length"] for row in rows]
            panel.plot(lengths, slopes, "^-.", color="tab:purple", markersize=4, linewidth=1.2, label=SHARED_MOMENTS)
            continue
        for name, look in LOOKS.items():
            slopes = [row["methods"][name]["slope"] for row in rows]
            panel.errorbar(
                [row["length"] for row in rows], [one["value"] for one in slopes],
                yerr=[1.96 * (one["standard_error"] or math.nan) for one in slopes],
                label=name, capsize=2, markersize=4, linewidth=1.2, **look,
            )  # fmt: skip
        panel.axhspan(*BAND, color="tab:green", alpha=0.12)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_ylim(0.4, 4)
        panel.set_yticks([0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3], ["0.5", "0.7", "0.85", "1", "1.2", "1.5", "2", "3"])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        decayed = f"weight decay {setting.decay:g}" if setting.decay else "no weight decay"
        panel.set_title(f"{TITLES[setting.loss]}, {TITLES[setting.optimizer]},\n{decayed}", fontsize=10)
    for panel in panels[1]:
        panel.set_xlabel("hτ (largest curvature)")
    for panel in panels[:, 0]:
        panel.set_ylabel("slope of real on predicted, 95 %")
    figure.legend(*panels[0, 1].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=HERE / "records" / "solve_regression.json")
    everything = {setting.name: setting for setting in (*SETTINGS, *SHARED)}
    parser.add_argument("--only", nargs="+", choices=everything, help="beside what the record has of others")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    started = time.perf_counter()
    before = json.loads(given.record.read_text()) if given.only and given.record.exists() else {}
    measured = before.get("measured", {}) | {name: measure(everything[name]) for name in given.only or everything}
    record = {
        "train": TRAIN, "queries": QUERIES, "drops": DROPS, "left_out": LEFT_OUT, "lowered": LOWERED,
        "batch": {"sgd": TRAIN, "adamw": BATCH},
        "length": "largest eigenvalue of reach^½·H·reach^½, H at the end of training",
        "seconds": before.get("seconds", 0.0) + time.perf_counter() - started, "measured": measured,
    }  # fmt: skip
    write_record(given.record, record)
    if len(measured) == len(everything):
        draw(given.record.with_suffix(".png"), record)


if __name__ == "__main__":
    main()

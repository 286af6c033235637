"""Where along a training are scores best taken?

    python -m experiments.halfway --work work [--only "mlp (SGD)"] [--minutes 20] [--figure FILE]

Small models are trained on all examples and on halves of them, for several lengths, from one start (but for one of
them: each seed has a start of its own). Scores are taken at the start, after a quarter, a half and three quarters of
the training on all examples, and at its end, and judged by the LDS of the halves: those of the first order at the κ
that the training says, of EK-FAC at kronfluence's own damping, of gradients, and of draws without a gradient, read as
far as they support it; and so are means of what several places say. Nothing is chosen by the LDS. Called again it goes
on where it stood.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import jostle
from experiments import resolution
from experiments.resolution import Problem, halves, lds_over_queries
from experiments.retraining import Budget, Record, file_name, measure_each
from jostle.attributors import FirstOrder, ekfac, gradient_similarity
from jostle.data.datasets import Data
from jostle.diagnose.plots import CHAIN_COLOURS
from jostle.evaluate import Trainer, retrain

PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)
TOGETHER = {"a quarter and a half": (0.25, 0.5), "all but the start": PLACES[1:]}
"""Places whose scores are averaged."""
EPOCHS: tuple[int, ...] = (4, 16, 64, 256)
SEEDS, LABELS = 2, 4
SGD, ADAMW = 0.1, 1e-3
"""Learning rates."""
BEFORE = 40
"""Epochs on other digits, where a model is trained on."""
METHODS: dict[str, Any] = {"first order": "-", "EK-FAC": "--", "gradients": ":", "draws": "-."}
CHAINS, DRAWS, RISE = 4, 100, 0.3
"""Of draws without a gradient."""


class Case(NamedTuple):
    """What is trained, from where, and how."""

    problem: Problem
    start: nn.Module | None
    """None: each seed begins with weights of its own."""
    adam: bool = False
    epochs: tuple[int, ...] = EPOCHS

    def trainer(self, epochs: int, data: Any = None) -> Trainer:
        rule = torch.optim.AdamW if self.adam else torch.optim.SGD
        return Trainer(
            lambda seed: self.problem.make() if self.start is None else self.start,
            self.problem.train if data is None else data,
            lambda weights: rule(weights, lr=self.rate, weight_decay=0.0), epochs=epochs,
            batch_size=self.problem.batch_size, loss=self.problem.loss,
        )  # fmt: skip

    def model(self, part: float, epochs: int) -> nn.Module:
        """What a part of the training on all examples makes of the start."""
        # The learning rate does not change, so that a part of a training is a shorter one.
        epochs, seed = round(part * epochs), SEEDS  # which no retraining has
        if epochs:
            return self.trainer(epochs)(np.arange(len(Data(self.problem.train, "train"))), seed).eval()
        torch.manual_seed(seed)
        return self.problem.make().eval() if self.start is None else self.start

    @property
    def rate(self) -> float:
        return ADAMW if self.adam else SGD

    def trained_before(self, data: Any, epochs: int) -> Case:
        """The same from a start that has seen other examples."""
        seen = self.trainer(epochs, data)(np.arange(len(Data(data, "before"))), 0)
        return self._replace(start=seen.eval())


def new(problem: Problem, **more: Any) -> Case:
    torch.manual_seed(0)
    return Case(problem, problem.make().eval(), **more)


def characters() -> Case:
    problem = resolution.characters()
    return new(problem, adam=True, epochs=EPOCHS[:-1]).trained_before(problem.pretrain, 12)


CASES: dict[str, Callable[[], Case]] = {
    "mlp (SGD)": lambda: new(resolution.PROBLEMS["mlp"]()),
    "mlp (AdamW)": lambda: new(resolution.PROBLEMS["mlp"](), adam=True),
    "mlp trained before (SGD)": lambda: new(resolution.PROBLEMS["mlp"]()).trained_before(
        resolution.digits(nn.Identity, first=500).train, BEFORE
    ),
    "mlp from other weights (SGD)": lambda: Case(resolution.PROBLEMS["mlp"](), None),
    "cnn (SGD)": lambda: new(resolution.PROBLEMS["cnn"]()),
    "characters fine-tuned (AdamW)": characters,
}


def scores_at(case: Case, model: nn.Module, steps: int) -> Iterator[tuple[str, Callable[[], jostle.Scores]]]:
    """What is compared at one place of a training of so many steps."""
    problem = case.problem
    given = {"train": problem.train, "query": problem.query, "loss": problem.loss}

    def first_order() -> jostle.Scores:
        limit = FirstOrder(model, **given, labels=LABELS, metric="adam" if case.adam else "isotropic")
        kappa = limit.kappa_of_training(case.rate * steps, batch_size=problem.batch_size)
        return limit.influence(kappa=kappa)

    yield "first order", first_order
    yield "EK-FAC", lambda: ekfac(model, **given)
    yield "gradients", lambda: gradient_similarity(model, **given)

    def draws() -> jostle.Scores:
        about = {"loss": problem.loss, "batch_size": problem.sampling_batch_size}
        chosen = jostle.calibrate(model, problem.train, pilot=False, rise=RISE, kappa=0.0, **about)
        run = jostle.attribute(model, **given, chains=CHAINS, draws=DRAWS, progress=False, **chosen.settings)
        # Times γ, near the centre a covariance is a product of gradients, whatever γ a place has.
        return scaled(run.influence(kappa="auto"), chosen.posterior.localization)

    yield "draws", draws


def scaled(scores: jostle.Scores, factor: float) -> jostle.Scores:
    return replace(scores, values=scores.values * np.float32(factor))


def measure(name: str, work: Path, record: Record, budget: Budget) -> None:
    """Whatever the record lacks of one case; a mean that it lacks takes the scores of all its places again."""
    kept = record.content["measured"].setdefault(name, {})
    case = CASES[name]()
    subsets = halves(len(Data(case.problem.train, "train")))
    for epochs in case.epochs:
        steps = case.trainer(epochs).steps(len(subsets.indices(0)))[0]
        found = kept.setdefault(str(epochs), {"steps": steps, "places": {}})
        places = {place: found["places"].setdefault(f"{place:g}", {}) for place in PLACES}
        together = {label: found.setdefault("together", {}).setdefault(label, {}) for label in TOGETHER}
        if all(rows.keys() >= METHODS.keys() for rows in (*places.values(), *together.values())):
            continue
        budget.check()
        bank = retrain(
            case.trainer(epochs), case.problem.train, case.problem.query, subsets=subsets, seeds=SEEDS,
            loss=case.problem.loss, out=work / file_name(f"{name}-{epochs}"), progress=False,
            minutes=budget.seconds_left / 60,
        )  # fmt: skip
        made: dict[tuple[str, float], jostle.Scores] = {}
        for place, rows in places.items():
            budget.check()  # the bank may have stopped before it was full
            means = [together[label] for label, of in TOGETHER.items() if place in of]
            for method, scores_of in scores_at(case, case.model(place, epochs), steps):
                if any(method not in lacking for lacking in (rows, *means)):
                    made[method, place] = scores_of()
                    rows[method] = lds_over_queries(bank, made[method, place])
            tell(name, steps, f"at {place:g} of them", rows)
            record.write()
        for label, rows in together.items():
            for method in METHODS.keys() - rows.keys():
                mean = jostle.Scores.mean_of([made[method, place] for place in TOGETHER[label]])
                rows[method] = lds_over_queries(bank, mean)
            tell(name, steps, f"{label} together", rows)
        record.write()


def tell(name: str, steps: int, where: str, rows: Mapping[str, Any]) -> None:
    shown = "  ".join(f"{method} {rows[method]['lds']:.3f}" for method in METHODS if method in rows)
    print(f"{name}, {steps} steps, {where}: {shown}", flush=True)


def markdown(measured: Mapping[str, Any]) -> str:
    """A line for each length of training and each method."""
    lines = [
        "| | steps | | " + " | ".join(f"at {place:g}" for place in PLACES) + " | " + " | ".join(TOGETHER) + " |",
        "| --- " * (3 + len(PLACES) + len(TOGETHER)) + "|",
    ]
    for name, kept in measured.items():
        for found in kept.values():
            for method in METHODS:
                rows = [found["places"].get(f"{place:g}", {}).get(method) for place in PLACES]
                rows += [found.get("together", {}).get(label, {}).get(method) for label in TOGETHER]
                cells = [f"{row['lds']:.3f} ± {row['standard_error']:.3f}" if row else "" for row in rows]
                lines.append(f"| {name} | {found['steps']} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(measured: Mapping[str, Any], path: Path) -> None:
    """LDS against where scores are taken, a panel for each case, a colour for each length."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(3.3 * len(measured), 3.8), layout="constrained")
    panels = figure.subplots(1, len(measured), squeeze=False, sharey=True)[0]
    colours = dict(zip(EPOCHS, CHAIN_COLOURS, strict=False))
    for axes, (name, kept) in zip(panels, measured.items(), strict=True):
        for epochs, found in kept.items():
            colour = colours[int(epochs)]
            for method, style in METHODS.items():
                rows = [(place, found["places"].get(f"{place:g}")) for place in PLACES]
                points = [(place, row[method]["lds"]) for place, row in rows if row and method in row]
                if points:
                    axes.plot(*zip(*points, strict=True), style, color=colour, marker="o", markersize=3.5)
        axes.set_title(name, fontsize=10)
        axes.set_xticks(PLACES, ["start", "¼", "½", "¾", "end"])
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("LDS")
    figure.supxlabel("where in the training scores are taken", fontsize=10)
    lines = {method: Line2D([], [], color="0.3", linestyle=style) for method, style in METHODS.items()}
    lines |= {f"{epochs} epochs": Line2D([], [], color=colour) for epochs, colour in colours.items()}
    figure.legend(lines.values(), lines, loc="outside upper center", ncols=len(lines), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="LDS against where along a training scores are taken.")

    def measure_one(name: str, given: argparse.Namespace, record: Record, budget: Budget) -> None:
        measure(name, given.work, record, budget)

    about = {"learning_rates": {"SGD": SGD, "AdamW": ADAMW}, "labels": LABELS, "seeds": SEEDS}
    measured = measure_each(parser, "halfway", CASES, about, measure_one, draw)
    print(f"\n{markdown(measured)}", flush=True)


if __name__ == "__main__":
    main()

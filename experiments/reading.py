"""What is gained by reading influence at a larger n_beta than was sampled?

    python -m experiments.reading --work work [--only mlp,cnn] [--minutes 20] [--figure FILE]

The draws are independent Gaussian perturbations, without any gradient, at two rises of the mean loss. They are read as
they are and with the training losses held, at several κ (`jostle.conditioning`), and the scores judged by the LDS of a
bank of retrainings: on the models of `experiments.resolution`, on which the idea was tried out, and on models it was
not tried on, those of `experiments.calibration` and the ridge regression of `experiments.samplers`. Beside them: what
such draws tend to near w*, in closed form (`jostle.attributors.FirstOrder`), read at the same κ; gradients; EK-FAC at
kronfluence's own damping; and chains that were sampled at κ = 10, as `jostle.calibrate` has it,
for which a gradient is taken at every step. Called again it goes on where it stood.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

import jostle
from experiments import calibration, resolution, samplers
from experiments.kept import mean_losses
from experiments.resolution import Problem, Trainer, halves, lds_over_queries
from experiments.retraining import Budget, Record, measure_each
from jostle.attributors import FirstOrder, ekfac, gradient_similarity
from jostle.conditioning import Conditioned, Moves
from jostle.data.datasets import Data
from jostle.diagnose.plots import CHAIN_COLOURS
from jostle.estimate import covariance
from jostle.evaluate import Bank
from jostle.losses import Loss

DAMPINGS = (1e-8, 1e-6, 1e-4, 1e-2, 1.0)
"""Tried for EK-FAC, besides kronfluence's own."""

EKFAC_SEEDS, SEED = 5, ", seed "
"""Of the labels that its factors are fitted to, at its own damping: how much it varies from run to run."""

KAPPAS = (0.0, 1.0, 3.0, 10.0, 30.0, 100.0)
RISES = (0.3, 0.03)
CHAINS, DRAWS, SEEDS = 4, 100, 3
SAMPLED, FIRST_ORDER, SPREAD = "sampled at κ = 10", "first order, no draws", "first order, spread of 40 draws"
ADAM = "first order, metric of Adam"
LABELS = {FIRST_ORDER: 4, SPREAD: 4, "first order, 16 labels": 16, "first order, own labels": 0, ADAM: 4}
"""How many labels are drawn from the model for what is held; 0 are those that there are."""

KINDS = ("covariance", "correlation")


class Case(NamedTuple):
    """A model, what its influence is asked for, and the bank that judges it."""

    model: nn.Module
    train: Any
    query: Any
    loss: Loss
    bank: Bank
    batch_size: int
    training: Mapping[str, float] | None = None
    """How the models of the bank were trained by AdamW, as `FirstOrder.kappa_of_training` wants to know it."""


def trained(problem: Problem) -> Callable[[Path, Record, Budget], Case]:
    def make(work: Path, record: Record, budget: Budget) -> Case:
        trainer = Trainer(problem)
        subsets = halves(len(Data(problem.train, "train")))
        return Case(
            trainer.model(), problem.train, problem.query, problem.loss, trainer.bank(work / "bank", subsets),
            problem.sampling_batch_size, resolution.training_of(problem, len(subsets.indices(0))),
        )  # fmt: skip

    return make


def ridge(work: Path, record: Record, budget: Budget) -> Case:
    setting = samplers.linear(work, record, budget)
    return Case(setting.model, setting.train, setting.query, setting.loss, setting.banks["0.5"], 100)


TRIED = {name: lambda make=make: trained(make()) for name, make in resolution.PROBLEMS.items()}
UNSEEN = {
    "ridge regression": lambda: ridge,
    **{f"{name} (unseen)": lambda make=make: trained(make()) for name, make in calibration.PROBLEMS.items()},
}
CASES: dict[str, Callable[[], Callable[[Path, Record, Budget], Case]]] = {**TRIED, **UNSEEN}


def baselines(case: Case) -> Iterator[tuple[str, Callable[[], jostle.Scores]]]:
    given = (case.model, case.train, case.query)
    for cosine in (False, True):
        name = "gradient cosine" if cosine else "gradient similarity"
        yield name, lambda cosine=cosine: gradient_similarity(*given, loss=case.loss, cosine=cosine)
    yield "EK-FAC", lambda: ekfac(*given, loss=case.loss)
    for damping in DAMPINGS:
        yield f"EK-FAC, damping {damping:g}", lambda damping=damping: ekfac(*given, loss=case.loss, damping=damping)
    for seed in range(1, EKFAC_SEEDS):
        yield f"EK-FAC{SEED}{seed}", lambda seed=seed: ekfac(*given, loss=case.loss, seed=seed)


def best_of_ekfac(kept: Mapping[str, Any]) -> float | None:
    """Its LDS at the damping that suits it best, so that it is tuned; what it is compared with is not."""
    found = [
        one["lds"]
        for method, one in kept["baselines"].items()
        if method.startswith("EK-FAC") and SEED not in method and "lds" in one
    ]
    return max(found, default=None)


def read(run: jostle.Run, bank: Bank) -> dict[str, Any]:
    """The LDS of one run at every κ."""
    return {
        kind: {f"{kappa:g}": lds_over_queries(bank, run.influence(kappa=kappa, normalize=kind == "correlation"))
               for kappa in KAPPAS}
        for kind in ("covariance", "correlation")
    }  # fmt: skip


def first_order(case: Case, label: str) -> dict[str, Any]:
    """What draws tend to near w*, read at every κ; losses move as in 40 draws at the first rise, where asked.

    In the metric of Adam also at the κ of the training, which knows of no retraining.
    """
    limit, run = FirstOrder(
        case.model, case.train, case.query, loss=case.loss, labels=LABELS[label],
        metric="adam" if label == ADAM else "isotropic",
    ), None  # fmt: skip
    if label == SPREAD:
        chosen = jostle.calibrate(
            case.model, case.train, loss=case.loss, batch_size=case.batch_size, pilot=False, rise=RISES[0], kappa=0.0
        )
        run = jostle.attribute(
            case.model, case.train, case.query, loss=case.loss, chains=CHAINS, draws=40 // CHAINS, progress=False,
            **chosen.settings,
        )  # fmt: skip

    def measured(kappa: float, kind: str) -> dict[str, float]:
        return lds_over_queries(case.bank, limit.influence(kappa=kappa, normalize=kind == "correlation", spread=run))

    found: dict[str, Any] = {kind: {f"{kappa:g}": measured(kappa, kind) for kappa in KAPPAS} for kind in KINDS}
    if label == ADAM and case.training:
        kappa = limit.kappa_of_training(**case.training)
        found["training"] = {**case.training, "kappa": kappa, **{kind: measured(kappa, kind) for kind in KINDS}}
    return found


def measure(name: str, work: Path, record: Record, budget: Budget, *, draws: int = DRAWS, seeds: int = SEEDS) -> None:
    """Whatever the record lacks of one model."""
    kept = record.content["measured"].setdefault(name, {"baselines": {}, "runs": {}})
    budget.check()
    case = CASES[name]()(work / name.replace(" ", "_"), record, budget)
    kept |= {"weights": sum(value.numel() for value in case.model.parameters()), "train": case.bank.about["train"],
             "queries": case.bank.about["queries"], "bank": case.bank.summary()["text"]}  # fmt: skip
    for method, scores in baselines(case):
        if method not in kept["baselines"]:
            try:
                kept["baselines"][method] = lds_over_queries(case.bank, scores())
            except jostle.InputError as error:  # a loss or a layer that a method does not know
                kept["baselines"][method] = {"fault": str(error)}
            record.write()
    for label in LABELS:
        if label not in kept:
            kept[label] = first_order(case, label)
            record.write()
    cells = [(f"rise {rise:g}", {"rise": rise, "kappa": 0.0}, seed) for seed in range(seeds) for rise in RISES]
    for label, settings, seed in [*cells, (SAMPLED, {}, 0)]:
        key = f"{label}, seed {seed}"
        if key in kept["runs"]:
            continue
        budget.check()
        started = time.process_time()
        chosen = jostle.calibrate(
            case.model, case.train, loss=case.loss, batch_size=case.batch_size, pilot=False, **settings
        )
        run = jostle.attribute(
            case.model, case.train, case.query, loss=case.loss, chains=CHAINS, draws=draws, seed=seed, progress=False,
            **chosen.settings,
        )  # fmt: skip
        kept["runs"][key] = {
            "setting": label, "localization": chosen.posterior.localization, "n_beta": chosen.posterior.n_beta,
            "cpu_seconds": round(time.process_time() - started, 1), "lds": read(run, case.bank),
        }  # fmt: skip
        found = kept["runs"][key]["lds"]["covariance"]
        shown = "  ".join(f"{kappa} {one['lds']:.3f}" for kappa, one in found.items())
        print(f"{name}, {key}: covariance at κ {shown}", flush=True)
        record.write()


def measure_longer(name: str, work: Path, record: Record, budget: Budget, draws: int) -> None:
    """One run of so many draws in all, read after parts of them: is it draws that are missing?"""
    kept = record.content["measured"].setdefault(name, {"baselines": {}, "runs": {}})
    if kept.get("longer", {}).get("draws") == draws:
        return
    case = CASES[name]()(work / name.replace(" ", "_"), record, budget)
    chosen = jostle.calibrate(
        case.model, case.train, loss=case.loss, batch_size=case.batch_size, pilot=False, rise=RISES[0], kappa=0.0
    )
    run = jostle.attribute(
        case.model, case.train, case.query, loss=case.loss, chains=CHAINS, draws=draws // CHAINS, progress=False,
        **chosen.settings,
    )  # fmt: skip
    losses, held = [mean_losses(run, part) for part in ("train", "query")], run.traces.held_losses("train")[:, :, :]
    about = {"fingerprints": run.manifest["fingerprints"]}
    table: dict[str, Any] = {}
    for part in sorted({count for count in (100, 400, 1_000, 2_000, draws) if count <= draws}):
        train, query, now = (trace[:, : part // CHAINS] for trace in (*losses, held))
        moves = Moves(now, np.arange(CHAINS))
        for kappa in KAPPAS:
            sides = (train, query) if not kappa else (Conditioned(trace, moves, kappa) for trace in (train, query))
            scores = jostle.Scores(values=-covariance(*sides).values, method="bif", provenance=about)
            table.setdefault(str(part), {})[f"{kappa:g}"] = lds_over_queries(case.bank, scores)
        shown = "  ".join(f"{kappa} {one['lds']:.3f}" for kappa, one in table[str(part)].items())
        print(f"{name}, {part} draws: covariance at κ {shown}", flush=True)
    kept["longer"] = {"draws": draws, "rise": RISES[0], "covariance": table}
    record.write()


def mean_over_seeds(kept: Mapping[str, Any], setting: str, kind: str) -> dict[float, tuple[float, float]]:
    """κ → mean LDS and its standard error over seeds of the sampler; 0 where there is one."""
    runs = [run["lds"][kind] for run in kept["runs"].values() if run["setting"] == setting]
    out = {}
    for kappa in KAPPAS if runs else ():
        values = [run[f"{kappa:g}"]["lds"] for run in runs]
        out[kappa] = (
            float(np.mean(values)),
            float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0,
        )
    return out


def markdown(measured: Mapping[str, Any], kind: str) -> str:
    """A line for each model."""
    lines = [
        f"| {kind} | gradients | EK-FAC | at its best damping | {SAMPLED} | "
        + " | ".join(f"κ = {kappa:g}" for kappa in KAPPAS)
        + " |",
        "| " + " | ".join(["---"] * (5 + len(KAPPAS))) + " |",
    ]
    similar = "gradient cosine" if kind == "correlation" else "gradient similarity"
    for name, kept in measured.items():
        plain = [kept["baselines"].get(method, {}).get("lds") for method in (similar, "EK-FAC")]
        plain.append(best_of_ekfac(kept))
        plain.append(mean_over_seeds(kept, SAMPLED, kind).get(0.0, (None,))[0])
        first = [f"{value:.3f}" if value is not None else "" for value in plain]
        for rise in RISES:
            found = mean_over_seeds(kept, f"rise {rise:g}", kind)
            cells = [f"{mean:.3f} ± {error:.3f}" for mean, error in found.values()]
            lines.append(f"| {name}, {rise:g} nats | {' | '.join(first)} | {' | '.join(cells)} |")
            first = [""] * len(plain)
        for label in (label for label in LABELS if label in kept):
            cells = [f"{found['lds']:.3f}" for found in kept[label][kind].values()]
            lines.append(f"| {name}, {label} | {' | '.join(first)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def markdown_of_training(measured: Mapping[str, Any]) -> str:
    """A line for each model: the κ that its training says, and what is read there."""
    best = f"the best covariance of κ ≤ {KAPPAS[-1]:g}"
    lines = [f"| | EK-FAC | at its best damping | κ of the training | correlation | covariance | {best} |"]
    lines.append("| --- " * 7 + "|")
    for name, kept in measured.items():
        if found := kept.get(ADAM, {}).get("training"):
            values = [kept["baselines"]["EK-FAC"].get("lds"), best_of_ekfac(kept)]
            values += [found[kind]["lds"] for kind in reversed(KINDS)]
            values.append(max(one["lds"] for one in kept[ADAM]["covariance"].values()))
            cells = [f"{value:.3f}" for value in values]
            cells.insert(2, f"{found['kappa']:.0f}")
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(measured: Mapping[str, Any], path: Path) -> None:
    """LDS against the κ at which the same draws are read, a panel for each model."""
    from matplotlib.figure import Figure

    columns = math.ceil(len(measured) / 2)
    figure = Figure(figsize=(3.1 * columns, 6.4), layout="constrained")
    panels = figure.subplots(2, columns, squeeze=False).ravel()
    places = [0.3, *KAPPAS[1:]]
    for axes, (name, kept) in zip(panels, measured.items(), strict=False):
        for rise, colour in zip(RISES, CHAIN_COLOURS, strict=False):
            found = mean_over_seeds(kept, f"rise {rise:g}", "covariance")
            if found:
                axes.errorbar(
                    places, [mean for mean, _ in found.values()], [error for _, error in found.values()], marker="o",
                    markersize=4, color=colour, label=f"no gradient, {rise:g} nats", capsize=2,
                )  # fmt: skip
        for label, colour in zip((FIRST_ORDER, SPREAD), CHAIN_COLOURS[2:], strict=False):
            if label in kept:
                limit = [found["lds"] for found in kept[label]["covariance"].values()]
                axes.plot(places, limit, marker="s", markersize=4, color=colour, label=label)
        sampled = mean_over_seeds(kept, SAMPLED, "covariance")
        if sampled:
            axes.plot(places[0], sampled[0.0][0], marker="*", markersize=11, color="black", linestyle="", label=SAMPLED)
        plain = [kept["baselines"].get(method, {}).get("lds") for method in ("gradient similarity", "EK-FAC")]
        names = ("gradient similarity", "EK-FAC", "EK-FAC, best damping")
        for method, value, style in zip(names, (*plain, best_of_ekfac(kept)), (":", "--", "-."), strict=True):
            if value is not None:
                axes.axhline(value, color="0.4", linestyle=style, label=method)
        axes.set_xscale("log")
        axes.set_xticks(places, ["0", *(f"{kappa:g}" for kappa in KAPPAS[1:])])
        axes.minorticks_off()
        axes.set_title(name, fontsize=10)
        axes.grid(alpha=0.3)
    for axes in panels[len(measured) :]:
        axes.set_visible(False)
    figure.supxlabel("κ at which the draws are read (0: as they were sampled)", fontsize=10)
    figure.supylabel("LDS of covariances", fontsize=10)
    labelled = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(labelled.values(), labelled.keys(), loc="outside upper center", ncols=7, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="LDS of the same draws, read at several n_beta.")
    parser.add_argument("--longer", type=int, metavar="N", help="instead: one run of N draws, read after parts of them")

    def measure_one(name: str, given: argparse.Namespace, record: Record, budget: Budget) -> None:
        if given.longer:
            measure_longer(name, given.work, record, budget, given.longer)
        else:
            measure(name, given.work, record, budget)

    measured = measure_each(parser, "reading", CASES, {"chains": CHAINS, "draws": DRAWS}, measure_one, draw)
    for kind in KINDS:
        print(f"\n{markdown(measured, kind)}", flush=True)
    print(f"\n{markdown_of_training(measured)}", flush=True)


if __name__ == "__main__":
    main()

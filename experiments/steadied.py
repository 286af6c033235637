"""What do a few draws and gradients know together, that neither knows alone?

    python -m experiments.steadied --work work [--only mlp,cnn] [--minutes 20] [--figure FILE]

On the models of `experiments.reading`: independent Gaussian draws, without any gradient, at a rise of the mean loss by
0.3 nats; their limit near w* in closed form (`jostle.attributors.FirstOrder`); and the draws drawn toward that limit as
far as their noise says (`jostle.Scores.toward`). Correlations of all three are read at κ = 0 and 10 and judged by the
LDS of a bank of retrainings, which nothing of this sees. Called again it goes on where it stood.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import jostle
from experiments.reading import CASES, CHAINS, RISES
from experiments.resolution import lds_over_queries
from experiments.retraining import Budget, Record, measure_each
from jostle.attributors import FirstOrder
from jostle.diagnose.plots import CHAIN_COLOURS
from jostle.errors import EstimateWarning

DRAWS, SEEDS, KAPPAS = (100, 400), 3, (0.0, 10.0)
WAYS = ("draws", "first order", "both")


def measure(name: str, work: Path, record: Record, budget: Budget) -> None:
    """Whatever the record lacks of one model."""
    kept = record.content["measured"].setdefault(name, {})
    wanted = [(draws, seed) for draws in DRAWS for seed in range(SEEDS) if f"{draws} draws, seed {seed}" not in kept]
    if not wanted:
        return
    budget.check()
    case = CASES[name]()(work / name.replace(" ", "_"), record, budget)
    limit = FirstOrder(case.model, case.train, case.query, loss=case.loss)
    chosen = jostle.calibrate(
        case.model, case.train, loss=case.loss, batch_size=case.batch_size, pilot=False, rise=RISES[0], kappa=0.0
    )
    for draws, seed in wanted:
        budget.check()
        run = jostle.attribute(
            case.model, case.train, case.query, loss=case.loss, chains=CHAINS, draws=draws // CHAINS, seed=seed,
            progress=False, **chosen.settings,
        )  # fmt: skip
        found = kept[f"{draws} draws, seed {seed}"] = {}
        for kappa in KAPPAS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", EstimateWarning)  # what few draws do not support is measured, too
                drawn = run.influence(kappa=kappa, normalize=True, standard_error=True)
            steady = limit.influence(kappa=kappa, normalize=True)
            both = drawn.toward(steady)
            ways = zip(WAYS, (drawn, steady, both), strict=True)
            about = both.provenance["toward"]
            found[f"κ = {kappa:g}"] = {
                **{way: lds_over_queries(case.bank, scores)["lds"] for way, scores in ways},
                "weights": [*about["weights"].values()], "share_of_noise": about["share_of_noise"],
            }  # fmt: skip
        print(f"{name}, {draws} draws, seed {seed}: {found['κ = 0']}", flush=True)
        record.write()


def means(kept: Mapping[str, Any], draws: int, reading: str) -> dict[str, float]:
    """The LDS of each way, over seeds."""
    runs = [one[reading] for key, one in kept.items() if key.startswith(f"{draws} draws")]
    return {way: float(np.mean([run[way] for run in runs])) for way in WAYS}


def markdown(measured: Mapping[str, Any], reading: str) -> str:
    """A line for each model."""
    columns = [f"{draws} draws | first order | both" for draws in DRAWS]
    lines = [f"| {reading} | {' | '.join(columns)} |", "| --- " * (1 + 3 * len(DRAWS)) + "|"]
    for name, kept in measured.items():
        cells = [f"{value:.3f}" for draws in DRAWS for value in means(kept, draws, reading).values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(measured: Mapping[str, Any], path: Path) -> None:
    """LDS of the three ways, a panel for each κ, a group for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    panels = figure.subplots(1, len(KAPPAS), sharey=True)
    for axes, reading in zip(panels, (f"κ = {kappa:g}" for kappa in KAPPAS), strict=True):
        for place, kept in enumerate(measured.values()):
            for offset, draws in zip((-0.2, 0.2), DRAWS, strict=True):
                for way, value in means(kept, draws, reading).items():
                    first = place == 0 and draws == DRAWS[0]
                    axes.plot(
                        place + offset, value, marker="osD"[WAYS.index(way)], markersize=5, linestyle="",
                        color=CHAIN_COLOURS[WAYS.index(way)], label=way if first else None,
                        fillstyle="full" if draws == DRAWS[0] else "none",
                    )  # fmt: skip
        axes.set_xticks(range(len(measured)), list(measured), rotation=30, ha="right", fontsize=8)
        axes.set_title(reading, fontsize=10)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("LDS of correlations")
    handles, labels = panels[0].get_legend_handles_labels()
    title = f"filled: {DRAWS[0]} draws, open: {DRAWS[1]}"
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, title=title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="LDS of draws, of their limit, and of draws drawn toward it.")

    def measure_one(name: str, given: argparse.Namespace, record: Record, budget: Budget) -> None:
        measure(name, given.work, record, budget)

    measured = measure_each(parser, "steadied", CASES, {"chains": CHAINS, "rise": RISES[0]}, measure_one, draw)
    for kappa in KAPPAS:
        print(f"\n{markdown(measured, f'κ = {kappa:g}')}", flush=True)


if __name__ == "__main__":
    main()

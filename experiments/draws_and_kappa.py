"""What more draws, and reading at a larger n_beta, would bring: the LDS of runs that were kept, in parts and together.

    python -m experiments.draws_and_kappa kept --bank bank-strong-0.5 \
        --runs "calibrated=strong-calibrated,strong-calibrated__seed_1,strong-calibrated__seed_2" \
        --beside experiments/records/language_retraining.json --figure figure.png

The directory is what `experiments.language_retraining --keep` or another script left. Runs of one name are put
together, as if their chains were of one run. Of each it takes the first draws of every chain, more and more of them,
and reads them at several κ (`jostle.conditioning`); nothing is sampled. --beside gives lines to compare with, from the
record of the same bank.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.environment import write_record

from experiments.kept import SETS, KeptBank, influence, read_run
from experiments.retraining import RECORDS
from jostle.conditioning import Moves
from jostle.diagnose.plots import CHAIN_COLOURS
from jostle.evaluate import Bank, lds

KAPPAS = (0.0, 3.0, 10.0, 30.0, 100.0)
SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0)
KINDS = ("covariance", "correlation")


def rows_of(
    bank: Bank,
    losses: Sequence[np.ndarray],
    fingerprints: Mapping[str, str],
    bootstrap: int,
    kappas: Sequence[float] = KAPPAS,
) -> list[dict[str, Any]]:
    """LDS per query of some of the draws, read at every κ; with its error where all of them are read."""
    rows = []
    for share in SHARES:
        draws = round(share * losses[0].shape[1])
        train, query = (part[:, :draws] for part in losses)
        moves = Moves(train, np.arange(len(train)))
        for kappa in kappas:
            row: dict[str, Any] = {"draws": len(train) * draws, "kappa": kappa}
            for kind in KINDS:
                scores = influence(
                    train, query, fingerprints, normalize=kind == "correlation", kappa=kappa, moves=moves
                )
                found = lds(bank, scores, bootstrap=bootstrap if share == 1 else 0)
                row |= {kind: found.value} | ({f"{kind}_error": found.standard_error} if share == 1 else {})
            rows.append(row)
            print(f"  {row['draws']:6} draws, κ = {kappa:<5g} {row['covariance']:.3f} / {row['correlation']:.3f}")
    return rows


def lines_beside(record: Path, bank: Path) -> dict[str, float]:
    """What other methods have on the bank of that name."""
    measured = json.loads(record.read_text())["measured"]
    setting, alpha = bank.stem.removeprefix("bank-").rsplit("-", 1)
    methods = measured[setting][alpha]["methods"]
    return {
        name: row["per_query"]
        for name, row in methods.items()
        if name.startswith(("EK-FAC, damping", "GradSim")) or name == "BM25"
    }


def draw(path: Path, record: Mapping[str, Any]) -> None:
    """LDS against draws, a line for each κ; other methods across."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5 * len(record["runs"]), 4.8), layout="constrained")
    kappas = sorted({row["kappa"] for rows in record["runs"].values() for row in rows})
    panels = figure.subplots(1, len(record["runs"]), squeeze=False, sharey=True)[0]
    for panel, (name, rows) in zip(panels, record["runs"].items(), strict=True):
        for colour, kappa in zip(CHAIN_COLOURS, kappas, strict=False):
            some = [row for row in rows if row["kappa"] == kappa]
            label = f"read at κ = {kappa:g}" if kappa else "as sampled"
            panel.plot(
                [row["draws"] for row in some], [row["covariance"] for row in some], "o-", color=colour, label=label
            )
        for other, value in record["beside"].get(name, {}).items():
            panel.axhline(value, color="0.5", linestyle=":")
            side = {"ha": "left", "va": "top" if other.startswith("EK-FAC") else "bottom"}
            panel.annotate(other, (0.01, value), xycoords=("axes fraction", "data"), fontsize=8, **side)
        panel.set_xscale("log")
        panel.minorticks_off()
        panel.set_xticks(*[sorted({row["draws"] for row in rows})] * 2)
        panel.set(xlabel="draws", ylabel="LDS per query (covariance)", title=name)
        panel.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(kappas), frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description="What more draws and a larger κ bring, from runs that were kept.")
    parser.add_argument("directory", type=Path, help="what --keep of an experiment left")
    parser.add_argument("--bank", required=True, help="the name of a bank there")
    parser.add_argument("--runs", nargs="+", required=True, metavar="NAME=RUN,RUN", help="runs there, put together")
    parser.add_argument("--beside", type=Path, help="the record of the same experiment")
    parser.add_argument("--record", type=Path, default=RECORDS / "draws_and_kappa.json")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--bootstrap", type=int, default=200)
    parser.add_argument("--kappas", type=float, nargs="+", default=KAPPAS, metavar="KAPPA", help="to read at")
    arguments = parser.parse_args()
    path = arguments.directory / f"{arguments.bank}.npz"
    bank = KeptBank(path)
    record: dict[str, Any] = {"bank": bank.summary()["text"], "runs": {}, "beside": {}}
    for words in arguments.runs:
        name, _, names = words.rpartition("=")
        if arguments.beside:
            record["beside"][name] = lines_beside(arguments.beside, path)
        runs = [read_run(arguments.directory, one) for one in names.split(",")]
        fewest = min(run.about["draws"] for run in runs)
        losses = [np.concatenate([run.losses[part][:, :fewest] for run in runs]) for part in SETS]
        print(name, losses[0].shape, flush=True)
        record["runs"][name] = rows_of(
            bank, losses, runs[0].about["fingerprints"], arguments.bootstrap, arguments.kappas
        )
    write_record(arguments.record, record)
    if arguments.figure:
        draw(arguments.figure, record)


if __name__ == "__main__":
    main()

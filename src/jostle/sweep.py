"""Grids of hyperparameters: a run for every cell, and the paper's figures of loss traces.

``OUT/cells/n_beta=30,localization=1000,step_size=1e-05,burn_in=0`` is the run of one cell, whole and like any other.
A cell that is there is never sampled again, and one that was interrupted goes on; so a sweep can be stopped, resumed
and widened. Cells go through joblib: one after another, on so many processes, or on whatever backend the caller has put
joblib into (Dask, Ray), where files have the same names everywhere.
"""

from __future__ import annotations

import itertools
import json
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from jaxtyping import Float

from jostle.asking import requests
from jostle.asking.tasks import Task
from jostle.diagnose import plots, read_sample
from jostle.errors import ChainsFailedError, InputError
from jostle.evaluate import Bank, lds
from jostle.files import replace_file
from jostle.posterior import Posterior, Potential
from jostle.runs.manifest import read_manifest
from jostle.runs.run import Run, load

AXES = ("n_beta", "localization", "step_size", "burn_in")
LDS, AGREEMENT = "LDS", "agreement of halves"
SHOWN_DRAWS = 400
"""A trace in a cell of a figure has no room for more points than this."""


@dataclass(frozen=True)
class Cell:
    """One setting of the grid, and what came of it; ``fault`` says why there are no scores."""

    settings: dict[str, float]
    directory: str
    fault: str | None
    value: float | None = None
    """The LDS, or the agreement of halves of the draws."""
    rise: float | None = None
    failed_chains: int = 0
    verdict: str | None = None
    effective_draws: float | None = None
    center_loss: float | None = None
    mean_loss: Float[np.ndarray, "chain draw"] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the traces, as plain data."""
        return {name: value for name, value in vars(self).items() if name != "mean_loss"}


def grid(request: Mapping[str, Any], axes: Mapping[str, Sequence[float]]) -> list[dict[str, float]]:
    """Every combination; an axis that is not given has the request's own value."""
    values = [list(dict.fromkeys(axes.get(name) or [request[name]])) for name in AXES]
    return [dict(zip(AXES, combination, strict=True)) for combination in itertools.product(*values)]


def sweep(
    request: Mapping[str, Any],
    axes: Mapping[str, Sequence[float]],
    out: Path,
    *,
    bank: Bank | None = None,
    jobs: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> list[Cell]:
    """Sample every cell that is not there yet, and judge all of them."""
    import joblib

    cells = grid(request, axes)
    base = {name: value for name, value in request.items() if name not in AXES} | requests.source_of(request)
    for settings in cells:  # before anything is written; a step that cannot work is a cell's own fault
        Posterior(n_beta=settings["n_beta"], localization=settings["localization"])
    _keep(out, base)
    say(f"{len(cells)} cell{'s' if len(cells) > 1 else ''} in {out / 'cells'}")
    work = (joblib.delayed(_cell)(base | settings, settings, out, bank) for settings in cells)
    found: Any = joblib.Parallel(n_jobs=jobs)(work)
    replace_file(out / "sweep.json", json.dumps([cell.to_dict() for cell in found], indent=2) + "\n")
    return list(found)


def _keep(out: Path, base: dict[str, Any]) -> None:
    """Write down what all cells share, or refuse a directory whose cells share something else."""
    path = out / "sweep.yaml"
    kept = json.loads(json.dumps(base, default=str))
    if path.is_file():
        there = yaml.safe_load(path.read_text())
        changed = [name for name in sorted({*there, *kept}) if there.get(name) != kept.get(name)]
        if changed:
            name = changed[0]
            raise InputError(
                "out",
                got=f"{out}, a sweep with {name} {there.get(name)}",
                expected=f"{name} {kept.get(name)}, as passed now",
                fix="choose another directory, or delete this one",
            )
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError("out", got=f"{out}, which exists and holds something else", expected="a new directory")
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(kept, sort_keys=False, allow_unicode=True))


def _cell(request: dict[str, Any], settings: dict[str, float], out: Path, bank: Bank | None) -> Cell:
    directory = out / "cells" / ",".join(f"{name}={value:.12g}" for name, value in settings.items())
    try:
        run = _run(request, directory)
    except ChainsFailedError:
        run = Run(directory)
    except _RefusedError as error:
        return Cell(settings, str(directory), str(error))
    found = run.diagnostics(support=False)
    healthy = run.healthy_chains
    sample = read_sample(run.traces, healthy, mirrored=run.antithetic)
    every = math.ceil(sample.mean_loss.shape[1] / SHOWN_DRAWS)
    shown = {"mean_loss": sample.mean_loss[:, ::every], "center_loss": sample.center_loss}
    lost = len(run.failed_chains)
    if not len(healthy):
        step = run.manifest["failed_chains"][0]["step"]
        return Cell(settings, str(directory), f"diverged at step {step}", failed_chains=lost, **shown)
    value = found["agreement"]["halves"]["spearman"] if bank is None else lds(bank, run.influence(normalize=True)).value
    return Cell(
        settings,
        str(directory),
        "runs away" if found["runaway"]["chains"] else None,
        value=value,
        rise=found["rise"],
        failed_chains=lost,
        verdict=found["verdict"]["level"],
        effective_draws=found["effective_draws"],
        **shown,
    )


class _RefusedError(Exception):
    """A setting that cannot work, whatever the model is."""


def _run(request: dict[str, Any], directory: Path) -> Run:
    if (directory / "manifest.json").is_file() and read_manifest(directory)["status"] == "complete":
        return load(directory)
    potential = Potential(
        request["n_beta"], request["localization"], request.get("prior_precision", 0.0), torch.empty(0)
    )
    try:
        requests.sampler_of(request).check(potential, burn_in=request["burn_in"])
    except InputError as error:
        raise _RefusedError(f"refused: {error}") from error
    directory.parent.mkdir(exist_ok=True)
    sources = {name: request[name] for name in (*requests.SOURCES, "device") if name in request}
    return requests.carry_out(request, directory, say=lambda line: None, task=_task(json.dumps(sources)))


@cache
def _task(sources: str) -> Task:
    """The model and the data, loaded once in every process."""
    return requests.task_of(json.loads(sources))


def draw(cells: Sequence[Cell], out: Path, *, of: str) -> list[Path]:
    """Draw the grids: n_beta to the right, localization downwards; a picture for each step size and burn-in."""
    groups: dict[tuple[float, float], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.settings["step_size"], cell.settings["burn_in"]), []).append(cell)
    written = []
    for (step_size, burn_in), group in groups.items():
        name = "sweep.png" if len(groups) == 1 else f"sweep,step_size={step_size:g},burn_in={burn_in:g}.png"
        plots.check(out / name)
        _draw(group, out / name, f"step size {step_size:g}, burn-in {burn_in:g}", of)
        written.append(out / name)
    return written


def _draw(cells: Sequence[Cell], path: Path, title: str, of: str) -> None:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    columns = sorted({cell.settings["n_beta"] for cell in cells})
    rows = sorted({cell.settings["localization"] for cell in cells})
    figure = Figure(figsize=(1.6 + 2.3 * len(columns), 1.5 + 1.7 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True)
    # A title is not wrapped by itself, and a narrow picture would cut it off.
    words = f"mean training loss along the chains, and {of} ({title})"
    figure.suptitle(textwrap.fill(words, int(10 * figure.get_figwidth())), fontsize=12)
    legend = (
        "a cell's colour is its number, from 0 (violet) to 1 (yellow); bold: the best, if it can be trusted; "
        "dotted: the loss at w*; hatched: no number"
    )
    figure.supxlabel(textwrap.fill(legend, int(14 * figure.get_figwidth())), fontsize=8, color=plots.GREY)
    best = max(cells, key=rank)
    for cell in cells:
        row, column = rows.index(cell.settings["localization"]), columns.index(cell.settings["n_beta"])
        axes = panels[row][column]
        _traces(axes, cell)
        if _sound(cell):
            assert cell.value is not None
            axes.set_facecolor((*colormaps["viridis"](max(0.0, min(1.0, cell.value)))[:3], 0.30))
            weight = "bold" if cell is best and cell.verdict != "unreliable" else "normal"
            doubt = "" if cell.verdict == "good" else f" {cell.verdict}"
            axes.set_title(f"{cell.value:.2f}{doubt}", fontsize=10 if doubt else 12, fontweight=weight, pad=3)
        else:
            axes.set_facecolor("0.92")
            axes.patch.set_hatch("///")
            axes.patch.set_edgecolor("0.75")
            axes.set_title(_word(cell), fontsize=10, color=plots.LEVEL_COLOURS["unreliable"], pad=3)
        if cell.failed_chains and cell.value is not None:
            lost = f"{cell.failed_chains} failed"
            axes.text(0.97, 0.94, lost, ha="right", va="top", fontsize=8, color="black", transform=axes.transAxes)
        axes.tick_params(labelsize=7, length=2)
        if axes.get_yscale() == "linear":
            axes.locator_params(axis="y", nbins=4)
        if row == len(rows) - 1:
            axes.set_xlabel(f"draw\nn_beta {columns[column]:g}", fontsize=10)
        if column == 0:
            axes.set_ylabel(f"localization\n{rows[row]:g}", fontsize=10)
    figure.savefig(path, dpi=120)


def rank(cell: Cell) -> tuple[bool, bool, float]:
    """By which cells are ordered: the number counts only where the verdict allows it.

    Halves of a bad run may agree, and where the draws are too few its LDS is that of these draws, not of the setting.
    """
    return _sound(cell), cell.verdict != "unreliable", cell.value if cell.value is not None else -1.0


def _sound(cell: Cell) -> bool:
    return cell.fault is None and cell.value is not None


def _word(cell: Cell) -> str:
    if cell.fault is None:
        return "no number"
    if cell.fault.startswith("refused"):
        return "step too long" if cell.fault.startswith("refused: step_size") else "refused"
    return cell.fault


def _traces(axes: Any, cell: Cell) -> None:
    """Every chain's mean loss; one that leaves is shown as far as an axis can reach."""
    if cell.mean_loss is None or cell.center_loss is None:
        axes.set_yticks([])
        return
    for number, chain in enumerate(cell.mean_loss):
        finite = np.abs(chain) < plots.LARGEST
        colour = plots.CHAIN_COLOURS[number % len(plots.CHAIN_COLOURS)]
        axes.plot(np.flatnonzero(finite), chain[finite], linewidth=0.8, color=colour)
    axes.axhline(cell.center_loss, color="black", linestyle=":", linewidth=1.0)
    if cell.fault is not None and cell.center_loss > 0:
        axes.set_yscale("log")

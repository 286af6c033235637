"""What was measured on one machine, to be read on another: the losses of a run and of a bank, in files that travel.

A run's mean loss of every example at every draw is kept in two bytes: as a whole number of steps from the middle of its
column's range. A column of N draws has a range of at most √(2N) standard deviations, so that what is lost is below
0.06 % of one for 3,000 draws, whatever the losses; half precision loses that much where draws are far from w*. Files
stay below a limit: longer runs are several of them.

    run = kept.read_run(directory, "strong-calibrated")
    lds(kept.KeptBank(directory / "bank-strong-0.5.npz"), run.influence(normalize=True, kappa=10))
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import jostle
from jostle.conditioning import Conditioned, Moves
from jostle.estimate import covariance
from jostle.evaluate import Bank, Subsets
from jostle.evaluate.bank import LOSS
from jostle.scores import Scores
from jostle.traces.store import SequenceLosses

SETS = ("train", "query")
FILE_BYTES = 15 << 20
STEPS = 2 * 32_767
"""Whole numbers of two bytes, without the last one on the left."""


@functools.lru_cache(maxsize=len(SETS))
def mean_losses(run: jostle.Run, name: str) -> np.ndarray:
    """(chain, draw, sample), of the chains that did not fail; read once, for there are many views of it."""
    return run.traces.sequence_losses(name)[:, :, :][run.healthy_chains]


def center_losses(run: jostle.Run, name: str) -> np.ndarray:
    """(sample), at w*."""
    columns, losses = run.traces.columns(name), run.traces.center_losses(name)
    if not columns.per_token:
        return losses
    return SequenceLosses(losses[None, None], columns, "mean")[:, :, :][0, 0]


def influence(
    train: np.ndarray, query: np.ndarray, fingerprints: Mapping[str, str], *, normalize: bool, kappa: float = 0.0,
    moves: Moves | None = None,
) -> Scores:  # fmt: skip
    """What a run with these draws would say, read at κ; who knows how the training losses move says so."""
    sides: Any = (train, query)
    if kappa:
        moves = moves or Moves(train, np.arange(len(train)))
        sides = (Conditioned(side, moves, kappa) for side in sides)
    estimate = covariance(*sides, normalize=normalize)
    return Scores(
        values=-estimate.values, method="bif", normalized=normalize, provenance={"fingerprints": dict(fingerprints)}
    )


def in_steps(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whole numbers, and of each column what 0 and a step of 1 stand for."""
    least, most = (bound(values, axis=(0, 1), keepdims=True).astype(np.float64) for bound in (np.min, np.max))
    middle, step = (least + most) / 2, (most - least) / STEPS
    number = np.rint((values - middle) / np.where(step > 0, step, 1))
    return number.astype(np.int16), middle[0, 0].astype(np.float32), step[0, 0].astype(np.float32)


def write_run(directory: Path, name: str, run: jostle.Run) -> None:
    """Keep a run's losses as differences from those at w*."""
    about = {
        "config": run.config, "fingerprints": run.manifest["fingerprints"], "seconds": run.manifest["seconds"],
        "chains": run.healthy_chains.tolist(), "draws": run.draws,
    }  # fmt: skip
    small: dict[str, Any] = {"about": np.array(json.dumps(about))}
    steps = {}
    for part in SETS:
        center = center_losses(run, part)
        found = in_steps(mean_losses(run, part).astype(np.float64) - center)
        steps[part], small[f"{part}_middle"], small[f"{part}_step"] = found
        small[f"{part}_center"] = center.astype(np.float32)
    draws = steps["train"].shape[1]
    each = max(1, int(FILE_BYTES * draws / sum(value.nbytes for value in steps.values())))
    directory.mkdir(parents=True, exist_ok=True)
    for number, first in enumerate(range(0, draws, each)):
        part = {key: value[:, first : first + each] for key, value in steps.items()}
        np.savez(_path(directory, name, number), **part, **(small if number == 0 else {}))


def _path(directory: Path, name: str, number: int) -> Path:
    return directory / (f"{name}.{number}.npz" if number else f"{name}.npz")


@dataclass(frozen=True, eq=False)
class KeptRun:
    """A run's losses.

    Attributes:
        losses: of "train" and "query", (chain, draw, sample): differences from those at w*.
        center: the losses at w*.
        about: config, fingerprints and seconds of the run.
    """

    losses: dict[str, np.ndarray]
    center: dict[str, np.ndarray]
    about: dict[str, Any]

    def influence(self, *, normalize: bool = False, kappa: float = 0.0, draws: int | None = None) -> Scores:
        """As that of the run, or of the first draws of each chain; at a κ, with whole sequences held, not tokens."""
        train, query = (self.losses[part][:, :draws] for part in SETS)
        return influence(train, query, self.about["fingerprints"], normalize=normalize, kappa=kappa)


def read_run(directory: Path, name: str) -> KeptRun:
    """Read a run from its files."""
    parts = []
    while _path(directory, name, len(parts)).is_file():
        with np.load(_path(directory, name, len(parts)), allow_pickle=False) as arrays:
            parts.append(dict(arrays))
    if not parts:
        raise FileNotFoundError(f"no {name}.npz in {directory}")
    first, losses = parts[0], {}
    for side in SETS:
        steps = np.concatenate([part[side] for part in parts], axis=1)
        losses[side] = (first[f"{side}_middle"] + first[f"{side}_step"] * steps.astype(np.float64)).astype(np.float32)
    about = json.loads(str(first["about"]))
    if losses["train"].shape[1] != about["draws"]:
        raise ValueError(f"{name} has {losses['train'].shape[1]} of {about['draws']} draws: a file is missing, or old")
    return KeptRun(losses, {side: first[f"{side}_center"] for side in SETS}, about)


def write_bank(path: Path, bank: Bank) -> None:
    """Keep a bank's losses, as precisely as it has them, and its subsets."""
    about = {key: value for key, value in bank.about.items() if key != "shapes"}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path, about=np.array(json.dumps({**about, "failures": bank.failures})),
        losses=bank.values().astype(about["dtype"]), members=np.packbits(bank.subsets.members, axis=1),
    )  # fmt: skip


class KeptBank(Bank):
    """A bank in one file; it can be asked for losses, not filled."""

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as arrays:
            self.about = json.loads(str(arrays["about"]))
            members = np.unpackbits(arrays["members"], axis=1, count=self.about["train"]).astype(bool)
            self._losses = arrays["losses"].astype(np.float32)
        self.directory = path
        self.subsets = Subsets(members, self.about["kind"], self.about["labels"])

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The retrainings that failed, with their reasons."""
        return self.about["failures"]

    def values(self, name: str = LOSS) -> np.ndarray:
        """(subset, seed, query), NaN where one is missing."""
        if name != LOSS:
            raise KeyError(f"{self.directory} has losses alone, not {name}")
        return self._losses

    def _pairs(self, kind: str) -> set[tuple[int, int]]:
        if kind == "failures":
            return {(one["subset"], one["seed"]) for one in self.failures}
        return {(int(subset), int(seed)) for subset, seed in np.argwhere(np.isfinite(self._losses).all(2))}

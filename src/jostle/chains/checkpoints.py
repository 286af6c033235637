"""Checkpoints: where every chain stands, on disk, and when it is time for another."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import torch

from jostle.chains.chain import Group, Walk
from jostle.chains.recording import Recorder
from jostle.models.functional import FunctionalModel
from jostle.traces.tensor_files import read_metadata, read_tensors, write_tensors

CHECKPOINT_SHARE = 0.02
"""The share of the run's time that checkpoints may take."""


class Checkpoints:
    """The state of every chain, each in a file that is replaced whole or not at all."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._before, self._started = 0.0, time.perf_counter()

    @property
    def seconds(self) -> float:
        """How long these chains have run, with what `go_on_from` was told."""
        return self._before + time.perf_counter() - self._started

    def go_on_from(self, seconds: float) -> None:
        """Count on from so many seconds, or from those of the last checkpoint, which are more after an interruption."""
        there = [read_metadata(path).get("seconds", 0.0) for path in self._directory.glob("*.safetensors")]
        self._before, self._started = max(seconds, *there, 0.0), time.perf_counter()

    def _path(self, chain: int) -> Path:
        return self._directory / f"chain-{chain:04d}.safetensors"

    def save(self, group: Group, model: FunctionalModel, recorder: Recorder, draws: int) -> None:
        """Store a group, between two steps; the draws it has passed, so many, must be flushed already.

        What is stored is whole, however the model is spread, so that another number of processes can go on with it.
        """
        self._directory.mkdir(exist_ok=True)
        about = {"step": group.step, "draws": draws, "seconds": self.seconds}
        for row, chain in enumerate(group.chains):
            tensors = {"weights": model.gather(group.weights[row])}
            for name, value in group.statistics.items():
                per_weight = value.shape == group.weights.shape
                tensors[f"statistics/{name}"] = model.gather(value[row]) if per_weight else value[row]
            tensors |= {f"recorder/{name}": value for name, value in recorder.unfinished(chain).items()}
            if model.crew.leads:
                write_tensors(self._path(chain), tensors, about)

    def steps(self, chains: Iterable[int]) -> dict[int, int]:
        """Return the step at which each chain can go on."""
        return {
            chain: read_metadata(self._path(chain))["step"] if self._path(chain).exists() else 0 for chain in chains
        }

    def draws(self, chain: int) -> int | None:
        """Return how many draws of a chain there were when it was stored; None where that was not kept yet."""
        return read_metadata(self._path(chain)).get("draws") if self._path(chain).exists() else 0

    def load(self, chains: list[int], step: int, dynamics: Walk, recorder: Recorder) -> Group:
        """Return chains as they were stored at this step."""
        group = dynamics.start(chains)
        if step == 0:
            return group
        stored = [read_tensors(self._path(chain))[0] for chain in chains]
        device = group.weights.device
        moving, group.step = dynamics.model.moving, step
        group.weights = torch.stack([moving.keep(tensors["weights"]) for tensors in stored]).to(device)
        for name, before in group.statistics.items():
            values = [tensors[f"statistics/{name}"] for tensors in stored]
            if before.shape == group.weights.shape:
                values = [moving.keep(value) for value in values]
            group.statistics[name] = torch.stack(values).to(device)
        for chain, tensors in zip(chains, stored, strict=True):
            prefix = "recorder/"
            recorder.restore(
                chain,
                {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)},
            )
        return group


class CheckpointClock:
    """Says when a checkpoint is due: not too often, and never for more than a small share of the time."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._cost = seconds, 0.0
        self._last = time.monotonic()

    def due(self) -> bool:
        """Whether it is time."""
        wait = max(self._seconds, self._cost / CHECKPOINT_SHARE if self._seconds else 0.0)
        return time.monotonic() - self._last >= wait

    def took(self, seconds: float) -> None:
        """Take note of how long one took."""
        self._last, self._cost = time.monotonic(), seconds

"""A clock that is looked at once a draw: what a draw takes, and nothing of what is done once in a run."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WARM_UP = 2
"""Draws that do not count: they still pay for what is done the first time."""


class EnoughDrawsError(Exception):
    """All draws that were to be timed are."""


class Clock:
    """An observable that leaves a mark at every draw of a run, and may end the run.

    So nothing is timed that is not part of a draw, like writing where a chain ends: 45 GB of the largest model. On a
    GPU a mark is an event in the stream of work, and nobody waits.

    Args:
        run: the directory of the run: before it has a manifest, ways to run are tried, and calls do not count. None
            counts all of them.
        end: end the run by an `EnoughDrawsError` at so many marks; None lets it finish.
        at: what else to do after so many marks.
    """

    def __init__(
        self, run: Path | None = None, *, end: int | None = None, at: Mapping[int, Callable[[], None]] | None = None
    ) -> None:
        self._run, self._end, self._at = run, end, at or {}
        self._marks: list[Any] = []

    def __call__(self, model: Any) -> Tensor:
        device = next(model.parameters()).device
        if self._run is None or (self._run / "manifest.json").is_file():
            mark: Any = time.perf_counter()
            if device.type == "cuda":
                mark = torch.cuda.Event(enable_timing=True)
                mark.record()
            self._marks.append(mark)
            if len(self._marks) in self._at:
                self._at[len(self._marks)]()
            if len(self._marks) == self._end:
                raise EnoughDrawsError
        return torch.zeros(1, device=device)

    def seconds(self, draws: int) -> float:
        """From the first draw on, of so many."""
        return self._between(self._marks[0], self._marks[draws])

    def seconds_a_draw(self, draws: int | None = None) -> float:
        """The median of those after the warm-up, up to so many marks."""
        counted = self._marks[WARM_UP:draws]
        return statistics.median(self._between(*pair) for pair in itertools.pairwise(counted))

    def _between(self, first: Any, last: Any) -> float:
        if isinstance(first, float):
            return last - first
        last.synchronize()
        return first.elapsed_time(last) / 1000

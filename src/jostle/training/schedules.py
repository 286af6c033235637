"""The sum of learning rates, rebuilt from the few that were logged, where they determine the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

TOLERANCE = 1e-6
"""Of a factor: logged rates are float64, and those of float32 schedules are within 1e-7."""
OPEN = 0.01
"""By how much sums may differ, relative to them, that logged rates cannot tell apart."""
SUMS = 33
"""How many of the warm-ups that fit are summed: the first, the last, and some between."""

Progress = Float[np.ndarray, " step"]
DECAYS: dict[str, Callable[[Progress], Progress]] = {
    "constant": np.ones_like,
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + np.cos(np.pi * progress)) / 2,
}
"""The factor of the rate from the end of the warm-up (progress 0) to the last step (1), as transformers has them."""


class Point(NamedTuple):
    """The factor of the rate before a step, where steps count from 0."""

    step: int
    factor: float


class Rebuilt(NamedTuple):
    """The least and largest Σ of factors among the schedules that agree with every point."""

    least: float
    most: float

    @property
    def determined(self) -> bool:
        """Whether they are the same for all that matters."""
        return self.most - self.least <= OPEN * self.most


def factor(
    decay: str, step: Int[np.ndarray, " step"] | int, warm_up: Int[np.ndarray, " step"] | int, total: int
) -> Progress:
    """The rate's factor: t/W in a warm-up of W steps, then decay((t − W)/(T − W))."""
    progress = np.clip((step - np.asarray(warm_up)) / np.maximum(1, total - np.asarray(warm_up)), 0, 1)
    return np.where(np.less(step, warm_up), step / np.maximum(1, warm_up), DECAYS[decay](progress))


def rebuild(logged: Sequence[Point], last: Point, total: int) -> Rebuilt | None:
    """Return Σ of the factors of the steps before the last point, or None where no schedule fits.

    Args:
        logged: what was logged after so many steps: the rate of the last of them or, by older Trainers, of the next.
        last: the rate of the step that would come next.
        total: how many steps the schedule was made for.
    """
    every = np.arange(last.step)
    sums = [
        float(factor(decay, every, int(warm_up), total).sum())
        for decay, warm_ups in _fitting(logged, last, total)
        for warm_up in warm_ups[np.unique(np.linspace(0, len(warm_ups) - 1, SUMS).astype(int))]
    ]
    return Rebuilt(min(sums), max(sums)) if sums else None


def _fitting(logged: Sequence[Point], last: Point, total: int) -> Iterator[tuple[str, Int[np.ndarray, " warm_up"]]]:
    """The schedules that agree with every point: a decay, and all the warm-ups with which it does."""
    for decay in DECAYS:
        for lag in (1, 0):
            warm_ups = np.arange(total + 1)
            for step, value in [last, *(Point(step - lag, value) for step, value in logged)]:
                warm_ups = warm_ups[np.abs(factor(decay, step, warm_ups, total) - value) <= TOLERANCE]
            if len(warm_ups):
                yield decay, warm_ups

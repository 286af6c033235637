"""`jostle.replay`: what leaving out a training example would do to a query, by the exact derivative of a training."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from jostle.chains.progress import telling
from jostle.data.datasets import Collate, Data
from jostle.errors import EstimateWarning, InputError, warn
from jostle.models.functional import eval_mode, free_memory, sample_means
from jostle.scores import Scores
from jostle.training.backwards import Backwards
from jostle.training.repeatable import Microbatch, Repeatable, Repetition, Timeline
from jostle.training.steps import Root

log = logging.getLogger("jostle")

SMOOTHING = 0.1
"""c of √(v̂ + c·mean v̂), by which Adam's steps are divided in the derivative, with the mean over a tensor."""

STATE_BYTES = 4 << 30
"""What states of the training may take in a machine's memory; of a GPU's, half of the free."""

QUERIES = 8
"""Queries whose losses are differentiated at once."""


CHECKED, SHARE = 20, 0.02
"""Trainings without random examples, and without how many of them, that predictions are held against."""

RESAMPLED = 1000


@dataclass(frozen=True)
class Check:
    """Predictions beside trainings that were really done again without some random examples.

    Attributes:
        real: the change of each query's loss, (training, query).
        predicted: the sum of the effects of what was left out.
        left_out: how many examples each training went without.
    """

    real: Float[np.ndarray, "training query"]
    predicted: Float[np.ndarray, "training query"]
    left_out: int

    @property
    def correlation(self) -> tuple[float, float]:
        """Of real and predicted changes, each query's less their mean, and its standard error: trainings resampled."""
        return self._resampled(lambda x, y: (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))

    @property
    def slope(self) -> tuple[float, float]:
        """Of real on predicted changes, likewise."""
        return self._resampled(lambda x, y: (x * y).sum() / (x * x).sum())

    def _resampled(self, measure: Callable[[np.ndarray, np.ndarray], float]) -> tuple[float, float]:
        def measured(rows: np.ndarray) -> float:
            return measure(*(one[rows] - one[rows].mean(0) for one in (self.predicted, self.real)))

        count, generator = len(self.real), np.random.default_rng(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            every = [measured(generator.integers(0, count, count)) for _ in range(RESAMPLED)]
            return float(measured(np.arange(count))), float(np.std(every))

    def __str__(self) -> str:
        (correlation, error), (slope, own) = self.correlation, self.slope
        return (
            f"{len(self.real)} trainings without {self.left_out} random examples: correlation {correlation:.2f} ± "
            f"{1.96 * error:.2f}, slope {slope:.2f} ± {1.96 * own:.2f}"
        )


@dataclass(frozen=True, eq=False)
class Replay:
    """What leaving training examples out would do to each query's loss, to first order, along the training's own path.

    Attributes:
        effects: the rise of each query's loss, in nats, if a training example had been left out: positive means that it
            helped. Left out is: its loss has weight 0, all else stays.
        tokens: for each training example, what its tokens do, (token, query); a query's column sums to the effect. None
            where they were not asked for.
        check: predictions beside trainings that were really done again; None if there are none.
        provenance: what it was made from.
    """

    effects: Float[np.ndarray, "train query"]
    tokens: list[Float[np.ndarray, "token query"]] | None = None
    check: Check | None = None
    provenance: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        train, query = self.effects.shape
        checked = "" if self.check is None else f"; {self.check}"
        return f"Replay({train} train × {query} query, effects in nats{checked})"

    @property
    def scores(self) -> Scores:
        """The same as `Scores`, for lists, files and evaluation: negative helps, so these are minus the effects."""
        return self.scores_with(self.provenance)

    def scores_with(self, provenance: Mapping[str, Any]) -> Scores:
        """Return the scores with another provenance."""
        return Scores(values=np.negative(self.effects), method="replay", scale=1.0, provenance={**provenance})


def smooth_root(share: float) -> Root:
    """√(v + share·mean v): near v = 0 the derivative of what is divided by √v says nothing of larger changes."""

    def root(square: Tensor) -> Tensor:
        square = square + share * square.detach().mean()
        there = square > 0  # nowhere else has there been a gradient
        return torch.where(there, torch.where(there, square, 1.0).sqrt(), 0.0)

    return root


def replay(
    training: Repeatable,
    query: Any,
    *,
    collate: Collate | None = None,
    tokens: bool = False,
    smoothing: float = SMOOTHING,
    check: int = CHECKED,
    share: float = SHARE,
    progress: bool = False,
) -> Replay:
    """Return what leaving out each training example would do to each query's loss, in nats.

    The training is repeated once, and then gone through backwards: the derivative of a query's loss by the weight of
    each example's loss, through every step of the optimizer.

    Args:
        training: what is repeated; ``Trainer.repeatable(seed)`` has that of a `jostle.evaluate.Trainer`.
        query: the query examples.
        collate: makes a batch of a list of samples.
        tokens: return what each training token does, too.
        smoothing: of what Adam's steps are divided by, in the derivative alone; 0: none.
        check: train so many times more, each without random examples, and hold predictions against that; 0: do not.
        share: of the examples that each of these goes without.
        progress: show it.

    Example:
        >>> found = jostle.replay(trainer.repeatable(seed=0), query)
        >>> found.scores.top(query=0)
    """
    started = time.perf_counter()
    if not smoothing >= 0:
        raise InputError("smoothing", got=smoothing, expected="a share of the mean, from 0 on")
    if check and not (isinstance(check, int | np.integer) and check >= 2):
        raise InputError("check", got=repr(check), expected="0, or a whole number of trainings from 2 on")
    if not 0 < share < 1:
        raise InputError("share", got=share, expected="a share of the examples between 0 and 1")
    repetition = Repetition(training)
    device = repetition.parameters[0].device
    free = free_memory(device)
    asked = Data(query, "query", collate=collate, device=device)
    with telling(progress) as tell:
        timeline = Timeline(repetition, STATE_BYTES if free is None else free // 2, tell)
        timeline.go()
        backwards = Backwards(repetition, smooth_root(smoothing))
        parts = np.array_split(np.arange(len(asked)), math.ceil(len(asked) / QUERIES))
        costs = backwards.of_queries([asked.batch(part) for part in parts])
        found = _Found(len(training.data), len(asked), tokens)
        for number, moved in timeline.backwards():
            costs = backwards.step(costs, number, moved, found.add)
            tell(f"back at step {number} of {len(repetition)}")
        checked = _checked(training, asked, found.effects, check, share, tell) if check else None
    bad = np.flatnonzero(~np.isfinite(found.effects).all(0))
    if len(bad):
        warn(f"the derivative of query {bad[0]} is not finite: its training amplifies every change", EstimateWarning)
    return Replay(
        found.effects, found.tokens, checked,
        {
            "steps": len(repetition), "smoothing": smoothing, "states_apart": timeline.apart,
            "seconds": time.perf_counter() - started,
        },
    )  # fmt: skip


def _checked(
    training: Repeatable,
    query: Data,
    effects: Float[np.ndarray, "train query"],
    count: int,
    share: float,
    tell: Callable[[str], None],
) -> Check:
    examples = len(training.data)
    left_out = max(1, round(share * examples))
    generator, losses, predicted = np.random.default_rng(0), [], []
    for number in range(count + 1):
        weights = np.ones(examples)
        if number:
            weights[generator.permutation(examples)[:left_out]] = 0
        repetition = Repetition(training, weights)
        repetition.go()
        with torch.no_grad(), eval_mode(repetition.model):
            parts = [query.batch(part) for part in np.array_split(np.arange(len(query)), -(-len(query) // QUERIES))]
            objective = training.objective.loss
            found = [sample_means(objective(repetition.model, part), objective, part) for part in parts]
        losses.append(torch.cat(found).double().cpu().numpy())
        predicted.append((1 - weights) @ effects)
        tell(f"checked by {number} of {count} trainings")
    return Check(np.stack(losses[1:]) - losses[0], np.stack(predicted[1:]), left_out)


class _Found:
    """Effects as they are summed up, from the last step to the first."""

    def __init__(self, train: int, query: int, tokens: bool) -> None:
        self.effects = np.zeros((train, query), np.float64)
        self._by_token: list[np.ndarray] | None = [np.zeros((0, query))] * train if tokens else None

    @property
    def tokens(self) -> list[np.ndarray] | None:
        return self._by_token

    def add(self, part: Microbatch, of_losses: Float[Tensor, "query sample ..."]) -> None:
        values = np.negative(of_losses.double().cpu().numpy())
        np.add.at(self.effects, part.examples, values.sum(tuple(range(2, values.ndim))).T)
        if self._by_token is None:
            return
        if values.ndim < 3:
            raise InputError("tokens", got="a loss of one number a sample", expected="a loss of tokens")
        for example, own in zip(part.examples, values.transpose(1, 2, 0), strict=True):
            there = self._by_token[example]
            total = np.zeros((max(len(there), len(own)), own.shape[1]))
            total[: len(there)] += there
            total[: len(own)] += own
            self._by_token[example] = total

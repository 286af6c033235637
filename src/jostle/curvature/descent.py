"""Training once more, backwards and with the curvature at its end: what a query's gradient asks of the weights.

A training that descends a quadratic loss moves by Δ ← Δ − rate·M·(H + hold)·Δ between one step and the next. Taken
backwards, from a query's gradient p = g on,

    x ← x + reach/S·p,    p ← p − (H + hold)·reach/S·p        (S steps),

which leads to x = reach^½·φ(A)·reach^½·g with φ(a) = (1 − (1 − a/S)^S)/a. Each step sees H of a few examples alone, of
others than the step before: they are drawn independently of p, so that what is expected of x stays the same. What their
choice adds is measured by doing it again.

Steps have momentum, as in training: with it they may be twenty times as long, up to a/S = 2(1 + β)/(1 − β).

Reference: Robbins and Monro, *A stochastic approximation method*, 1951; Polyak, *Some methods of speeding up the
convergence of iteration methods*, 1964.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from jostle.curvature.gauss_newton import GaussNewton, tokens_of

log = logging.getLogger("jostle")

MOMENTUM = 0.9

FEWEST_STEPS = 64
"""Over which momentum builds up, and after which (1 − a/S)^S is near to e⁻ᵃ wherever that is not 0."""

LONGEST = 12.0
"""A step's length, a/S, in the direction of most curvature: 38 is where it would not be stable, but single batches
have more curvature than their mean."""

STEP_TOKENS = {"cuda": 2048, "cpu": 512}
"""Of how many tokens a step sees the curvature: fewer, and a GPU idles; more, and there is less choice of how many in
all."""

GROWN = 1.5
"""Without noise, p only shrinks, as the square of a norm weighs it: a run in which it has grown so much is no good."""

POWER_STEPS, POWER_VECTORS = 8, 4
"""Iterations by which the largest curvature is found, of a few vectors at once."""


@dataclass
class Descents:
    """Runs over random steps, each independent of the others, whose mean is the answer.

    Args:
        curvature: H, within its context.
        reach: how far training moves each weight; 0 where it never moved.
        hold: the curvature that weight decay adds.
        seed: of the examples that steps see.

    Attributes:
        steps: S; it doubles where a run was not stable, and stays so.
        examples: of a step.
    """

    curvature: GaussNewton
    reach: Float[Tensor, " weight"]
    hold: Float[Tensor, " weight"]
    seed: int = 0
    steps: int = field(init=False)
    examples: int = field(init=False)

    def __post_init__(self) -> None:
        data, kind = self.curvature.data, "cuda" if self.reach.is_cuda else "cpu"
        self.examples = min(len(data), max(1, STEP_TOKENS[kind] // tokens_of(data)))
        self._rng = np.random.default_rng((self.seed, 2))
        largest = self._largest()
        self.momentum = MOMENTUM if largest > 256 else 0.0
        self.steps = max(256, int(np.ceil(largest / LONGEST))) if self.momentum else max(FEWEST_STEPS, int(np.ceil(largest)))
        log.info("largest %.3g", largest)
        log.info("%d steps of %d examples", self.steps, self.examples)

    @property
    def visits(self) -> int:
        """How many examples a run looks at, with repetitions."""
        return self.steps * self.examples

    def run(
        self,
        gradients: Float[Tensor, "query weight"],
        tell: Callable[[int], None] = lambda step: None,
    ) -> Float[Tensor, "query weight"]:
        """Return x of one run, for every query; with ``steps`` doubled until that is stable."""
        while True:
            found = self._run(gradients, tell)
            if found is not None:
                return found
            self.steps *= 2
            log.info("not stable; going on with %d steps", self.steps)

    def _run(self, gradients: Tensor, tell: Callable[[int], None]) -> Tensor | None:
        # Momentum that has not built up yet: what it leaves undone at the end, steps make up for.
        MOMENTUM = self.momentum
        undone = MOMENTUM * (1 - MOMENTUM**self.steps) / (1 - MOMENTUM)
        pace = self.reach * ((1 - MOMENTUM) / (self.steps - undone))
        left, moving, found = gradients.clone(), torch.zeros_like(gradients), torch.zeros_like(gradients)
        before = self._length(left)
        for number, rows in enumerate(self._batches()):
            moving.mul_(MOMENTUM).addcmul_(left, pace)
            found += moving
            left -= self.curvature(moving, rows=rows)
            left.addcmul_(moving, self.hold, value=-1)
            if number % 16 == 15 or number == self.steps - 1:
                tell(number + 1)
                if not bool((self._length(left) <= GROWN * before).all()):
                    return None
        return found

    def _length(self, vectors: Tensor) -> Float[Tensor, " query"]:
        """In the norm of training's metric."""
        return torch.stack([(self.reach * one.square()).sum() for one in vectors]).sqrt()

    def _batches(self) -> Iterator[Int[np.ndarray, " row"]]:
        """All examples in a random order, then all again in another, as many at once as a step sees."""
        count, order = len(self.curvature.data), np.empty(0, np.int64)
        for _ in range(self.steps):
            while len(order) < self.examples:
                order = np.concatenate([order, self._rng.permutation(count)])
            yield order[: self.examples]
            order = order[self.examples :]

    def _largest(self) -> float:
        """The largest eigenvalue of reach^½·(H + hold)·reach^½, of some examples, to a few percent."""
        root = self.reach.sqrt()
        generator = torch.Generator().manual_seed(self.seed)
        vectors = torch.randn(POWER_VECTORS, len(root), generator=generator).to(root)
        some = next(self.curvature.parts(self.curvature.data, self._rng.permutation(len(self.curvature.data))))
        for _ in range(POWER_STEPS):
            vectors = torch.linalg.qr(vectors.T)[0].T
            images = root * (self.curvature(root * vectors, rows=some) + self.hold * root * vectors)
            values = torch.linalg.eigvalsh(vectors @ images.T)
            vectors = images
        return float(values[-1])

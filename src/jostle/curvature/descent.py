"""Training once more, backwards, with the curvature at its end: what a query's gradient asks of the weights.

Training on a quadratic loss moves by Δ ← Δ − rate·M·(H + hold)·Δ from one step to the next. Taken backwards, from a
query's gradient p = g on,

    x ← x + reach/S·p,    p ← p − (H + hold)·reach/S·p        in each of S steps,

which ends at x = reach^½·φ(A)·reach^½·g with A = reach^½·(H + hold)·reach^½ and φ(a) = (1 − (1 − a/S)^S)/a. A step sees
H of a few examples alone. They are drawn anew in each step, so the mean of x over such draws is the x of all examples;
how far one run is from it shows in other runs. (Were each example seen equally often, as by permutations, what it alone
has would be damped alike in every run, and wrongly: by (1 − a/E)^E if it comes up E times.) As in training, what counts
is how many examples are seen in all, however many there are.

Where curvature is large, steps have momentum, which lets them be longer: up to a/S = 2(1 + β)/(1 − β).

Reference: Robbins and Monro, *A stochastic approximation method*, 1951; Polyak, *Some methods of speeding up the
convergence of iteration methods*, 1964.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from jostle.curvature.gauss_newton import GaussNewton, tokens_of
from jostle.data.datasets import Data

log = logging.getLogger("jostle")


class Pace(NamedTuple):
    """How long steps may be.

    Attributes:
        momentum: β.
        fewest: steps: with fewer, (1 − a/S)^S is not near to e⁻ᵃ; and momentum lags by β/(1 − β) of them.
        longest: a/S in the direction of most curvature. Half of what is stable or less, as the few examples of a step
            may have several times the mean's curvature.
    """

    momentum: float
    fewest: int
    longest: float


PACES = (Pace(0.0, 64, 1.0), Pace(0.85, 128, 12.0))
"""The one with fewer steps is used; either is within 4 % of φ."""

STEP_TOKENS = {"cuda": 2048, "cpu": 512}
"""How many tokens the examples of a step have: with fewer, a GPU idles; with more, a run may see more than it needs."""

GROWN = 100.0
"""Without chance, p only shrinks in the norm of training's metric. By chance it grows where few examples have
curvature (a word of one text alone): that is noise like other noise, up to here. A run in which p has grown so much is
lost."""

ALONE = 1.0
"""How far one visit of an example may take a row that it alone has, as a share of the way to where its loss is flat.
Where curvature times reach is large, x is one over curvature, whatever the reach: so a shorter one changes little,
while steps that are too long would make p grow."""

POWER_STEPS, POWER_VECTORS = 8, 4
"""Iterations that find the largest curvature, each of so many vectors."""

TOO_MANY = 1 << 22
"""Steps: a run that is not stable by then has something else that is wrong."""


DOWNWARDS = 0.02
"""Curvature may be negative by so much of the largest, from rounding."""


class NotConvexError(Exception):
    """Curvature is negative in some direction: the loss curves downwards in the model's outputs."""


class NotFiniteError(Exception):
    """Curvature is not finite, or so large that no steps are stable."""


def examples_of_step(data: Data, device: torch.device) -> int:
    """Return how many examples a step sees: all, where two runs of some would take as long."""
    some = max(1, STEP_TOKENS["cuda" if device.type == "cuda" else "cpu"] // tokens_of(data, mean=True))
    return len(data) if 2 * some >= len(data) else some


class Descents:
    """Runs over random examples, independent of each other, whose mean is the answer.

    Args:
        curvature: H, within its context.
        reach: how far training moves each weight; 0 where it never moved.
        hold: the curvature that weight decay adds.
        stiffest: for each weight, n times the curvature, in the metric of training, that one example gives its row
            (`largest_in_rows`); 0 outside of embeddings.
        seed: of the examples that steps see.

    Attributes:
        examples: of a step.
        steps: S. It doubles where a run was not stable, and stays so.
        momentum: β.
    """

    def __init__(
        self,
        curvature: GaussNewton,
        reach: Float[Tensor, " weight"],
        hold: Float[Tensor, " weight"],
        *,
        stiffest: Float[Tensor, " weight"] | None = None,
        seed: int = 0,
    ) -> None:
        self._curvature, self._reach, self._hold, self._stiffest = curvature, reach, hold, stiffest
        self._rng = np.random.default_rng((seed, 2))
        self.examples = examples_of_step(curvature.data, reach.device)
        largest = self._largest(seed)
        if not math.isfinite(largest):
            raise NotFiniteError
        self.steps, self.momentum = min(
            (max(fewest, math.ceil(largest / longest)), momentum) for momentum, fewest, longest in PACES
        )
        self._require_few()
        log.info("largest curvature %.3g: %d steps of %d examples", largest, self.steps, self.examples)

    def __len__(self) -> int:
        """How many examples there are."""
        return len(self._curvature.data)

    @property
    def visits(self) -> int:
        """How many examples a run sees, repetitions counted."""
        return self.steps * self.examples

    @property
    def exact(self) -> bool:
        """Whether every step sees all examples, so that nothing is left to chance."""
        return self.examples == len(self)

    def see_all(self) -> None:
        """Show every step all examples."""
        self.examples = len(self)

    def __call__(
        self, gradients: Float[Tensor, "query weight"], tell: Callable[[str], None] = lambda what: None
    ) -> Float[Tensor, "query weight"]:
        """Return x of every query, by one run."""
        while True:
            found = self._run(gradients, tell)
            if found is not None:
                return found
            self.steps *= 2
            self._require_few()

    def _require_few(self) -> None:
        if self.steps > TOO_MANY:
            raise NotFiniteError

    def _run(self, gradients: Tensor, tell: Callable[[str], None]) -> Tensor | None:
        # Of what momentum has taken up, the last steps have not moved on yet; a longer pace makes up for it.
        undone = self.momentum * (1 - self.momentum**self.steps) / (1 - self.momentum)
        pace = self._reach * ((1 - self.momentum) / (self.steps - undone))
        if self._stiffest is not None and not self.exact:
            pace *= (ALONE * self.visits / self._stiffest).clamp(max=1.0)
        left, moving, found = gradients.clone(), torch.zeros_like(gradients), torch.zeros_like(gradients)
        largest = GROWN * self._lengths(left)
        self._curvature.expect(self.steps)
        started = time.perf_counter()
        for number, rows in enumerate(self._batches(), 1):
            moving.mul_(self.momentum).addcmul_(left, pace)
            found += moving
            left -= self._curvature(moving, rows=rows)
            left.addcmul_(moving, self._hold, value=-1)
            if number % 16 == 0 or number == self.steps:
                left_over = (time.perf_counter() - started) / number * (self.steps - number)
                told = f"{left_over / 60:.0f} min" if left_over > 100 else f"{left_over:.0f} s"
                tell(f"step {number} of {self.steps}, {told} of this run left")
                if not (self._lengths(left) <= largest).all():
                    log.info("not stable at step %d of %d", number, self.steps)
                    return None
        return found

    def _lengths(self, vectors: Tensor) -> Float[Tensor, " query"]:
        """In the norm of training's metric."""
        return torch.stack([(self._reach * one.square()).sum() for one in vectors]).sqrt()

    def _batches(self) -> Iterator[Int[np.ndarray, " row"]]:
        """The examples of each step, none twice."""
        for _ in range(self.steps):
            yield self._rng.choice(len(self), self.examples, replace=False)

    def _largest(self, seed: int) -> float:
        """The largest eigenvalue of A of some examples, roughly, from below."""
        root, generator = self._reach.sqrt(), torch.Generator(self._reach.device).manual_seed(seed)
        few = min(POWER_VECTORS, len(root))
        vectors = torch.randn(few, len(root), generator=generator, dtype=root.dtype, device=root.device)
        some = self._rng.permutation(len(self))[: 4 * self.examples]
        values = torch.zeros(1)
        for _ in range(POWER_STEPS):
            size = vectors.norm()
            if not size:
                return 0.0
            vectors = vectors / size  # so that no square of it is too small for a number
            lengths, directions = torch.linalg.eigh((vectors @ vectors.T).double())
            least = torch.finfo(vectors.dtype).eps * lengths[-1]  # of vectors that have become alike, one is left out
            vectors = (directions * lengths.clamp(min=least).rsqrt()).T.to(vectors.dtype) @ vectors
            scaled = root * vectors
            images = root * (self._curvature(scaled, rows=some) + self._hold * scaled)
            if not torch.isfinite(images).all():
                return math.inf
            values = torch.linalg.eigvalsh(vectors @ images.T)
            vectors = images
        if not self._curvature.is_convex and values[0] < -DOWNWARDS * values[-1].abs():
            raise NotConvexError
        return float(values[-1])

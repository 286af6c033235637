"""How trained weights respond to a change of their loss: the inverse of curvature, damped as training damps it.

Training moves each weight by `reach` against a gradient of the mean loss, per unit of it, and weight decay holds it
with a curvature `hold` (`jostle.Training.diagonals`). With H the Gauss–Newton matrix of the mean loss and
A = reach^½·(H + hold)·reach^½, a query's gradient g asks for

    x = reach^½·φ(A)·reach^½·g,    φ(a) = (1 − e⁻ᵃ)/a  or  1/(1 + a).

The first is where gradient descent on a quadratic loss stands at the end of training, the second where it would stand
still: (H + D)⁻¹g with D = hold + 1/reach. Leaving out an example whose share of the loss is ω and whose gradient is gᵢ
then raises the query's loss by ω·gᵢᵀx.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from jostle.curvature import conjugate_gradients
from jostle.curvature.conjugate_gradients import Iterate
from jostle.curvature.gauss_newton import GaussNewton
from jostle.curvature.preconditioners import KroneckerPreconditioner
from jostle.errors import InputError
from jostle.models.weights import MovingWeights

Filter = Literal["descent", "minimum"]
"""φ: where training ends, or where it would stand still."""

SHIFT, ONCE, TWICE = 2.538210, 0.962357, 4.242347
"""(1 − e⁻ᵃ)/a = ONCE/(a + SHIFT) + TWICE/(a + SHIFT)² within 4 % for every a ≥ 0: the best of its kind. So the first
filter takes two solutions of the second's kind, with 1/reach SHIFT times as large."""

DENSE = {"cpu": 2048, "cuda": 4096}
"""Weights up to which the matrix itself is the quicker way, and the exact one."""

CLOSE = 0.05
"""Solved: the estimated error of the scores is below this share of their spread, for every query."""

SLOWEST = 0.95
"""The convergence rate that is believed at most: a step that seems to change nothing may precede a large one."""

Rows = Callable[[Float[Tensor, " weight"]], Iterable[Float[Tensor, "row weight"]]]
"""Gives rows whose products sum to about SHS, block by block, for weights that are scaled by S."""


@dataclass(frozen=True)
class Responses:
    """What the queries' gradients ask of the weights.

    Attributes:
        vectors: x of each query.
        errors: the estimated error of gᵢᵀx: the root of its mean square over some training examples, for each query.
        spreads: the standard deviation of gᵢᵀx over the same examples.
        residuals: of the last system: how much of the right-hand side is left, in the norm of D⁻¹, recomputed from x.
        iterations: products with H that each query took; 0 where the matrix itself was inverted.
    """

    vectors: Float[Tensor, "query weight"]
    errors: Float[np.ndarray, " query"]
    spreads: Float[np.ndarray, " query"]
    residuals: Float[np.ndarray, " query"]
    iterations: int

    @property
    def solved(self) -> np.ndarray:
        """Whether each query is solved."""
        return (self.errors <= CLOSE * self.spreads) & np.isfinite(self.residuals)


class Response:
    """Solves for queries, a block of them at a time.

    Args:
        curvature: H, within its context.
        reach: how far training moves each weight; 0 where it never moved.
        hold: the curvature that weight decay adds.
        filter: φ.
        rows: for the preconditioner; None for none but the diagonal one.
        probes: gradients of some training examples, by whose scores convergence is judged.
        exact: the same H in full precision, where ``curvature`` has less: what is left by it is solved for once more.
        examples: those of ``curvature``'s data that H is the mean over; None for all.
    """

    def __init__(
        self,
        curvature: GaussNewton,
        reach: Float[Tensor, " weight"],
        hold: Float[Tensor, " weight"],
        *,
        filter: Filter,
        rows: Rows | None,
        probes: Float[Tensor, "probe weight"],
        exact: GaussNewton | None = None,
        examples: np.ndarray | None = None,
    ) -> None:
        self._curvature, self._reach, self._hold, self._filter = curvature, reach, hold, filter
        self._probes, self._exact, self._examples = probes, exact, examples
        moving = curvature.moving
        self.dense = is_small(moving)
        if self.dense:
            self._values, self._vectors = self._decomposed()
            return
        self._moves = reach > 0
        shift = SHIFT if filter == "descent" else 1.0
        self._unit = torch.where(self._moves, (hold + shift / reach.clamp(min=_tiny(reach))).rsqrt(), 0.0)
        kept = self._unit
        self._preconditioner = None if rows is None else KroneckerPreconditioner(moving, lambda: rows(kept))

    def __call__(
        self,
        gradients: Float[Tensor, "query weight"],
        *,
        iterations: int,
        tell: Callable[[str], None] = lambda what: None,
    ) -> Responses:
        """Return what these gradients ask for, by about so many products with H at most."""
        if self.dense:
            return self._by_matrix(gradients)
        if self._filter == "descent":  # two solutions
            iterations = max(1, iterations // 2)
        vectors, judged = self._solve(gradients, iterations, tell)
        errors, residuals, taken = judged.errors, judged.residuals, judged.iterations
        if self._filter == "descent":
            inner = torch.where(self._moves, vectors / self._reach.clamp(min=_tiny(self._reach)), 0.0)
            twice, again = self._solve(inner, iterations, tell)
            vectors = vectors.mul_(ONCE).add_(twice, alpha=TWICE)
            errors = np.hypot(ONCE * errors, TWICE * again.errors)
            residuals, taken = again.residuals, taken + again.iterations
        return Responses(vectors, errors, self._spreads(vectors), residuals, taken)

    def _solve(self, right: Tensor, iterations: int, tell: Callable[[str], None]) -> tuple[Tensor, _Judged]:
        """(H + D)⁻¹ of each row, and how near it is."""
        unit, judged = self._unit, _Judged(self._probes, self._unit)

        def product(vectors: Tensor, curvature: GaussNewton = self._curvature) -> Tensor:
            found = vectors + unit * curvature(unit * vectors, rows=self._examples)
            if not torch.isfinite(found).all():
                raise InputError(
                    "loss",
                    got="products with its curvature that are not finite",
                    expected="a loss with finite gradients and curvature at every training example",
                )
            return found

        def enough(iterate: Iterate) -> bool:
            share = judged(iterate)
            tell(f"iteration {iterate.iterations}: scores are known to {100 * share:.3g} % of their spread")
            return share <= CLOSE / 2

        scaled = unit * right
        iterate = conjugate_gradients.solve(
            product, scaled, preconditioner=self._preconditioner, iterations=iterations, enough=enough
        )
        solutions = iterate.solutions
        if self._exact is None:
            left = scaled - product(solutions)
        else:
            # Rounded products lead elsewhere, which their own residuals do not see; how far is counted as an error.
            left = scaled - self._exactly(product, solutions)
            correction = conjugate_gradients.solve(
                product, left, preconditioner=self._preconditioner, iterations=max(1, judged.iterations // 2)
            ).solutions
            judged.errors = np.hypot(judged.errors, judged.size_of(correction))
            solutions = solutions + correction
            left = scaled - self._exactly(product, solutions)
        judged.residuals = (left.norm(dim=1) / scaled.norm(dim=1).clamp(min=_tiny(scaled))).cpu().numpy()
        return unit * solutions, judged

    def _exactly(self, product: Callable[..., Tensor], vectors: Tensor) -> Tensor:
        assert self._exact is not None
        with self._exact:
            return product(vectors, self._exact)

    def _decomposed(self) -> tuple[Tensor, Tensor]:
        root = self._reach.double().sqrt()
        matrix = self._curvature.dense(rows=self._examples).double()
        matrix.diagonal().add_(self._hold)
        return torch.linalg.eigh(root[:, None] * matrix * root)

    def _by_matrix(self, gradients: Tensor) -> Responses:
        values = self._values.clamp(min=0)
        if self._filter == "descent":
            kept = torch.where(values > 1e-6, -torch.expm1(-values) / values.clamp(min=1e-6), 1 - values / 2)
        else:
            kept = 1 / (1 + values)
        root = self._reach.double().sqrt()
        vectors = ((gradients * root) @ self._vectors * kept @ self._vectors.T * root).to(gradients.dtype)
        none = np.zeros(len(gradients))
        return Responses(vectors, none, self._spreads(vectors), none, 0)

    def _spreads(self, vectors: Tensor) -> Float[np.ndarray, " query"]:
        return _spread((self._probes @ vectors.T.to(self._probes.dtype)).double()).cpu().numpy()


class _Judged:
    """How far scores of some examples are from where conjugate gradients will lead them.

    Steps shrink by about one factor, so that what is left to come is a geometric series.
    """

    def __init__(self, probes: Float[Tensor, "probe weight"], unit: Float[Tensor, " weight"]) -> None:
        self._probes, self._unit = probes, unit
        self._before: Tensor | None = None
        self._step: Tensor | None = None
        self.errors = np.zeros(0)
        self.residuals = np.zeros(0)
        self.iterations = 0

    def __call__(self, iterate: Iterate) -> float:
        """Look at an iterate; return the largest error of a query as a share of the spread of its scores."""
        self.iterations = iterate.iterations
        scores = self._scores(iterate.solutions)
        step = (scores - (0 if self._before is None else self._before)).square().mean(0).sqrt()
        spread = _spread(scores).clamp(min=_tiny(scores))
        rate = torch.full_like(step, SLOWEST) if self._step is None else step / self._step.clamp(min=_tiny(step))
        rate = rate.clamp(max=SLOWEST)
        self.errors = (step * torch.maximum(rate / (1 - rate), torch.ones_like(rate))).cpu().numpy()
        self._before, self._step = scores, step
        return float((torch.from_numpy(self.errors) / spread.cpu()).max())

    def size_of(self, vectors: Float[Tensor, "query weight"]) -> Float[np.ndarray, " query"]:
        """The root mean square of what vectors give as scores."""
        return self._scores(vectors).square().mean(0).sqrt().cpu().numpy()

    def _scores(self, vectors: Tensor) -> Float[Tensor, "probe query"]:
        return (self._probes @ (self._unit * vectors).T.to(self._probes.dtype)).double()


def is_small(moving: MovingWeights) -> bool:
    """Whether the matrix itself is the way."""
    return moving.total <= DENSE["cuda" if moving.center.is_cuda else "cpu"]


def _spread(scores: Float[Tensor, "probe query"]) -> Float[Tensor, " query"]:
    """The standard deviation; of a single score, its size."""
    return scores.std(0) if len(scores) > 1 else scores[0].abs()


def _tiny(values: Tensor) -> float:
    return torch.finfo(values.dtype).tiny

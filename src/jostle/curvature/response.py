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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from jostle.curvature.descent import DOWNWARDS, Descents, NotConvexError, NotFiniteError
from jostle.curvature.gauss_newton import GaussNewton
from jostle.models.weights import MovingWeights

Filter = Literal["descent", "minimum"]
"""φ: where training ends, or where it would stand still."""

STILL = 4.0
"""A descent that is held by 1/reach, too, and goes on for so many times as long has come to 1/(1 + a), within e⁻⁴."""

DENSE = {"cpu": 2048, "cuda": 4096}
"""Weights up to which the matrix itself is the quicker way, and the exact one."""


@dataclass(frozen=True)
class Responses:
    """What the queries' gradients ask of the weights.

    Attributes:
        vectors: x of each query.
        errors: the standard error of gᵢᵀx that chance leaves: the root of its mean square over some training examples,
            for each query.
        together: the mean product of the errors of two of them.
        spreads: the standard deviation of gᵢᵀx over the same examples.
        runs: of whose results x is the mean; 0 where the matrix itself was inverted.
        visits: how many training examples were seen in them, repetitions counted.
    """

    vectors: Float[Tensor, "query weight"]
    errors: Float[np.ndarray, " query"]
    together: Float[np.ndarray, " query"]
    spreads: Float[np.ndarray, " query"]
    runs: int = 0
    visits: int = 0


class Response:
    """Answers queries, a block of them at a time.

    Args:
        curvature: H, within its context.
        reach: how far training moves each weight; 0 where it never moved.
        hold: the curvature that weight decay adds.
        filter: φ.
        probes: gradients of some training examples, as much as each counts, by whose scores the error is judged.
        stiffest: what one example gives the rows that it alone has (`largest_in_rows`).
        seed: of what chance decides.
    """

    def __init__(
        self,
        curvature: GaussNewton,
        reach: Float[Tensor, " weight"],
        hold: Float[Tensor, " weight"],
        *,
        filter: Filter,
        probes: Float[Tensor, "probe weight"],
        stiffest: Float[Tensor, " weight"] | None = None,
        seed: int = 0,
    ) -> None:
        self._probes, self._filter = probes, filter
        self._dense = is_small(curvature.moving)
        if self._dense:
            self._root = reach.double().sqrt()
            matrix = curvature.dense().double()
            matrix.diagonal().add_(hold)
            if not torch.isfinite(matrix).all():
                raise NotFiniteError
            self._values, self._basis = torch.linalg.eigh(self._root[:, None] * matrix * self._root)
            if not curvature.is_convex and self._values[0] < -DOWNWARDS * self._values[-1].abs():
                raise NotConvexError
            return
        if filter == "minimum":
            held = torch.where(reach > 0, 1 / reach.clamp(min=torch.finfo(reach.dtype).tiny), 0.0)
            reach, hold = STILL * reach, hold + held
            stiffest = None if stiffest is None else STILL * stiffest
        self._descents = Descents(curvature, reach, hold, stiffest=stiffest, seed=seed)

    def __call__(
        self,
        gradients: Float[Tensor, "query weight"],
        *,
        within: float,
        runs: int,
        tell: Callable[[str], None] = lambda what: None,
    ) -> Responses:
        """Return what these gradients ask for, by ``runs`` runs or until a typical error is ``within`` its spread."""
        if self._dense:
            return self._by_matrix(gradients)
        descents, vectors, taken = self._descents, torch.zeros_like(gradients), _Runs()
        errors = together = spreads = np.zeros(len(gradients))
        known = "run 1 of 2 or more"
        while taken.runs < runs:
            found = descents(gradients, lambda what, known=known: tell(f"{known}, {what}"))
            taken.add(self._scores(found), descents.visits)
            if descents.exact:
                return self._without_error(found, taken.runs, taken.visits)
            vectors += (found - vectors) * (descents.visits / taken.visits)
            del found
            (errors, together), spreads = taken.errors(), _spread(self._scores(vectors))
            share = float(np.median(errors / np.maximum(spreads, np.finfo(np.float64).tiny)))
            if share <= within:
                break
            known = "run 2"
            if taken.runs > 1:
                known = f"run {taken.runs + 1}, scores known to {share:.2g} of their spread"
                needed = min(runs, taken.runs * (share / within) ** 2) - taken.runs
                if needed * descents.examples >= len(descents):
                    descents.see_all()  # one run without chance is no longer than what is needed of others
        return Responses(vectors, errors, together, spreads, taken.runs, taken.visits)

    def _without_error(self, vectors: Tensor, runs: int = 0, visits: int = 0) -> Responses:
        none = np.zeros(len(vectors))
        return Responses(vectors, none, none, _spread(self._scores(vectors)), runs, visits)

    def _by_matrix(self, gradients: Tensor) -> Responses:
        values = self._values.clamp(min=0)
        if self._filter == "descent":
            kept = torch.where(values > 1e-6, -torch.expm1(-values) / values.clamp(min=1e-6), 1 - values / 2)
        else:
            kept = 1 / (1 + values)
        scaled = (gradients * self._root) @ self._basis
        vectors = (scaled * kept @ self._basis.T * self._root).to(gradients.dtype)
        return self._without_error(vectors)

    def _scores(self, vectors: Float[Tensor, "query weight"]) -> Float[np.ndarray, "probe query"]:
        return (self._probes @ vectors.T.to(self._probes.dtype)).double().cpu().numpy()


class _Runs:
    """Scores by single runs, whose differences tell how far their mean is from what it would become."""

    def __init__(self) -> None:
        self._scores: list[Float[np.ndarray, "probe query"]] = []
        self._visits: list[int] = []

    @property
    def runs(self) -> int:
        return len(self._scores)

    @property
    def visits(self) -> int:
        return sum(self._visits)

    def add(self, scores: Float[np.ndarray, "probe query"], visits: int) -> None:
        self._scores.append(scores)
        self._visits.append(visits)

    def errors(self) -> tuple[Float[np.ndarray, " query"], Float[np.ndarray, " query"]]:
        """The standard error of the mean, by queries, and the mean product of two examples' errors.

        The variance of a run is as 1/visits.
        """
        scores, visits = np.stack(self._scores), np.array(self._visits, np.float64)
        if self.runs < 2:
            return np.full(scores.shape[2], np.inf), np.zeros(scores.shape[2])
        away = np.sqrt(visits)[:, None, None] * (scores - np.average(scores, axis=0, weights=visits))
        squares, probes = np.square(away).sum(1), scores.shape[1]
        pairs = (np.square(away.sum(1)) - squares) / max(1, probes * (probes - 1))
        own, together = (one.sum(0) / ((self.runs - 1) * self.visits) for one in (squares / probes, pairs))
        return np.sqrt(own), together


def is_small(moving: MovingWeights) -> bool:
    """Whether the matrix itself is the way."""
    return moving.total <= DENSE["cuda" if moving.center.is_cuda else "cpu"]


def _spread(scores: Float[np.ndarray, "probe query"]) -> Float[np.ndarray, " query"]:
    """The standard deviation; of a single score, its size."""
    return scores.std(0, ddof=1) if len(scores) > 1 else np.abs(scores[0])

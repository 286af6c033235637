"""A cheap inverse of I + H̃, from gradients of labels that the model itself would give.

H̃ = SHS is the Gauss–Newton matrix in coordinates in which the posterior's own precision is I (S = D^(−1/2)). It is
symmetric and positive definite, applied to rows, and made from rows g̃ᵢ with Σ g̃ᵢg̃ᵢᵀ ≈ H̃.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from jostle.models.weights import MovingWeights

Rows = Callable[[], Iterable[Float[Tensor, "row weight"]]]
"""Gives the rows g̃, block by block, as often as it is called."""

LARGEST_BASIS = 4096
"""A side of a tensor that is longer (a vocabulary) has no basis of its own."""


class KroneckerPreconditioner:
    """(I + H̃)⁻¹ where H̃ is diagonal in a Kronecker basis of each tensor.

    Of a tensor G (as a matrix, its first dimension by the others) the bases are the eigenvectors of E[GGᵀ] and E[GᵀG];
    in them, the mean square of each number is its curvature. What different tensors have in common is left out.

    Reference: George et al., *Fast Approximate Natural Gradient Descent in a Kronecker-factored Eigenbasis*, 2018;
    Gupta et al., *Shampoo: Preconditioned Stochastic Tensor Optimization*, 2018.
    """

    def __init__(self, moving: MovingWeights, rows: Rows) -> None:
        self._moving = moving
        shapes = [(shape[0], shape[1:].numel()) if len(shape) > 1 else (1, shape.numel()) for shape in moving.shapes]
        self._shapes = shapes
        sides: list[list[Tensor | None]] = [[None, None] for _ in shapes]
        for block in rows():
            for number, gradients in enumerate(self._tensors(block)):
                for side, equation in enumerate(("boi,bpi->op", "boi,boj->ij")):
                    if 1 < shapes[number][side] <= LARGEST_BASIS and min(shapes[number]) > 1:
                        found = torch.einsum(equation, gradients, gradients)
                        before = sides[number][side]
                        sides[number][side] = found if before is None else before.add_(found)
        self._bases = [[None if one is None else _basis(one) for one in pair] for pair in sides]
        self._curvature = torch.zeros(moving.total, dtype=moving.dtype, device=moving.center.device)
        for block in rows():
            self._curvature += torch.cat([one.square().sum(0).flatten() for one in self._rotated(block)])

    def __call__(self, vectors: Float[Tensor, "vector weight"]) -> Float[Tensor, "vector weight"]:
        """Apply it."""
        rotated = torch.cat([one.flatten(1) for one in self._rotated(vectors)], dim=1).div_(1 + self._curvature)
        return torch.cat([one.flatten(1) for one in self._rotated(rotated, back=True)], dim=1)

    def _tensors(self, rows: Tensor) -> list[Tensor]:
        parts = rows.split(self._moving.sizes, dim=1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _rotated(self, rows: Tensor, *, back: bool = False) -> Iterable[Tensor]:
        for tensor, (left, right) in zip(self._tensors(rows), self._bases, strict=True):
            if left is not None:
                tensor = (left if back else left.T) @ tensor
            if right is not None:
                tensor = tensor @ (right.T if back else right)
            yield tensor


def _basis(products: Float[Tensor, "side side"]) -> Float[Tensor, "side side"]:
    return torch.linalg.eigh(products.double())[1].to(products.dtype)

"""EK-FAC's answer, refined: many linear systems of one positive definite matrix at once, by its products alone.

Block conjugate gradients: every step's directions serve all right-hand sides, so that each is solved in the space that
all of them have opened together. A Kronecker-factored inverse makes steps few. This is what `jostle.solve` is measured
against: it needs several times the products, and knows one damping for all weights.

Reference: O'Leary, *The block conjugate gradient algorithm and related methods*, 1980.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from jostle.models.weights import MovingWeights

Product = Callable[[Float[Tensor, "vector weight"]], Float[Tensor, "vector weight"]]

INDEPENDENT = {torch.float32: 1e-7, torch.float64: 1e-11}
"""Directions whose share of a block is smaller, of those of a scale of 1, are those of others and rounding."""

SLICE = 1 << 20
"""Weights over which products are summed in single precision; these sums, in double."""


@dataclass
class Iterate:
    """Where conjugate gradients stand.

    Attributes:
        solutions: x, a row each.
        residuals: b − A·x, as the recursion has them.
        iterations: products with A so far.
    """

    solutions: Float[Tensor, "system weight"]
    residuals: Float[Tensor, "system weight"]
    iterations: int = 0


def solve(
    product: Product,
    right: Float[Tensor, "system weight"],
    *,
    preconditioner: Product | None = None,
    iterations: int,
    enough: Callable[[Iterate], bool] = lambda iterate: False,
) -> Iterate:
    """Return x with A·x = b for every row b, or where the iterations end.

    Args:
        product: A·v of rows v; symmetric and positive definite, to rounding.
        right: b.
        preconditioner: about A⁻¹·v, symmetric and positive definite as well; default: v itself.
        iterations: at most so many, each a product with A of as many vectors as there are systems.
        enough: asked after each; ends the solve.
    """
    precondition = preconditioner or (lambda vectors: vectors)
    iterate = Iterate(torch.zeros_like(right), right.clone())
    moved = precondition(iterate.residuals)
    # Systems of one scale, so that a small one is not taken for rounding beside a large one.
    sizes = products_of(moved, right).diagonal()
    scales = torch.where(sizes > 0, sizes.rsqrt(), 0).to(right.dtype)
    directions = scales[:, None] * moved
    for _ in range(iterations):
        image = product(directions)
        inverse = _inverse(products_of(directions, image), INDEPENDENT[right.dtype])
        steps = (inverse @ products_of(directions, iterate.residuals)).T.to(right.dtype)
        iterate.solutions += steps @ directions
        iterate.residuals -= steps @ image
        iterate.iterations += 1
        if enough(iterate) or iterate.iterations == iterations:
            break
        moved = scales[:, None] * precondition(iterate.residuals)
        back = (inverse @ products_of(image, moved)).T.to(right.dtype)
        del image
        directions = moved.sub_(back @ directions)
        # Residuals shrink; directions are only directions.
        directions /= _lengths(directions)[:, None]
    return iterate


def products_of(
    left: Float[Tensor, "row weight"], right: Float[Tensor, "column weight"]
) -> Float[Tensor, "row column"]:
    """Return the products of all rows with all columns, in double precision."""
    total = torch.zeros(len(left), len(right), dtype=torch.float64, device=left.device)
    for start in range(0, left.shape[1], SLICE):
        total += left[:, start : start + SLICE] @ right[:, start : start + SLICE].T
    return total


def _lengths(rows: Tensor) -> Float[Tensor, " row"]:
    return rows.norm(dim=1).clamp(min=torch.finfo(rows.dtype).tiny)


def _inverse(matrix: Float[Tensor, "direction direction"], least: float) -> Float[Tensor, "direction direction"]:
    """The inverse on the directions that are independent of each other, and 0 on the rest."""
    matrix = (matrix + matrix.T) / 2
    own = matrix.diagonal()
    scale = torch.where(own > 0, own.rsqrt(), 0)
    values, vectors = torch.linalg.eigh(scale[:, None] * matrix * scale)
    kept = values > least * len(values)
    vectors = vectors[:, kept] * values[kept].rsqrt()
    return scale[:, None] * (vectors @ vectors.T) * scale


Rows = Callable[[], Iterable[Float[Tensor, "row weight"]]]
"""Gives the rows g̃, block by block, as often as it is called."""

LARGEST_BASIS = 4096
"""A side of a tensor that is longer (a vocabulary) has no basis of its own."""


class KroneckerPreconditioner:
    """(I + H̃)⁻¹, with H̃ = SHS for a diagonal S, where H̃ is diagonal in a Kronecker basis of each tensor.

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

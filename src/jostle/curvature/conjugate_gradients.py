"""Many linear systems of one positive definite matrix at once, by its products alone.

Block conjugate gradients: every step's directions serve all right-hand sides, so that each is solved in the space that
all of them have opened together. Queries of one model share most of it.

Reference: O'Leary, *The block conjugate gradient algorithm and related methods*, 1980.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

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

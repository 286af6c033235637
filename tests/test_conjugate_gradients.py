"""What EK-FAC is refined by in the experiments: conjugate gradients against dense solves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from experiments.conjugate_gradients import Iterate, KroneckerPreconditioner, solve
from torch import Tensor, nn

from jostle.models.weights import MovingWeights
from test_curvature import close

# --- conjugate gradients ---


def spd(size: int, condition: float, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, generator=random, dtype=torch.float64))[0]
    return basis @ torch.diag(torch.logspace(0, -np.log10(condition), size, dtype=torch.float64)) @ basis.T


def small_residual(matrix: Tensor, right: Tensor, tolerance: float) -> Callable[[Iterate], bool]:
    sizes = right.norm(dim=1)

    def enough(iterate: Iterate) -> bool:
        return bool(((right - iterate.solutions @ matrix).norm(dim=1) <= tolerance * sizes).all())

    return enough


@pytest.mark.parametrize(
    ("dtype", "condition", "tolerance", "most"), [(torch.float64, 1e4, 1e-8, 50), (torch.float32, 100, 1e-5, 50)]
)
def test_block_solves(dtype: torch.dtype, condition: float, tolerance: float, most: int) -> None:
    """One that depends on others, one of 0, one far smaller: each comes out, and none spoils others."""
    A = spd(60, condition).to(dtype)
    right = torch.randn(5, 60, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    right = torch.cat([right, right[:1] - 2 * right[1:2], torch.zeros(1, 60, dtype=dtype), right[2:3]])
    right[4] *= 1e-6
    found = solve(lambda rows: rows @ A, right, iterations=most, enough=small_residual(A, right, tolerance))
    truth = torch.linalg.solve(A.double(), right.double().T).T
    assert found.iterations < most
    kept = [0, 1, 2, 3, 4, 5, 7]
    errors = (found.solutions.double() - truth)[kept].norm(dim=1) / truth[kept].norm(dim=1)
    assert errors.max() < condition * tolerance
    assert (found.solutions[6] == 0).all()


def test_a_preconditioner_saves_iterations() -> None:
    """Scales over six decades beside a mild matrix: with the diagonal, what is left is the mild one."""
    size = 200
    scales = torch.logspace(0, 3, size, dtype=torch.float64)[
        torch.randperm(size, generator=torch.Generator().manual_seed(0))
    ]
    A = scales[:, None] * spd(size, 10) * scales
    right = torch.randn(2, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    counts = [
        solve(
            lambda rows: rows @ A, right, preconditioner=one, iterations=600, enough=small_residual(A, right, 1e-6)
        ).iterations
        for one in (None, lambda rows: rows / A.diagonal())
    ]
    assert counts[1] < 30
    assert counts[0] > 8 * counts[1]


# --- preconditioners ---


def dense_of(operator: Callable[[Tensor], Tensor], size: int) -> Tensor:
    return operator(torch.eye(size, dtype=torch.float64))


def blocks(rows: Tensor) -> Callable[[], Iterator[Tensor]]:
    return lambda: iter(rows.split(4))


@functools.cache
def sampled() -> tuple[MovingWeights, Tensor]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    moving = MovingWeights(network, "all")
    return moving, torch.randn(11, moving.total, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_the_preconditioner_is_symmetric_and_positive() -> None:
    moving, G = sampled()
    dense = dense_of(KroneckerPreconditioner(moving, blocks(G)), moving.total)
    assert close(dense.T, dense, 1e-12)
    assert torch.linalg.eigvalsh(dense).min() > 0


def test_a_kronecker_matrix_is_inverted_exactly() -> None:
    """Of one linear layer, with rows G = √(λᵢμⱼ)·uᵢvⱼᵀ: their products are A ⊗ B."""
    model = nn.Linear(4, 3, bias=False).double()
    moving = MovingWeights(model, "all")
    A, B = 3 * spd(3, 50), 20 * spd(4, 200, seed=1)
    left, right = torch.linalg.cholesky(A), torch.linalg.cholesky(B)
    G = torch.einsum("oa,ib->aboi", left, right).reshape(12, 12)
    H = torch.einsum("op,ij->oipj", A, B).reshape(12, 12)
    assert close(G.T @ G, H, 1e-12)
    found = dense_of(KroneckerPreconditioner(moving, blocks(G)), 12)
    assert close(found, torch.linalg.inv(torch.eye(12, dtype=torch.float64) + H), 1e-10)

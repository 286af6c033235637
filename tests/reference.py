"""Naive twins and closed forms: what the fast paths are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.linalg
import torch
from torch import Tensor, nn

from jostle.chains import randomness
from jostle.models.weights import MovingWeights


def algorithm_1(
    model: nn.Module,
    train: tuple[Tensor, ...],
    query: tuple[Tensor, ...],
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor],
    *,
    n_beta: float,
    localization: float,
    step_size: float,
    batch_size: int,
    chains: int,
    draws: int,
    seed: int,
) -> np.ndarray:
    """Algorithm 1 of the paper, line by line, with Jostle's random numbers; returns the BIF, −Cov.

    The index (c−1)C+t of the paper is (c−1)T+t here, and the sign is the definition's.
    """
    moving = MovingWeights(model, "all")
    n, p = len(train[0]), len(query[0])
    center = {name: value.detach().clone() for name, value in model.named_parameters()}
    L = np.zeros((n, chains * draws))
    Phi = np.zeros((p, chains * draws))
    for c in range(chains):
        for name, value in model.named_parameters():
            value.data.copy_(center[name])
        for t in range(draws):
            for i in range(n):
                L[i, c * draws + t] = loss(model, tuple(part[i : i + 1] for part in train)).item()
            for j in range(p):
                Phi[j, c * draws + t] = loss(model, tuple(part[j : j + 1] for part in query)).item()
            (batch,) = randomness.minibatches(seed, [c], t, size=batch_size, of=n)
            model.zero_grad()
            for k in batch:
                (loss(model, tuple(part[k : k + 1] for part in train))[0] / len(batch)).backward()
            noise = moving.unflatten(next(randomness.noise(seed, [c], t, moving, torch.device("cpu")))[1][0])
            for name, w in model.named_parameters():
                assert w.grad is not None
                drift = n_beta * w.grad + localization * (w.data - center[name])
                w.data += -step_size / 2 * drift + np.sqrt(step_size) * noise[name]
    for name, value in model.named_parameters():
        value.data.copy_(center[name])
    total = chains * draws
    centering = np.eye(total) - np.ones((total, total)) / total
    return -(L @ centering @ centering @ Phi.T) / (total - 1)


@dataclass(frozen=True)
class LinearGaussian:
    """Linear regression with known noise: ℓᵢ(w) = (yᵢ − xᵢᵀw)²/2σ², whose localized posterior is Gaussian."""

    X: np.ndarray
    y: np.ndarray
    noise_variance: float
    center: np.ndarray
    n_beta: float
    localization: float

    @classmethod
    def random(
        cls, *, samples: int, weights: int, n_beta: float, localization: float, off_minimum: float = 0.0, seed: int = 0
    ) -> LinearGaussian:
        """A well-conditioned problem; w* lies ``off_minimum`` away from the least-squares solution, in every weight."""
        generator = np.random.default_rng(seed)
        X = generator.normal(size=(samples, weights)) * np.linspace(0.7, 1.3, weights)
        y = X @ generator.normal(size=weights) + 0.5 * generator.normal(size=samples)
        center = np.linalg.lstsq(X, y, rcond=None)[0] + off_minimum
        return cls(X, y, 0.25, center, n_beta, localization)

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.X), torch.from_numpy(self.y)[:, None]

    def model(self) -> nn.Module:
        model = nn.Linear(self.X.shape[1], 1, bias=False, dtype=torch.float64)
        model.weight.data.copy_(torch.from_numpy(self.center)[None])
        return model

    @property
    def sample_hessians(self) -> np.ndarray:
        return np.einsum("ia,ib->iab", self.X, self.X) / self.noise_variance

    @property
    def mean_hessian(self) -> np.ndarray:
        return self.sample_hessians.mean(0)

    def sample_gradients(self, w: np.ndarray) -> np.ndarray:
        return (self.X @ w - self.y)[:, None] * self.X / self.noise_variance

    @property
    def precision(self) -> np.ndarray:
        """A = nβ·H̄ + γI."""
        return self.n_beta * self.mean_hessian + self.localization * np.eye(len(self.center))

    @property
    def mode(self) -> np.ndarray:
        """μ = w* − A⁻¹·nβ·∇L̄(w*)."""
        return self.center - np.linalg.solve(self.precision, self.n_beta * self.sample_gradients(self.center).mean(0))

    def sgld_covariance(self, step_size: float) -> np.ndarray:
        """[A(I − εA/4)]⁻¹, the stationary covariance of full-batch SGLD at a finite step."""
        A = self.precision
        return np.linalg.inv(A @ (np.eye(len(A)) - step_size * A / 4))

    def preconditioned_covariance(self, step_size: float, G: np.ndarray) -> np.ndarray:
        """(A − εAGA/4)⁻¹, the same for a fixed diagonal preconditioner G."""
        A = self.precision
        return np.linalg.inv(A - step_size * A @ np.diag(G) @ A / 4)

    def minibatch_covariance(self, step_size: float, batch_size: int) -> np.ndarray:
        """The Lyapunov equation with the noise of minibatches drawn without replacement.

        Σ = MΣM + εI + (ε·nβ/2)²·c·[S(μ) + (1/n)Σᵢ (Hᵢ − H̄)Σ(Hᵢ − H̄)], M = I − εA/2, c = (n − m)/(m(n − 1)):
        the noise depends on the weights, but only quadratically, so the equation is linear in Σ.
        """
        A, n, d = self.precision, len(self.y), len(self.center)
        M = np.eye(d) - step_size / 2 * A
        gradients = self.sample_gradients(self.mode)
        spread = gradients - gradients.mean(0)
        S = spread.T @ spread / n
        deviations = self.sample_hessians - self.mean_hessian
        factor = (step_size * self.n_beta / 2) ** 2 * (n - batch_size) / (batch_size * (n - 1))
        operator = np.kron(M, M) + factor * np.mean([np.kron(D, D) for D in deviations], axis=0)
        constant = step_size * np.eye(d) + factor * S
        return np.linalg.solve(np.eye(d * d) - operator, constant.ravel()).reshape(d, d)

    def loss_covariance(self, covariance: np.ndarray) -> np.ndarray:
        """Cov(ℓᵢ, ℓⱼ) = gᵢᵀΣgⱼ + ½·tr(HᵢΣHⱼΣ) under N(μ, Σ), exactly."""
        g = self.sample_gradients(self.mode)
        HS = self.sample_hessians @ covariance
        return g @ covariance @ g.T + 0.5 * np.einsum("iab,jba->ij", HS, HS)


def stationary_covariance(M: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Σ = MΣMᵀ + noise."""
    return scipy.linalg.solve_discrete_lyapunov(M, noise)


def covariance(left: np.ndarray, right: np.ndarray, *, within: bool = False) -> np.ndarray:
    """Covariance by its textbook sum; arrays are (chain, draw, column)."""
    groups = [slice(None)] if not within else [slice(c, c + 1) for c in range(len(left))]
    total = np.zeros((left.shape[2], right.shape[2]))
    for group in groups:
        a = left[group].reshape(-1, left.shape[2]).astype(np.float64)
        b = right[group].reshape(-1, right.shape[2]).astype(np.float64)
        total += (a - a.mean(0)).T @ (b - b.mean(0))
    return total / (left.shape[0] * left.shape[1] - len(groups))

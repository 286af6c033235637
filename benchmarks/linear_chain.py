"""An update rule on a quadratic potential, without a model: its exact law where it is linear, and many chains at once.

U(w) = nβ·wᵀHw/2 + κ‖w‖²/2 around w* = 0. There a rule whose step is linear in weights, gradient and noise is

    s ← Ms + Nξ + Ke,   s = (weights, what it carries),   e = the noise of the minibatch's mean gradient,

and M, N and K are read off the rule itself by letting it step from unit vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from jostle.posterior import Posterior, Potential
from jostle.samplers import Sampler

Noise = Callable[[Tensor, torch.Generator], Tensor]
"""(weights of every chain, generator) -> what minibatches add to the gradient of the mean loss."""


@dataclass(frozen=True)
class Minibatches:
    """The noise of minibatches, drawn without replacement, of samples with quadratic losses.

    Cov(e | w) = c·[S + mean((Hᵢ − H̄)wwᵀ(Hᵢ − H̄))],   c = (n − m)/(m(n − 1)),   S = the covariance of the gradients.
    """

    gradients: np.ndarray
    """Of every sample, where the potential has its minimum."""
    hessians: np.ndarray
    batch_size: int

    @property
    def scale(self) -> float:
        """c."""
        n = len(self.gradients)
        return (n - self.batch_size) / (self.batch_size * (n - 1))

    @property
    def constant(self) -> np.ndarray:
        """c·S."""
        spread = self.gradients - self.gradients.mean(0)
        return self.scale * spread.T @ spread / len(spread)

    @cached_property
    def curvature(self) -> np.ndarray:
        """c·mean((Hᵢ − H̄) ⊗ (Hᵢ − H̄)), which takes the covariance of weights, as a vector, to that of e."""
        deviations = self.hessians - self.hessians.mean(0)
        d = deviations.shape[1]
        flat = deviations.reshape(len(deviations), -1)
        products = (self.scale / len(flat) * flat.T @ flat).reshape(d, d, d, d)
        return products.transpose(0, 2, 1, 3).reshape(d * d, d * d)

    def __call__(self, weights: Tensor, generator: torch.Generator) -> Tensor:
        """Draw a minibatch for every chain."""
        n = len(self.gradients)
        order = torch.rand(len(weights), n, generator=generator).argsort(1)
        share = (order < self.batch_size).double() / self.batch_size - 1 / n
        hessian = (share @ torch.from_numpy(self.hessians).flatten(1)).unflatten(1, self.hessians.shape[1:])
        return share @ torch.from_numpy(self.gradients) + (hessian @ weights[:, :, None])[:, :, 0]


@dataclass(frozen=True)
class LinearChain:
    """M, N and K of a rule; the first d coordinates of the state are the weights."""

    M: np.ndarray
    N: np.ndarray
    K: np.ndarray

    @classmethod
    def of(cls, sampler: Sampler, H: np.ndarray, posterior: Posterior) -> LinearChain:
        d = len(H)
        potential, hessian = _potential(posterior, d), torch.from_numpy(H)
        carried = list(sampler.init(torch.zeros(1, d, dtype=torch.float64)))

        def step(states: Tensor, gradients: Tensor, noise: Tensor) -> np.ndarray:
            weights, *statistics = states.split(d, dim=1)
            moved, after = sampler.step(
                weights, gradients, noise, dict(zip(carried, statistics, strict=True)), potential, burning_in=False
            )
            return torch.cat([moved, *(after[name] for name in carried)], dim=1).T.numpy()

        size = d * (1 + len(carried))
        unit, states = torch.eye(d, dtype=torch.float64), torch.eye(size, dtype=torch.float64)
        still, nothing = torch.zeros(d, size, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64)
        return cls(
            step(states, states[:, :d] @ hessian, torch.zeros_like(states[:, :d])),
            step(still, nothing, unit),
            step(still, unit, nothing),
        )

    @property
    def weights(self) -> int:
        return self.N.shape[1]

    def is_stable(self) -> bool:
        return bool(np.abs(np.linalg.eigvals(self.M)).max() < 1)

    def stationary(self, noise: Minibatches | None = None) -> np.ndarray:
        """Σ = MΣMᵀ + NNᵀ + K·Cov(e)·Kᵀ, of the whole state; with minibatches it is linear in Σ too."""
        constant = self.N @ self.N.T
        if noise is None:
            return scipy.linalg.solve_discrete_lyapunov(self.M, constant)
        constant = constant + self.K @ noise.constant @ self.K.T
        pick = np.eye(self.weights, len(self.M))
        operator = np.kron(self.M, self.M) + np.kron(self.K, self.K) @ noise.curvature @ np.kron(pick, pick)
        size = len(self.M)
        covariance = np.linalg.solve(np.eye(size * size) - operator, constant.ravel()).reshape(size, size)
        # Beyond the stable step the equation still has a solution, but none that is a covariance.
        if np.linalg.eigvalsh(covariance)[0] < -1e-9 * np.abs(covariance).max():
            raise ValueError("the noise of the minibatches makes the covariance grow without bound")
        return covariance

    def weight_covariance(self, noise: Minibatches | None = None) -> np.ndarray:
        return self.stationary(noise)[: self.weights, : self.weights]


def simulate(
    sampler: Sampler,
    H: np.ndarray,
    posterior: Posterior,
    *,
    chains: int,
    draws: int,
    burn_in: int,
    thin: int = 1,
    gradient_noise: Noise | None = None,
    seed: int = 0,
) -> Tensor:
    """Run chains, all at once, and return their weights: (chain, draw, weight).

    Args:
        sampler: the rule.
        H: the Hessian of the mean loss.
        posterior: nβ and what holds the weights.
        chains: how many.
        draws: of each.
        burn_in: steps before the first draw.
        thin: steps between draws.
        gradient_noise: what is added to the gradient of the mean loss.
        seed: of all noise.
    """
    d = len(H)
    generator = torch.Generator().manual_seed(seed)
    potential, hessian = _potential(posterior, d), torch.from_numpy(H)
    weights = torch.zeros(chains, d, dtype=torch.float64)
    statistics = sampler.init(weights)
    seen = torch.empty(chains, draws, d, dtype=torch.float64)
    for step in range(burn_in + (draws - 1) * thin + 1):
        draw, between = divmod(step - burn_in, thin)
        if draw >= 0 and between == 0:
            seen[:, draw] = weights
        gradient = weights @ hessian
        if gradient_noise is not None:
            gradient += gradient_noise(weights, generator)
        noise = torch.randn(chains, d, generator=generator, dtype=torch.float64)
        burning_in = step < burn_in
        weights, statistics = sampler.step(weights, gradient, noise, statistics, potential, burning_in=burning_in)
    return seen


def _potential(posterior: Posterior, weights: int) -> Potential:
    return posterior.potential(torch.zeros(weights, dtype=torch.float64))

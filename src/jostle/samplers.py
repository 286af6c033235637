"""The update rules, side by side, each with its equation.

A rule is a frozen configuration with a few methods (see `Sampler`): `init` makes the statistics it carries from
step to step, `step` moves all chains of a group at once, and `check` says beforehand what cannot work. A rule
never sees the model or the data: it gets the gradient of a minibatch's mean loss, standard normal numbers, and
the potential. Everything it carries is in its statistics, so a checkpoint of weights and statistics resumes it.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from jaxtyping import Float
from torch import Tensor

from jostle.errors import InputError
from jostle.posterior import Potential

Weights = Float[Tensor, "chain weight"]
Statistics = dict[str, Tensor]
"""What a rule carries from step to step; the first axis of every tensor is the chain."""


class Sampler(Protocol):
    """One rule for moving the weights."""

    def init(self, weights: Weights) -> Statistics:
        """Return the statistics before the first step."""
        ...

    def step(
        self,
        weights: Weights,
        mean_loss_gradient: Weights,
        noise: Weights,
        statistics: Statistics,
        potential: Potential,
        *,
        burning_in: bool,
    ) -> tuple[Weights, Statistics]:
        """Return weights and statistics after one step; changes neither argument."""
        ...

    def check(self, potential: Potential, *, burn_in: int) -> None:
        """Raise `InputError` where the settings cannot work."""
        ...

    def remarks(self, statistics: Statistics) -> list[str]:
        """Say, after sampling, what a user should know about how the rule behaved."""
        ...


@dataclass(frozen=True, kw_only=True)
class SGLD:
    """Stochastic-gradient Langevin dynamics, the paper's update:

        w ← w − (ε/2)·(nβ·ḡ + γ(w − w*)) + N(0, ε).

    Its stationary covariance on a quadratic potential with Hessian A and exact gradients is [A(I − εA/4)]⁻¹.

    Reference: Welling and Teh, *Bayesian Learning via Stochastic Gradient Langevin Dynamics*, 2011.
    """

    step_size: float

    def __post_init__(self) -> None:
        _require_positive("step_size", self.step_size)

    def init(self, weights: Weights) -> Statistics:
        """Carry nothing."""
        return {}

    def step(
        self,
        weights: Weights,
        mean_loss_gradient: Weights,
        noise: Weights,
        statistics: Statistics,
        potential: Potential,
        *,
        burning_in: bool,
    ) -> tuple[Weights, Statistics]:
        """Apply the update above."""
        drift = potential.gradient(weights, mean_loss_gradient)
        return weights - self.step_size / 2 * drift + math.sqrt(self.step_size) * noise, statistics

    def check(self, potential: Potential, *, burn_in: int) -> None:
        """The pull to the centre alone overshoots, and grows, from εγ = 4 on."""
        curvature = potential.localization + potential.prior_precision
        if self.step_size * curvature >= 4:
            raise InputError(
                "step_size",
                got=f"{self.step_size:g} with a localization of {curvature:g}",
                expected=f"a step size below 4/localization = {4 / curvature:.3g}, or the chain grows without bound",
                fix=f"{0.2 / curvature:.2g} is a safe start",
            )

    def remarks(self, statistics: Statistics) -> list[str]:
        """Nothing to say."""
        return []


@dataclass(frozen=True, kw_only=True)
class RMSpropSGLD:
    """SGLD preconditioned by a running second moment of the gradient:

        V ← αV + (1 − α)ḡ²,   G = 1/(√V̂ + e),   V̂ = V/(1 − αᵗ),
        w ← w − (ε/2)·G·(nβ·ḡ + γ(w − w*)) + N(0, εG).

    With G held fixed its stationary covariance on a quadratic potential with Hessian A is (A − εAGA/4)⁻¹. While G
    still moves with the chain the target is only approximate (the term ∂G/∂w is left out, as is usual): freeze
    it after the burn-in to sample the posterior itself.

    Args:
        step_size: ε.
        smoothing: α, the share of V kept at each step.
        stabilizer: e, which bounds G by 1/e. Where it exceeds √V̂ the rule is plain SGLD with step ε/e.
        bias_correction: divide V by 1 − αᵗ, so that early steps are not over-long.
        freeze_after_burn_in: hold G fixed from the first draw on.

    Reference: Li et al., *Preconditioned Stochastic Gradient Langevin Dynamics for Deep Neural Networks*, 2016.
    """

    step_size: float
    smoothing: float = 0.99
    stabilizer: float = 1e-2
    bias_correction: bool = True
    freeze_after_burn_in: bool = False

    def __post_init__(self) -> None:
        _require_positive("step_size", self.step_size)
        _require_positive("stabilizer", self.stabilizer)
        if not 0 <= self.smoothing < 1:
            raise InputError("smoothing", got=self.smoothing, expected="a number in [0, 1)")

    @classmethod
    def devinterp(cls, *, step_size: float) -> Self:
        """Return the variant of devinterp 2.0.1: V starts at 0 and is not corrected, e = 0.1."""
        return cls(step_size=step_size, smoothing=0.99, stabilizer=0.1, bias_correction=False)

    def init(self, weights: Weights) -> Statistics:
        """Carry V and, per chain, how often it was updated."""
        return {
            "second_moment": torch.zeros_like(weights),
            "updates": weights.new_zeros(len(weights), 1, dtype=torch.int64),
        }

    def step(
        self,
        weights: Weights,
        mean_loss_gradient: Weights,
        noise: Weights,
        statistics: Statistics,
        potential: Potential,
        *,
        burning_in: bool,
    ) -> tuple[Weights, Statistics]:
        """Apply the updates above, in this order."""
        if burning_in or not self.freeze_after_burn_in:
            moment = self.smoothing * statistics["second_moment"]
            moment = moment + (1 - self.smoothing) * mean_loss_gradient.square()
            statistics = {"second_moment": moment, "updates": statistics["updates"] + 1}
        scale = self.preconditioner(statistics)
        drift = potential.gradient(weights, mean_loss_gradient)
        moved = weights - self.step_size / 2 * scale * drift + (self.step_size * scale).sqrt() * noise
        return moved, statistics

    def preconditioner(self, statistics: Statistics) -> Weights:
        """G = 1/(√V̂ + e)."""
        return 1 / (self._root(statistics) + self.stabilizer)

    def _root(self, statistics: Statistics) -> Weights:
        moment = statistics["second_moment"]
        if self.bias_correction:
            updates = statistics["updates"].clamp(min=1).to(moment.dtype)
            moment = moment / (1 - self.smoothing**updates)
        return moment.sqrt()

    def check(self, potential: Potential, *, burn_in: int) -> None:
        """Nothing is certain of stability beforehand: G depends on the gradients."""
        if self.freeze_after_burn_in and burn_in == 0:
            raise InputError(
                "burn_in",
                got="0 with freeze_after_burn_in=True",
                expected="steps in which the preconditioner can be learnt",
                fix=f"a burn-in of {math.ceil(2 / (1 - self.smoothing))} steps is twice its memory",
            )

    def remarks(self, statistics: Statistics) -> list[str]:
        """Say so where the stabilizer, not the gradient, sets the step of most weights."""
        dominated = (self._root(statistics) < self.stabilizer).double().mean().item()
        if dominated <= 0.5:
            return []
        return [
            f"RMSpropSGLD: the stabilizer {self.stabilizer:g} exceeds √V̂ for {dominated:.0%} of the weights, where "
            f"the rule is plain SGLD with a step of {self.step_size / self.stabilizer:.3g}; lower the stabilizer "
            f"(median √V̂ is {self._root(statistics).median().item():.2g}) or use SGLD"
        ]


def _require_positive(name: str, value: float) -> None:
    if not (isinstance(value, numbers.Real) and math.isfinite(value) and value > 0):
        raise InputError(name, got=repr(value), expected="a positive number")

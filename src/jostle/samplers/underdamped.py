"""Rules with momentum: a position and a velocity for every weight, of mass 1, in steps of time h = √ε."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from jostle.errors import InputError
from jostle.posterior import Potential
from jostle.samplers.protocol import Rule, Statistics, Weights, pull, refuse_overshoot, require_positive


@dataclass(frozen=True, kw_only=True)
class BAOAB(Rule):
    """Underdamped Langevin dynamics: kick, half a drift, friction and noise, half a drift, for one gradient a step.

        p ← p − h·∇U(w)
        w ← w + (h/2)·p
        p ← c·p + √(1 − c²)·ξ,   c = e^(−Γh),   h = √ε,   Γ = 2·friction·√(γ + λ)
        w ← w + (h/2)·p

    On a quadratic potential with Hessian A and exact gradients the weights' stationary covariance is A⁻¹ at every
    stable step (εA < 4) and any friction. A direction of curvature a forgets at a rate that is best near Γ = 2√a. So
    friction 1, the default, is critical for the directions that nothing but the pull holds, which are the slowest ones;
    these then forget in about 2/√(ε(γ + λ)) steps instead of SGLD's 2/(ε(γ + λ)). At high friction the rule is
    `LeimkuhlerMatthews` with the same ε.

    The noise of minibatches heats it, and the more the lower the friction is: `SGNHT` measures and absorbs that heat.

    Args:
        step_size: ε = h², comparable with the ε of SGLD.
        friction: Γ in units of 2√(γ + λ).

    Reference: Leimkuhler and Matthews, *Rational Construction of Stochastic Numerical Methods for Molecular Sampling*,
    2013; the two half kicks of neighbouring steps, between which the weights stand still, are made as one.
    """

    step_size: float
    friction: float = 1.0

    def __post_init__(self) -> None:
        require_positive("step_size", self.step_size)
        require_positive("friction", self.friction)

    def init(self, weights: Weights) -> Statistics:
        """Carry the momentum; chains start at rest."""
        return {"momentum": torch.zeros_like(weights)}

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
        time = math.sqrt(self.step_size)
        kept = math.exp(-_friction(self.friction, potential) * time)
        kicked = statistics["momentum"] - time * potential.gradient(weights, mean_loss_gradient)
        momentum = kept * kicked + math.sqrt(1 - kept**2) * noise
        return weights + time / 2 * (kicked + momentum), {"momentum": momentum}

    def check(self, potential: Potential, *, burn_in: int) -> None:
        """Refuse a step from which the chain grows without bound, and a friction without a unit."""
        _require_pull(potential)
        refuse_overshoot(self.step_size, potential)


@dataclass(frozen=True, kw_only=True)
class SGNHT(Rule):
    """The stochastic-gradient Nosé–Hoover thermostat: `BAOAB` with a friction that each chain measures for itself.

        p ← p − h·∇U(w)
        w ← w + (h/2)·p
        ζ ← ζ + (h/2)·(γ + λ)·(mean(p²) − 1)
        p ← e^(−ζh)·p + √(Γ(1 − e^(−2ζh))/ζ)·ξ,   h = √ε,   Γ = 2·friction·√(γ + λ)
        ζ ← ζ + (h/2)·(γ + λ)·(mean(p²) − 1)
        w ← w + (h/2)·p

    Gradient noise of unknown size heats the momenta; the thermostat ζ (one number a chain, Γ at first) rises until
    mean(p²) over all weights of the chain is 1 again, which it is under the posterior. Noise of variance v in every
    direction of ∇U raises ζ by hv/2 and leaves the weights' covariance at A⁻¹, up to terms of order ε. Noise that is
    larger in some directions than in others is absorbed on average only: too hot in some, too cold in others.

    The rate γ + λ, at which ζ follows the momenta, is that of the slowest weights.

    Args:
        step_size: ε = h², comparable with the ε of SGLD.
        friction: Γ in units of 2√(γ + λ); sets the noise that is put in besides that of the gradients.

    Reference: Ding et al., *Bayesian Sampling Using Stochastic Gradient Thermostats*, 2014. The symmetric splitting is
    that of Leimkuhler and Shang, *Adaptive Thermostats for Noisy Gradient Systems*, 2016, with its half kicks joined.
    """

    step_size: float
    friction: float = 1.0
    whole_chain: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_positive("step_size", self.step_size)
        require_positive("friction", self.friction)

    def init(self, weights: Weights) -> Statistics:
        """Carry the momentum and, for each chain, ζ − Γ."""
        return {"momentum": torch.zeros_like(weights), "excess_friction": weights.new_zeros(len(weights), 1)}

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
        time, put_in = math.sqrt(self.step_size), _friction(self.friction, potential)

        def measured(excess: Weights, momentum: Weights) -> Weights:
            return excess + time / 2 * pull(potential) * (momentum.square().mean(1, keepdim=True) - 1)

        kicked = statistics["momentum"] - time * potential.gradient(weights, mean_loss_gradient)
        excess = measured(statistics["excess_friction"], kicked)
        exponent = 2 * time * (put_in + excess)
        # (1 − e^(−x))/x, which is 1 at 0; ζ may pass through 0 and below.
        share = torch.where(exponent == 0, 1, -torch.expm1(-exponent) / exponent)
        momentum = torch.exp(-exponent / 2) * kicked + (2 * put_in * time * share).sqrt() * noise
        moved = weights + time / 2 * (kicked + momentum)
        return moved, {"momentum": momentum, "excess_friction": measured(excess, momentum)}

    def check(self, potential: Potential, *, burn_in: int) -> None:
        """Refuse a step from which the chain grows without bound, and a friction without a unit."""
        _require_pull(potential)
        refuse_overshoot(self.step_size, potential)


def _friction(relative: float, potential: Potential) -> float:
    """Γ: twice the root of a curvature is where an oscillation just does not happen."""
    return 2 * relative * math.sqrt(pull(potential))


def _require_pull(potential: Potential) -> None:
    if not pull(potential):
        raise InputError(
            "localization",
            got="0 without a prior",
            expected="a positive localization or prior_precision, by which friction is measured",
            fix="LeimkuhlerMatthews needs neither",
        )

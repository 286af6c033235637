"""Rules without momentum: the weights, and at most a little memory beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from jostle.errors import InputError
from jostle.posterior import Potential
from jostle.samplers.protocol import Rule, Statistics, Weights, pull, refuse_overshoot, require_positive


@dataclass(frozen=True, kw_only=True)
class Gaussian(Rule):
    """Independent draws around w*, without any gradient: the control that every other rule has to beat.

        w ← μ + N(0, 1/(γ + λ)),   μ = γw*/(γ + λ).

    This is the posterior itself at nβ = 0, exactly, and every step is a new draw: one between draws (``thin=1``) and
    one before the first (``burn_in=1``, since step 0 is w*) are enough, and the default of `jostle.attribute`.

    Scores of this rule know the losses' gradients and curvature at and around w*, but not how the data as a whole hold
    the weights: to first order they are −gᵢᵀgⱼ/γ, a dot product of gradients.
    """

    independent: ClassVar[bool] = True

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
        """Draw anew."""
        precision = pull(potential)
        mean = potential.center * (potential.localization / precision)
        return mean + noise / math.sqrt(precision), statistics

    def check(self, potential: Potential, *, burn_in: int) -> None:
        """Refuse a posterior that has the losses in it, and a first draw that would be w* itself."""
        if potential.n_beta:
            raise InputError(
                "n_beta",
                got=f"{potential.n_beta:g} with the Gaussian sampler, which uses no gradient",
                expected="n_beta=0",
                fix="set n_beta to 0, or use another sampler",
            )
        if burn_in < 1:
            raise InputError(
                "burn_in",
                got="0 with the Gaussian sampler",
                expected="at least 1: step 0 is w* itself, and not a draw",
                fix="leave it out, or burn_in=1: every step is a new draw",
            )


@dataclass(frozen=True, kw_only=True)
class SGLD(Rule):
    """Stochastic-gradient Langevin dynamics, the paper's update:

        w ← w − (ε/2)·(nβ·ḡ + γ(w − w*)) + N(0, ε).

    Its stationary covariance on a quadratic potential with Hessian A and exact gradients is [A(I − εA/4)]⁻¹.

    Reference: Welling and Teh, *Bayesian Learning via Stochastic Gradient Langevin Dynamics*, 2011.
    """

    step_size: float

    def __post_init__(self) -> None:
        require_positive("step_size", self.step_size)

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
        """Refuse a step from which the chain grows without bound."""
        refuse_overshoot(self.step_size, potential)


@dataclass(frozen=True, kw_only=True)
class LeimkuhlerMatthews(Rule):
    """SGLD whose noise is the mean of this step's and the last one's:

        w ← w − (ε/2)·∇U(w) + √ε·(ξₜ + ξₜ₊₁)/2,   ∇U = nβ·ḡ + γ(w − w*) + λw.

    Its stationary covariance on a quadratic potential with Hessian A and exact gradients is A⁻¹ at every step that is
    stable (εA < 4), where that of SGLD is [A(I − εA/4)]⁻¹. For other potentials its error is of order ε², not ε. It is
    the limit of `BAOAB` at infinite friction.

    The noise of minibatches is not corrected: it adds to the covariance as it does for SGLD.

    Reference: Leimkuhler and Matthews, *Rational Construction of Stochastic Numerical Methods for Molecular Sampling*,
    2013.
    """

    step_size: float

    def __post_init__(self) -> None:
        require_positive("step_size", self.step_size)

    def init(self, weights: Weights) -> Statistics:
        """Carry the noise of the last step; there was none before the first."""
        return {"last_noise": torch.zeros_like(weights)}

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
        jolt = math.sqrt(self.step_size) / 2 * (statistics["last_noise"] + noise)
        return weights - self.step_size / 2 * drift + jolt, {"last_noise": noise}

    def check(self, potential: Potential, *, burn_in: int) -> None:
        """Refuse a step from which the chain grows without bound."""
        refuse_overshoot(self.step_size, potential)


@dataclass(frozen=True, kw_only=True)
class OrnsteinUhlenbeck(Rule):
    """Pull and noise integrated exactly, the gradient as a constant force over the step:

        w ← μ + (w − μ)·e^(−εκ/2) − nβ·ḡ·(1 − e^(−εκ/2))/κ + N(0, (1 − e^(−εκ))/κ),   κ = γ + λ,   μ = γw*/κ.

    Its stationary covariance on a quadratic loss with Hessian H and exact gradients is
    [A(I − (nβH/κ)·tanh(εκ/4))]⁻¹ with A = nβH + κ, and it is stable while nβH·tanh(εκ/4) < κ: at *any* step where the
    pull outweighs the curvature (nβH < κ). Long steps pay for that: as ε grows, draws become independent and the
    covariance tends to [A(I − nβH/κ)]⁻¹, which to first order in nβH/κ is the one without a gradient. As ε → 0, or
    without a pull, it is SGLD.

    Reference: Uhlenbeck and Ornstein, *On the Theory of the Brownian Motion*, 1930 (the part that is exact); the
    splitting is the exponential integrator for a linear drift.
    """

    step_size: float

    def __post_init__(self) -> None:
        require_positive("step_size", self.step_size)

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
        precision, step = pull(potential), self.step_size
        if not precision:
            gain, variance, target = step / 2, step, weights
        else:
            gain = -math.expm1(-step * precision / 2) / precision
            variance = -math.expm1(-step * precision) / precision
            target = potential.center * (potential.localization / precision)
        pulled = weights + gain * precision * (target - weights)
        return pulled - gain * potential.n_beta * mean_loss_gradient + math.sqrt(variance) * noise, statistics

    def check(self, potential: Potential, *, burn_in: int) -> None:
        """Nothing is certain beforehand: the pull alone is stable at any step, and the curvature is not known."""


@dataclass(frozen=True, kw_only=True)
class RMSpropSGLD(Rule):
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
        require_positive("step_size", self.step_size)
        require_positive("stabilizer", self.stabilizer)
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
        below = self._root(statistics) < self.stabilizer
        dominated = below.count_nonzero().item() / below.numel()  # a mean would copy the mask, as wider numbers
        if dominated <= 0.5:
            return []
        return [
            f"RMSpropSGLD: the stabilizer {self.stabilizer:g} exceeds √V̂ for {dominated:.0%} of the weights, where "
            f"the rule is plain SGLD with a step of {self.step_size / self.stabilizer:.3g}; lower the stabilizer "
            f"(median √V̂ is {self._root(statistics).median().item():.2g}) or use SGLD"
        ]

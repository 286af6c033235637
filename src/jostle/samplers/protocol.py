"""What an update rule is, and what all of them ask of their settings."""

from __future__ import annotations

import math
import numbers
import sys
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from jostle.errors import InputError
from jostle.posterior import Potential

Weights = Float[Tensor, "chain weight"]
Statistics = dict[str, Tensor]
"""What a rule carries from step to step; the first axis of every tensor is the chain."""


class Sampler(Protocol):
    """One rule for moving the weights.

    The weights of a very large model come in blocks, one after another, and gradient, noise and whatever else has their
    shape with them. A rule that needs all weights of a chain at once (for a mean over them) says so with a class
    attribute ``whole_chain = True``; one whose every step is a new draw, with ``independent = True``. Chains that a
    rule of a user's own moves are not spread over threads.

    Where the posterior has a metric D, all of it is in the metric's units, of which a rule need not know: the weights
    are u = D^½(w − w*), around a centre at 0, and the gradient is D^−½ times that of the mean loss.
    """

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


class Rule:
    """What most rules have in common: nothing is carried from step to step, and there is nothing to say."""

    def init(self, weights: Weights) -> Statistics:
        """Carry nothing."""
        return {}

    def remarks(self, statistics: Statistics) -> list[str]:
        """Nothing to say."""
        return []


def pull(potential: Potential) -> float:
    """γ + λ: the curvature that holds every weight, whatever the losses are."""
    return potential.localization + potential.prior_precision


def steps_to_forget(step_size: float, curvature: float, friction: float | None = None) -> float:
    """How long a rule remembers in a direction of curvature a: 2/(εa) steps, with momentum 2/√(εa).

    The sum of its autocorrelations to one side: with momentum and critical friction these are (1 + t√a)·e^(−t√a). More
    friction slows it down in proportion, and so does less: it swings.
    """
    if friction is None:
        return 2 / (step_size * curvature)
    return 2 * max(friction, 1 / friction) / math.sqrt(step_size * curvature)


def require_positive(name: str, value: float) -> None:
    """Refuse what is not a positive number."""
    if not (isinstance(value, numbers.Real) and 0 < value <= sys.float_info.max):
        raise InputError(name, got=repr(value), expected="a positive number")


def refuse_overshoot(step_size: float, potential: Potential) -> None:
    """Refuse ε(γ + λ) ≥ 4, from where on the pull to the centre alone overshoots, and grows.

    The curvature of the losses adds to it, but nobody knows that beforehand.
    """
    curvature = pull(potential)
    if step_size * curvature >= 4:
        name = "(localization + prior precision)" if potential.prior_precision else "localization"
        raise InputError(
            "step_size",
            got=f"{step_size:g} with a {name} of {curvature:g}",
            expected=f"a step size below 4/{name} = {4 / curvature:.3g}, or the chain grows without bound",
            fix=f"{0.2 / curvature:.2g} is a safe start",
        )

"""The localized posterior: its centre w*, and how strongly it is held there."""

from __future__ import annotations

import numbers
import sys
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from jostle.errors import InputError
from jostle.models.weights import WeightSelection


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """The localized, tempered posterior of the paper, up to its constant:

        p(w) ∝ exp(−nβ·L̄(w) − γ/2·‖w − w*‖² − λ/2·‖w‖²),   L̄ = mean loss over the sampling data.

    Args:
        n_beta: nβ, the effective number of samples; multiplies the *mean* loss. 0 leaves only the pull to w*.
        localization: γ, the precision of the Gaussian that holds the weights near w*. 0 gives the global BIF.
        weights: which weights move. ``"all"`` (every parameter that requires a gradient); a group such as
            ``"attention"``, ``"attention+mlp"`` or ``"layers.3-5.attention"`` (see `jostle.models.weights`); a glob
            over parameter names such as ``"layers.*.attention.*"``; a regular expression (``re.compile(...)`` or
            ``"re:..."``, searched); a sequence of these; or a callable ``(name, parameter) -> bool``. All other weights
            are neither copied nor perturbed.
        prior_precision: λ, the precision of an optional Gaussian prior centred at 0.

    Reference: Kreer et al., *Bayesian Influence Functions for Hessian-Free Data Attribution*, section 2.3.
    """

    n_beta: float
    localization: float
    weights: WeightSelection = "all"
    prior_precision: float = 0.0

    def __post_init__(self) -> None:
        for name in ("n_beta", "localization", "prior_precision"):
            value: float = getattr(self, name)
            if not (isinstance(value, numbers.Real) and 0 <= value <= sys.float_info.max):
                raise InputError(name, got=repr(value), expected="a finite number that is not negative")
        if self.n_beta == self.localization == self.prior_precision == 0:
            raise InputError(
                "posterior",
                got="n_beta = localization = prior_precision = 0",
                expected="at least one of them positive",
                fix="without any of them nothing holds the weights; raise localization",
            )

    def potential(self, center: Float[Tensor, " weight"]) -> Potential:
        """Return the potential U = −log p around a centre."""
        return Potential(self.n_beta, self.localization, self.prior_precision, center)


@dataclass(frozen=True)
class Potential:
    """U(w) = nβ·L̄(w) + γ/2·‖w − w*‖² + λ/2·‖w‖², known by its gradient."""

    n_beta: float
    localization: float
    prior_precision: float
    center: Float[Tensor, " weight"]

    def gradient(
        self, weights: Float[Tensor, "chain weight"], mean_loss_gradient: Float[Tensor, "chain weight"]
    ) -> Float[Tensor, "chain weight"]:
        """∇U(w) = nβ·ḡ + γ(w − w*) + λw, where ḡ is the gradient of a minibatch's mean loss."""
        gradient = self.n_beta * mean_loss_gradient + self.localization * (weights - self.center)
        return gradient + self.prior_precision * weights if self.prior_precision else gradient

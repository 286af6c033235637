"""The localized posterior: its centre w*, how strongly it is held there, and in which metric."""

from __future__ import annotations

import dataclasses
import numbers
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from jostle.data.datasets import fingerprint_tensors
from jostle.errors import InputError
from jostle.models.weights import MovingWeights, WeightSelection

Diagonal = Float[Tensor, " weight"] | Mapping[str, Tensor | float]
"""A positive number for each moving weight: in one vector, or by the names of parameters."""


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """The localized, tempered posterior of the paper, up to its constant:

        p(w) ∝ exp(−nβ·L̄(w) − γ/2·(w − w*)ᵀD(w − w*) − λ/2·‖w‖²),   L̄ = mean loss over the sampling data.

    D is the identity, unless a metric is given. Then samplers move in u = D^½(w − w*), where the pull is γ/2·‖u‖² and
    the gradient is D^−½·∇L̄: step sizes, their limits and every stated law are those of u. In w this is a rule
    preconditioned by D⁻¹.

    Args:
        n_beta: nβ, the effective number of samples; multiplies the *mean* loss. 0 leaves only the pull to w*.
        localization: γ, the precision of the Gaussian that holds the weights near w*. 0 gives the global BIF.
        weights: which weights move. ``"all"`` (every parameter that requires a gradient); a group such as
            ``"attention"``, ``"attention+mlp"`` or ``"layers.3-5.attention"`` (see `jostle.models.weights`); a glob
            over parameter names such as ``"layers.*.attention.*"``; a regular expression (``re.compile(...)`` or
            ``"re:..."``, searched); a sequence of these; or a callable ``(name, parameter) -> bool``. All other weights
            are neither copied nor perturbed.
        prior_precision: λ, the precision of an optional Gaussian prior centred at 0. Not beside a metric.
        metric: D, a positive number for each moving weight: one vector in the order of
            `jostle.models.weights.MovingWeights`, or a mapping from the name of every parameter that moves to a tensor
            of its shape, or to one number for all of it. Where it is infinite, a weight stays at w*. Sampling holds one
            more vector, D^−½, beside w*.
        linear_term: whether L̄ keeps its linear term at w*. ``False`` replaces it by L̄(w) − ∇L̄(w*)·(w − w*), so that
            a checkpoint that is no minimum of L̄ is one of the potential: ∇L̄(w*), taken once over all sampling data, is
            subtracted from the gradient of every step. Takes one pass over the data and one more vector.

    Example:
        A training run defines a posterior of its own, whose precision is nβ(H + D) where H is the curvature of L̄: γ is
        then nβ itself, D is in `jostle.Training.diagonals`, and nβ is a width. The checkpoint need not be a minimum::

            found = training.diagonals(MovingWeights(model, "all"))
            D = found.hold + 1 / found.reach
            Posterior(n_beta=n, localization=n, metric=D, linear_term=False)

    Reference: Kreer et al., *Bayesian Influence Functions for Hessian-Free Data Attribution*, section 2.3.
    """

    n_beta: float
    localization: float
    weights: WeightSelection = "all"
    prior_precision: float = 0.0
    metric: Diagonal | None = None
    linear_term: bool = True

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
        if not isinstance(self.linear_term, bool):
            raise InputError("linear_term", got=repr(self.linear_term), expected="True or False")
        if not isinstance(self.metric, Tensor | Mapping | None):
            expected = "a tensor, or a mapping from the names of parameters to tensors or numbers"
            raise InputError("metric", got=f"a {type(self.metric).__name__}", expected=expected)
        if self.metric is not None and self.prior_precision:
            # In the units of the metric a prior around 0 is not isotropic, which samplers rely on.
            raise InputError("prior_precision", got=f"{self.prior_precision:g} with a metric", expected="0")

    def potential(self, center: Float[Tensor, " weight"]) -> Potential:
        """Return the potential U = −log p around a centre; refuses what `in_units` takes out of it."""
        if self.metric is not None:
            raise InputError("posterior", got="one with a metric", expected="none here, where all weights count alike")
        if not self.linear_term:
            raise InputError("posterior", got="linear_term=False", expected="True here, where losses stay as they are")
        return Potential(self.n_beta, self.localization, self.prior_precision, center)

    def in_units(self) -> Posterior:
        """Return the posterior of u = D^½(w − w*), given gradients of what L̄ was replaced by: it has no metric."""
        return dataclasses.replace(self, metric=None, linear_term=True)

    def laid_out(self, moving: MovingWeights) -> Posterior:
        """Return the same posterior, its metric as one vector in the order of the moving weights."""
        return dataclasses.replace(self, metric=None if self.metric is None else _vector(self.metric, moving.whole))

    def unit(self, moving: MovingWeights) -> Float[Tensor, " weight"] | None:
        """Return D^−½, by which w − w* is divided to be u; None where there is no metric."""
        if self.metric is None:
            return None
        diagonal = _vector(self.metric, moving.whole)
        # What is infinite is made finite: its unit is then as good as 0, and can be divided by.
        unit = diagonal.clamp(max=torch.finfo(torch.float32).max).rsqrt().to(moving.dtype)
        bad = ~(torch.isfinite(unit) & (unit > 0))
        if bad.any():
            place = int(bad.nonzero()[0, 0])
            name = next(name for name, part in moving.whole.slices.items() if part.start <= place < part.stop)
            raise InputError(
                "metric",
                got=f"{diagonal[place].item():g} for a weight of {name!r}",
                expected="positive numbers, whose roots have an inverse",
            )
        return moving.keep(unit).to(moving.center.device)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain data; of the metric its hash, and of what runs may lack only what is set."""
        named = ("n_beta", "localization", "weights", "prior_precision")
        settings = {name: getattr(self, name) for name in named}
        settings |= {} if self.metric is None else {"metric": self._fingerprint}
        return settings | ({} if self.linear_term else {"linear_term": False})

    @cached_property
    def _fingerprint(self) -> str:
        """A hash of the metric, which may take seconds."""
        assert self.metric is not None
        named = {"": self.metric} if isinstance(self.metric, Tensor) else self.metric
        return fingerprint_tensors({name: torch.as_tensor(value) for name, value in named.items()})


def _vector(metric: Diagonal, moving: MovingWeights) -> Float[Tensor, " weight"]:
    """D as one vector, float32 or wider, in main memory: chains have no use for it, only for its root."""
    if isinstance(metric, Tensor):
        if metric.shape != (moving.total,):
            raise InputError(
                "metric",
                got=f"shape {tuple(metric.shape)}",
                expected=f"({moving.total},), a number for each of the {moving.total:,} weights that move",
            )
        return metric.detach().to("cpu", torch.promote_types(torch.float32, metric.dtype))
    missing = [name for name in moving.names if name not in metric]
    if missing:
        raise InputError(
            "metric",
            got=f"nothing for {missing[0]!r}" + (f" and {len(missing) - 1} others" if len(missing) > 1 else ""),
            expected="a tensor or a number for every parameter that moves",
        )
    parts = []
    for name, shape in zip(moving.names, moving.shapes, strict=True):
        value, expected = metric[name], f"a tensor of shape {tuple(shape)}, or one number"
        if not isinstance(value, Tensor | numbers.Real):
            raise InputError("metric", got=f"a {type(value).__name__} for {name!r}", expected=expected)
        value = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=moving.dtype)
        if value.shape not in ((), shape):
            raise InputError("metric", got=f"shape {tuple(value.shape)} for {name!r}", expected=expected)
        wide = value.to("cpu", torch.promote_types(moving.dtype, value.dtype))
        parts.append(wide.expand(shape).reshape(-1))
    return torch.cat(parts)


@dataclass(frozen=True)
class Potential:
    """U(w) = nβ·L̄(w) + γ/2·‖w − w*‖² + λ/2·‖w‖², known by its gradient.

    Where the posterior has a metric it is that of u: `weights` are u, around a centre at 0.
    """

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

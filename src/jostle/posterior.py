"""The localized posterior: its centre w*, how strongly it is held there, and which weights move."""

from __future__ import annotations

import fnmatch
import itertools
import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from jostle.errors import InputError

WeightSelection = str | re.Pattern[str] | Sequence[str | re.Pattern[str]] | Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """The localized, tempered posterior of the paper, up to its constant:

        p(w) ∝ exp(−nβ·L̄(w) − γ/2·‖w − w*‖² − λ/2·‖w‖²),   L̄ = mean loss over the sampling data.

    Args:
        n_beta: nβ, the effective number of samples; multiplies the *mean* loss. 0 leaves only the pull to w*.
        localization: γ, the precision of the Gaussian that holds the weights near w*. 0 gives the global BIF.
        weights: which weights move. ``"all"`` (every parameter that requires a gradient); a glob over parameter
            names such as ``"layers.*.attention.*"``; a regular expression (``re.compile(...)`` or ``"re:..."``,
            searched); a sequence of these; or a callable ``(name, parameter) -> bool``. All other weights are
            neither copied nor perturbed.
        prior_precision: λ, the precision of an optional Gaussian prior centred at 0.

    Reference: Kreer et al., *Bayesian Influence Functions for Hessian-Free Data Attribution*, section 2.3.
    """

    n_beta: float
    localization: float
    weights: WeightSelection = "all"
    prior_precision: float = 0.0

    def __post_init__(self) -> None:
        for name in ("n_beta", "localization", "prior_precision"):
            value = getattr(self, name)
            if not (isinstance(value, numbers.Real) and 0 <= float(value) < math.inf):
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


class MovingWeights:
    """The weights that move, as slices of one flat vector; chain state has shape ``(chain, weight)``.

    The state is float32 or wider, whatever the model computes in: in bfloat16 one step's drift is below half a
    unit in the last place of a typical weight and would be rounded away while the noise stayed.
    """

    def __init__(self, model: nn.Module, selection: WeightSelection) -> None:
        parameters = _select(model, selection)
        self.names = tuple(parameters)
        self.shapes = tuple(parameter.shape for parameter in parameters.values())
        self.sizes = tuple(parameter.numel() for parameter in parameters.values())
        self.total = sum(self.sizes)
        ends = list(itertools.accumulate(self.sizes))
        self.slices = {
            name: slice(end - size, end) for name, size, end in zip(self.names, self.sizes, ends, strict=True)
        }
        self._dtypes = tuple(parameter.dtype for parameter in parameters.values())
        self.dtype = torch.float32
        for dtype in self._dtypes:
            self.dtype = torch.promote_types(self.dtype, dtype)
        self.center = self.flatten(parameters).detach()
        if not torch.isfinite(self.center).all():
            bad = next(name for name, value in parameters.items() if not torch.isfinite(value).all())
            raise InputError(
                f"weight {bad!r}",
                got="NaN or infinite values",
                expected="finite weights",
                fix="load a checkpoint from before training diverged",
            )

    def flatten(self, tensors: Mapping[str, Tensor]) -> Float[Tensor, " weight"]:
        """Lay named tensors end to end."""
        return torch.cat([tensors[name].reshape(-1).to(self.dtype) for name in self.names])

    def unflatten(self, flat: Float[Tensor, " weight"]) -> dict[str, Tensor]:
        """Name the slices, in the shape and type in which the model computes with them."""
        parts = flat.split(self.sizes)
        return {
            name: part.view(shape).to(dtype)
            for name, part, shape, dtype in zip(self.names, parts, self.shapes, self._dtypes, strict=True)
        }


def _select(model: nn.Module, selection: WeightSelection) -> dict[str, nn.Parameter]:
    """The chosen parameters under their first name: a tied weight has several names, and moves once."""
    aliases: dict[int, list[str]] = {}
    parameters: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.is_floating_point():
            continue
        aliases.setdefault(id(parameter), []).append(name)
        if aliases[id(parameter)] == [name]:
            parameters[name] = parameter
    matches = _matcher(selection)
    chosen = {
        name: parameter
        for name, parameter in parameters.items()
        if any(matches(alias, parameter) for alias in aliases[id(parameter)])
    }
    if not chosen:
        some = ", ".join(list(parameters)[:4]) or "none at all"
        frozen = selection == "all" and bool(parameters)
        raise InputError(
            "weights",
            got=f"{selection!r}, which matches no weight",
            expected=f"a match among the model's {len(parameters)} floating-point weights ({some}, ...)",
            fix="every weight is frozen: pass weights='*' to move them all the same"
            if frozen
            else "list(dict(model.named_parameters())) shows every name",
        )
    return chosen


def _matcher(selection: WeightSelection) -> Callable[[str, nn.Parameter], bool]:
    if callable(selection):
        return selection
    if selection == "all":
        return lambda name, parameter: parameter.requires_grad
    if isinstance(selection, re.Pattern):
        return lambda name, parameter: selection.search(name) is not None
    if isinstance(selection, str):
        if selection.startswith("re:"):
            return _matcher(_compiled(selection.removeprefix("re:")))
        return lambda name, parameter: fnmatch.fnmatchcase(name, selection)
    matchers = [_matcher(part) for part in selection]
    return lambda name, parameter: any(matches(name, parameter) for matches in matchers)


def _compiled(expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as error:
        raise InputError(
            "weights", got=f"{expression!r} ({error})", expected="a regular expression after 're:'"
        ) from error

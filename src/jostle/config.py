"""The typed description of a run; what ``config.yaml`` holds."""

from __future__ import annotations

import dataclasses
import json
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from jostle.data.datasets import fingerprint_text
from jostle.errors import InputError
from jostle.posterior import Posterior
from jostle.samplers import Sampler
from jostle.samplers.protocol import require_positive

Keep = Literal["traces", "covariance"]
Precision = Literal["model", "bfloat16", "float8", "float8-emulated"]
Criterion = Literal["ess", "error"]
"""What a run may be told to go on until: effective draws, or the standard error of the strongest normalized scores."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides a run's numbers, besides the weights and the data.

    Step 0 is w*; draw t of every chain is observed at step ``burn_in + t * thin``.
    """

    posterior: Posterior
    sampler: Sampler
    loss: str
    potential_loss: str
    observables: tuple[str, ...]
    chains: int
    draws: int
    burn_in: int
    thin: int
    batch_size: int
    keep: Keep
    seed: int
    precision: Precision = "model"
    control_variates: bool = False
    antithetic: bool = False
    until: Mapping[Criterion, float] | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        for name in ("chains", "draws", "thin", "batch_size"):
            require_whole(name, getattr(self, name), at_least=1)
        require_whole("burn_in", self.burn_in, at_least=0)
        require_whole("seed", self.seed, at_least=0)
        for name in self.observables:
            if not name or "/" in name:
                raise InputError("observables", got=f"the name {name!r}", expected="names without a slash")
        if self.observables and self.keep == "covariance":
            raise InputError(
                "observables", got="keep='covariance', which keeps nothing but train × query", expected="keep='traces'"
            )
        if self.chains * self.draws < 2:
            raise InputError("draws", got="one draw in all", expected="at least two, for a covariance")
        if self.keep not in ("traces", "covariance"):
            raise InputError("keep", got=repr(self.keep), expected="'traces' or 'covariance'")
        for name in ("control_variates", "antithetic"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(name, got=repr(getattr(self, name)), expected="True or False")
        if self.antithetic and self.chains % 2:
            raise InputError("chains", got=f"{self.chains} with antithetic=True", expected="an even number: pairs")
        if self.antithetic and self.keep == "covariance":
            # Of a chain that fails, its mirror image is left out with it; sums have it already.
            raise InputError("keep", got="'covariance' with antithetic=True", expected="'traces', for pairs of chains")
        self._check_stopping()
        if self.precision not in get_args(Precision):
            expected = ", ".join(repr(name) for name in get_args(Precision))
            raise InputError("precision", got=repr(self.precision), expected=f"one of {expected}")

    def _check_stopping(self) -> None:
        if self.until is not None and not isinstance(self.until, Mapping):
            raise InputError("until", got=repr(self.until), expected='{"ess": 400}, for one')
        for name, value in (self.until or {}).items():
            if name not in get_args(Criterion):
                raise InputError("until", got=repr(name), expected=" or ".join(get_args(Criterion)))
            require_positive(f"until {name}", value)
        if self.minutes is not None:
            require_positive("minutes", self.minutes)
        if self.stops_early and self.keep == "covariance":  # sums of chains that may go on are not added up
            name = "until" if self.until else "minutes"
            raise InputError(name, got="keep='covariance'", expected="keep='traces', to stop early")

    @property
    def stops_early(self) -> bool:
        """Whether ``draws`` is only the most there may be."""
        return bool(self.until) or self.minutes is not None

    @property
    def steps(self) -> range:
        """The steps at which a chain is observed."""
        return range(self.burn_in, self.burn_in + self.draws * self.thin, self.thin)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain data."""
        posterior = _plain(self.posterior.to_dict())
        posterior["weights"] = _describe_selection(self.posterior.weights)
        sampler = {"name": type(self.sampler).__name__, **_fields(self.sampler)}
        plain = {"posterior": posterior, "sampler": sampler, "observables": list(self.observables)}
        return _fields(self) | plain | {"until": dict(self.until) if self.until else None}

    def fingerprint(self) -> str:
        """Return a hash of the configuration."""
        return fingerprint_settings(self.to_dict())


def fingerprint_settings(settings: dict[str, Any]) -> str:
    """Return a hash of a configuration as plain data, which is what ``config.yaml`` holds."""
    return fingerprint_text(json.dumps(settings, sort_keys=True, default=str))


def fingerprint_names(names: Iterable[str]) -> str:
    """Return a hash of which parameters move."""
    return fingerprint_text("\n".join(names))


def _fields(settings: Any) -> dict[str, Any]:
    """The settings of an object, with NumPy's numbers as Python's."""
    return _plain(vars(settings))


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """NumPy's numbers as Python's, which YAML can write."""
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in fields.items()}


def describe(function: Any) -> str:
    """Name a loss or a callable: its settings where it shows them, else where it was defined."""
    if dataclasses.is_dataclass(function):
        return repr(function)
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"


def _describe_selection(selection: Any) -> Any:
    if isinstance(selection, str):
        return selection
    if hasattr(selection, "pattern"):
        return f"re:{selection.pattern}"
    if callable(selection):
        return describe(selection)
    return [_describe_selection(part) for part in selection]


def require_whole(name: str, value: Any, *, at_least: int) -> None:
    """Refuse what is not a whole number, or too small."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < at_least:
        expected = "a positive whole number" if at_least else "a whole number that is not negative"
        raise InputError(name, got=repr(value), expected=expected)

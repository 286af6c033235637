"""What `attribute` was given, checked and evaluated at w* before anything is written."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jostle.chains.chain import Dynamics
from jostle.chains.execution import Execution
from jostle.chains.observing import Observer
from jostle.chains.spreading import OnEveryThread, Spread, can_spread, is_pure
from jostle.config import Config, Precision
from jostle.data.datasets import Collate, Data
from jostle.errors import InputError
from jostle.losses import FACTORIES, Loss
from jostle.models.checks import check_gradient, check_neighbours, side_by_side_failure, vmap_differs
from jostle.models.float8 import Float8, require_float8
from jostle.models.functional import Observable, SideBySide
from jostle.models.in_place import InPlace
from jostle.models.weights import MovingWeights
from jostle.posterior import Posterior
from jostle.ranks import Crew, Ranks
from jostle.samplers import SGLD, Sampler

log = logging.getLogger("jostle")

SIDE_BY_SIDE_WEIGHTS = 32_000_000
"""Chains run side by side, by default, while their moving weights together are fewer than this."""

SIDE_BY_SIDE_SCORES = 256_000_000
"""The same for the scores that ``keep="covariance"`` holds for every chain."""

CHECKED_EXAMPLES = 16_384
"""Of the sampling data, at most this many examples are evaluated at w*, evenly spaced."""


@dataclass(frozen=True, kw_only=True)
class Functions:
    """What is evaluated: the loss that is recorded, the one that drives the chain where it is another, and every φ."""

    loss: Loss
    potential_loss: Loss | None
    observables: Mapping[str, Observable]

    @property
    def driving_loss(self) -> Loss:
        """What drives the chain."""
        return self.potential_loss or self.loss


@dataclass(frozen=True, kw_only=True)
class DataSets:
    """The observed sets, and what minibatches are drawn from, which may be one of them."""

    observed: Mapping[str, Data]
    drawn_from: Data

    @classmethod
    def of(
        cls, train: Any, query: Any, sampling_data: Any, *, collate: Collate | None, device: torch.device
    ) -> DataSets:
        """Wrap what was passed."""
        given = {"train": train} | ({} if query is None else {"query": query})
        observed = {name: Data(data, name, collate=collate, device=device) for name, data in given.items()}
        if sampling_data is None:
            return cls(observed=observed, drawn_from=observed["train"])
        return cls(observed=observed, drawn_from=Data(sampling_data, "sampling_data", collate=collate, device=device))

    @property
    def drawn_from_others(self) -> bool:
        """Whether minibatches are of other data than the training examples."""
        return self.drawn_from is not self.observed["train"]

    def fingerprints(self) -> dict[str, str]:
        """Return a hash of each."""
        hashes = {name: data.fingerprint() for name, data in self.observed.items()}
        return hashes | {"sampling_data": self.drawn_from.fingerprint()}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything that sampling needs.

    Attributes:
        observers: of every observed set.
        at_center: what every function is at w*.
        alone: chains one after another, in place.
        together: chains side by side, where they can run so.
        spread: the same over several threads of a CPU.
        at_once: how many of them.
    """

    observers: Mapping[str, Observer]
    at_center: Mapping[str, Tensor]
    alone: Dynamics
    together: Dynamics | None
    spread: Spread | None
    at_once: int

    @property
    def batch_sizes(self) -> dict[str, int]:
        """Examples in one forward pass of an observation, by set."""
        return {name: observer.batch_size for name, observer in self.observers.items()}

    def control(self, center_gradient: Tensor) -> None:
        """Give the gradient at w* to all whose steps use it."""
        for dynamics in (self.alone, self.together, self.spread):
            if dynamics is not None:
                dynamics.center_gradient = center_gradient

    def way(self, execution: Execution) -> Dynamics:
        """Return how the chains move that run in this way."""
        if self.spread is None and execution.threads > 1:
            log.warning(
                "chains were spread over %d threads and are not now: their last bits may differ", execution.threads
            )
        if self.together is None or execution.chains_at_once == 1:
            return self.alone
        return self.spread if self.spread is not None and execution.threads > 1 else self.together


def functional(model: nn.Module, moving: MovingWeights, crew: Crew, precision: Precision) -> InPlace:
    """Return the model on this rank, or this rank's part of it.

    With float8, a float32 model computes the rest in bfloat16; not on a CPU, where that is a hundred times as slow, and
    emulation rounds linear layers alone.
    """
    if crew.count == 1:
        wide = any(value.dtype == torch.float32 and value.device.type != "cpu" for value in model.parameters())
        bfloat16 = precision == "bfloat16" or (precision.startswith("float8") and wide)
        return InPlace(model, moving, bfloat16=bfloat16, float8=_float8(model, precision))
    from jostle.models.sharding import Sharded  # which takes a second to import

    return Sharded(model, moving, crew, bfloat16=precision == "bfloat16")


def _float8(model: nn.Module, precision: Precision) -> Float8 | None:
    """What observes in float8, where that was asked for."""
    if not precision.startswith("float8"):
        return None
    if precision == "float8":
        require_float8(next(model.parameters()).device)
    return Float8(model, emulated=precision == "float8-emulated")


def prepare(
    in_place: InPlace,
    config: Config,
    functions: Functions,
    data: DataSets,
    *,
    batch_sizes: Mapping[str, int | None],
    chains_at_once: int | None,
    most_at_once: int,
    threads: int,
) -> Prepared:
    """Evaluate everything at w*, refuse what cannot be sampled, and see which ways there are of running chains.

    Args:
        in_place: the model.
        config: the run's configuration.
        functions: what is evaluated.
        data: what it is evaluated on.
        batch_sizes: examples in one forward pass of an observation, by set; None chooses.
        chains_at_once: how many chains are to run side by side; None chooses.
        most_at_once: how many may, at most.
        threads: over how many threads of a CPU these may be spread.
    """
    loss, driving_loss = functions.loss, functions.driving_loss
    drives_otherwise = functions.potential_loss is not None or data.drawn_from_others
    for observed in data.observed.values():
        check_neighbours(in_place, loss, observed)
    if drives_otherwise:
        check_neighbours(in_place, driving_loss, data.drawn_from)
    at_center = {
        f"observable {name}": _check_observable(name, phi, in_place) for name, phi in functions.observables.items()
    }
    observers = {
        name: Observer(in_place, loss, observed, batch_sizes.get(name)) for name, observed in data.observed.items()
    }
    at_center |= {f"loss on {name}": observer.center_losses for name, observer in observers.items()}
    if drives_otherwise:
        size = observers["train"].batch_size
        driving = Observer(in_place, driving_loss, data.drawn_from, size, most=CHECKED_EXAMPLES)
        at_center["potential loss"] = driving.center_losses
    if config.posterior.n_beta:
        check_gradient(in_place, driving_loss, data.drawn_from)

    parts: dict[str, Any] = {
        "sampling_data": data.drawn_from,
        "potential_loss": driving_loss,
        "observers": observers,
        "observables": functions.observables,
        "unit": config.posterior.unit(in_place.moving),
    }
    alone, together, spread = Dynamics(in_place, config, **parts), None, None
    at_once = min(most_at_once, _most_at_once(config, in_place, observers, chains_at_once))
    if at_once > 1:
        reason = vmap_differs(in_place.model, in_place.moving.names) if config.posterior.n_beta else None
        reason = reason or side_by_side_failure(
            in_place,
            observed=[(loss, observed) for observed in data.observed.values()],
            driven=(driving_loss, data.drawn_from),
            observables=list(functions.observables.values()),
        )
        if reason is None:
            model, moving, on_cpu = in_place.model, in_place.moving, in_place.device.type == "cpu"
            functions_of_it = (loss, driving_loss), functions.observables
            how = {"bfloat16": in_place.bfloat16, "captured": on_cpu and is_pure(model, *functions_of_it)}
            together = Dynamics(SideBySide(model, moving, **how), config, **parts)
            # What is read from somewhere else may not bear being read by several threads.
            in_memory = all(part.on_device for part in (data.drawn_from, *data.observed.values()))
            safe = in_memory and can_spread(model, *functions_of_it, config.sampler)
            if threads > 1 and safe and on_cpu:
                spread = Spread(OnEveryThread(model, moving, **how), config, threads=threads, **parts)
        elif chains_at_once is not None:
            raise InputError("chains_at_once", got=chains_at_once, expected=f"1 for this model ({reason})")
        else:
            log.info("chains run one after another (%s)", reason)
    log.info("%s weights of %d parameters move", f"{in_place.moving.total:,}", len(in_place.moving.names))
    return Prepared(
        observers=observers, at_center=at_center, alone=alone, together=together, spread=spread, at_once=at_once
    )


def check_kinds(
    model: Any, loss: Any, potential_loss: Any, posterior: Posterior | None, sampler: Sampler | None
) -> None:
    """Refuse what is not the kind of thing it should be, before it fails somewhere inside."""
    if not isinstance(model, nn.Module):
        raise InputError("model", got=f"a {type(model).__name__}", expected="an instance of torch.nn.Module, at w*")
    # Both would take the mean of the gradients of different chains, or none at all, without a word.
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise InputError(
            "model", got="one in DistributedDataParallel", expected="the model in it", fix="pass model.module"
        )
    sharding: Any = sys.modules.get("torch.distributed.tensor")  # a second to import, and loaded where it is used
    if sharding is not None and any(isinstance(parameter, sharding.DTensor) for parameter in model.parameters()):
        raise InputError(
            "model", got="sharded weights (DTensor)", expected="a model that is whole on every rank", fix="pass shards="
        )
    for name, function in (("loss", loss), ("potential_loss", potential_loss)):
        if function in FACTORIES:
            raise InputError(name, got=f"losses.{function.__name__} itself", expected="what it returns", fix="call it")
        if function is not None and (not callable(function) or isinstance(function, nn.Module)):
            raise InputError(
                name,
                got=f"a {type(function).__name__}",
                expected="a function f(model, batch) that returns one loss a sample",
                fix="jostle.losses has classification(), regression() and next_token()",
            )
    if posterior is not None and not isinstance(posterior, Posterior):
        raise InputError("posterior", got=f"a {type(posterior).__name__}", expected="a jostle.Posterior")
    if isinstance(sampler, type) or not all(
        hasattr(sampler or SGLD, name) for name in ("init", "step", "check", "remarks")
    ):
        got = f"the class {sampler.__name__}" if isinstance(sampler, type) else f"a {type(sampler).__name__}"
        raise InputError("sampler", got=got, expected="an update rule such as jostle.SGLD(step_size=1e-5)")


def check_sharded(config: Config, *, chains_at_once: int | None, compile: bool | None) -> None:
    """Refuse what a model that is spread over ranks cannot do."""
    if getattr(config.sampler, "whole_chain", False):
        rule = type(config.sampler).__name__
        raise InputError("shards", got=f"{rule}, which needs all weights at once", expected="another sampler")
    if chains_at_once not in (None, 1):
        raise InputError("chains_at_once", got=f"{chains_at_once} with shards", expected="1")
    if compile:
        raise InputError("compile", got="True with shards", expected="False")
    if config.precision.startswith("float8"):
        raise InputError("precision", got=f"{config.precision!r} with shards", expected="'bfloat16'")


def check_examples(examples: Any, sets: Mapping[str, Data]) -> None:
    """Refuse examples to show that are not those of the data."""
    if not isinstance(examples, Mapping):
        raise InputError("examples", got=f"a {type(examples).__name__}", expected='{"train": [...], "query": [...]}')
    for name, shown in examples.items():
        if name not in sets or len(shown) != len(sets[name]):
            expected = " and ".join(f"{len(data)} of {key!r}" for key, data in sets.items())
            raise InputError("examples", got=f"{len(shown)} of {name!r}", expected=expected)


def check_ranks(
    ranks: Ranks, fingerprints: Mapping[str, str], at_center: Mapping[str, Tensor], tolerance: float
) -> None:
    """Refuse ranks that have other weights, data or functions than rank 0, before anything is written."""
    norms = {name: float(value.norm()) for name, value in at_center.items()}
    for rank, (theirs, their_norms) in enumerate(ranks.gather((dict(fingerprints), norms))):
        for name, ours in fingerprints.items():
            if theirs[name] != ours:
                raise InputError(
                    name, got=f"fingerprint {theirs[name]} on rank {rank}", expected=f"{ours}, as on rank 0"
                )
        for name, norm in norms.items():
            if abs(their_norms[name] - norm) > max(1e-3, tolerance) * norm + 1e-6:
                raise InputError(
                    name, got=f"norm {their_norms[name]:.6g} at w* on rank {rank}", expected=f"{norm:.6g}, as on rank 0"
                )


def _most_at_once(config: Config, in_place: InPlace, observers: Mapping[str, Observer], wanted: int | None) -> int:
    """How many chains may move side by side, if they can: as asked, or as many as are small enough."""
    if wanted is not None:
        return min(config.chains, wanted)
    most = min(config.chains, max(1, SIDE_BY_SIDE_WEIGHTS // in_place.moving.total))
    if config.keep == "covariance":  # every open chain has a matrix of its own
        entries = observers["train"].columns.samples * observers["query"].columns.samples
        most = min(most, max(1, SIDE_BY_SIDE_SCORES // entries))
    return most


def _check_observable(name: str, observable: Observable, in_place: InPlace) -> Tensor:
    def called(model: nn.Module) -> Tensor:
        given = observable(model)
        if not isinstance(given, Tensor):
            expected = "a tensor of finite floating-point values of shape (p,)"
            raise InputError(f"observable {name!r}", got=f"a {type(given).__name__}", expected=expected)
        return given

    value = in_place.evaluate(called, in_place.moving.center[None])[0]
    if value.ndim != 1 or not value.is_floating_point() or not torch.isfinite(value).all():
        found = "values that are not finite at w*" if value.is_floating_point() else f"values of {value.dtype}"
        raise InputError(
            f"observable {name!r}",
            got=f"shape {tuple(value.shape)}" if value.ndim != 1 else found,
            expected="finite floating-point values of shape (p,)",
        )
    return value

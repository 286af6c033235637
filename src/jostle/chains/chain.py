"""Chains: where they stand, how they move, and what is seen of them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from jostle.chains import randomness
from jostle.chains.observing import Known, Observer
from jostle.chains.thermometer import Thermometer, directions_of
from jostle.config import Config
from jostle.data.datasets import Data
from jostle.losses import OURS, Loss, at_least_float32
from jostle.models.functional import FunctionalModel, Observable
from jostle.models.in_place import InPlace
from jostle.samplers import Statistics

log = logging.getLogger("jostle")

WORTH_SHARING = 0.02
"""Of all that goes through the model for a draw, how large a part may go through it twice."""


@dataclass
class Group:
    """Chains that are at the same step, moved together."""

    chains: list[int]
    step: int
    weights: Float[Tensor, "chain weight"]
    statistics: Statistics
    ahead: Float[Tensor, "chain weight"] | None = None
    """The gradient of the next step, where it is known from the draw before it."""

    def select(self, keep: list[int]) -> None:
        """Keep only these rows."""
        self.chains = [self.chains[row] for row in keep]
        self.weights = self.weights[keep]
        self.statistics = {name: value[keep] for name, value in self.statistics.items()}
        self.ahead = None if self.ahead is None else self.ahead[keep]


class Walk(Protocol):
    """How chains get from draw to draw, and what is seen there."""

    config: Config
    model: FunctionalModel

    def start(self, chains: list[int]) -> Group:
        """Put chains at step 0."""
        ...

    def advance(self, group: Group, most: int = 1) -> None:
        """Move a group by a step, or by up to so many where stopping in between would cost time."""
        ...

    def observe(self, group: Group) -> dict[str, Float[Tensor, "chain column"]]:
        """Return what is recorded of a draw."""
        ...


class Dynamics:
    """How chains move and what is seen of them.

    Args:
        unit: that of the posterior's metric, where others have it already.

    Attributes:
        keeps_weights: whether the weights of every draw are recorded, too.
        thermometer: reads the temperature at every draw, where there is one.
        shares_passes: whether losses that a gradient's pass has found are not observed again: a draw's losses, and the
            gradient of the step that follows, are taken at the same weights.
        center_gradient: the gradient at w* of the mean loss over all sampling data (see `full_gradient`), where
            `needs_center_gradient`.
    """

    def __init__(
        self,
        model: FunctionalModel,
        config: Config,
        *,
        sampling_data: Data,
        potential_loss: Loss,
        observers: Mapping[str, Observer],
        observables: Mapping[str, Observable],
        unit: Float[Tensor, " weight"] | None = None,
    ) -> None:
        self.model, self.config = model, config
        self._sampling_data, self._potential_loss = sampling_data, potential_loss
        self._observers, self._observables = observers, observables
        self._center = model.moving.center
        self._unit = config.posterior.unit(model.moving) if unit is None else unit
        self._posterior = config.posterior.in_units()
        self.center_gradient: Float[Tensor, " weight"] | None = None
        self.keeps_weights = False
        self.thermometer: Thermometer | None = None
        self._move: Callable[..., Statistics] = self._step
        self._compiled = False
        self._pieces = 1
        self.shares_passes = False
        sets = (name for name, seen in observers.items() if seen.observes(sampling_data, potential_loss))
        self._shared_set = next(sets, None)
        config.sampler.check(self._posterior.potential(self._center), burn_in=config.burn_in)

    def compile_step(self, compiled: bool = True) -> None:
        """Make the step one pass over memory; without it, each of its operations is one."""
        self._compiled = compiled
        self._move = torch.compile(self._step, dynamic=False) if compiled else self._step

    def start(self, chains: list[int]) -> Group:
        """Put chains at w*, at step 0."""
        moving = self.model.moving
        weights = torch.empty(len(chains), moving.total, dtype=moving.dtype, device=self.model.device)
        weights.copy_(moving.center)
        at = weights if self._unit is None else _nowhere(weights)
        return Group(chains, 0, weights, self.config.sampler.init(at))

    def gradient(self, group: Group) -> Float[Tensor, "chain weight"]:
        """Return the gradient of each chain's mean loss on the minibatch B of its next step.

        With control variates it is ∇L̄(w; B) − ∇L̄(w*; B) + ∇L̄(w*): the same on average, and without what of the
        minibatch's noise is there at w* already. Without the linear term of L̄, both have ∇L̄(w*) subtracted.

        Reference: Baker et al., *Control variates for stochastic gradient MCMC*, 2019.
        """
        config = self.config
        if not config.posterior.n_beta:
            return torch.zeros_like(group.weights)
        batches = self._minibatches(group)
        gradient = self._mean_loss_gradient(group.weights, batches)
        if not self._controlled:
            return self._without_linear_term(gradient)
        # A tensor of its own before the next call, which may write its gradient over this one.
        if config.posterior.linear_term:
            assert self.center_gradient is not None
            gradient = gradient + self.center_gradient
        else:
            gradient = gradient.clone()
        return gradient - self._mean_loss_gradient(self._center.repeat(len(group.chains), 1), batches)

    @property
    def _controlled(self) -> bool:
        """Whether minibatch gradients have control variates, which those of the whole data do not need."""
        return self.config.control_variates and self.config.batch_size < len(self._sampling_data)

    @property
    def needs_center_gradient(self) -> bool:
        """Whether steps need ∇L̄(w*): control variates add it, unless the linear term, which subtracts it, is gone."""
        posterior = self.config.posterior
        return bool(posterior.n_beta) and self._controlled == posterior.linear_term

    def _without_linear_term(self, gradient: Float[Tensor, "chain weight"]) -> Float[Tensor, "chain weight"]:
        """Subtract ∇L̄(w*), where the potential is without the linear term of L̄."""
        if self.config.posterior.linear_term:
            return gradient
        assert self.center_gradient is not None
        return gradient - self.center_gradient

    def _minibatches(self, group: Group) -> list[np.ndarray]:
        """The examples of each chain's next step."""
        config, sources = self.config, self._sources(group.chains)
        n = len(self._sampling_data)
        return randomness.minibatches(config.seed, sources, group.step, size=config.batch_size, of=n)

    @property
    def can_share_passes(self) -> bool:
        """Whether the losses of a gradient's pass are those of an observation (`shares_passes`), to rounding."""
        model, config = self.model, self.config
        alike = isinstance(model, InPlace) and model.observes_as_it_moves and self._shared_set is not None
        part = bool(config.posterior.n_beta) and config.batch_size < len(self._sampling_data)
        # Of others' losses it is not known that a token has its column however long the batch's other sequences are.
        return alike and part and not config.control_variates and type(self._potential_loss) in OURS

    def is_worth_sharing(self, thin: int) -> bool:
        """Whether, at so many steps a draw, going through its minibatch once instead of twice saves something."""
        model, size = self.model, self.config.batch_size
        if not self.can_share_passes:
            return False
        assert isinstance(model, InPlace)
        observed = sum(observer.columns.samples for observer in self._observers.values())
        # The gradient, and room to spare, since it is there while all else is observed.
        return size >= WORTH_SHARING * (observed + 3 * size * thin) and model.has_room_for_gradients(3)

    def beside_steps(self, observation: float, step: float) -> float:
        """Of the seconds of an observation, those that come to the steps': it may have the gradient of the next one."""
        return max(0.0, observation - step) if self.shares_passes else observation

    def _gradient_and_known(self, group: Group) -> tuple[Tensor | None, dict[str, Known]]:
        """The gradient of the next step, and the losses that come with it, where passes are shared."""
        model, data, name = self.model, self._sampling_data, self._shared_set
        if not self.shares_passes or self._pieces > 1 or len(group.chains) > 1:
            return None, {}
        assert isinstance(model, InPlace)
        assert name is not None
        (chosen,) = self._minibatches(group)
        try:
            gradient, losses = model.gradient_and_losses(self._potential_loss, group.weights[0], data, chosen)
            return self._without_linear_term(gradient[None]), {name: Known(chosen, losses)}
        except torch.OutOfMemoryError:
            self.shares_passes = False
        # Only here: an error that is being handled holds on to the memory of what failed.
        model.free_memory()
        log.warning("out of memory: minibatches go through the model twice a draw from here on")
        return None, {}

    def new_thermometer(self, most: int) -> Thermometer | None:
        """Return one with so many directions: gradients at draws of the localization alone. None where these are 0."""
        config, posterior, moving, unit = self.config, self._posterior, self.model.moving, self._unit
        spread = posterior.localization**-0.5 if posterior.localization else 0.0

        def gradient(number: int) -> Tensor:
            chain = -2 * (number + 1)  # nobody's, and first of its pair where chains are antithetic
            weights = torch.empty_like(self._center)[None]
            for part, noise in randomness.noise(config.seed, [chain], 0, moving, self.model.device):
                away = spread * noise if unit is None else spread * noise * unit[part]
                weights[:, part] = self._center[part] + away
            found = self.gradient(Group([chain], 0, weights, {}))[0]
            return found if unit is None else found * unit

        directions = directions_of(gradient, most, moving.whole.total, self.model.crew) if most else None
        self.model.let_go()
        if directions is None:
            return None
        compiled = self._compiled and self.model.device.type == "cuda"
        return Thermometer(directions, self._center, posterior, self.model.crew, unit=unit, compiled=compiled)

    def _mean_loss_gradient(self, weights: Tensor, batches: list[np.ndarray]) -> Float[Tensor, "chain weight"]:
        """The gradient on each chain's minibatch; in pieces of it once memory has run out."""
        while True:
            try:
                if self._pieces == 1:
                    return self.model.mean_loss_gradient(self._potential_loss, weights, self._sampling_data, batches)
                total: Tensor | None = None
                for pieces in zip(*(np.array_split(batch, self._pieces) for batch in batches), strict=True):
                    part = self.model.mean_loss_gradient(self._potential_loss, weights, self._sampling_data, [*pieces])
                    share = len(pieces[0]) / len(batches[0])
                    # A sum of its own, since the next call may write over this part; in its own precision, since a
                    # wider one has no room, either.
                    total = part * share if total is None else total.add_(part, alpha=share)
                assert total is not None
                return total
            except torch.OutOfMemoryError:
                if self._pieces >= len(batches[0]) or self.model.crew.count > 1:
                    raise
            # Only here: an error that is being handled holds on to the memory of what failed.
            self.model.free_memory()
            self._pieces = min(2 * self._pieces, len(batches[0]))
            log.warning("out of memory: minibatches are gone through in %d pieces from here on", self._pieces)

    def advance(self, group: Group, most: int = 1, *, noise_first: bool = False) -> None:
        """Move a group by one step; its noise, which knows nothing of where it stands, may come before its gradient."""
        config, sources = self.config, self._sources(group.chains)
        blocks: Iterable[tuple[slice, Tensor]] = randomness.noise(
            config.seed, sources, group.step, self.model.moving, self.model.device, self.model.with_room
        )
        if noise_first:
            blocks = list(blocks)
        gradient = self.gradient(group) if group.ahead is None else group.ahead
        group.ahead = None
        burning_in = group.step < config.burn_in
        before, after = group.statistics, {}
        mirrored = [row for row, chain in enumerate(group.chains) if chain != sources[row]]
        if getattr(config.sampler, "whole_chain", False):
            noises = [noise for _, noise in blocks]
            whole = noises[0] if len(noises) == 1 else torch.cat(noises, dim=1)
            blocks = [(slice(0, self.model.moving.total), whole)]
        for part, noise in blocks:
            if mirrored:
                noise[mirrored] *= -1
            block = {name: value[:, part] if self._per_weight(value) else value for name, value in before.items()}
            unit = None if self._unit is None else self._unit[part]
            moved = (group.weights[:, part], gradient[:, part], noise, block, self._center[part], unit, burning_in)
            # A step writes when all is computed, so that one that found no room can be made again.
            after = self.model.with_room(functools.partial(self._move, *moved))
        torch.autograd.graph.increment_version(group.weights)  # said aloud, since a compiled step may not
        # Statistics of single weights were moved in place, block by block; those of whole chains come from the last.
        group.statistics = {name: before[name] if self._per_weight(before[name]) else after[name] for name in before}
        group.step += 1

    def _sources(self, chains: list[int]) -> list[int]:
        """Whose random numbers each chain uses: its own or, in an antithetic pair, those of the first of the two."""
        return [chain - chain % 2 for chain in chains] if self.config.antithetic else chains

    def _per_weight(self, statistic: Tensor) -> bool:
        return statistic.ndim == 2 and statistic.shape[1] == self.model.moving.total

    def _step(
        self,
        weights: Tensor,
        gradient: Tensor,
        noise: Tensor,
        statistics: Statistics,
        center: Tensor,
        unit: Tensor | None,
        burning_in: bool,
    ) -> Statistics:
        """Move a block of weights, and what is known of each of them, in place: one pass over memory if compiled.

        This is where the metric is: the sampler moves u = (w − w*)/unit, where the gradient is unit·∇L̄.
        """
        center, gradient = center.to(weights.dtype), gradient.to(weights.dtype)
        at, around = weights, center
        if unit is not None:
            at, around, gradient = (weights - center) / unit, _nowhere(center), unit * gradient
        moved, after = self.config.sampler.step(
            at, gradient, noise, statistics, self._posterior.potential(around), burning_in=burning_in
        )
        weights.copy_(moved if unit is None else center + unit * moved)
        for name, value in statistics.items():
            if value.shape == weights.shape:
                value.copy_(after[name])
        return after

    def observe(
        self, group: Group, observers: Mapping[str, Observer] | None = None
    ) -> dict[str, Float[Tensor, "chain column"]]:
        """Return the losses of every observed set, every observable, and the temperature, at the group's weights.

        ``observers`` stand in for those of the run: a pilot looks at a few examples only.
        """
        gradient, known = self._gradient_and_known(group) if observers is None else (None, {})
        observers = self._observers if observers is None else observers
        seen = {name: observer(self.model, group.weights, known.get(name)) for name, observer in observers.items()}
        for name, observable in self._observables.items():
            # A copy: of a view of the weights, the next step would make its own.
            seen[f"observables/{name}"] = at_least_float32(self.model.evaluate(observable, group.weights)).clone()
        if self.thermometer is not None:
            # The last that is asked of the model before the next step: what it returns may be written over by another.
            gradient = self.gradient(group) if gradient is None else gradient
            seen["temperature"] = self.thermometer.read(group.weights, gradient)
        group.ahead = gradient if group.step != self.config.steps[-1] else None
        if self.keeps_weights:
            # A copy, whole however the model is spread: the next step is made in place.
            seen["weights"] = torch.stack([self.model.gather(flat).cpu() for flat in group.weights])
        return seen


def _nowhere(weights: Float[Tensor, "*some weight"]) -> Float[Tensor, "*some weight"]:
    """No distance from w*, of the shape of these; takes no memory."""
    return weights.new_zeros(()).expand_as(weights)


def full_gradient(model: FunctionalModel, loss: Loss, data: Data, batch_size: int) -> Float[Tensor, " weight"]:
    """Return the gradient at w* of the mean loss over all data, in batches, the same whenever it is asked for."""
    center, total = model.moving.center[None], torch.zeros_like(model.moving.center, dtype=torch.float64)
    for start in range(0, len(data), batch_size):
        chosen = np.arange(start, min(start + batch_size, len(data)))
        total += len(chosen) / len(data) * model.mean_loss_gradient(loss, center, data, [chosen])[0]
    return total.to(model.moving.dtype)

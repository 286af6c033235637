"""Chains of a group spread over threads: the way of small models on a CPU.

Operations on a hundred thousand numbers gain nothing from threads of their own, which mostly wait for each other. So
every thread takes some of the chains, and does all of their step and of their observation by itself.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from jostle.chains.chain import Dynamics, Group
from jostle.chains.observing import Observer
from jostle.losses import FACTORIES, Loss
from jostle.models.functional import SideBySide
from jostle.samplers import BAOAB, SGLD, Sampler

Result = TypeVar("Result")

BUILT_IN = frozenset(type(factory()) for factory in FACTORIES)
"""Losses that know of no model but the one they are given."""

OUR_SAMPLERS = (SGLD.__module__, BAOAB.__module__)
"""Rules that remember nothing, but for their statistics."""

AWAY_SECONDS = 0.2
"""How long threads may walk on by themselves, while nobody asks whether the run is to stop."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_pure(model: nn.Module, losses: Iterable[Loss], observables: Mapping[str, Any]) -> bool:
    """Return whether nothing is known to remember what a model computes, or to compute it from anything but tensors."""
    hooked = any(getattr(module, name, None) for module in model.modules() for name in HOOKS)
    return not observables and not hooked and all(type(loss) in BUILT_IN for loss in losses)


def can_spread(model: nn.Module, losses: Iterable[Loss], observables: Mapping[str, Any], sampler: Sampler) -> bool:
    """Return whether every thread may have a copy of the model.

    Functions are not copied with it: one of a user's may hold on to the model itself, which stays at w*, and the hooks
    of all copies write to the same place. Nor is a sampler: one of a user's may remember what it did.
    """
    return type(sampler).__module__ in OUR_SAMPLERS and is_pure(model, losses, observables)


class OnEveryThread(SideBySide):
    """A model of which every thread has a copy, since weights are substituted in it; its tensors are there once."""

    @property
    def model(self) -> nn.Module:
        """This thread's."""
        if not hasattr(self._own, "model"):
            shared = {id(value): value for value in (*self._given.parameters(), *self._given.buffers())}
            self._own.model = copy.deepcopy(self._given, shared)
        return self._own.model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._given, self._own = model, threading.local()
        self._own.model = model


class Spread(Dynamics):
    """Chains of a group moved and observed by several threads, each some of them.

    Attributes:
        threads: how many.
    """

    def __init__(self, model: OnEveryThread, *others: Any, threads: int, **named: Any) -> None:
        super().__init__(model, *others, **named)
        self.threads, self._step_seconds = threads, math.inf
        self._ready = threading.local()

    def advance(self, group: Group, most: int = 1, *, noise_first: bool = False) -> None:
        """Move a group by as many steps as are short together; the threads wait for each other after the last."""
        parts, advance = self._parts(group), super().advance
        steps = min(most, max(1, int(AWAY_SECONDS / self._step_seconds)))

        def move(number: int, part: Group) -> None:
            for _ in range(steps):
                # Gradients are much Python, which one thread at a time may run; noise is next to none.
                advance(part, noise_first=noise_first != (number % 2 == 1))

        started = time.perf_counter()
        self._each(move, parts)
        self._step_seconds = (time.perf_counter() - started) / steps
        # Weights, and statistics of single weights, were moved in place; those of whole chains may be new.
        group.statistics = {
            name: value if self._per_weight(value) else torch.cat([part.statistics[name] for part in parts])
            for name, value in group.statistics.items()
        }
        torch.autograd.graph.increment_version(group.weights)
        group.ahead = None
        group.step += steps

    def observe(
        self, group: Group, observers: Mapping[str, Observer] | None = None
    ) -> dict[str, Float[Tensor, "chain column"]]:
        """Return the losses of every observed set, every observable, and the temperature, at the group's weights."""
        observe, parts = super().observe, self._parts(group)
        seen = self._each(lambda _, part: observe(part, observers), parts)
        gradients = [part.ahead for part in parts if part.ahead is not None]
        group.ahead = torch.cat(gradients) if gradients else None
        return {name: torch.cat([values[name] for values in seen]) for name in seen[0]}

    def _parts(self, group: Group) -> list[Group]:
        """The group in parts that share its memory; `data`, as what one thread moves is not a change to another's."""
        count, threads = len(group.chains), min(self.threads, len(group.chains))
        bounds = [count * number // threads for number in range(threads + 1)]
        rows = [slice(first, last) for first, last in itertools.pairwise(bounds)]
        return [
            Group(
                group.chains[part],
                group.step,
                group.weights[part].data,
                {name: value[part].data for name, value in group.statistics.items()},
                None if group.ahead is None else group.ahead[part],
            )
            for part in rows
        ]

    def _each(self, work: Callable[[int, Group], Result], parts: list[Group]) -> list[Result]:
        pool = _pool(self.threads, os.getpid())
        running = [pool.submit(self._work, work, number, part) for number, part in enumerate(parts)]
        wait(running)  # where one fails, too: nobody goes on while others still move
        return [part.result() for part in running]

    def _work(self, work: Callable[[int, Group], Result], number: int, part: Group) -> Result:
        if not hasattr(self._ready, "here"):
            # What a loss finds out about a model, once for each, it cannot find out among chains side by side.
            with torch.no_grad():
                self._potential_loss(self.model.model, self._sampling_data.batch(range(1)))
            self._ready.here = True
        return work(number, part)


@cache
def _pool(count: int, process: int) -> ThreadPoolExecutor:
    """Threads whose operations do not start others; of this process, since a fork has none of its parent's."""
    before, all_here = torch.get_num_threads(), threading.Barrier(count)

    def begin() -> None:
        torch.get_num_threads()  # the first call in a thread would undo what was set before it
        torch.set_num_threads(1)
        all_here.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="jostle-chains", initializer=begin)
    try:
        list(pool.map(int, range(count)))
    finally:
        torch.set_num_threads(before)  # here, that is; each thread has its own number
    return pool

"""A training that can be repeated: what it began with, and what each of its steps saw."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from jostle.data.datasets import fingerprint_tensors
from jostle.errors import InputError
from jostle.losses import Batch
from jostle.models.functional import free_memory
from jostle.training.objective import Objective
from jostle.training.steps import KEPT, kind_of

log = logging.getLogger("jostle")

STATE_BYTES = 4 << 30
"""What states may take in the machine's memory where it does not say what is free."""


class Examples(Protocol):
    """What a training takes its batches from."""

    def __len__(self) -> int: ...

    def batch(self, indices: Int[np.ndarray, " sample"]) -> Batch:
        """Return the batch of these examples."""

    def fingerprint(self) -> str:
        """Return a hash of all of them."""
        ...


class Microbatch(NamedTuple):
    """What goes through the model at once, as a part of a step.

    Attributes:
        examples: their indices.
        share: by which their mean loss is multiplied: 1 where a step has one microbatch.
        counted: what the sum of their losses is divided by, where that is known of the whole step. It says what
            ``share`` says, and to the bit what a training that divides at once does.
        state: PyTorch's random state before it; None: what the microbatch before has left.
        digest: a hash of the batch; None: not known.
    """

    examples: Int[np.ndarray, " sample"]
    share: float = 1.0
    counted: int | None = None
    state: RandomState | None = None
    digest: str | None = None


@dataclass(frozen=True)
class Repeatable:
    """A training that can be repeated.

    Attributes:
        model: as it was before the first step, in the mode that it was trained in. It is left as it is.
        data: what it was trained on.
        objective: what a microbatch minimizes.
        optimizer: makes the optimizer of a model's parameters.
        steps: the microbatches of each step.
        schedule: makes the schedule of an optimizer, which is stepped with it.
        clip_norm: what all gradients together were cut to.
        state: PyTorch's random state before the first step, on the CPU and on each GPU; None: nothing is random.
        sums: of all trained weights after each step, where the training was recorded.
    """

    model: nn.Module
    data: Examples
    objective: Objective
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer]
    steps: Sequence[Sequence[Microbatch]]
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    clip_norm: float | None = None
    state: RandomState | None = None
    sums: Sequence[float] | None = None


RandomState = tuple[Tensor, list[Tensor]]


def random_state() -> RandomState:
    """Return PyTorch's random state, on the CPU and on each GPU."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def set_random_state(state: RandomState) -> None:
    """Put PyTorch's random state back."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


def are_equal(one: RandomState, other: RandomState) -> bool:
    """Return whether two random states are the same."""
    pairs = zip((one[0], *one[1]), (other[0], *other[1]), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


def digest_of(batch: Batch) -> str:
    """Return a hash of a batch."""
    return fingerprint_tensors({"batch": batch})


def sum_of(weights: Iterable[Tensor]) -> Float[Tensor, ""]:
    """Return the sum of all weights in float64: two trainings whose weights differ hardly ever agree in it."""
    return torch.stack([value.detach().sum(dtype=torch.float64) for value in weights]).sum()


@contextlib.contextmanager
def own_randomness() -> Iterator[None]:
    """Leave PyTorch's random state as it was."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=devices):
        yield


@dataclass
class Snapshot:
    """All that a step begins with.

    Attributes:
        weights: of each parameter that is trained.
        buffers: of the model.
        optimizer: its state, and that of its schedule.
        state: PyTorch's random state.
    """

    weights: list[Tensor]
    buffers: list[Tensor]
    optimizer: dict[str, Any]
    schedule: dict[str, Any] | None
    state: RandomState

    def on_host(self) -> Snapshot:
        """Return the same in the machine's memory."""

        def moved(value: Any) -> Any:
            return value.cpu() if isinstance(value, Tensor) else value

        return dataclasses.replace(
            self,
            weights=[value.cpu() for value in self.weights],
            buffers=[value.cpu() for value in self.buffers],
            optimizer=pytree.tree_map(moved, self.optimizer),
        )


class Repetition:
    """A training as it is repeated, one step after another.

    Args:
        training: what is repeated. Its model is copied.
        weights: by which each example's loss is multiplied; default: 1. Denominators stay.

    Attributes:
        model: as it stands.
        optimizer: as it stands.
        kind: of the optimizer.
        number: how many steps were taken.
        differs: the first step after which weights were others than recorded; None: there was none so far.
        draws: whether a step has drawn random numbers, as dropout does.
    """

    differs: int | None = None
    draws: bool = False

    def __init__(self, training: Repeatable, weights: Float[np.ndarray, " train"] | None = None) -> None:
        self.about, self.number = training, 0
        self.model = copy.deepcopy(training.model)
        self.parameters = [value for value in self.model.parameters() if value.requires_grad]
        if not self.parameters:
            raise InputError("model", got="no parameter that requires a gradient", expected="some that are trained")
        self.optimizer = training.optimizer(self.parameters)
        self.kind = kind_of(self.optimizer)
        self._schedule = None if training.schedule is None else training.schedule(self.optimizer)
        self.random = training.state or random_state()
        self._weights = None
        if weights is not None:
            self._weights = torch.as_tensor(weights, device=self.parameters[0].device)
        self._look_ahead()

    def __len__(self) -> int:
        return len(self.about.steps)

    def step(self) -> list[bool]:
        """Take the next step, as the training did; return which parameters it moved."""
        about = self.about
        with own_randomness():
            before = self.random
            set_random_state(before)
            self.optimizer.zero_grad()
            for part in about.steps[self.number]:
                if part.state is not None:
                    before = part.state
                    set_random_state(before)
                given = None if self._weights is None else self._weights[part.examples]
                value = about.objective(self.model, self._batch(part), given, part.counted)
                (value if part.share == 1 or part.counted is not None else part.share * value).backward()
            moved = [value.grad is not None for value in self.parameters]
            if about.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.parameters, about.clip_norm)
            self.optimizer.step()
            if self._schedule is not None:
                self._schedule.step()
            self.random = random_state()
            self.draws = self.draws or not are_equal(before, self.random)
        self._compare()
        self.number += 1
        self._look_ahead()
        return moved

    def _batch(self, part: Microbatch) -> Batch:
        """Return a microbatch's batch, if it is the one that was recorded."""
        batch = self.about.data.batch(part.examples)
        if part.digest is None or self._weights is not None:  # with weights, it is the same training once more
            return batch
        found = digest_of(batch)
        if found != part.digest:
            raise InputError(
                f"step {self.number}",
                got=f"a batch {found} of examples {np.array2string(part.examples, threshold=6)}",
                expected=f"the batch {part.digest} that the training saw",
                fix="make batches without chance: a collate function or a data set that draws gives others",
            )
        return batch

    def _compare(self) -> None:
        """Hold weights against those that were recorded."""
        if self.about.sums is None or self.differs is not None or self._weights is not None:
            return
        found, recorded = float(sum_of(self.parameters)), self.about.sums[self.number]
        if found != recorded and not (math.isnan(found) and math.isnan(recorded)):
            self.differs = self.number

    def _look_ahead(self) -> None:
        """Stand in the random state that the next step began with, where it is known."""
        if self.number < len(self) and (state := self.about.steps[self.number][0].state) is not None:
            self.random = state

    def go(self) -> None:
        """Take all steps that are left."""
        while self.number < len(self):
            self.step()

    def snapshot(self) -> Snapshot:
        """Return a copy of all that the next step begins with."""
        return Snapshot(
            [value.detach().clone() for value in self.parameters],
            [value.clone() for value in self.model.buffers()],
            copy.deepcopy(self.optimizer.state_dict()),
            None if self._schedule is None else copy.deepcopy(self._schedule.state_dict()),
            self.random,
        )

    @torch.no_grad()
    def go_back_to(self, snapshot: Snapshot, number: int) -> None:
        """Stand again where a copy was made."""
        for places, values in (
            (self.parameters, snapshot.weights), (self.model.buffers(), snapshot.buffers)
        ):  # fmt: skip
            for place, value in zip(places, values, strict=True):
                place.copy_(value)
        self.optimizer.load_state_dict(copy.deepcopy(snapshot.optimizer))
        if self._schedule is not None and snapshot.schedule is not None:
            self._schedule.load_state_dict(copy.deepcopy(snapshot.schedule))
        self.random, self.number = snapshot.state, number


class Timeline:
    """A training's steps from the last to the first, with all that each of them began with.

    States are kept where there is room: on the model's device, or beside a GPU in the machine's memory. Where not all
    of T fit, about every √T-th is kept, and from there the training is repeated.

    Args:
        repetition: stands at the first step, and afterwards at the last.
        room: how many bytes states may take on the model's device, and in the machine's memory where that is another;
            default: half of what is free.
        tell: is told how far it has come.

    Attributes:
        apart: steps from one state that is kept to the next.
        on_host: whether states are kept in the machine's memory, though the model is on a GPU.
    """

    def __init__(
        self,
        repetition: Repetition,
        room: tuple[int, int] | None = None,
        tell: Callable[[str], None] = lambda what: None,
    ) -> None:
        self._repetition, self._tell = repetition, tell
        steps, self._size = len(repetition), max(1, _bytes_of(repetition))
        own, host = room or free_room(repetition.parameters[0].device)
        whole, apart = steps * self._size, max(1, math.isqrt(max(0, steps - 1)) + 1)
        few = min(steps, 2 * apart) * self._size
        self.apart = 1 if whole <= max(own, host) else apart
        needed = whole if self.apart == 1 else few
        self.on_host = needed > own and host > own
        if needed > max(own, host):
            log.warning("states take %.3g GB, and %.3g GB are free", needed / 1e9, 2 * max(own, host) / 1e9)
        self._kept: dict[int, Snapshot] = {}
        self._moved: list[list[bool]] = []

    @property
    def plan(self) -> str:
        """What is kept, and where."""
        count = len(self._repetition)
        place = "the machine's memory" if self.on_host else f"memory of {self._repetition.parameters[0].device}"
        if self.apart == 1:
            return f"all {count} are kept, {count * self._size / 1e9:.3g} GB in {place}"
        needed = min(count, 2 * self.apart) * self._size
        return f"every {self.apart}th of {count} is kept, others are made again; {needed / 1e9:.3g} GB in {place}"

    def go(self) -> None:
        """Repeat the training to its end."""
        repetition = self._repetition
        while repetition.number < len(repetition):
            number = repetition.number
            if number % self.apart == 0:
                self._kept[number] = self._snapshot()
            self._moved.append(repetition.step())
            self._tell(f"step {number + 1} of {len(repetition)}")

    def backwards(self, end: int | None = None) -> Iterator[tuple[int, list[bool]]]:
        """Stand before each step, from the last on or the one before ``end``; give its number, and what it moves."""
        repetition, end = self._repetition, len(self._repetition) if end is None else end
        for start in sorted(self._kept, reverse=True):
            states = [self._kept.pop(start)]
            if start >= end:
                continue
            repetition.go_back_to(states[0], start)
            for _ in range(start + 1, end):
                repetition.step()
                states.append(self._snapshot())
            for number in reversed(range(start, end)):
                repetition.go_back_to(states.pop(), number)
                yield number, self._moved[number]
            end = start

    def _snapshot(self) -> Snapshot:
        found = self._repetition.snapshot()
        return found.on_host() if self.on_host else found


def free_room(device: torch.device) -> tuple[int, int]:
    """Return how many bytes states may take on a device, and in the machine's memory where that is another."""
    try:
        host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError):  # not every system says
        host = STATE_BYTES
    own = free_memory(device)
    return (host, 0) if own is None else (own // 2, host)


def _bytes_of(repetition: Repetition) -> int:
    """What a state takes."""
    trained = sum(value.numel() * value.element_size() for value in repetition.parameters)
    buffers = sum(value.numel() * value.element_size() for value in repetition.model.buffers())
    return buffers + (1 + len(KEPT[repetition.kind])) * trained

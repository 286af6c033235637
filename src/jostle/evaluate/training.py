"""Training on subsets, where that is plain: shuffled batches, one optimizer. Small models are trained many at once."""

from __future__ import annotations

import contextlib
import copy
import logging
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call, vmap

from jostle.data.datasets import Collate, Data, map_tensors
from jostle.errors import InputError
from jostle.losses import Batch, Loss
from jostle.losses import classification as classification_loss
from jostle.models.functional import Called, places_of, sample_means

log = logging.getLogger("jostle")

Job = tuple[Int[np.ndarray, " member"], int]
"""What one model is trained on: indices of examples, and a seed."""

TRIED, WORTH_IT = (1, 4, 16, 64, 256), 1.1
"""How many models at once are tried, and how much quicker the next must be than the best before it."""
WARM_UP, TIMED = 2, 5
"""Steps before and while they are timed."""


class Trainer:
    """``train(indices, seed) -> model`` for `retrain`: many small models at once, where that is quicker.

    Weights of all models are stacked, and one step moves them all, so that what is small for a GPU becomes large. The
    numbers are those of one model after another, to rounding, which is checked before the first training. What cannot
    be stacked, such as a model with dropout, is trained one by one.

    Args:
        new_model: ``new_model(seed) -> model``, what a training begins with; PyTorch's seed is set before. A model that
            it returns is copied, so ``lambda seed: pretrained`` will do.
        train: the training examples, of which subsets are taken, as for `retrain`.
        optimizer: ``optimizer(parameters) -> torch.optim.Optimizer``, of those that treat every number by itself: SGD,
            Adam, AdamW and the like.
        epochs: passes over a subset.
        batch_size: examples in a step; default: all of the subset. The next epoch begins where the last one did not
            fill a batch.
        schedule: ``schedule(optimizer, steps) -> torch.optim.lr_scheduler.LRScheduler``, which is stepped with the
            optimizer.
        loss: as for `jostle.attribute`; a sequence's loss is the mean of its tokens'.
        collate: makes a batch of a list of samples.
        at_once: so many models at once; default: as many as are quickest, which is tried.

    Example:
        >>> adamw = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)
        >>> train = Trainer(lambda seed: nn.Linear(64, 10), data, adamw, epochs=30, batch_size=64)
        >>> bank = retrain(train, data, query, subsets=random_subsets(600, 100), out="bank")
    """

    def __init__(
        self,
        new_model: Callable[[int], nn.Module],
        train: Any,
        optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
        *,
        epochs: int,
        batch_size: int | None = None,
        schedule: Callable[[torch.optim.Optimizer, int], Any] | None = None,
        loss: Loss | None = None,
        collate: Collate | None = None,
        at_once: int | None = None,
    ) -> None:
        for name, value in (("epochs", epochs), ("batch_size", batch_size), ("at_once", at_once)):
            if value is not None and value < 1:
                raise InputError(name, got=value, expected="a positive number")
        self.new_model, self.optimizer, self.schedule = new_model, optimizer, schedule
        self.epochs, self.batch_size, self.at_once = epochs, batch_size, at_once
        self.loss = loss or classification_loss()
        self._source, self._collate = train, collate
        self._data: Data | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Go to another process without what is on a device here."""
        return self.__dict__ | {"_data": None}

    def __call__(self, indices: Int[np.ndarray, " member"], seed: int) -> nn.Module:
        """Train one model."""
        return self.together([(indices, seed)])[0]

    def together(self, jobs: Sequence[Job]) -> list[nn.Module]:
        """Train one model for each, those at once that take as many steps of as many examples."""
        models: dict[int, nn.Module] = {}
        for places in self._alike(jobs):
            *_, stack = self._training([jobs[place] for place in places])
            models |= zip(places, stack.models(), strict=True)
        return [models[place] for place in range(len(jobs))]

    def most_at_once(self, jobs: Sequence[Job]) -> int:
        """Return how many to train at once; a few steps are tried, and what they tell is said in the log."""
        alike = max(self._alike(jobs), key=len, default=[])
        jobs = [jobs[place] for place in alike]
        if self.at_once == 1 or len(jobs) < 2:
            return 1
        failure = self._failure(jobs[:2])
        if failure is not None:
            log.info("models are trained one by one: %s", failure)
            return 1
        if self.at_once is not None:
            return self.at_once
        rates: dict[int, float] = {}
        best = count = 1
        for count in sorted({min(count, len(jobs)) for count in TRIED}):
            with contextlib.suppress(torch.OutOfMemoryError):
                rates[count] = self._steps_a_second(jobs[:count])
            if count > 1 and rates.get(count, 0.0) < WORTH_IT * rates[best]:
                break
            best = count
        if best == 1:
            log.info("models are trained one by one: %d at once make no more steps a second", count)
        else:
            log.info("models are trained %d at once: %.3g steps a second; one by one %.3g", best, rates[best], rates[1])
        return best

    def steps(self, examples: int) -> tuple[int, int]:
        """Return how many steps a training on so many examples takes, and how many of them are in each."""
        size = min(self.batch_size or examples, examples)
        return max(1, self.epochs * examples // size), size

    def _alike(self, jobs: Sequence[Job]) -> list[list[int]]:
        """Which of them can be stacked."""
        found: dict[tuple[int, int], list[int]] = {}
        for place, (indices, _) in enumerate(jobs):
            found.setdefault(self.steps(len(indices)), []).append(place)
        return list(found.values())

    def _training(self, jobs: Sequence[Job]) -> Generator[_Stack, None, None]:
        """Train, step by step."""
        steps, size = self.steps(len(jobs[0][0]))
        with _seeded(jobs[0][1] if len(jobs) == 1 else None):
            stack = _Stack([self._new(seed) for _, seed in jobs])
            optimizer = self.optimizer(stack.parameters)
            schedule = self.schedule and self.schedule(optimizer, steps)
            batches = self._batches(jobs, size, stack.device)
            for _ in range(steps):
                stack.gradient(self.loss, next(batches))
                optimizer.step()
                if schedule is not None:
                    schedule.step()
                yield stack

    def _new(self, seed: int) -> nn.Module:
        with _seeded(seed):
            model = self.new_model(seed)
        if not isinstance(model, nn.Module):
            raise InputError("new_model", got=f"a {type(model).__name__}", expected="a torch.nn.Module")
        return copy.deepcopy(model).train()

    def _batches(self, jobs: Sequence[Job], size: int, device: torch.device) -> Iterator[Batch]:
        """The next batch of every model, one after another."""
        if self._data is None:
            self._data = Data(self._source, "train", collate=self._collate, device=device)
        orders = [_orders(np.asarray(indices), seed, size) for indices, seed in jobs]
        while True:
            yield self._data.batch(np.concatenate([next(order) for order in orders]))

    def _steps_a_second(self, jobs: Sequence[Job]) -> float:
        """Of all these models together; short trainings are timed with their beginnings."""

        def without_end() -> Generator[_Stack, None, None]:
            while True:
                yield from self._training(jobs)

        with contextlib.closing(without_end()) as steps:
            for stack in islice(steps, WARM_UP):
                stack.wait()
            started = time.perf_counter()
            for stack in islice(steps, TIMED):
                stack.wait()
            return len(jobs) * TIMED / (time.perf_counter() - started)

    def _failure(self, jobs: Sequence[Job]) -> str | None:
        """Train two models for two steps; return why they cannot be stacked, or None where the numbers are the same."""
        try:
            return self._difference(jobs)
        except Exception as error:  # any model may hit any limit of vmap; by itself it will say what it has
            return f"{type(error).__name__}: {str(error).partition('. ')[0][:100]}"

    def _difference(self, jobs: Sequence[Job]) -> str | None:
        steps, size = self.steps(len(jobs[0][0]))
        both, *single = (_Stack([self._new(seed) for _, seed in part]) for part in (jobs, jobs[:1], jobs[1:]))
        optimizers = [self.optimizer(stack.parameters) for stack in (both, *single)]
        ours, *theirs = (self._batches(part, size, both.device) for part in (jobs, jobs[:1], jobs[1:]))
        for _ in range(min(2, steps)):
            both.gradient(self.loss, next(ours))
            for place, (stack, batches) in enumerate(zip(single, theirs, strict=True)):
                stack.gradient(self.loss, next(batches))
                stacked, alone = both.gradients(), stack.gradients()
                whole = torch.cat([gradient.flatten() for gradient in alone]).norm()
                for one, other in zip(stacked, alone, strict=True):
                    # What is zero but for rounding differs by as much as it has.
                    if not (one[place] - other).norm() <= 1e-3 * other.norm() + 1e-5 * whole:
                        return "at once, the model has other gradients"
                    other.copy_(one[place])  # so that rounding does not add up
            before = [[value.clone() for value in stack.state()] for stack in single]
            for optimizer in optimizers:
                optimizer.step()
            for place, stack in enumerate(single):
                for start, one, other in zip(before[place], both.state(), stack.state(), strict=True):
                    changes = (other - start, one[place] - other, start)
                    moved, differs, length = (value.double().norm() for value in changes)
                    if not differs <= 1e-2 * moved + 1e-6 * length:
                        return "the optimizer does not treat every number by itself, or a buffer of the model differs"
        return None


class _Stack:
    """Models that are trained at once; one by itself is what it is."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models, self._alone, self._known = models, len(models) == 1, False
        first = models[0]
        self.device = next(first.parameters()).device
        self._places = places_of(first, [name for name, _ in first.named_parameters()])
        if self._alone:
            self._weights, self._buffers = dict(first.named_parameters()), dict(first.named_buffers())
        else:
            self._weights, self._buffers = (
                {name: torch.stack([dict(kind(model))[name].detach() for model in models]) for name, _ in kind(first)}
                for kind in (nn.Module.named_parameters, nn.Module.named_buffers)
            )
            for name, parameter in first.named_parameters():
                self._weights[name].requires_grad_(parameter.requires_grad)

    @property
    def parameters(self) -> list[Tensor]:
        """Those that are trained; of several models, stacked."""
        return [value for value in self._weights.values() if value.requires_grad]

    def gradients(self) -> list[Tensor]:
        """Of those that have one."""
        return [value.grad for value in self.parameters if value.grad is not None]

    def state(self) -> list[Tensor]:
        """Everything that a training may change."""
        return [value.detach() for value in (*self._weights.values(), *self._buffers.values())]

    def gradient(self, loss: Loss, batch: Batch) -> None:
        """Take the gradient of each model's mean loss on its own part of a batch."""
        for parameter in self.parameters:
            parameter.grad = None

        def mean_loss(model: nn.Module, batch: Batch) -> Float[Tensor, ""]:
            return sample_means(loss(model, batch), loss, batch).mean()

        if self._alone:
            mean_loss(self._models[0], batch).backward()
            return
        call = Called(self._models[0], mean_loss)

        def one(weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Batch) -> Tensor:
            given = {f"model.{place}": value for name, value in weights.items() for place in self._places[name]}
            given |= {f"model.{name}": value for name, value in buffers.items()}
            return functional_call(call, given, (batch,), tie_weights=False)

        parts = map_tensors(batch, lambda tensor: tensor.unflatten(0, (len(self._models), -1)))
        if not self._known:  # a loss may look at a model and its numbers once, which it cannot do below
            with torch.no_grad(), _seeded(0):
                mean_loss(self._models[0], map_tensors(parts, lambda tensor: tensor[0]))
            self._known = True
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # is found out by trying
            # A model's loss knows no other's weights, so the gradient of their sum is that of each.
            vmap(one)(self._weights, self._buffers, parts).sum().backward()

    def wait(self) -> None:
        """Until what was begun is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.no_grad()
    def models(self) -> list[nn.Module]:
        """Return them as they are now, by themselves."""
        if not self._alone:
            for place, model in enumerate(self._models):
                own = dict(model.named_parameters()) | dict(model.named_buffers())
                for name, value in (self._weights | self._buffers).items():
                    own[name].copy_(value[place])
        return [model.eval() for model in self._models]


def _orders(indices: np.ndarray, seed: int, size: int) -> Iterator[np.ndarray]:
    """Batches of one size, of permutations without an end."""
    generator = np.random.default_rng(seed)
    waiting = indices[:0]
    while True:
        while len(waiting) < size:
            waiting = np.concatenate([waiting, generator.permutation(indices)])
        yield waiting[:size]
        waiting = waiting[size:]


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Set PyTorch's seed, and put its state back afterwards."""
    if seed is None:
        yield
        return
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield

"""Training on subsets, where that is plain: shuffled batches, one optimizer. Small models are trained many at once."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from jostle.data.datasets import Collate, Data, map_tensors
from jostle.errors import InputError
from jostle.losses import Batch, Loss, described
from jostle.losses import classification as classification_loss
from jostle.models.checks import check_losses, in_words, vmap_differs
from jostle.models.functional import called_with, eval_mode, places_of, sample_means
from jostle.training.objective import Alike, Objective
from jostle.training.repeatable import Microbatch, Repeatable, random_state

Pair = tuple[Int[np.ndarray, " member"], int]
"""The first two of a `Job`."""


class Job(NamedTuple):
    """What one model is trained on.

    Attributes:
        indices: of examples.
        seed: of the model and of the order of its batches.
        weights: by which each of these examples' losses is multiplied; None for 1.
    """

    indices: Int[np.ndarray, " member"]
    seed: int
    weights: Float[np.ndarray, " member"] | None = None


TRIED, WORTH_IT = (1, 4, 16, 64, 256), 1.1
"""How many models at once are tried, and how much quicker the next must be than the best before it."""
LONGEST, LARGEST_SHARE = 30.0, 0.1
"""What is trained at once is lost when it is interrupted: at most so many seconds, or such a share of all the time."""
LONGEST_TRY = 5.0
"""Seconds that one try may take, where that is more than `LARGEST_SHARE` of all the time."""
SHORT = 1.0
"""Seconds that all trainings take one by one, below which nothing else is tried."""
WARM_UP, TIMED = 2, 5
"""Steps before and while they are timed."""
LARGE = 1e4
"""By how much one model's gradient is made longer than another's, to see whether an optimizer looks at both."""

_RANDOMNESS = threading.RLock()
"""PyTorch has one random state for all threads."""

_KERNELS = threading.RLock()
"""And one choice of kernels."""


class Trainer:
    """``train(indices, seed) -> model`` for `retrain`: many small models at once, where that is quicker.

    Weights of all models are stacked, and one step moves them all, so that what is small for a GPU becomes large. Each
    step is that of one model by itself, to rounding; `retrain` compares two models both ways before it trains any.
    What cannot be stacked, such as a model with dropout, is trained one by one.

    Args:
        new_model: ``new_model(seed) -> model``, what a training begins with; PyTorch's seed is set before. A copy of it
            is trained, in training mode, so ``lambda seed: pretrained`` will do.
        train: the training examples, of which subsets are taken, as for `retrain`.
        optimizer: ``optimizer(parameters) -> torch.optim.Optimizer``, of those that treat every number by itself: SGD,
            Adam, AdamW and the like. Stacked parameters have one dimension more.
        epochs: passes over a subset.
        batch_size: examples in a step; default: all of the subset. The next epoch begins where the last one did not
            fill a batch.
        clip_norm: cut each model's gradient to this length.
        schedule: ``schedule(optimizer, steps) -> torch.optim.lr_scheduler.LRScheduler``, which is stepped with the
            optimizer.
        loss: as for `jostle.attribute`; a sequence's loss is the mean of its tokens'.
        count_alike: what counts alike in a batch: with ``"sequences"`` its loss is the mean over sequences, with
            ``"tokens"`` the sum over all tokens' losses divided by their number.
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
        clip_norm: float | None = None,
        schedule: Callable[[torch.optim.Optimizer, int], Any] | None = None,
        loss: Loss | None = None,
        count_alike: Alike = "sequences",
        collate: Collate | None = None,
        at_once: int | None = None,
    ) -> None:
        for name, value in (("epochs", epochs), ("batch_size", batch_size), ("at_once", at_once)):
            given = name == "epochs" or value is not None
            if given and (not isinstance(value, int | np.integer) or value < 1):
                raise InputError(name, got=repr(value), expected="a positive whole number")
        if count_alike not in get_args(Alike):
            raise InputError("count_alike", got=repr(count_alike), expected="'sequences' or 'tokens'")
        if clip_norm is not None and not clip_norm > 0:
            raise InputError("clip_norm", got=clip_norm, expected="a positive length")
        for name, value, of in (("new_model", new_model, "seed"), ("optimizer", optimizer, "parameters")):
            if not callable(value) or isinstance(value, nn.Module | torch.optim.Optimizer):
                raise InputError(name, got=f"a {type(value).__name__}", expected=f"a function of {of} that makes one")
        if isinstance(loss, nn.Module):
            fix = "jostle.losses has those of classification, regression and next tokens"
            raise InputError("loss", got=f"a {type(loss).__name__}", expected="a function loss(model, batch)", fix=fix)
        self.new_model, self.optimizer, self.schedule = new_model, optimizer, schedule
        self.epochs, self.batch_size, self.clip_norm, self.at_once = epochs, batch_size, clip_norm, at_once
        self.loss = loss or classification_loss()
        self.count_alike: Alike = count_alike
        self._source, self._collate = train, collate
        self._data: tuple[torch.device, Data] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Go to another process without what is on a device here."""
        return self.__dict__ | {"_data": None}

    def __repr__(self) -> str:
        about = ", ".join(f"{name}={value}" for name, value in self.about().items())
        return f"Trainer({about}, at_once={self.at_once or 'as many as are quickest'})"

    def about(self) -> dict[str, Any]:
        """Return what is known of the training: a bank is of one."""
        about = {"epochs": self.epochs, "batch_size": self.batch_size or "all", "clip_norm": self.clip_norm or "none"}
        about |= {"loss": described(self.loss), "schedule": "none" if self.schedule is None else "one of your own"}
        about["count_alike"] = self.count_alike
        with contextlib.suppress(Exception):  # it may want to know of which parameters these are
            optimizer = self.optimizer([nn.Parameter(torch.zeros(1))])
            numbers = {name: value for name, value in optimizer.defaults.items() if type(value) in (int, float, tuple)}
            settings = ", ".join(f"{name}={value}" for name, value in numbers.items())
            about["optimizer"] = f"{type(optimizer).__name__}({settings})"
        return about

    def require_data(self, train: Any, fingerprint: str, collate: Collate | None) -> None:
        """Refuse to train on other examples than those of a bank."""
        if self._source is train or Data(self._source, "train", collate=collate).fingerprint() == fingerprint:
            return
        raise InputError(
            "train", got="other examples than those of the Trainer, or another order", expected="the same for both"
        )

    def steps(self, examples: int) -> tuple[int, int]:
        """Return how many steps a training on so many examples takes, and how many of them are in each."""
        size = max(1, min(self.batch_size or examples, examples))
        return self.epochs * examples // size, size

    def __call__(self, indices: Int[np.ndarray, " member"], seed: int) -> nn.Module:
        """Train one model."""
        return self.together([Job(indices, seed)])[0]

    def with_weights(self, weights: Float[np.ndarray, " train"], seed: int) -> nn.Module:
        """Train one model on all examples, where each example's loss is multiplied by its weight.

        Batches, their order and what their losses are divided by are those of the training on all examples. Where
        examples meet otherwise than in the loss, as in batch norms, those with weight 0 take part.
        """
        return self.together([Job(np.arange(len(weights)), seed, weights)])[0]

    def repeatable(self, seed: int = 0, *, device: torch.device | str | None = None) -> Repeatable:
        """Return the training on all examples as `jostle.replay` takes it."""
        with _seeded(seed):
            model = self._new(seed)
            state = random_state()
        if device is not None:
            model = model.to(device)
        data = self._on(next(model.parameters()).device)
        steps, size = self.steps(len(data))
        order = _orders(np.arange(len(data)), seed, size)
        return Repeatable(
            model, data, Objective(self.loss, self.count_alike), self.optimizer,
            [[Microbatch(next(order))] for _ in range(steps)],
            schedule=None if self.schedule is None else functools.partial(_scheduled, self.schedule, steps),
            clip_norm=self.clip_norm, state=state,
        )  # fmt: skip

    def together(self, jobs: Sequence[Job | Pair]) -> list[nn.Module]:
        """Train a model for each, at once those that take as many steps; whether they may be, `most_at_once` says."""
        jobs = [_job_of(job) for job in jobs]
        alike: dict[tuple[Any, ...], list[int]] = {}
        for number, job in enumerate(jobs):
            alike.setdefault((*self.steps(len(job.indices)), job.weights is None), []).append(number)
        models: dict[int, nn.Module] = {}
        for numbers in alike.values():
            (trained,) = deque(self._training([jobs[number] for number in numbers]), maxlen=1)
            models |= zip(numbers, trained.models(), strict=True)
        return [models[number] for number in range(len(jobs))]

    def most_at_once(self, jobs: Sequence[Job | Pair], of: int | None = None) -> tuple[int, str]:
        """Return how many to train at once, and why, in words.

        A few steps are tried. What a single model cannot do, such as a loss that fails, is raised.

        Args:
            jobs: some that take as many steps, of other seeds if there are any.
            of: how many there are in all.
        """
        jobs = [_job_of(job) for job in jobs]
        with contextlib.closing(self._training(jobs[:1], looking=True)) as steps:
            next(steps)
        if self.at_once == 1 or len(jobs) < 2:
            return 1, "one by one"
        try:
            failure = self._difference(jobs[0], max(jobs[1:], key=lambda job: job.seed != jobs[0].seed))
        except (Exception, SystemExit) as error:  # any model may hit any limit of vmap
            failure = f"{type(error).__name__}: {str(error).partition('. ')[0][:100]}"
        if failure is not None:
            return 1, f"one by one: {failure}"
        if self.at_once is not None:
            return self.at_once, f"{self.at_once} at once"
        return self._quickest(jobs, of or len(jobs))

    def _quickest(self, jobs: Sequence[Job], of: int) -> tuple[int, str]:
        rates: dict[int, float] = {}
        best, missed = 1, 0
        total = of * self.steps(len(jobs[0].indices))[0]
        for count in sorted({min(count, len(jobs)) for count in TRIED}):
            if 1 in rates and not self._worth_trying(count, total, rates[best]):
                break
            with contextlib.suppress(Exception):  # out of memory, or one of them fails, which will be told
                rates[count] = self._steps_a_second(jobs[:count])
            if 1 not in rates or (count == 1 and total < SHORT * rates[1]):
                return 1, "one by one"
            better = rates.get(count, 0.0) >= WORTH_IT * rates[best]
            best, missed = (count, 0) if better else (best, missed + (count > 1))
            if missed == 2 or count not in rates:
                break
        longest = max(LONGEST, LARGEST_SHARE * total / rates[best])
        seconds = {count: count * total / of / rate for count, rate in rates.items()}
        best = max([1, *(count for count in rates if count <= best and seconds[count] <= longest)])
        if best == 1:
            if max(rates) == 1:
                return 1, "one by one: trying others would take longer than they could save"
            return 1, f"one by one: {max(rates)} at once are not quicker, or would take too long to be interrupted"
        return best, f"{best} at once, {rates[best]:,.3g} steps a second; one by one {rates[1]:,.3g}"

    def _worth_trying(self, count: int, total: int, rate: float) -> bool:
        """Whether a try of so many at once is short, or a small share of all, at the rate of those before it."""
        return count * (WARM_UP + TIMED) <= max(LARGEST_SHARE * total, LONGEST_TRY * rate)

    def _training(self, jobs: Sequence[Job | Pair], *, looking: bool = False) -> Generator[_One, None, None]:
        """Train, step by step; ``looking`` closely at the loss."""
        jobs = [_checked(job) for job in jobs]
        steps, size = self.steps(len(jobs[0].indices))
        with _seeded(jobs[0].seed) if len(jobs) == 1 else contextlib.nullcontext():
            stack = self._stack(jobs)
            optimizer = self._optimizer(stack)
            schedule = None if self.schedule is None else self.schedule(optimizer, steps)
            batches = self._batches(jobs, size, stack.device)
            for _ in range(steps):
                batch, weights = next(batches)
                if looking:
                    stack.look(self.loss, batch, size)
                self._gradient(stack, batch, weights)
                optimizer.step()
                if schedule is not None:
                    schedule.step()
                yield stack

    def _gradient(self, stack: _One, batch: Batch, weights: Float[Tensor, " sample"] | None) -> None:
        stack.gradient(Objective(self.loss, self.count_alike), batch, weights)
        if self.clip_norm is not None:
            stack.clip(self.clip_norm)

    def _stack(self, jobs: Sequence[Job]) -> _One:
        """New models; one has its randomness from whoever trains it."""
        if len(jobs) == 1:
            return _One(self._new(jobs[0].seed))
        models = []
        for job in jobs:
            with _seeded(job.seed):
                models.append(self._new(job.seed))
        return _Many(models)

    def _new(self, seed: int) -> nn.Module:
        model = self.new_model(seed)
        if not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
            raise InputError("new_model", got=f"a {type(model).__name__}", expected="a torch.nn.Module with parameters")
        with contextlib.suppress(RuntimeError):  # some that were used cannot be copied, and are not given twice
            model = copy.deepcopy(model)
        return model.train()

    def _optimizer(self, stack: _One) -> torch.optim.Optimizer:
        optimizer = self.optimizer(stack.parameters)
        theirs = {id(value) for group in optimizer.param_groups for value in group["params"]}
        if not theirs <= {id(value) for value in stack.parameters}:
            raise InputError(
                "optimizer", got="an optimizer of other parameters", expected="one of the parameters that it is given"
            )
        return optimizer

    def _on(self, device: torch.device) -> Data:
        if self._data is None or self._data[0] != device:
            self._data = device, Data(self._source, "train", collate=self._collate, device=device)
        return self._data[1]

    def _batches(
        self, jobs: Sequence[Job], size: int, device: torch.device
    ) -> Iterator[tuple[Batch, Float[Tensor, " sample"] | None]]:
        """The next batch of every model, one after another; and its examples' weights, where jobs have any."""
        data = self._on(device)
        given = [_weights_of(job, len(data)) for job in jobs if job.weights is not None]
        orders = [_orders(job.indices, job.seed, size) for job in jobs]
        while True:
            chosen = [next(order) for order in orders]
            each = [weights[some] for weights, some in zip(given, chosen, strict=bool(given))]
            yield data.batch(np.concatenate(chosen)), torch.as_tensor(np.concatenate(each)) if given else None

    def _steps_a_second(self, jobs: Sequence[Job | Pair]) -> float:
        """Of all these models together; short trainings are timed with their beginnings."""

        def without_end() -> Generator[_One, None, None]:
            while True:
                yield from self._training(jobs)

        with contextlib.closing(without_end()) as steps:
            for stack in itertools.islice(steps, WARM_UP):
                stack.wait()
            started = time.perf_counter()
            for stack in itertools.islice(steps, TIMED):
                stack.wait()
            return len(jobs) * TIMED / (time.perf_counter() - started)

    def _difference(self, *jobs: Job) -> str | None:
        """Train two models for two steps; return in what they differ from what each is by itself."""
        together = self._stack(jobs)
        alone = []
        for job in jobs:
            with _seeded(job.seed):
                alone.append(self._stack([job]))
        first = alone[0].model
        data = self._on(together.device)
        if (
            reason := vmap_differs(first, {name for name, value in first.named_parameters() if value.requires_grad})
            or _minds_padding(first, self.loss, data)
        ) is not None:
            return reason
        optimizers = [self._optimizer(stack) for stack in (together, *alone)]
        if len({_groups(*pair) for pair in zip(optimizers, (together, *alone), strict=True)}) > 1:
            return "the optimizer has other groups for parameters with one dimension more"
        size = self.steps(len(jobs[0].indices))[1]
        batches = [self._batches(some, size, together.device) for some in (jobs, jobs[:1], jobs[1:])]
        for longer in (1.0, LARGE):
            for stack, own in zip((together, *alone), batches, strict=True):
                self._gradient(stack, *next(own))
            for number, one in enumerate(alone):
                if not all(value.grad is None or torch.isfinite(value.grad).all() for value in one.parameters):
                    return "gradients are not finite"
                if not _same_gradients(together, one, number):
                    return "at once, a model has other gradients"
                _share_gradients(together, one, number, longer**number)
            for optimizer in optimizers:
                optimizer.step()
            for number, one in enumerate(alone):
                pairs = zip(together.parameters, one.parameters, strict=True)
                if not all(_close(stacked[number], own, 1e-5) for stacked, own in pairs):
                    return "the optimizer does not treat every number of every model by itself"
            if longer == 1 and not self._come_out_alike(together, alone, data.batch(jobs[0].indices[:2])):
                return "at once, a model comes out differently"
        return None

    @torch.no_grad()
    def _come_out_alike(self, together: _One, alone: Sequence[_One], batch: Batch) -> bool:
        """Whether models are the same as users will see them, with whatever they keep."""
        pairs = list(zip(together.models(), (one.models()[0] for one in alone), strict=True))
        for got, expected in pairs:
            kept = zip(got.state_dict().values(), expected.state_dict().values(), strict=True)
            losses = tuple(self.loss(model, _copied(batch)) for model in (got, expected))
            if not all(_close(one, other, 1e-3) for one, other in (*kept, losses)):
                return False
        for model in itertools.chain.from_iterable(pairs):
            model.train()
        return True


class _One:
    """A model that is trained by itself."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.device = next(model.parameters()).device

    @property
    def parameters(self) -> list[Tensor]:
        """Those that are trained."""
        return [value for value in self.model.parameters() if value.requires_grad]

    def look(self, loss: Loss, batch: Batch, size: int) -> None:
        """Refuse what is not a loss for each example."""
        with torch.no_grad(), _seeded(0), in_words("loss", size), eval_mode(self.model):
            check_losses(loss(self.model, _copied(batch)), size, "loss")

    def gradient(self, objective: Objective, batch: Batch, weights: Float[Tensor, " sample"] | None) -> None:
        """Take the gradient of the mean loss."""
        for parameter in self.parameters:
            parameter.grad = None
        self._backward(objective, batch, weights)

    def _backward(self, objective: Objective, batch: Batch, weights: Float[Tensor, " sample"] | None) -> None:
        objective(self.model, batch, weights).backward()

    def clip(self, longest: float) -> None:
        """Cut each model's gradient to a length."""
        nn.utils.clip_grad_norm_(self.parameters, longest)

    def wait(self) -> None:
        """Until what was begun is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def models(self) -> list[nn.Module]:
        """Return what is trained as it is now."""
        self.model.zero_grad(set_to_none=True)
        return [self.model.eval()]


class _Many(_One):
    """Models that are trained at once: their numbers are stacked, all else is the first one's."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__(models[0])
        self._models, self._looked = models, False
        if len({_layout(model) for model in models}) > 1:
            raise InputError("new_model", got="models of unequal parameters or buffers", expected="alike for all seeds")
        self._places = places_of(self.model)
        self._weights = _stacked(models, nn.Module.named_parameters)
        self._buffers = _stacked(models, nn.Module.named_buffers)
        for name, parameter in self.model.named_parameters():
            self._weights[name].requires_grad_(parameter.requires_grad)

    @property
    def parameters(self) -> list[Tensor]:
        return [value for value in self._weights.values() if value.requires_grad]

    def _backward(self, objective: Objective, batch: Batch, weights: Float[Tensor, " sample"] | None) -> None:
        """Of each model's mean loss on its own part of a batch."""

        def one(parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *inputs: Any) -> Tensor:
            return called_with(self.model, self._places, objective, {**parameters, **buffers}, *inputs)

        parts = map_tensors((batch, weights), lambda tensor: tensor.unflatten(0, (len(self._models), -1)))
        if not self._looked:  # a loss may look at a model and its numbers once, which it cannot do below
            self.look(objective.loss, map_tensors(parts[0], lambda tensor: tensor[0]), _first(parts).shape[1])
            self._looked = True
        with warnings.catch_warnings(), _kernels_for_vmap(self.device):
            warnings.filterwarnings("ignore", "There is a performance drop")  # is found out by trying
            # A model's loss knows no other's weights, so the gradient of their sum is that of each.
            in_dims = (0, 0, 0, None if weights is None else 0)
            vmap(one, in_dims)(self._weights, self._buffers, *parts).sum().backward()

    def clip(self, longest: float) -> None:
        gradients = [value.grad for value in self.parameters if value.grad is not None]
        lengths = torch.stack([gradient.reshape(len(gradient), -1).norm(dim=1) for gradient in gradients]).norm(dim=0)
        factors = (longest / (lengths + 1e-6)).clamp_max(1.0)
        for gradient in gradients:
            gradient *= factors.view(-1, *[1] * (gradient.ndim - 1))

    @torch.no_grad()
    def models(self) -> list[nn.Module]:
        for number, model in enumerate(self._models):
            own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            for name, value in {**self._weights, **self._buffers}.items():
                own[name].copy_(value[number])
            model.zero_grad(set_to_none=True)
        return [model.eval() for model in self._models]


def _scheduled(schedule: Callable[[torch.optim.Optimizer, int], Any], steps: int, optimizer: Any) -> Any:
    return schedule(optimizer, steps)


def _stacked(
    models: Sequence[nn.Module], named: Callable[[nn.Module], Iterable[tuple[str, Tensor]]]
) -> dict[str, Tensor]:
    columns = [dict(named(model)) for model in models]
    return {name: torch.stack([column[name].detach() for column in columns]) for name in columns[0]}


def _layout(model: nn.Module) -> tuple[Any, ...]:
    """What models must have in common."""
    named = (*model.named_parameters(), *model.named_buffers())
    return tuple((name, value.shape, value.dtype, value.device, value.requires_grad) for name, value in named)


def _copied(batch: Batch) -> Batch:
    return map_tensors(batch, torch.clone)


def _first(batch: Batch) -> Tensor:
    found: list[Tensor] = []
    map_tensors(batch, found.append)
    return found[0]


def _groups(optimizer: torch.optim.Optimizer, stack: _One) -> tuple[Any, ...]:
    """Which parameters are in which group."""
    numbers = {id(value): number for number, value in enumerate(stack.parameters)}
    return tuple(tuple(numbers[id(value)] for value in group["params"]) for group in optimizer.param_groups)


def _same_gradients(together: _One, one: _One, number: int) -> bool:
    pairs = [(a.grad, b.grad) for a, b in zip(together.parameters, one.parameters, strict=True)]
    whole = sum(b.double().square().sum() for _, b in pairs if b is not None) ** 0.5
    for a, b in pairs:
        if a is None or b is None:
            if a is not b:
                return False
        # What is zero but for rounding differs by as much as it has.
        elif not (a[number] - b).double().norm() <= _rounding(b) * (b.double().norm() + 0.01 * whole):
            return False
    return True


def _share_gradients(together: _One, one: _One, number: int, longer: float) -> None:
    """Give a model by itself the gradients that it has among others, so that rounding does not add up.

    Where one of them is much longer than the others, an optimizer that looks at all models is found out.
    """
    for a, b in zip(together.parameters, one.parameters, strict=True):
        if a.grad is not None and b.grad is not None:
            a.grad[number] *= longer
            b.grad.copy_(a.grad[number])


def _rounding(value: Tensor) -> float:
    return max(1e-3, 4 * torch.finfo(value.dtype).eps)


def _close(got: Tensor, expected: Tensor, tolerance: float) -> bool:
    if got.shape != expected.shape or torch.equal(got, expected):
        return got.shape == expected.shape
    if not got.is_floating_point():
        return False
    tolerance = max(tolerance, 4 * torch.finfo(got.dtype).eps)
    return bool((got - expected).double().norm() <= tolerance * expected.double().norm())


def _minds_padding(model: nn.Module, loss: Loss, data: Data) -> str | None:
    """Models at once are padded to the longest example of all."""
    if data.on_device and data.lengths is None:
        return None
    shortest, *_, longest = sorted(data.spread(2), key=lambda index: _first(data.batch([index])).numel())
    if shortest == longest:
        return None
    with torch.no_grad(), eval_mode(model):
        alone, beside = (
            sample_means(loss(model, batch), loss, batch)[0]
            for batch in (data.batch([shortest]), data.batch([shortest, longest]))
        )
    return None if _close(beside, alone, 1e-4) else "a model minds how long other examples are"


def _job_of(job: Job | Pair) -> Job:
    return job if isinstance(job, Job) else Job(*job)


def _checked(job: Job | Pair) -> Job:
    job = _job_of(job)
    found = np.asarray(job.indices)
    if found.ndim != 1 or not len(found) or not np.issubdtype(found.dtype, np.integer):
        got = f"{len(found)} of {found.dtype}" if found.ndim == 1 else f"an array of shape {found.shape}"
        fix = "np.flatnonzero(mask)" if found.dtype == bool else ""
        raise InputError("indices", got=got, expected="whole numbers of at least one example", fix=fix)
    return job._replace(indices=found)


def _weights_of(job: Job, examples: int) -> Float[np.ndarray, " train"]:
    weights = np.asarray(job.weights, np.float64)
    if weights.shape != (examples,) or len(job.indices) != examples:
        got = f"an array of shape {weights.shape}"
        raise InputError("weights", got=got, expected=f"one for each of the {examples} examples of train")
    if not np.isfinite(weights).all():
        raise InputError("weights", got="numbers that are not finite", expected="finite ones")
    return weights


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
def _kernels_for_vmap(device: torch.device) -> Iterator[None]:
    """Of a GPU's other kernels for attention, the way back cannot be taken through vmap; other threads wait."""
    if device.type != "cuda":
        yield
        return
    with _KERNELS, sdpa_kernel(SDPBackend.MATH):
        yield


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Set PyTorch's seed, and put its state back afterwards; other threads wait."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with _RANDOMNESS, torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield

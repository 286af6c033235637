"""Records a training that somebody runs, in two lines around its loop."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.data import DataLoader

from jostle.data.datasets import Collate, Data
from jostle.errors import InputError
from jostle.losses import Batch, Loss
from jostle.training.loaders import Watched, innermost, source_of
from jostle.training.objective import Alike, Objective
from jostle.training.records import InPrecision, OptimizerAgain, Recorded, SettingsAgain, copied, moving
from jostle.training.repeatable import (
    Microbatch,
    RandomState,
    digest_of,
    own_randomness,
    random_state,
    set_random_state,
    sum_of,
)
from jostle.training.steps import kind_of

Accumulate = Literal["mean", "sum", "tokens"]
Clipping = float | Literal["detect"] | None

ONCE, TWICE = 5e-6, 2e-5
"""How near to a round number the longest gradient is that was cut to it: seen in one step, or in more."""

NEAR = 0.01
"""How near a loss is to the training's own, where they are the same: in whatever precision."""

_SPREAD = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}


class Taken(NamedTuple):
    """A batch as it went into the training.

    Attributes:
        examples: their indices.
        digest: a hash of it.
        own: how many tokens, or examples, it counts; None: the loss does not say.
        state: PyTorch's random state before it.
        counted: what the sum of its losses is divided by, where the training says that.
    """

    examples: Int[np.ndarray, " sample"]
    digest: str | None
    own: int | None
    state: RandomState | None = None
    counted: Tensor | int | None = None


class Recorder:
    """Records a training: two lines around a loop.

    Make it before the first step. Then take batches from ``watch(loader)``, and call `finish` after the last step.

    Args:
        model: what is trained, as it stands before the first step. A copy is kept.
        optimizer: its optimizer, which has taken no step.
        loss: one loss a sample, or a token, ``loss(model, batch)``: what the loop takes the mean of.
        count_alike: with ``"sequences"`` a batch's loss is the mean over samples, with ``"tokens"`` over all tokens.
        accumulate: what becomes of several batches in one step: their ``"mean"``, their ``"sum"``, or the mean of all
            ``"tokens"`` of the step; or a number by which each batch's loss is multiplied.
        clip_norm: what gradients are cut to; None: nothing. Default: seen by their lengths.
        data: the examples, for a loop without a loader, which takes its batches from ``batch(indices)``.
        collate: makes a batch of a list of these samples.

    Raises:
        InputError: something that could not be repeated, here or at the first step. What is seen later is said by
            `finish`, so that no training ends because of its record.

    Example:
        >>> recorder = Recorder(model, optimizer, loss=loss)
        >>> for batch in recorder.watch(loader):
        ...     train_on(batch)
        >>> training = recorder.finish()
        >>> print(repeat_check(training))
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss: Loss,
        count_alike: Alike = "sequences",
        accumulate: Accumulate | float = "mean",
        clip_norm: Clipping = "detect",
        data: Any = None,
        collate: Collate | None = None,
    ) -> None:
        _check_choices(loss, count_alike, accumulate, clip_norm)
        self.model, self.optimizer = model, optimizer
        self._objective: Any = loss, count_alike
        self._accumulate, self._clip_norm = accumulate, clip_norm
        self._trained = _check_model(model)
        _check_optimizer(optimizer, self._trained)
        self._device = next(iter(self._trained.values())).device
        self._again = OptimizerAgain.of(optimizer, [*self._trained.values()])
        self._start = copied(model)
        self._source: tuple[Any, Collate | None] | None = None
        self._data = None
        if data is not None:
            self._data = Data(data, "train", collate=collate, device=self._device)
        self._waiting: list[Taken] = []
        self._steps: list[list[Taken]] = []
        self._settings: list[list[list[float]]] = []
        self._norms: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._modes: list[bool] = []
        self._precision: torch.dtype | None = None
        self._state: RandomState | None = None
        self.first_loss: Tensor | None = None
        """What the training itself says of the first batch, where it does: that tells what it divides by."""
        self._problem: InputError | None = None
        self._recorded: Recorded | None = None
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        self._looks = [
            module.register_forward_pre_hook(self._look)
            for module in model.modules()
            if any(value.requires_grad for value in module.parameters(recurse=False))
        ]

    def watch(self, loader: Iterable[Batch]) -> Iterable[Batch]:
        """Return a loader whose batches are noted as they are taken: use it in place of the other."""
        base = innermost(loader)
        self.use(base)
        return Watched(loader, lambda examples, batch: self.take(self.taken(examples, batch)))

    def use(self, loader: DataLoader[Any]) -> None:
        """Note where examples come from."""
        if self._data is not None or (self._source is not None and self._source[0] is not loader.dataset):
            raise InputError("loader", got="a second data set", expected="one that all training examples are in")
        self._source = source_of(loader)

    def batch(self, indices: Sequence[int] | Int[np.ndarray, " sample"] | Tensor) -> Batch:
        """Return the batch of these examples of ``data``, which the loop goes on with now."""
        if self._data is None:
            raise InputError(
                "recorder", got="no data", expected="the training examples", fix="Recorder(..., data=examples)"
            )
        examples = indices.cpu().numpy() if isinstance(indices, Tensor) else np.asarray(indices)
        batch = self._data.batch(examples)
        self.take(self.taken(examples, batch))
        return batch

    def taken(self, examples: Int[np.ndarray, " sample"], batch: Batch) -> Taken:
        """Return what is kept of a batch."""
        loss, count_alike = self._objective
        own = len(examples)
        if count_alike == "tokens":
            mask = getattr(loss, "token_mask", None)
            own = None if mask is None else int(mask(batch).sum())
        return Taken(examples, digest_of(batch), own)

    def take(self, taken: Taken) -> None:
        """Note a batch that goes into the model now."""
        found = random_state()
        # Few of them differ on a GPU, where the CPU draws nothing: what is equal is kept once.
        if self._state is not None and torch.equal(found[0], self._state[0]):
            same = all(torch.equal(*pair) for pair in zip(found[1], self._state[1], strict=True))
            found = self._state if same else (self._state[0], found[1])
        self._state = found
        self._waiting.append(taken._replace(state=found))

    def finish(self) -> Recorded:
        """Return what was recorded, to be repeated."""
        if self._recorded is None:
            self.stop()
            if self._problem is not None:
                raise self._problem
            if not self._steps:
                raise InputError("recorder", got="no step of the optimizer", expected="a training between its lines")
            self._recorded = self._made()
        return self._recorded

    def stop(self) -> None:
        """Look no more."""
        for hook in (*self._hooks, *self._looks):
            hook.remove()

    def _made(self) -> Recorded:
        for module, training in zip(self._start.modules(), self._modes, strict=True):
            module.training = training
        data = self._data
        if data is None:
            assert self._source is not None
            with own_randomness():  # a data set may draw
                data = Data(self._source[0], "train", collate=self._source[1], device=self._device)
        loss, count_alike = self._objective
        if self._precision is not None:
            loss = InPrecision(loss, self._device.type, self._precision)
        objective = Objective(loss, count_alike)
        if self.first_loss is not None:
            self._see_divisor(objective, data)
        end = {name: value.detach().clone() for name, value in moving(self.model).items()}
        return Recorded(
            self._start, data, objective, self._again,
            [self._microbatches(step) for step in self._steps],
            schedule=SettingsAgain(np.array(self._settings)), clip_norm=self._length(),
            state=self._steps[0][0].state, sums=[float(value) for value in self._sums], end=end,
        )  # fmt: skip

    @torch.no_grad()
    def _see_divisor(self, objective: Objective, data: Data) -> None:
        """Find out what losses were divided by, from the first: not every model does what it is told to."""
        assert self.first_loss is not None
        first, told = self._steps[0][0], float(self.first_loss)
        buffers = [value.clone() for value in self._start.buffers()]
        with own_randomness():
            assert first.state is not None
            set_random_state(first.state)
            batch = data.batch(first.examples)
            mean = float(objective(self._start, batch))
        for place, value in zip(self._start.buffers(), buffers, strict=True):
            place.copy_(value)
        if digest_of(batch) != first.digest:
            return  # that will be said of the step
        share = 1.0 if first.counted is None or first.own is None else first.own / int(first.counted)
        if abs(share * mean - told) <= NEAR * abs(told):
            return
        if abs(mean - told) > NEAR * abs(told):
            raise InputError(
                "loss",
                got=f"{mean:.6g} of the first batch",
                expected=f"the {told:.6g} that the training had",
                fix="pass the loss that it minimizes, RecordingCallback(loss=...)",
            )
        self._accumulate = "sum"
        self._steps = [[taken._replace(counted=None) for taken in step] for step in self._steps]

    def _microbatches(self, step: Sequence[Taken]) -> list[Microbatch]:
        found, counts = [], [taken.own for taken in step]
        for taken in step:
            share, counted = 1 / len(step), taken.counted
            if isinstance(self._accumulate, int | float):
                share = float(self._accumulate)
            elif self._accumulate == "sum":
                share = 1.0
            elif self._accumulate == "tokens":
                counted = sum(own or 0 for own in counts)
            if counted is not None:
                if taken.own is None:
                    raise InputError(
                        "loss", got="one that does not say which tokens count", expected="a method token_mask(batch)"
                    )
                counted = int(counted)
                share = taken.own / counted
            found.append(Microbatch(taken.examples, share, counted, taken.state, taken.digest))
        return found

    def _length(self) -> float | None:
        """What gradients were cut to."""
        lengths = np.array([float(value) for value in self._norms])
        if isinstance(self._clip_norm, str):
            return cut_to(lengths)
        if self._clip_norm is not None and (longer := np.flatnonzero(lengths > 1.001 * self._clip_norm)).size:
            raise InputError(
                "clip_norm",
                got=f"{self._clip_norm:g}, and at step {longer[0]} a gradient of length {lengths[longer[0]]:.4g}",
                expected="what the loop cuts gradients to",
            )
        return self._clip_norm

    def _look(self, module: nn.Module, inputs: Any) -> None:
        """See once in which precision the model computes."""
        kind = self._device.type
        if torch.is_autocast_enabled(kind):
            self._precision = torch.get_autocast_dtype(kind)
        for hook in self._looks:
            hook.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._problem is not None:
            return
        self._problem = self._found_wrong(any(value is not None for value in (*args[1:], *kwargs.values())))
        if self._problem is not None:
            if not self._steps:
                self.stop()
                raise self._problem
            return
        self._modes = [module.training for module in self.model.modules()]
        gradients = [value.grad for value in self._trained.values() if value.grad is not None]
        self._norms.append(nn.utils.get_total_norm(gradients).detach())
        self._settings.append([_numbers(group) for group in optimizer.param_groups])
        self._steps.append(self._waiting)
        self._waiting = []

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._problem is None:
            self._sums.append(sum_of(self._trained.values()))

    def _found_wrong(self, told: bool) -> InputError | None:
        """What makes that the step that comes could not be repeated."""
        where = f"step {len(self._steps)}"
        if _within_scaler():
            return InputError(
                where, got="a GradScaler", expected="gradients that are not scaled, and steps that are not skipped",
                fix="train in bfloat16 or float32",
            )  # fmt: skip
        if told:
            return InputError(where, got="optimizer.step(closure)", expected="optimizer.step()")
        if not self._waiting:
            return InputError(
                where,
                got="no batch since the step before",
                expected="the batches that it is made of",
                fix="take them from recorder.watch(loader)",
            )
        if self._steps and self._modes != [module.training for module in self.model.modules()]:
            return InputError(
                where, got="modules that changed between training and eval mode", expected="the same in every step"
            )
        trained = [value for value in self.model.parameters() if value.requires_grad]
        if {id(value) for value in trained} != {id(value) for value in self._trained.values()}:
            return InputError(
                where, got="other weights that are trained than at first", expected="the same all the time"
            )
        groups = [len(group["params"]) for group in self.optimizer.param_groups]
        if len(groups) != len(self._again.groups):
            return InputError(where, got="a new group of parameters", expected="the same groups all the time")
        return None


def cut_to(lengths: Float[np.ndarray, " step"]) -> float | None:
    """Return what gradients of these lengths were cut to: the longest, where it is a round number; else None.

    Where several are the longest, a number of three digits is round; where one is, of two.
    """
    lengths = lengths[np.isfinite(lengths)]
    longest = lengths.max(initial=0.0)
    if not longest > 0:
        return None
    several = np.sum(lengths > (1 - TWICE) * longest) > 1
    digits, tolerance = (3, TWICE) if several else (2, ONCE)
    near = float(f"{longest:.{digits}g}")
    return near if abs(longest / near - 1) < tolerance else None


def _check_choices(loss: Any, count_alike: Any, accumulate: Any, clip_norm: Any) -> None:
    if isinstance(loss, nn.Module) or not callable(loss):
        raise InputError("loss", got=f"a {type(loss).__name__}", expected="a function loss(model, batch)")
    if count_alike not in get_args(Alike):
        raise InputError("count_alike", got=repr(count_alike), expected="'sequences' or 'tokens'")
    if accumulate not in get_args(Accumulate) and not (isinstance(accumulate, int | float) and accumulate > 0):
        raise InputError("accumulate", got=repr(accumulate), expected="'mean', 'sum', 'tokens', or a positive number")
    if accumulate == "tokens" and count_alike != "tokens":
        raise InputError("accumulate", got="'tokens'", expected="count_alike='tokens' with it")
    if clip_norm not in (None, "detect") and not (isinstance(clip_norm, int | float) and clip_norm > 0):
        raise InputError("clip_norm", got=repr(clip_norm), expected="a positive length, None, or 'detect'")


def _check_model(model: nn.Module) -> dict[str, Tensor]:
    """Return what is trained; refuse what is spread over processes."""
    spread = [
        type(module).__name__ for module in model.modules() if _SPREAD & {c.__name__ for c in type(module).__mro__}
    ]
    sharded = [name for name, value in model.named_parameters() if type(value.data).__name__ == "DTensor"]
    if spread or sharded:
        got = f"a {spread[0]}" if spread else f"{sharded[0]}, which is sharded (DTensor)"
        raise InputError("model", got=got, expected="a model that one process trains by itself")
    if type(model).__name__ == "OptimizedModule":
        raise InputError("model", got="a compiled model", expected="the model that it was compiled from")
    trained: dict[str, Tensor] = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not trained:
        raise InputError("model", got="no parameter that requires a gradient", expected="some that are trained")
    return trained


def _check_optimizer(optimizer: Any, trained: Mapping[str, Tensor]) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        fix = "pass optimizer.optimizer" if hasattr(optimizer, "optimizer") else ""
        raise InputError("optimizer", got=f"a {type(optimizer).__name__}", expected="PyTorch's own", fix=fix)
    kind_of(optimizer)
    if optimizer.state:
        raise InputError(
            "optimizer",
            got="one that has taken steps",
            expected="one before its first step",
            fix="record a training from its beginning",
        )
    own = {id(value) for group in optimizer.param_groups for value in group["params"] if value.requires_grad}
    missing = [name for name, value in trained.items() if id(value) not in own]
    if missing:
        raise InputError(
            "optimizer",
            got=f"one without {missing[0]}, which requires a gradient",
            expected="all weights that require gradients",
            fix="call requires_grad_(False) on those that are not trained",
        )
    if own - {id(value) for value in trained.values()}:
        raise InputError("optimizer", got="weights that are not the model's", expected="the model's alone")


def _within_scaler() -> bool:
    """Whether a `GradScaler` makes this call: it leaves no other trace."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            return getattr(frame.f_locals.get("self"), "_enabled", True)  # one that is switched off does nothing
        frame = frame.f_back
    return False


def _numbers(group: Mapping[str, Any]) -> list[float]:
    """`SETTINGS` of a group."""
    first, second = group.get("betas", (math.nan, math.nan))
    values = (group["lr"], group["weight_decay"], group.get("momentum", math.nan), first, second)
    return [float(value) for value in values]

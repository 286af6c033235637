"""A training that was recorded: what it began with, and what each of its steps saw; as files, too.

It is repeated from that, and held against what came out. Nothing that a record is kept in is executed.
"""

from __future__ import annotations

import copy
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import google_crc32c
import numpy as np
import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.data import DataLoader

from jostle.data.datasets import Collate, Data, fingerprint_tensors
from jostle.errors import InputError
from jostle.files import replace_file, replacing
from jostle.losses import IGNORED_LABEL, Batch, Loss, at_least_float32, described
from jostle.training.batches import are_tokens, load_batches, save_batches
from jostle.training.loaders import innermost, source_of
from jostle.training.objective import Objective
from jostle.training.repeatable import (
    Examples,
    Microbatch,
    RandomState,
    Repeatable,
    Repetition,
)
from jostle.training.steps import KINDS

SETTINGS = ("lr", "weight_decay", "momentum", "beta1", "beta2")
"""What schedules change of a group."""

FORMAT = 1
SMALL, START, END, STEPS = "record.json", "start.safetensors", "end.safetensors", "steps.npz"
BATCHES = "batches.safetensors"


@dataclass(frozen=True)
class OptimizerAgain:
    """Makes an optimizer as one was, of another copy of the same parameters.

    Attributes:
        kind: its class.
        groups: of each group, the places of its parameters among all that are trained, and its settings.
    """

    kind: Callable[..., torch.optim.Optimizer]
    groups: tuple[tuple[tuple[int, ...], Mapping[str, Any]], ...]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, trained: Sequence[Tensor]) -> OptimizerAgain:
        """Return what makes this one again."""
        places = {id(value): place for place, value in enumerate(trained)}
        return cls(type(optimizer), tuple(
            (
                tuple(places[id(value)] for value in group["params"] if id(value) in places),
                {name: _plain(value) for name, value in group.items() if name not in ("params", "param_names")},
            )
            for group in optimizer.param_groups
        ))  # fmt: skip

    def __call__(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Make it."""
        given = [*parameters]
        # A group of frozen weights alone has no parameters here: it stays, since rates are kept by group.
        groups = [{**settings, "params": [given[place] for place in places]} for places, settings in self.groups]
        return self.kind(groups)


@dataclass(frozen=True)
class SettingsAgain:
    """Gives each step the settings that it had: a schedule, of whatever kind it was.

    Attributes:
        numbers: `SETTINGS` of each step and group; not a number where a group has none.
    """

    numbers: Float[np.ndarray, "step group setting"]

    def __call__(self, optimizer: torch.optim.Optimizer) -> _Settings:
        """Begin with the first step."""
        return _Settings(self.numbers, optimizer)


class _Settings:
    def __init__(self, numbers: Float[np.ndarray, "step group setting"], optimizer: torch.optim.Optimizer) -> None:
        self._numbers, self._optimizer, self._step = numbers, optimizer, 0
        self._set()

    def step(self) -> None:
        self._step += 1
        self._set()

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._step = state["step"]
        self._set()

    def _set(self) -> None:
        row = self._numbers[min(self._step, len(self._numbers) - 1)]
        for group, (rate, decay, momentum, first, second) in zip(self._optimizer.param_groups, row, strict=True):
            group["lr"], group["weight_decay"] = float(rate), float(decay)
            if "momentum" in group:
                group["momentum"] = float(momentum)
            if "betas" in group:
                group["betas"] = float(first), float(second)


@dataclass(frozen=True)
class TrainerLoss:
    """What a Hugging Face causal language model makes of its labels: of each token, to the bit what it makes of all.

    `jostle.losses.next_token` gives the same to rounding, and takes less memory.
    """

    kept_as: ClassVar[str] = "trainer"

    def __call__(self, model: nn.Module, batch: Batch) -> Float[Tensor, "batch token"]:
        """Return the losses; a token's stands in its own place, and is predicted from those before it."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = at_least_float32(model(**inputs, use_cache=False).logits)
        targets = F.pad(_labels(batch), (0, 1), value=IGNORED_LABEL)[:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED_LABEL)
        return F.pad(losses.view(targets.shape)[:, :-1], (1, 0))

    def token_mask(self, batch: Batch) -> Bool[Tensor, "batch token"]:
        """Return which tokens are predicted."""
        mask = _labels(batch) != IGNORED_LABEL
        mask[:, 0] = False
        return mask


def _labels(batch: Batch) -> Tensor:
    """What is predicted: where a batch does not say, as a query may not, every token but padding."""
    if "labels" in batch:
        return batch["labels"]
    tokens = batch["input_ids"]
    mask = batch.get("attention_mask", torch.ones_like(tokens))
    return torch.where(mask != 0, tokens, IGNORED_LABEL)


@dataclass(frozen=True)
class InPrecision:
    """A loss in mixed precision, as the training had it; its derivative is taken in full precision."""

    loss: Loss
    device: str
    dtype: torch.dtype

    @property
    def in_full_precision(self) -> Loss:
        """The loss itself."""
        return self.loss

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the losses."""
        with torch.autocast(self.device, self.dtype):
            return self.loss(model, batch)

    def __getattr__(self, name: str) -> Any:
        """All else is the loss's own."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.loss, name)


@dataclass(frozen=True)
class Repeated:
    """How a repetition came out beside the training that was recorded.

    Attributes:
        step: the first after which the sum of all trained weights was another, from 0 on; None: there was none.
        steps: how many there were.
        name: of the weight, or the statistic, that differs most at the end; None: none does.
        largest: by how much.
    """

    step: int | None
    steps: int
    name: str | None
    largest: float

    @property
    def equal(self) -> bool:
        """Whether all is equal to the bit."""
        return self.step is None and self.name is None

    def __str__(self) -> str:
        if self.equal:
            return f"{self.steps} steps repeated: equal to the bit"
        end = "the end is equal" if self.name is None else f"{self.name} differs by {self.largest:.3g} at the end"
        if self.step is None:
            return (
                f"{self.steps} steps repeated, equal to the bit, but {end}: weights were changed after the last step, "
                "as by an average of weights, or by loading others"
            )
        causes = (
            "another loss than the loop's, gradients that were clipped or changed otherwise, batches that were skipped"
            if self.step == 0
            else "kernels that do not give the same twice, another number of threads, weights or gradients that were "
            "changed between steps, random numbers that were drawn between a batch and the model"
        )
        return f"step {self.step} of {self.steps} is the first that differs, and {end}; usual causes: {causes}"


@dataclass(frozen=True, kw_only=True)
class Recorded(Repeatable):
    """A training that was recorded.

    Attributes:
        end: the trained weights and the buffers after it, by name.
    """

    end: Mapping[str, Tensor] = field(repr=False)

    def compare(self, repetition: Repetition) -> Repeated:
        """Hold a repetition that has come to its end against the record."""
        name, largest = None, 0.0
        for own, value in moving(repetition.model).items():
            found, recorded = value.detach(), self.end[own].to(value.device)
            if torch.equal(found, recorded):
                continue
            apart = float((found.double() - recorded.double()).abs().max())
            if name is None or not apart <= largest:
                name, largest = own, apart
        return Repeated(repetition.differs, len(repetition), name, largest)

    def save(self, path: str | Path, *, batches: bool | None = None) -> None:
        """Write the record into a directory: what is not there yet is made, what is there is replaced.

        Frozen weights and the loss are not in it.

        Args:
            path: the directory.
            batches: keep them, so that neither the data nor their collate function is needed to repeat the training.
                Default: where they are tokens, which take little room.
        """
        folder, files = Path(path), [START, END, STEPS]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SMALL).unlink(missing_ok=True)  # without it, what is half written is no record
        for name, tensors in ((START, moving(self.model)), (END, self.end)):
            with replacing(folder / name) as temporary:
                safetensors.torch.save_file(_apart(tensors), temporary)
        with replacing(folder / STEPS) as temporary, temporary.open("wb") as file:
            arrays: dict[str, Any] = _arrays(self)
            np.savez(file, **arrays)
        (folder / BATCHES).unlink(missing_ok=True)
        if are_tokens(self) if batches is None else batches:
            save_batches(self, folder / BATCHES)
            files.append(BATCHES)
        about = _about(self) | {"files": {name: _sum_of_file(folder / name) for name in files}}
        replace_file(folder / SMALL, json.dumps(about, indent=1))


def repeat_check(recorded: Recorded) -> Repeated:
    """Repeat a training once, and hold it against the record.

    Example:
        >>> print(repeat_check(training))
        60 steps repeated: equal to the bit
    """
    repetition = Repetition(recorded)
    repetition.go()
    return recorded.compare(repetition)


def load_record(
    path: str | Path, *, model: nn.Module, data: Any = None, loss: Loss | None = None, collate: Collate | None = None
) -> Recorded:
    """Read a record that was saved.

    Args:
        path: the directory.
        model: one of the same shapes. Its frozen weights have to be those of the training; all others are in the
            record.
        data: the training examples, or the loader that they were taken from; not needed where the record has its
            batches.
        loss: what the training minimized, as it was given to the recorder. It need not be given for a record of a
            Hugging Face Trainer whose loss was its own.
        collate: makes a batch of a list of samples.

    Raises:
        InputError: a record that was cut short; other data, other frozen weights, or another model than the training's.
    """
    folder = Path(path)
    about = _read_about(folder)
    start, end = (_read_tensors(folder / name) for name in (START, END))
    started = _started(copied(model), start, about)
    device = next(value for value in started.parameters() if value.requires_grad).device
    known: Examples
    if data is None:
        if BATCHES not in about["files"]:
            raise InputError("data", got="none, for a record without its batches", expected="the training examples",
                             fix="load_record(..., data=...), or save it with batches=True")  # fmt: skip
        known = load_batches(folder / BATCHES, about["examples"], about["data"], device)
    else:
        if isinstance(data, DataLoader) or hasattr(data, "base_dataloader"):
            data, collate = source_of(innermost(data))
        known = Data(data, "train", collate=collate, device=device)
        what = "the training examples, in their order, and their collate function"
        _require("data", known.fingerprint(), about["data"], what)
    with np.load(io.BytesIO((folder / STEPS).read_bytes()), allow_pickle=False) as arrays:
        steps, numbers, sums = _steps_of(arrays)
    loss = _loss_of(about, loss)
    names = [name for name, value in started.named_parameters() if value.requires_grad]
    kinds = {kind.__name__: kind for kind in KINDS}
    groups = tuple(
        (tuple(names.index(name) for name in group["names"]), _settings_of(group["settings"]))
        for group in about["groups"]
    )
    return Recorded(
        started, known, Objective(loss, about["count_alike"]), OptimizerAgain(kinds[about["optimizer"]], groups), steps,
        schedule=SettingsAgain(numbers), clip_norm=about["clip_norm"], state=steps[0][0].state, sums=sums,
        end={name: value.to(device) for name, value in end.items()},
    )  # fmt: skip


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model that computes plainly: what others have put around its forward pass is left behind."""
    try:
        found: Any = copy.deepcopy(model)
    except Exception as error:  # any module may refuse in its own way
        reason = f"{type(error).__name__}: {str(error).partition('. ')[0][:120]}"
        raise InputError("model", got=f"one that cannot be copied ({reason})", expected="one that can") from error
    for module in found.modules():
        if "_original_forward" in module.__dict__:  # mixed precision by accelerate, which is bound to the model itself
            module.__dict__.pop("_original_forward")
            module.__dict__.pop("forward", None)
    if getattr(found, "is_gradient_checkpointing", False):
        found.gradient_checkpointing_disable()  # it changes no number
    found.zero_grad(set_to_none=True)
    return found


def moving(model: nn.Module) -> dict[str, Tensor]:
    """All that a training changes, by name."""
    found: dict[str, Tensor] = {name: value for name, value in model.named_parameters() if value.requires_grad}
    return {**found, **dict(model.named_buffers())}


def dtype_of(model: nn.Module) -> str:
    """Return the precision that most of a model's weights are in."""
    counts: Counter[str] = Counter()
    for value in model.parameters():
        counts[str(value.dtype).removeprefix("torch.")] += value.numel()
    return counts.most_common(1)[0][0]


def dtype_of_record(path: str | Path) -> torch.dtype:
    """Return the precision that most of the weights of a recorded model were in."""
    return getattr(torch, _read_about(Path(path))["dtype"])


def _frozen(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    return found


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that share no memory, as safetensors wants them."""
    return {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}


def _sum_of_file(path: Path) -> dict[str, int]:
    content = path.read_bytes()
    return {"bytes": len(content), "crc32c": google_crc32c.value(content)}


def _about(recorded: Recorded) -> dict[str, Any]:
    """All of a record that is no array."""
    again, objective = recorded.optimizer, recorded.objective
    assert isinstance(again, OptimizerAgain)
    loss, precision = objective.loss, None
    if isinstance(loss, InPrecision):
        loss, precision = loss.loss, {"device": loss.device, "dtype": str(loss.dtype).removeprefix("torch.")}
    names = [name for name, value in recorded.model.named_parameters() if value.requires_grad]
    return {
        "format": FORMAT,
        "optimizer": again.kind.__name__,
        "groups": [{"names": [names[place] for place in places], "settings": dict(settings)}
                   for places, settings in again.groups],
        "clip_norm": recorded.clip_norm,
        "count_alike": objective.count_alike,
        "loss": getattr(loss, "kept_as", described(loss)),
        "precision": precision,
        "modes": [name for name, module in recorded.model.named_modules() if module.training],
        "data": recorded.data.fingerprint(),
        "examples": len(recorded.data),
        "dtype": dtype_of(recorded.model),
        "start": fingerprint_tensors(moving(recorded.model)),
        "frozen": fingerprint_tensors(_frozen(recorded.model)),
    }  # fmt: skip


def _arrays(recorded: Recorded) -> dict[str, np.ndarray]:
    """The steps of a record: microbatches one after another, and random states once each."""
    assert isinstance(recorded.schedule, SettingsAgain)
    assert recorded.sums is not None
    parts = [part for step in recorded.steps for part in step]
    states: dict[int, RandomState] = {id(part.state): part.state for part in parts if part.state is not None}
    places = {key: place for place, key in enumerate(states)}
    found = {
        "examples": np.concatenate([part.examples for part in parts]).astype(np.int64),
        "sizes": np.array([len(part.examples) for part in parts]),
        "parts": np.array([len(step) for step in recorded.steps]),
        "share": np.array([part.share for part in parts]),
        "counted": np.array([-1 if part.counted is None else part.counted for part in parts]),
        "digest": np.array([part.digest or "" for part in parts]),
        "state": np.array([places.get(id(part.state), -1) for part in parts]),
        "settings": recorded.schedule.numbers,
        "sums": np.array(recorded.sums),
    }
    if states:
        found["states"] = np.stack([state[0].numpy() for state in states.values()])
        for device, _ in enumerate(next(iter(states.values()))[1]):
            found[f"states_{device}"] = np.stack([state[1][device].numpy() for state in states.values()])
    return found


def _steps_of(arrays: Mapping[str, np.ndarray]) -> tuple[list[list[Microbatch]], np.ndarray, list[float]]:
    """What `_arrays` gave."""
    rows = [arrays[name] for name in ("states", *(f"states_{d}" for d in range(64))) if name in arrays]
    states = [
        (torch.from_numpy(row[0].copy()), [torch.from_numpy(one.copy()) for one in row[1:]])
        for row in zip(*rows, strict=True)
    ]
    examples = np.split(arrays["examples"], np.cumsum(arrays["sizes"])[:-1])
    parts = [
        Microbatch(some, float(share), int(counted) if counted >= 0 else None, states[state] if state >= 0 else None,
                   str(digest) or None)
        for some, share, counted, state, digest in zip(
            examples, arrays["share"], arrays["counted"], arrays["state"], arrays["digest"], strict=True
        )
    ]  # fmt: skip
    ends = np.cumsum(arrays["parts"])
    steps = [parts[end - count : end] for end, count in zip(ends, arrays["parts"], strict=True)]
    return steps, arrays["settings"], arrays["sums"].tolist()


def _read_about(folder: Path) -> dict[str, Any]:
    """Read what a record says of itself; refuse one that is not whole."""

    def refuse(what: str) -> InputError:
        return InputError("record", got=f"{folder}, {what}", expected="a record as it was saved", fix="save it again")

    if not (folder / SMALL).is_file():
        raise refuse(f"which has no {SMALL}: it was never finished")
    try:
        about = json.loads((folder / SMALL).read_text())
        files, version = about["files"], about["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise refuse(f"whose {SMALL} cannot be read ({error})") from error
    if version != FORMAT:
        raise refuse(f"of format {version}")
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise refuse(f"which has no {name}")
        found = _sum_of_file(path)
        if found["bytes"] != expected["bytes"]:
            raise refuse(f"whose {name} was cut short: {found['bytes']} of {expected['bytes']} bytes")
        if found != expected:
            raise refuse(f"whose {name} does not have its checksum")
    return about


def _read_tensors(path: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(path)


@torch.no_grad()
def _started(model: nn.Module, start: Mapping[str, Tensor], about: Mapping[str, Any]) -> nn.Module:
    """Put a model where the training began."""
    own = moving(model)
    other = sorted({name for name, value in own.items() if name not in start or start[name].shape != value.shape}
                   | {*start} - {*own})  # fmt: skip
    if other:
        raise InputError(
            "model",
            got=f"one whose trained weights and buffers are others than the record's ({other[0]})",
            expected="one of the same shapes, with the same weights frozen",
        )
    _require("model", fingerprint_tensors(_frozen(model)), about["frozen"], "the frozen weights of the training")
    _require("record", fingerprint_tensors(start), about["start"], "the weights that the training began with")
    for name, value in own.items():
        value.data = start[name].to(value.device)  # in its own precision
    training = set(about["modes"])
    for name, module in model.named_modules():
        module.training = name in training
    return model


def _require(subject: str, found: str, expected: str, what: str) -> None:
    if found != expected:
        raise InputError(subject, got=f"others ({found})", expected=f"{what} ({expected})")


def _loss_of(about: Mapping[str, Any], loss: Loss | None) -> Loss:
    if loss is None:
        if about["loss"] != "trainer":
            raise InputError("loss", got="none", expected=f"the loss of the training: {about['loss']}")
        loss = TrainerLoss()
    precision = about["precision"]
    if precision is None:
        return loss
    return InPrecision(loss, precision["device"], getattr(torch, precision["dtype"]))


def _settings_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings as they were: JSON knows no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}

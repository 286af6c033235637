"""How a checkpoint of the Hugging Face Trainer was trained. Nothing in its files is executed.

``optimizer.pt`` is read as plain tensors and numbers; ``training_args.bin`` is a pickle of Python objects, and is not
opened.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jostle.errors import EstimateWarning, InputError, warn
from jostle.training.optimizers import OptimizerNumbers, kind_of_state, numbers_of_state, spread_rates
from jostle.training.schedules import Point, rebuild

FEW_LINES = 10
"""Log lines from which the clipping of more steps than these is not estimated without a word."""

_SHARDED = ("global_step*", "pytorch_model_fsdp*", "optimizer_*", "optimizer.bin", "rank*-of-*-optimizer.pt")
"""What DeepSpeed, FSDP and SageMaker leave in a checkpoint for the states of their optimizers."""

_NUMBERS = "give the numbers to jostle.Training: second moments are then estimated at the checkpoint"

_NOT_DECAYED = (r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", r"bias|layernorm|rmsnorm", r"bias")
"""What Trainers do not decay beside `nn.LayerNorm`, newest first: parts of lower-case names."""


@dataclass(frozen=True, kw_only=True)
class CheckpointNumbers:
    """What a checkpoint says of its training; `total_rates` by group of the optimizer."""

    optimizer: OptimizerNumbers
    total_rates: tuple[float, ...]
    batch_size: int | None
    clip_factor: float


@dataclass(frozen=True, kw_only=True)
class _Log:
    """``trainer_state.json``."""

    steps: int
    max_steps: int
    epoch: float | None
    device_batch: int | None
    lines: tuple[Mapping[str, Any], ...]


def read_checkpoint(
    directory: str | Path,
    model: nn.Module | None,
    *,
    total_rate: float | Sequence[float] | None,
    batch_size: int | None,
    examples: int | None,
    max_grad_norm: float | None,
    clip_factor: float | None,
) -> CheckpointNumbers:
    """Read a directory ``checkpoint-N``; see `jostle.Training.from_checkpoint`."""
    folder = Path(directory)
    _require_checkpoint(folder)
    log = _read_log(folder / "trainer_state.json")
    saved = _require_state(load_plain(folder / "optimizer.pt"), folder)
    kind_of_state(saved)
    model = load_model(folder) if model is None else model
    numbers = numbers_of_state(saved, _match(saved, model, folder))
    if total_rate is None:
        rates = _rebuild(folder, log, saved, numbers)
    else:
        rates = spread_rates(total_rate, numbers.rates, "total_rate")
    return CheckpointNumbers(
        optimizer=numbers,
        total_rates=rates,
        batch_size=batch_size if batch_size or numbers.optimizer == "sgd" else _batch_size(log, examples),
        clip_factor=_clip_factor(log, max_grad_norm) if clip_factor is None else clip_factor,
    )


def _require_checkpoint(folder: Path) -> None:
    if (folder / "optimizer.pt").is_file():
        return
    fix = "pass a directory checkpoint-N that the Trainer saved, with its optimizer"
    inner = sorted(folder.glob("checkpoint-*/"), key=lambda path: (len(path.name), path.name))
    if inner:
        fix = f"pass one of its checkpoints, such as {inner[-1]}"
    sharded = next((path.name for pattern in _SHARDED for path in sorted(folder.glob(pattern))), None)
    if sharded is not None:
        raise InputError(
            "checkpoint",
            got=f"{folder}, with an optimizer state in shards ({sharded})",
            expected="one whole optimizer.pt",
            fix=_NUMBERS,
        )
    raise InputError("checkpoint", got=f"{folder}, without optimizer.pt", expected="a checkpoint of Trainer", fix=fix)


def load_plain(path: Path) -> Any:
    """Load tensors and numbers; a pickle that would run code is refused, and does not run."""
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # damaged archives fail in many ways, and pickles with code in one
        raise InputError(
            str(path),
            got=f"a file that is no plain state ({type(error).__name__}); nothing in it was executed",
            expected="tensors and numbers alone, as torch.save(optimizer.state_dict(), ...) writes them",
            fix=_NUMBERS,
        ) from error


def _require_state(saved: Any, folder: Path) -> Mapping[str, Any]:
    """Refuse what is no ``state_dict()`` of an optimizer."""
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    states = saved.get("state") if isinstance(saved, dict) else None
    if isinstance(groups, list) and groups and isinstance(states, dict):
        indexed = all(isinstance(group, dict) and {"params", "lr", "weight_decay"} <= set(group) for group in groups)
        if indexed and all(isinstance(state, dict) for state in states.values()):
            return saved
    raise InputError(
        str(folder / "optimizer.pt"), got="something else than an optimizer's state", expected="its state_dict()"
    )


def _read_log(path: Path) -> _Log:
    try:
        state = json.loads(path.read_text())
        return _Log(
            steps=int(state["global_step"]),
            max_steps=int(state["max_steps"]),
            epoch=state.get("epoch"),
            device_batch=state.get("train_batch_size"),
            lines=tuple(line for line in state["log_history"] if _is_number(line.get("learning_rate"))),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(str(path), got=f"no log that can be read ({reason})", expected="the Trainer's log") from error


def load_model(folder: Path) -> nn.Module:
    """Load the causal language model of a checkpoint, or an adapter on its base, from files that are here."""
    try:
        import transformers

        if not (folder / "adapter_config.json").is_file():
            auto: Any = transformers.AutoModelForCausalLM
            return auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        import peft

        adapted: Any = peft.AutoPeftModelForCausalLM
        return adapted.from_pretrained(str(folder), is_trainable=True, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # packages, files and formats fail in many ways
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
        raise InputError(
            "checkpoint",
            got=f"{folder}, whose model could not be loaded ({reason})",
            expected="a causal language model",
            fix="pass the model that was trained: Training.from_checkpoint(directory, model)",
        ) from error


def _match(saved: Mapping[str, Any], model: nn.Module, folder: Path) -> list[list[str]]:
    """Name the parameters that an optimizer's indices stand for, by making its groups again."""
    shapes = {name: value.shape for name, value in model.named_parameters()}
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    held = [[_shape(saved["state"].get(place)) for place in group["params"]] for group in saved["param_groups"]]
    for groups in _groupings(model, len(sizes)):
        if [len(names) for names in groups] == sizes and all(
            shape in (None, shapes[name])
            for names, known in zip(groups, held, strict=True)
            for name, shape in zip(names, known, strict=True)
        ):
            return groups
    trained = sum(value.requires_grad for value in model.parameters())
    fix = "require gradients of the same parameters as in training, and pass the very model that was trained"
    adapter = (folder / "adapter_config.json").is_file() or trained > sum(sizes)
    if adapter and not any("lora_" in name for name in shapes):
        fix = "was a LoRA trained and merged? merged weights have no second moments: pass the model with its adapter"
    raise InputError(
        "optimizer.pt",
        got=f"the state of {sum(sizes)} parameters, in groups of {' and '.join(map(str, sizes))}",
        expected=f"that of the model's {trained} trainable parameters, each of its parameter's shape",
        fix=f"{fix}; or {_NUMBERS}",
    )


def _shape(state: Mapping[str, Any] | None) -> torch.Size | None:
    """The shape of a parameter, where its state has one."""
    tensors = ((state or {}).get(key) for key in ("exp_avg_sq", "momentum_buffer"))
    return next((value.shape for value in tensors if isinstance(value, torch.Tensor)), None)


def _groupings(model: nn.Module, count: int) -> Iterator[list[list[str]]]:
    """Groups as Trainers make them, with and without decay; or all in one."""
    names = [name for name, value in model.named_parameters() if value.requires_grad]
    if count == 1:
        yield [names]
    if count == 2:
        for pattern in _NOT_DECAYED:
            still = _undecayed(model, pattern)
            yield [[name for name in names if name not in still], [name for name in names if name in still]]


def _undecayed(model: nn.Module, pattern: str) -> set[str]:
    return {
        name
        for path, module in model.named_modules()
        for name in (f"{path}.{own}" if path else own for own, _ in module.named_parameters(recurse=False))
        if isinstance(module, nn.LayerNorm) or re.search(pattern, name.lower())
    }


def _rebuild(folder: Path, log: _Log, saved: Mapping[str, Any], numbers: OptimizerNumbers) -> tuple[float, ...]:
    """Σ of the rates by group, from the schedule that agrees with every logged rate."""
    first, group = numbers.rates[0], saved["param_groups"][0]
    lines = [Point(int(line["step"]), line["learning_rate"] / first) for line in log.lines if "step" in line and first]
    if not lines or "initial_lr" not in group:
        raise _undetermined(folder, f"{len(lines)} logged learning rates, and no schedule")
    rebuilt = rebuild(lines, Point(log.steps, float(group["lr"]) / first), log.max_steps)
    if rebuilt is None:
        raise _undetermined(folder, f"{len(lines)} learning rates that no constant, linear or cosine schedule gives")
    if not rebuilt.determined:
        least, most = (f"{first * value:.4g}" for value in rebuilt)
        raise _undetermined(
            folder, f"{len(lines)} learning rates that do not determine the warm-up (the sum is {least} to {most})"
        )
    return tuple(rate * (rebuilt.least + rebuilt.most) / 2 for rate in numbers.rates)


def _undetermined(folder: Path, what: str) -> InputError:
    return InputError(
        str(folder / "trainer_state.json"),
        got=what,
        expected="logged rates that determine the schedule",
        fix="pass total_rate, the sum of the learning rates of all steps",
    )


def _batch_size(log: _Log, examples: int | None) -> int:
    """Examples in an optimizer step: a multiple of a device's batch, with ⌈examples / batch⌉ steps in an epoch."""
    known = f"{log.device_batch} examples on each device" if log.device_batch else "nothing of it"
    ask = "pass batch_size: examples on a device, times devices, times gradient accumulation steps"
    if examples is None or not log.epoch or not log.device_batch:
        fix = f"{ask}; or examples, how many were trained on"
        raise InputError("batch_size", got=known, expected="the examples in an optimizer step", fix=fix)
    # Within an epoch whose last step has fewer batches, steps / epoch is up to one less than the steps of an epoch.
    steps = math.ceil(log.steps / log.epoch - 1e-6)
    fitting = [
        multiple * log.device_batch
        for multiple in range(1, math.ceil(examples / log.device_batch) + 1)
        if math.ceil(examples / (multiple * log.device_batch)) == steps
    ]
    if len(fitting) == 1:
        return fitting[0]
    could = f"it could be {fitting[0]} to {fitting[-1]}" if fitting else "which no multiple of it gives"
    raise InputError(
        "batch_size",
        got=f"{known}, and {steps} steps in an epoch of {examples} examples: {could}",
        expected="the examples in an optimizer step",
        fix=ask,
    )


def _clip_factor(log: _Log, max_grad_norm: float | None) -> float:
    """Σ rate·min(1, max_norm/norm) / Σ rate over the logged steps."""
    if not max_grad_norm:
        return 1.0
    seen = [line for line in log.lines if _is_number(line.get("grad_norm"))]
    if not seen:
        raise InputError(
            "clip_factor",
            got="a log without gradient norms",
            expected="them, to know by how much gradients were clipped",
            fix=f"pass clip_factor, the mean of min(1, {max_grad_norm:g} / norm), or max_grad_norm=0 where none was",
        )
    factors = [min(1.0, max_grad_norm / max(line["grad_norm"], 1e-12)) for line in seen]
    weights = [line["learning_rate"] for line in seen]
    weights = weights if sum(weights) > 0 else [1.0] * len(seen)
    mean = sum(map(float.__mul__, map(float, weights), factors)) / sum(weights)
    if len(seen) < min(FEW_LINES, log.steps):
        warn(
            f"clip_factor {mean:.3g} is estimated from {len(seen)} log lines of {log.steps} steps, with "
            f"max_grad_norm={max_grad_norm:g}; pass clip_factor where it is known",
            EstimateWarning,
        )
    return mean


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and math.isfinite(value)

"""What an optimizer's groups and state say of how it trained: a live one's, or those of a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jostle.errors import InputError

KINDS = ("sgd", "adam", "adamw")

_ADVICE = {
    "bit": "if it is Adam or AdamW with a compressed state, give its numbers as 'adam' or 'adamw'",
    "lion": "its steps have one size, whatever the gradients': the closest is 'adamw' with the same numbers",
    "adafactor": "the closest is 'adamw', with the rates that it really used",
    "muon": "its steps mix whole matrices, which no number for each weight describes: nothing here is close",
    "rmsprop": "the closest is 'adam', with total_rate / (1 - momentum) for total_rate",
}
"""What to use instead of an optimizer, by a part of its name."""

_TRACES = {
    "qmap1": "an 8-bit optimizer",
    "state1": "an optimizer of bitsandbytes",
    "exp_avg_sq_row": "Adafactor",
    "exp_avg_sq_col": "Adafactor",
    "scale_parameter": "Adafactor",
    "row_var": "Adafactor",
    "ns_steps": "Muon",
    "square_avg": "RMSprop",
    "sum": "Adagrad",
    "exp_inf": "Adamax",
    "mu_product": "NAdam",
    "train_mode": "a schedule-free optimizer",
}
"""Keys of a group or state by which other optimizers are recognised in a file."""

_ADAM_STATE = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


@dataclass(frozen=True, kw_only=True)
class OptimizerNumbers:
    """What an optimizer knows of its training. Tuples have an entry for each of its groups.

    Attributes:
        optimizer: one of `KINDS`.
        parameters: names, by group.
        rates: the rate before any schedule, by group.
        weight_decay: by group.
        second_moments: v̂, bias-corrected, by name; None where there is none.
    """

    optimizer: str
    parameters: tuple[tuple[str, ...], ...]
    rates: tuple[float, ...]
    weight_decay: tuple[float, ...]
    momentum: float
    dampening: float
    nesterov: bool
    eps: float
    second_moments: dict[str, Tensor] | None


def unknown_optimizer(name: str) -> InputError:
    """Return the refusal of an optimizer whose metric is not known, with what to use instead."""
    advice = next((text for part, text in _ADVICE.items() if part in name.lower()), "give the numbers of the closest")
    return InputError(
        "optimizer",
        got=name,
        expected="SGD, Adam or AdamW ('sgd', 'adam', 'adamw')",
        fix=f"{advice}; second moments that are not given are estimated at the checkpoint",
    )


def numbers_of(optimizer: Any, model: nn.Module) -> OptimizerNumbers:
    """Read a live optimizer, whose parameters are the model's own."""
    while not isinstance(optimizer, torch.optim.SGD | torch.optim.Adam):  # AdamW is an Adam
        if not hasattr(optimizer, "optimizer"):
            raise unknown_optimizer(type(optimizer).__name__)
        optimizer = optimizer.optimizer  # as accelerate wraps it
    groups, names = optimizer.param_groups, {id(value): name for name, value in model.named_parameters()}
    theirs = [value for group in groups for value in group["params"]]
    strange = sum(id(value) not in names for value in theirs)
    if strange:
        raise InputError(
            "optimizer",
            got=f"an optimizer of other parameters: {strange} of its {len(theirs)} are not the model's",
            expected="the optimizer that trained this model",
            fix="pass the very model that it was made for: a copy has other parameters",
        )
    # What is frozen did not move, though an optimizer was given it; but a whole model may be frozen after training.
    frozen = not any(value.requires_grad for value in theirs)
    parameters = [[names[id(value)] for value in group["params"] if frozen or value.requires_grad] for group in groups]
    states = {names[id(value)]: optimizer.state[value] for value in theirs if optimizer.state.get(value)}
    kind = "sgd" if isinstance(optimizer, torch.optim.SGD) else _adam_kind(groups)
    return _read(kind, groups, parameters, states)


def numbers_of_state(saved: Mapping[str, Any], parameters: Sequence[Sequence[str]]) -> OptimizerNumbers:
    """Read what ``optimizer.state_dict()`` saved, given the names of each group's parameters."""
    groups = saved["param_groups"]
    places = [place for group in groups for place in group["params"]]
    names = [name for group in parameters for name in group]
    states = {name: saved["state"][place] for place, name in zip(places, names, strict=True) if place in saved["state"]}
    return _read(kind_of_state(saved), groups, parameters, states)


def kind_of_state(saved: Mapping[str, Any]) -> str:
    """Recognise an optimizer by the keys of its groups and of its state; what is not recognised is refused."""
    keys = set(saved["param_groups"][0])
    held = {key for state in saved["state"].values() for key in state}
    if {"momentum", "dampening", "nesterov"} <= keys and held <= {"momentum_buffer"}:
        return "sgd"
    if {"betas", "eps", "amsgrad"} <= keys and held <= _ADAM_STATE:
        return _adam_kind(saved["param_groups"])
    traces = (name for key, name in _TRACES.items() if key in keys | held)
    lion = "Lion" if held == {"exp_avg"} else f"an optimizer that is not known, of groups with {sorted(keys)}"
    raise unknown_optimizer(next(traces, lion))


def _adam_kind(groups: Iterable[Mapping[str, Any]]) -> str:
    """Files of PyTorch before 2.7 do not say; there it is AdamW, which is what the Trainer uses."""
    return "adamw" if _common(groups, "decoupled_weight_decay", True) else "adam"


def _read(
    kind: str,
    groups: Sequence[Mapping[str, Any]],
    parameters: Sequence[Sequence[str]],
    states: Mapping[str, Mapping[str, Any]],
) -> OptimizerNumbers:
    if any(group.get("maximize") for group in groups):
        raise InputError("optimizer", got="maximize=True", expected="one that minimizes a loss, negated where needed")
    return OptimizerNumbers(
        optimizer=kind,
        parameters=tuple(map(tuple, parameters)),
        rates=tuple(float(group.get("initial_lr", group["lr"])) for group in groups),
        weight_decay=tuple(float(group["weight_decay"]) for group in groups),
        momentum=float(_common(groups, "momentum", 0.0)) if kind == "sgd" else 0.0,
        dampening=float(_common(groups, "dampening", 0.0)) if kind == "sgd" else 0.0,
        nesterov=bool(_common(groups, "nesterov", False)) if kind == "sgd" else False,
        eps=float(_common(groups, "eps", 1e-8)) if kind != "sgd" else 1e-8,
        second_moments=None if kind == "sgd" else _second_moments(groups, parameters, states),
    )


def _common(groups: Iterable[Mapping[str, Any]], key: str, default: Any) -> Any:
    values = [group.get(key, default) for group in groups]
    if any(value != values[0] for value in values):
        raise InputError(
            "optimizer",
            got=f"groups of different {key}: {', '.join(map(str, values))}",
            expected="groups that differ in rate and weight decay alone",
        )
    return values[0]


def _second_moments(
    groups: Sequence[Mapping[str, Any]],
    parameters: Sequence[Sequence[str]],
    states: Mapping[str, Mapping[str, Any]],
) -> dict[str, Tensor] | None:
    """v̂ by name; a parameter without a state, beside others that have one, never had a gradient: its v̂ is 0."""
    stepped = {name: state for name, state in states.items() if float(state.get("step", 0)) > 0}
    if not stepped:
        return None
    return {
        name: _second_moment(name, stepped[name], group) if name in stepped else torch.zeros(())
        for group, names in zip(groups, parameters, strict=True)
        for name in names
    }


def _second_moment(name: str, state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    """v̂ = v / (1 − β₂ᵗ), as the optimizer divides by it (Kingma & Ba 2015); AMSGrad holds the largest v."""
    held = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
    if not isinstance(held, Tensor) or hasattr(held, "full_tensor") or not held.is_floating_point():
        raise InputError(
            f"second moments of {name!r}",
            got=f"a {type(held).__name__}, spread over devices or compressed",
            expected="a plain tensor of each parameter's shape",
            fix="give the training's numbers to jostle.Training: second moments are then estimated at the checkpoint",
        )
    moment = held.detach().to("cpu", torch.promote_types(torch.float32, held.dtype))
    return moment / (1 - float(group["betas"][1]) ** float(state["step"]))


def spread_rates(given: float | Sequence[float], rates: Sequence[float], subject: str) -> tuple[float, ...]:
    """A number for each group of an optimizer; one number stands for all where all have the same rate."""
    numbers = [float(given)] if isinstance(given, float | int | np.number) else [float(value) for value in given]
    if len(numbers) == 1 and len(set(rates)) == 1:
        numbers = numbers * len(rates)
    if len(numbers) != len(rates):
        raise InputError(
            subject,
            got=f"{len(numbers)} numbers for {len(rates)} groups with rates {', '.join(f'{rate:g}' for rate in rates)}",
            expected="one for each group, in their order",
        )
    return tuple(numbers)

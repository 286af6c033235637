"""One step of an optimizer as a function of numbers, which can be differentiated: SGD, Adam, AdamW.

What a step makes of a weight depends on that weight, its gradient, and what the optimizer keeps of it. Clipping is
apart, since a length is of all gradients together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jostle.errors import InputError

Kept = dict[str, Tensor]
"""What an optimizer keeps of a parameter, by its own names: `momentum_buffer`; or `exp_avg` and `exp_avg_sq`."""

Root = Callable[[Tensor], Tensor]
"""√v̂ of Adam, or something smoother in its place."""


@dataclass(frozen=True)
class Rule:
    """How a step moves the parameters of one group.

    Attributes:
        kind: "sgd", "adam" or "adamw".
        settings: of the group, at this step.
        number: how many steps these parameters have moved by, this one among them.
    """

    kind: str
    settings: Mapping[str, Any]
    number: int

    def __call__(self, weight: Tensor, kept: Kept, gradient: Tensor, root: Root = torch.sqrt) -> tuple[Tensor, Kept]:
        """Return the weight after the step, and what is then kept."""
        settings, rate = self.settings, self.settings["lr"]
        if settings.get("maximize"):
            gradient = -gradient
        if settings["weight_decay"] and self.kind != "adamw":
            gradient = gradient + settings["weight_decay"] * weight
        if self.kind == "sgd":
            return self._by_sgd(weight, kept, gradient)
        if self.kind == "adamw":
            weight = weight * (1 - rate * settings["weight_decay"])
        first, second = settings["betas"]
        mean = kept["exp_avg"] + (1 - first) * (gradient - kept["exp_avg"])
        square = second * kept["exp_avg_sq"] + (1 - second) * gradient.square()
        length = root(square / (1 - second**self.number)) + settings["eps"]
        return weight - rate / (1 - first**self.number) * mean / length, {"exp_avg": mean, "exp_avg_sq": square}

    def _by_sgd(self, weight: Tensor, kept: Kept, gradient: Tensor) -> tuple[Tensor, Kept]:
        settings = self.settings
        momentum = settings["momentum"]
        if not momentum:
            return weight - settings["lr"] * gradient, {}
        buffer = gradient
        if self.number > 1:
            buffer = momentum * kept["momentum_buffer"] + (1 - settings["dampening"]) * gradient
        step = gradient + momentum * buffer if settings["nesterov"] else buffer
        return weight - settings["lr"] * step, {"momentum_buffer": buffer}


KINDS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.SGD: "sgd",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adamw",
}
KEPT = {"sgd": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq")}


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return "sgd", "adam" or "adamw".

    Raises:
        InputError: another optimizer, or a variant whose steps are not known here.
    """
    kind = KINDS.get(type(optimizer))
    if kind is None:
        raise InputError(
            "optimizer",
            got=f"a {type(optimizer).__name__}",
            expected="torch.optim.SGD, Adam or AdamW, whose steps can be differentiated here",
        )
    for group in optimizer.param_groups:
        if group.get("amsgrad"):
            raise InputError("optimizer", got="amsgrad=True", expected="Adam or AdamW without it")
        if kind == "adam" and group.get("decoupled_weight_decay"):
            kind = "adamw"
    return kind


def rules_of(optimizer: torch.optim.Optimizer, kind: str) -> list[tuple[nn.Parameter, Rule]]:
    """Return how the next step moves each parameter that has a gradient."""
    found = []
    for group in optimizer.param_groups:
        settings = {name: _number(value) for name, value in group.items() if name != "params"}
        for parameter in group["params"]:
            if parameter.requires_grad:
                state = optimizer.state.get(parameter, {})
                done = int(state["step"]) if "step" in state else int("momentum_buffer" in state)
                found.append((parameter, Rule(kind, settings, done + 1)))
    return found


def kept_of(optimizer: torch.optim.Optimizer, kind: str, parameter: nn.Parameter) -> Kept:
    """Return what an optimizer keeps of a parameter: zeros before its first step."""
    state = optimizer.state.get(parameter, {})
    found = {name: state.get(name) for name in KEPT[kind]}
    return {name: torch.zeros_like(parameter.data) if value is None else value for name, value in found.items()}


def clipped(
    gradients: Sequence[Tensor], longest: float | None
) -> tuple[list[Tensor], Callable[[list[Tensor]], list[Tensor]]]:
    """Return gradients cut to a length together, and what changes of those cost by the gradients themselves.

    The latter takes and gives a tensor for each parameter, (query, ...).
    """
    if longest is None:
        return [*gradients], lambda cotangents: cotangents
    length = torch.stack([gradient.norm() for gradient in gradients]).norm()
    factor = longest / (length + 1e-6)
    if not factor < 1:
        return [*gradients], lambda cotangents: cotangents

    def back(cotangents: list[Tensor]) -> list[Tensor]:
        pairs = [*zip(cotangents, gradients, strict=True)]
        along = sum((one.flatten(1) @ gradient.flatten() for one, gradient in pairs), torch.zeros_like(length))
        lost = along * factor / ((length + 1e-6) * length)
        return [factor * one - lost.view(-1, *[1] * gradient.ndim) * gradient for one, gradient in pairs]

    return [factor * gradient for gradient in gradients], back


def _number(value: Any) -> Any:
    """A rate may be a tensor, for graphs."""
    return float(value) if isinstance(value, Tensor) else value

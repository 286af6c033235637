"""Stand-ins for a model, before a loss: one keeps what the model gives, the other gives what was kept.

A stand-in is of the model's own class, has its parameters, attributes and methods, and differs in what a call does. So
do its parts: a loss may call the body of a model and then its head, and both are recorded, in the order of the calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

Answer = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""What is given for a call of a module, with its inputs by position and by name."""


def recorder(model: nn.Module, calls: list[Any]) -> nn.Module:
    """Return what stands in for a model, and adds what it gives to a list."""

    def record(called: Callable[..., Any], inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        found = called(*inputs, **named)
        calls.append(found)
        return found

    return _stand_in(model, record, {})


def replayer(model: nn.Module, calls: list[Any]) -> nn.Module:
    """Return what stands in for a model, and gives what was recorded, call by call."""
    left: Iterator[Any] = iter(calls)
    return _stand_in(model, lambda called, inputs, named: next(left), {})


def _stand_in(module: nn.Module, answer: Answer, known: dict[int, nn.Module]) -> nn.Module:
    if id(module) in known:
        return known[id(module)]
    kind: Any = _class_of(type(module))
    found = known[id(module)] = kind.__new__(kind)
    # The same dictionary of parameters, in which they are substituted while a function of the weights is computed.
    found.__dict__.update(vars(module))
    found.__dict__["_modules"] = {
        name: child if child is None else _stand_in(child, answer, known) for name, child in module._modules.items()
    }

    @functools.wraps(module.forward)
    def forward(*inputs: Any, **named: Any) -> Any:
        return answer(module.forward, inputs, named)

    # `stands_for` says to our own losses that a model is to be called as it is.
    found.__dict__.update(stands_for=module, forward=forward, _answer=answer)
    return found


@functools.cache
def _class_of(kind: Any) -> type[nn.Module]:
    def call(self: Any, *inputs: Any, **named: Any) -> Any:
        module = vars(self).get("stands_for")
        if module is None:  # made from stand-ins, as a part of a sequence is
            return kind.__call__(self, *inputs, **named)
        return vars(self)["_answer"](module, inputs, named)

    return type(kind)(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})

"""Functions of tensors, compiled on a GPU once they have taken long enough.

In the eager way each operation reads and writes memory by itself. Forward mode has several for every operation of a
model, and compiled they are one pass.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, _inductor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

log = logging.getLogger("jostle")

WORTH_IT, SPENT = 15.0, 5.0
"""Seconds that a function will take yet with inputs of one shape, or has taken where that is not known, before it is
compiled: that takes up to 15, and then it is two to three times as quick."""


OPTIONS = {"comprehensive_padding": False, "shape_padding": False}
"""Of the compiler: where it padded rows of intermediate results, forward mode came out wrong (torch 2.11). Texts were
padded at the same time, so which of the two mended it is not known."""


class Compiled:
    """Calls functions, from their compiled form where there is one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[Hashable, float] = {}
        self._compiled: dict[Hashable, Callable[..., Any] | None] = {}
        self._rounds, self._round = 0, 0

    def expect(self, rounds: int) -> None:
        """Be told how many times alike work comes."""
        self._rounds, self._round = rounds, 0
        self._seconds.clear()

    def next_round(self) -> None:
        """Be told that it begins once more."""
        self._round += 1

    def __call__(self, name: str, function: Callable[..., Any], *inputs: Any) -> Any:
        """Return ``function(*inputs)``; functions of one name do the same, whatever the numbers of the inputs are."""
        if self._device.type != "cuda":
            return function(*inputs)
        leaves, form = pytree.tree_flatten(inputs)
        kind = (name, form, *((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves))
        if kind not in self._compiled and self._is_worth_it(kind):
            self._compiled[kind] = self._compile(name, function, inputs, leaves)
        known = self._compiled.get(kind)
        if known is not None:
            return known(*(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        if kind in self._compiled:
            return function(*inputs)
        if self._round == 1 < self._rounds:  # what is done for the first time takes longer
            return function(*inputs)
        torch.cuda.synchronize(self._device)
        started = time.perf_counter()
        result = function(*inputs)
        torch.cuda.synchronize(self._device)
        self._seconds[kind] = self._seconds.get(kind, 0.0) + time.perf_counter() - started
        return result

    def _is_worth_it(self, kind: Hashable) -> bool:
        seconds, timed = self._seconds.get(kind, 0.0), self._round - 2  # of those rounds that are over
        if self._rounds > 1:
            return timed > 0 and seconds / timed * (self._rounds - self._round) > WORTH_IT
        return seconds > SPENT

    def _compile(
        self, name: str, function: Callable[..., Any], inputs: Any, leaves: list[Any]
    ) -> Callable[..., Any] | None:
        tensors: list[Any] = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        form = pytree.tree_structure(inputs)
        results: dict[str, Any] = {}

        def flat(*given: Tensor) -> tuple[Any, ...]:
            own = iter(given)
            result = function(
                *pytree.tree_unflatten([next(own) if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)
            )
            values, results["form"] = pytree.tree_flatten(result)
            return tuple(values)

        def zeros(size: Any, **options: Any) -> Tensor:
            # Those of forward mode have no memory, and compiled code would read them from there all the same.
            return torch.zeros(size, **{**options, "device": self._device})

        try:
            started = time.perf_counter()
            expected = function(*inputs)
            graph = make_fx(flat, decomposition_table={torch.ops.aten._efficientzerotensor.default: zeros})(*tensors)
            # Not by `torch.compile`: it would compile again for each layer, whose weights begin elsewhere.
            compiled: Any = _inductor.compile(graph, tensors, options=OPTIONS)
            found = compiled(*tensors)
            for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
                difference = (one.float() - other.float()).norm() / other.float().norm()
                eps = torch.finfo(other.dtype).eps
                if not difference <= max(0.01, 10 * eps):
                    raise ValueError(f"compiled, it gives other numbers: by {float(difference):.2g}")
            log.info("compiled %s in %.1f s", name, time.perf_counter() - started)
        except Exception as error:  # a model may do anything that cannot be compiled
            log.info("%s is not compiled (%s)", name, str(error).partition("\n")[0][:200])
            return None
        return lambda *given: pytree.tree_unflatten(compiled(*given), results["form"])

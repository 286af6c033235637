"""Functions of tensors as graphs of operations that run without Python.

A small model spends more time in Python than in its arithmetic, and threads take turns at it. Captured, a function is
one call: PyTorch goes through its operations by itself, the same ones in the same order and so with the same bits,
while other threads have Python.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.jit._fuser import optimized_execution

from jostle.data.datasets import map_tensors

log = logging.getLogger("jostle")

LONGEST_CALL = 0.03
"""A function that takes longer than this, in seconds, is not captured: it is arithmetic that hardly gains, or so many
operations that capturing them would take a while (some 300 times as long as they do)."""

MOST_SECONDS = 10.0
"""What capturing may take in all. After that no more is captured, of inputs of ever other shapes, say."""

COMPARED_CALLS = 4
"""So many calls of a graph are compared with the function itself. Numbers that a function has looked at in a way that
cannot be noticed, as by ``tolist``, would be those of the inputs at which it was captured."""

_capturing = threading.Lock()
"""PyTorch can do one at a time, of all threads: meanwhile it stands between all modules and their calls."""


@dataclass
class _Known:
    """What is known of a function with inputs of one kind."""

    seconds: float = 0.0
    """What its calls took, as it is."""
    least: float = float("inf")
    graph: Callable[..., Tensor] | None = None
    compared: int = 0


class Graphs:
    """Runs functions: as they are at first, and as graphs when that would have been worth it.

    That is when a function has taken as long, with inputs of one kind, as it took to capture the last one, which is a
    quarter of a second for a gradient of a small classifier.

    Attributes:
        at_once: capture whatever comes for the second time.
    """

    last = 2.0
    """What capturing took the last time in this process, in seconds; the first time it loads half a compiler."""

    def __init__(self) -> None:
        self.at_once = False
        self._known: dict[Hashable, _Known] = {}
        self._as_they_are: set[Hashable] = set()
        self._seconds = 0.0

    def run(self, name: Hashable, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Return ``function(*inputs)``; functions of one name do the same, and no input is differentiated."""
        # Which kernels there are may decide what a function does.
        name = (name, torch.backends.mkldnn.enabled)
        known = self._known.setdefault((name, _kind(inputs)), _Known())
        if known.graph is None and self._is_worth_it(name, known):
            with _capturing:
                if known.graph is None and self._is_worth_it(name, known):
                    self._capture(name, known, function, inputs)
        if known.graph is None or name in self._as_they_are:
            started = time.perf_counter()
            result = function(*inputs)
            taken = time.perf_counter() - started
            known.seconds, known.least = known.seconds + taken, min(known.least, taken)
            return result
        with optimized_execution(False):  # which would make other operations of them, with other bits
            result = known.graph(*_tensors(inputs))
        if known.compared < COMPARED_CALLS:
            known.compared += 1
            expected = function(*inputs)
            if not ((result == expected) | (result.isnan() & expected.isnan())).all():
                self._leave(name, "it gives other numbers")
                return expected
        return result

    def _is_worth_it(self, name: Hashable, known: _Known) -> bool:
        wanted = known.seconds > 0 if self.at_once else known.seconds >= Graphs.last
        return wanted and known.least < LONGEST_CALL and name not in self._as_they_are and self._seconds < MOST_SECONDS

    def _capture(self, name: Hashable, known: _Known, function: Callable[..., Tensor], inputs: tuple[Any, ...]) -> None:
        started = time.perf_counter()
        try:
            known.graph = _capture(function, inputs)
            Graphs.last = time.perf_counter() - started
        except Exception as error:  # any model may do what cannot be captured
            self._leave(name, f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}")
        self._seconds += time.perf_counter() - started

    def _leave(self, name: Hashable, reason: str) -> None:
        if not self._as_they_are:
            log.info("chains run through Python in part, since not all is captured as graphs (%s)", reason)
        self._as_they_are.add(name)


def _capture(function: Callable[..., Tensor], inputs: tuple[Any, ...]) -> Callable[..., Tensor]:
    from torch.fx.experimental.proxy_tensor import make_fx

    def of_tensors(*given: Tensor) -> Tensor:
        rest = iter(given)
        return function(*map_tensors(inputs, lambda _: next(rest)))

    tensors = tuple(_tensors(inputs))
    # Fails where numbers are seen to decide what is to be done.
    operations = make_fx(of_tensors)(*tensors)
    operations.graph.eliminate_dead_code()
    operations.recompile()
    # As modules of operations that Python calls, they would be no quicker: that is what takes the time.
    with optimized_execution(False):
        graph: Any = torch.jit.trace(operations, tensors, check_trace=False)
        graph(*tensors)  # the first call is slower
    return graph


def _tensors(inputs: tuple[Any, ...]) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(inputs, found.append)
    return found


def _kind(tree: Any) -> Hashable:
    """Everything about inputs but their numbers."""
    if isinstance(tree, Tensor):
        return tree.shape, tree.stride(), tree.dtype
    if isinstance(tree, Mapping):
        return type(tree), *((key, _kind(value)) for key, value in tree.items())
    return type(tree), *map(_kind, tree)

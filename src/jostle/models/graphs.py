"""Functions of tensors as graphs of operations that run without Python.

Threads take turns at Python, and a small model spends more time there than in its arithmetic. Captured, a function is
one call: PyTorch goes through its operations by itself, the same ones in the same order and so with the same bits,
while other threads have Python.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

log = logging.getLogger("jostle")

MOST_SECONDS = 10.0
"""What capturing may take, of a run of a minute and more: a gradient of a small classifier takes a quarter of a second,
one of a language model seconds. When they are over, whatever has another shape runs as it is."""


class Graphs:
    """Runs functions as graphs, captured when inputs of a shape come for the first time; or as they are."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, Callable[..., Tensor]] = {}
        self._as_they_are: set[Hashable] = set()
        self._seconds = 0.0
        self._capturing = threading.Lock()

    def run(self, name: Hashable, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Return ``function(*inputs)``; functions of one name do the same, and no input is differentiated."""
        leaves, structure = pytree.tree_flatten(inputs)
        # Which kernels there are may decide what a function does.
        name = (name, torch.backends.mkldnn.enabled)
        key = (name, str(structure), *map(_kind, leaves))
        if key not in self._graphs and name not in self._as_they_are and self._seconds < MOST_SECONDS:
            with self._capturing:  # PyTorch can do one at a time
                if key not in self._graphs and name not in self._as_they_are:
                    self._capture(name, key, function, leaves, structure)
        graph = self._graphs.get(key)
        return function(*inputs) if graph is None else graph(*filter(torch.is_tensor, leaves))

    def _capture(self, name: Hashable, key: Hashable, *what: Any) -> None:
        started = time.perf_counter()
        try:
            self._graphs[key] = _capture(*what)
        except Exception as error:  # any model may do what cannot be captured
            if not self._as_they_are:
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
                log.info("chains run through Python in part, since not all is captured as graphs (%s)", reason)
            self._as_they_are.add(name)
        self._seconds += time.perf_counter() - started


def _capture(function: Callable[..., Tensor], leaves: list[Any], structure: pytree.TreeSpec) -> Callable[..., Tensor]:
    from torch.fx.experimental.proxy_tensor import make_fx

    tensors = [leaf for leaf in leaves if torch.is_tensor(leaf)]

    def of_tensors(*given: Tensor) -> Tensor:
        rest = iter(given)
        filled = [next(rest) if torch.is_tensor(leaf) else leaf for leaf in leaves]
        return function(*pytree.tree_unflatten(filled, structure))

    # Fails where numbers decide what is to be done.
    operations = make_fx(of_tensors)(*tensors)
    operations.graph.eliminate_dead_code()
    operations.recompile()
    # As modules of operations that Python calls, they would be no quicker: that is what takes the time.
    graph: Any = torch.jit.trace(operations, tuple(tensors), check_trace=False)
    for _ in range(2):  # the first calls look at it, and are slower
        graph(*tensors)
    return graph


def _kind(leaf: Any) -> Hashable:
    return (leaf.shape, leaf.stride(), leaf.dtype) if torch.is_tensor(leaf) else leaf

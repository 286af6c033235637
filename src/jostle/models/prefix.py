"""Where only late blocks move, what comes before them is computed once.

The blocks of a model before the first that has a moving weight give the same output at every draw. It is kept for each
observed batch, and served in their place.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from jostle.data.datasets import versions
from jostle.losses import Batch, Loss

log = logging.getLogger("jostle")

KEPT_BYTES = {"cuda": 16 << 30, "cpu": 2 << 30}
"""How much memory the kept outputs may take; batches beyond it are computed in full at every draw."""


class Prefix:
    """The blocks that come before everything that moves, and their outputs for each observed batch.

    Args:
        model: the model.
        moving: the parameters that move.
    """

    def __init__(self, model: nn.Module, moving: list[nn.Parameter]) -> None:
        self._model = model
        self._moving = {id(parameter) for parameter in moving}
        self.blocks = repeated_blocks(model)
        first = next((number for number, block in enumerate(self.blocks) if self._moves(block)), len(self.blocks))
        self.frozen = self.blocks[:first]
        self._kept: dict[int, Any] = {}
        self._bytes = 0
        self._tried = False

    def _moves(self, module: nn.Module) -> bool:
        return any(id(parameter) in self._moving for parameter in module.parameters())

    def check(self, loss: Loss, batch: Batch) -> None:
        """Find out, by running the model once, whether anything that moves comes before the blocks do."""
        if self._tried or not self.frozen:
            return
        self._tried = True
        called: list[nn.Module] = []
        owners = [m for m in self._model.modules() if any(id(p) in self._moving for p in m.parameters(recurse=False))]
        watched = [*owners, self.frozen[0]]
        hooks = [module.register_forward_pre_hook(lambda module, inputs: called.append(module)) for module in watched]
        try:
            with torch.no_grad():
                loss(self._model, batch)
        finally:
            for hook in hooks:
                hook.remove()
        if not called or called[0] is not self.frozen[0] or called.count(self.frozen[0]) != 1:
            self.frozen = []
        else:
            log.info(
                "the first %d of %d blocks do not move: their outputs are kept", len(self.frozen), len(self.blocks)
            )

    @contextlib.contextmanager
    def serving(self, batch: Batch) -> Iterator[None]:
        """Have the frozen blocks give what they gave for this batch before; the first time, keep it."""
        if not self.frozen:
            yield
        elif id(batch) in self._kept:
            output = self._kept[id(batch)][1]
            before = [vars(block).get("forward") for block in self.frozen]  # a wrapper that others put there
            for block in self.frozen:
                block.forward = lambda *inputs, **named: output
            try:
                yield
            finally:
                for block, forward in zip(self.frozen, before, strict=True):
                    if forward is None:
                        del block.forward
                    else:
                        block.forward = forward
        else:
            outputs: list[tuple[Any, dict[Tensor, int]]] = []
            hook = self.frozen[-1].register_forward_hook(
                lambda module, inputs, output: outputs.append((output, versions(output)))
            )
            try:
                yield
            finally:
                hook.remove()
            if len(outputs) == 1:
                self._keep(batch, *outputs[0])

    def forget(self) -> None:
        """Give back the memory of everything that is kept."""
        self._kept, self._bytes = {}, 0

    def _keep(self, batch: Batch, output: Any, tensors: dict[Tensor, int]) -> None:
        """Keep what the last frozen block gave, which held these tensors then; or do without, from now on."""
        # What comes after it may have written over it, as a residual `x += f(x)` does.
        if not tensors or versions(output) != tensors:
            reason = "what comes after them changes them in place" if tensors else "they are no tensors"
            log.info("outputs of blocks that do not move are not kept (%s)", reason)
            self.frozen = []
            self.forget()
            return
        size = sum(value.numel() * value.element_size() for value in tensors)
        if self._bytes + size <= KEPT_BYTES.get(next(iter(tensors)).device.type, 0):
            self._bytes += size
            # The batch itself is kept beside its output, so that its identity is not given to another one.
            self._kept[id(batch)] = (batch, output)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the model's repeated blocks (a transformer's layers); none where it has none."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(child) for child in module}) == 1:
            return list(module)
    return []

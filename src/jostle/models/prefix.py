"""Where only late layers move, what comes before them is computed once.

What a model computes before the first module that has a moving weight is the same at every draw. It is kept for each
observed batch, and served in the place of those modules: the first of its repeated blocks (a transformer's layers), or,
of a model that has none, whatever it calls before anything that moves.
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
    """The modules that come before everything that moves, and what the last of them gives for each observed batch.

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

    def off(self) -> None:
        """Keep nothing."""
        self._tried, self.frozen = True, []
        self.forget()

    def check(self, loss: Loss, batch: Batch) -> None:
        """Find out, by running the model, whether anything that moves comes before what is to be kept."""
        if self._tried:
            return
        self._tried = True
        if not self.blocks:
            self._look_for_stages(loss, batch)
        elif self.frozen:
            entered = [module for module, left in self._calls(loss, batch) if not left]
            called = [module for module in entered if module is self.frozen[0] or self._owns_moving(module)]
            if not called or called[0] is not self.frozen[0] or called.count(self.frozen[0]) != 1:
                self.off()
                return
            log.info(
                "the first %d of %d blocks do not move: their outputs are kept", len(self.frozen), len(self.blocks)
            )

    def _owns_moving(self, module: nn.Module) -> bool:
        return any(id(parameter) in self._moving for parameter in module.parameters(recurse=False))

    def _calls(self, loss: Loss, batch: Batch) -> list[tuple[nn.Module, bool]]:
        """All modules in the order in which they are entered and, with True, left."""
        calls: list[tuple[nn.Module, bool]] = []
        hooks = []
        for module in self._model.modules():
            hooks.append(module.register_forward_pre_hook(lambda module, inputs: calls.append((module, False))))
            hooks.append(module.register_forward_hook(lambda module, inputs, output: calls.append((module, True))))
        try:
            with torch.no_grad():
                loss(self._model, batch)
        finally:
            for hook in hooks:
                hook.remove()
        return calls

    def _look_for_stages(self, loss: Loss, batch: Batch) -> None:
        """Of a model without repeated blocks: what it is done with when it comes to the first moving weight.

        What comes later may use more of that than the last output, as a connection that skips modules does. So it is
        tried out: the last gives what it gave, the others NaN, and no loss may notice.
        """
        calls = self._calls(loss, batch)
        entered = [module for module, left in calls if not left]
        first = next((place for place, (module, _) in enumerate(calls) if self._owns_moving(module)), 0)
        done = [module for module, left in calls[:first] if left and entered.count(module) == 1]
        within = {inner for module in done for inner in module.modules() if inner is not module}
        stages = [module for module in done if module not in within]
        if not any(True for module in stages for _ in module.parameters()):
            return
        self.frozen = stages
        try:
            with torch.no_grad():
                before, after = (self._served(loss, batch) for _ in range(2))
        except Exception as error:  # a model may do anything with what it is given
            log.debug("what comes before all that moves is not kept (%s)", error)
            self.off()
            return
        if id(batch) in self._kept and torch.allclose(before, after, rtol=1e-3, atol=1e-5):
            log.info("%d modules come before all that moves: what the last of them gives is kept", len(stages))
        else:
            self.off()

    def _served(self, loss: Loss, batch: Batch) -> Tensor:
        with self.serving(batch):
            return loss(self._model, batch)

    @contextlib.contextmanager
    def serving(self, batch: Batch) -> Iterator[None]:
        """Have the frozen modules give what they gave for this batch before; the first time, keep it."""
        if not self.frozen:
            yield
        elif id(batch) in self._kept:
            outputs = self._kept[id(batch)][1]
            before = [vars(module).get("forward") for module in self.frozen]  # a wrapper that others put there
            for module, output in zip(self.frozen, outputs, strict=True):
                module.forward = lambda *inputs, output=output, **named: output
            try:
                yield
            finally:
                for module, forward in zip(self.frozen, before, strict=True):
                    if forward is None:
                        del module.forward
                    else:
                        module.forward = forward
        else:
            given: list[tuple[Any, dict[Tensor, int]]] = []
            # Of all but the last only shapes count; blocks are taken to pass on what has the same one.
            watched = self.frozen[-1:] if self.blocks else self.frozen
            hooks = [
                module.register_forward_hook(lambda module, inputs, output: given.append((output, versions(output))))
                for module in watched
            ]
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()
            if len(given) == len(watched):
                self._keep(batch, given)

    def forget(self) -> None:
        """Give back the memory of everything that is kept."""
        self._kept, self._bytes = {}, 0

    def _keep(self, batch: Batch, given: list[tuple[Any, dict[Tensor, int]]]) -> None:
        """Keep what the last frozen module gave, which held these tensors then; or do without, from now on."""
        output, tensors = given[-1]
        # What comes after it may have written over it, as a residual `x += f(x)` does.
        if not tensors or versions(output) != tensors:
            reason = "what comes after them changes them in place" if tensors else "they are no tensors"
            log.info("outputs of modules that do not move are not kept (%s)", reason)
            self.off()
            return
        others = [output] * len(self.frozen[:-1]) if self.blocks else [_nothing_of(one) for one, _ in given[:-1]]
        size = sum(value.numel() * value.element_size() for value in tensors)
        if self._bytes + size <= KEPT_BYTES.get(next(iter(tensors)).device.type, 0):
            self._bytes += size
            # The batch itself is kept beside its output, so that its identity is not given to another one.
            self._kept[id(batch)] = (batch, [*others, output])


def _nothing_of(output: Any) -> Tensor:
    """A tensor of the same shape without any information, which takes no memory; whatever is made of it shows."""
    if not (isinstance(output, Tensor) and output.is_floating_point()):
        raise TypeError(f"an output that cannot be replaced: {type(output).__name__}")
    return torch.full((), torch.nan, dtype=output.dtype, device=output.device).expand(output.shape)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the model's repeated blocks (a transformer's layers); none where it has none."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(child) for child in module}) == 1:
            return list(module)
    return []

"""One chain at a time in the model's own parameters: the way of large models, and of whatever `vmap` cannot take.

A chain's weights are written over the model's moving parameters, so there is no second copy of them, and everything
that is usually done to a model can be done to this one: its blocks compiled, its passes recorded as CUDA graphs. w* is
put back at the end, whatever happens in between.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from jostle.data.datasets import Data
from jostle.losses import Batch, Loss, at_least_float32
from jostle.models.float8 import Float8
from jostle.models.functional import FunctionalModel, ObservedBatch, free_memory, minibatch, sample_means
from jostle.models.prefix import Prefix
from jostle.models.weights import MovingWeights

log = logging.getLogger("jostle")

LENGTH_STEP = 16
"""Minibatches of sequences are padded to a multiple of this on a GPU, so that few shapes are recorded."""


class InPlace(FunctionalModel):
    """The model, lent for sampling: a context manager that gives it back as it was.

    Args:
        model: the model, at w*.
        moving: which of its weights move.
        bfloat16: compute matrix products in bfloat16 (autocast).
        float8: what observes in float8, where that was asked for.

    Attributes:
        replayed: how many passes came from a CUDA graph.
    """

    def __init__(
        self, model: nn.Module, moving: MovingWeights, *, bfloat16: bool = False, float8: Float8 | None = None
    ) -> None:
        super().__init__(model, moving, bfloat16=bfloat16)
        self._float8 = float8
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._parameters = [parameters[name] for name in moving.names]
        self._placed: list[Tensor] = []
        self._placed_version: int | None = None
        self._prefix = Prefix(model, self._parameters)
        self._compiled: dict[nn.Module, Any] = {}
        self._graphs: dict[Hashable, Graph] | None = None
        self._gradient: Tensor | None = None
        self._lasting = contextlib.ExitStack()
        self._gradient_dtype = functools.reduce(torch.promote_types, (value.dtype for value in self._parameters))
        self.replayed = 0

    def __enter__(self) -> Self:
        self._required_gradient = [(value, value.requires_grad) for value in self.model.parameters()]
        # Gradients of weights that do not move would be computed and thrown away.
        moving = {id(parameter) for parameter in self._parameters}
        for parameter, _ in self._required_gradient:
            if parameter.is_floating_point():
                parameter.requires_grad_(id(parameter) in moving)
        # Images run through a GPU's matrix units with their channels innermost; one such filter makes all follow.
        convolutions = [module for module in self.model.modules() if isinstance(module, nn.Conv2d)]
        values = itertools.chain.from_iterable(module.parameters() for module in convolutions)
        filters = [value for value in values if value.ndim == 4 and value.is_cuda]
        self._laid_out = [(parameter, parameter.data) for parameter in filters]
        for parameter, values in self._laid_out:
            parameter.data = values.contiguous(memory_format=torch.channels_last)
        if self._float8 is not None:
            self.until_given_back(self._float8)
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._lasting.close()
        finally:  # whatever was entered besides, the weights are put back
            self._place(self.moving.center)
            self._placed = []
            for parameter, values in self._laid_out:
                parameter.data = values
            for parameter, required in self._required_gradient:
                parameter.requires_grad_(required)
            self.compile(None)
            self._graphs = self._gradient = None

    def until_given_back(self, context: contextlib.AbstractContextManager[Any]) -> None:
        """Enter a context that is left together with the model."""
        self._lasting.enter_context(context)

    def compile(self, backend: str | None) -> None:
        """Compile the model's repeated blocks, or all of it where it has none; None undoes it.

        Blocks that are alike share one compilation, which keeps it short however deep the model is.
        """
        for module, before in self._compiled.items():
            module._compiled_call_impl = before
        moving_blocks = self._prefix.blocks[len(self._prefix.frozen) :]
        modules = [] if backend is None else (moving_blocks or [self.model])
        self._compiled = {module: module._compiled_call_impl for module in modules}  # a user may have compiled them
        for module in modules:
            module.compile(backend=_inductor if backend == "inductor" else backend)
        if self._float8 is not None:
            self._float8.compile(backend)

    @property
    def compiled(self) -> bool:
        """Whether `compile` was called."""
        return bool(self._compiled)

    def replay(self) -> None:
        """From now on, record each pass as a CUDA graph and replay it: a launch takes longer than a small kernel."""
        self._graphs = {}
        # All recordings of a model share their working memory: no two are replayed at the same time.
        self._pool = torch.cuda.graph_pool_handle()

    def _place(self, flat: Float[Tensor, " weight"]) -> None:
        """Write one chain's weights over the parameters."""
        if not self._placed or self._placed[0].data_ptr() != flat.data_ptr():
            parts = zip(flat.split(self.moving.sizes), self.moving.shapes, strict=True)
            self._placed, self._placed_version = [part.view(shape) for part, shape in parts], None
        # Every operation in place counts a tensor's version up: the same weights are written once.
        if self._placed_version != flat._version:
            with torch.no_grad():
                torch.ops.aten._foreach_copy_(self._written(), self._placed)
            self._placed_version = flat._version

    def let_go(self) -> None:
        """Hold on to no chain's weights: of a large model there is no room for those of a chain that is gone."""
        self._placed = []

    def _written(self) -> list[Tensor]:
        """Where weights are written."""
        return [*self._parameters]

    def _run(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Call a function of the model."""
        return function(self.model, *inputs)

    @torch.no_grad()
    def evaluate(
        self, function: Callable[..., Tensor], weights: Float[Tensor, "chain weight"], *inputs: Any
    ) -> Float[Tensor, "chain ..."]:
        """Return ``function(model, *inputs)`` at each chain's weights."""
        values = []
        for flat in weights:
            self._place(flat)
            with self.precision():
                values.append(self._run(function, *inputs).clone())  # a view of a weight becomes the next chain's
        return torch.stack(values)

    @torch.no_grad()
    def losses(
        self, loss: Loss, weights: Float[Tensor, "chain weight"], batches: Iterable[ObservedBatch]
    ) -> Float[Tensor, "chain column"]:
        """Return the recorded losses of all these batches, one after another, at each chain's weights."""
        kept = isinstance(batches, list)

        def passes() -> Tensor:
            parts = []
            with self._float8.keeping() if self._float8 else contextlib.nullcontext():
                for observed in batches:
                    with self.precision(), self._prefix.serving(observed.batch) if kept else contextlib.nullcontext():
                        parts.append(observed.recorded(loss(self.model, observed.batch)))
            return at_least_float32(torch.cat(parts))

        if isinstance(batches, list):
            self._prefix.check(loss, batches[0].batch)
        values = []
        for flat in weights:
            self._place(flat)
            # Batches that are made anew for every draw have no place of their own to be read from again.
            key = ("losses", id(batches))
            values.append(self._recorded(key, passes, copied=len(weights) > 1) if kept else passes())
        return torch.stack(values)

    @torch.no_grad()
    def mean_loss_gradient(
        self, loss: Loss, weights: Float[Tensor, "chain weight"], data: Data, indices: list[np.ndarray]
    ) -> Float[Tensor, "chain weight"]:
        """Return the gradient of each chain's minibatch loss, in the precision that the model computes in."""
        gradients = []
        for flat, chosen in zip(weights, indices, strict=True):
            gradient, _ = self.gradient_and_losses(loss, flat, data, chosen)
            # That of a single chain is not copied: of a large model there is no room for two.
            gradients.append(gradient.clone() if len(weights) > 1 and gradient is self._gradient else gradient)
        return gradients[0][None] if len(gradients) == 1 else torch.stack(gradients)

    @torch.no_grad()
    def gradient_and_losses(
        self, loss: Loss, flat: Float[Tensor, " weight"], data: Data, chosen: np.ndarray
    ) -> tuple[Float[Tensor, " weight"], Float[Tensor, "sample ..."]]:
        """Return the gradient of a chain's minibatch loss, and the losses that it is the gradient of.

        Where passes are recorded, both are good until the next call; no other pass writes over them.
        """

        def passes(batch: Batch, gradient: Tensor) -> Tensor:
            with self.plain_kernels():
                with torch.enable_grad(), self.precision():
                    losses = loss(self.model, batch)
                    value = sample_means(losses, loss, batch).mean()
                self._backward(value, gradient.split(self.moving.sizes))
            return losses.detach()

        self._place(flat)
        if self._graphs is None or not data.on_device:
            self._gradient = None
            gradient = torch.empty(self.moving.total, dtype=self._gradient_dtype, device=self.device)
            return gradient, passes(minibatch(data, chosen), gradient)
        if self._gradient is None:  # not in the working memory that recordings share
            self._gradient = torch.empty(self.moving.total, dtype=self._gradient_dtype, device=self.device)
        longest = data.longest(chosen)
        if longest is not None:
            longest = min(-(-longest // LENGTH_STEP) * LENGTH_STEP, data.longest(range(len(data))) or longest)
        rows = torch.from_numpy(chosen).to(self.device, non_blocking=True)
        key, place = ("gradient", id(data), len(chosen), longest), self._gradient
        losses = self._recorded(key, lambda rows: passes(data.gather(rows, longest), place), rows, copied=True)
        return place, losses

    @property
    def observes_as_it_moves(self) -> bool:
        """Whether a gradient's pass over its minibatch is that of an observation, and nothing else, to rounding."""
        other_kernels = self._float8 is not None or self._needs_plain_kernels or self._rounds_logits
        return not other_kernels and not self._prefix.frozen and self.crew.count == 1

    @property
    def _rounds_logits(self) -> bool:
        """Whether a language model's head moves in half precision: with a gradient, its logits are stored in that."""
        find = getattr(self.model, "get_output_embeddings", lambda: None)
        head = set(head.parameters()) if (head := find()) is not None else set()
        half = self.bfloat16 or any(value.dtype.itemsize == 2 for value in head)
        return half and not head.isdisjoint(self._parameters)

    def has_room_for_gradients(self, count: int) -> bool:
        """Whether a GPU has memory for so many gradients beside a chain that has not been started."""
        room = free_memory(self.device)
        bytes_a_weight = count * self._gradient_dtype.itemsize + self.moving.dtype.itemsize
        return room is not None and room > bytes_a_weight * self.moving.total

    @torch.no_grad()
    def evaluate_tensors(
        self, key: Hashable, function: Callable[..., Tensor], flat: Float[Tensor, " weight"], *inputs: Tensor
    ) -> Tensor:
        """Return ``function(model, *inputs)`` at a chain's weights; functions of one key do the same."""

        def passes(*inputs: Tensor) -> Tensor:
            with self.precision():
                return function(self.model, *inputs)

        self._place(flat)
        return self._recorded((key, *(value.shape for value in inputs)), passes, *inputs, copied=True)

    def _backward(self, value: Tensor, places: Sequence[Tensor]) -> None:
        """Put each parameter's gradient in its place as soon as it is known: all of them are never there twice."""
        missing = dict(enumerate(places))

        def take(number: int, parameter: Tensor) -> None:
            assert parameter.grad is not None
            missing.pop(number).copy_(parameter.grad.reshape(-1))
            parameter.grad = None

        own = [parameter.grad for parameter in self._parameters]
        hooks = []
        for number, parameter in enumerate(self._parameters):
            parameter.grad = None
            hooks.append(parameter.register_post_accumulate_grad_hook(functools.partial(take, number)))
        try:
            value.backward(inputs=self._parameters)
        finally:
            for parameter, hook, gradient in zip(self._parameters, hooks, own, strict=True):
                hook.remove()
                parameter.grad = gradient
        for place in missing.values():
            place.zero_()

    def free_memory(self) -> None:
        """Give back what is kept for speed alone: no more CUDA graphs, each of which holds its working memory."""
        if self.device.type == "cuda":
            # The memory of a recording belongs to the stream that it was made on, and is taken apart when that one has
            # nothing to do; but it is replayed on another.
            torch.cuda.synchronize(self.device)
        self._graphs = self._gradient = None
        self._prefix.forget()
        super().free_memory()

    def _recorded(self, key: Hashable, function: Callable[..., Tensor], *inputs: Tensor, copied: bool) -> Tensor:
        """Call a function of tensors, from its graph once there is one; good until it is called again, or copied."""
        if self._graphs is None:
            return function(*inputs)
        if key not in self._graphs:
            try:
                self._graphs[key] = Graph(function, inputs, self._pool)
            except Exception as error:  # a model may do anything that a graph cannot hold
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                log.info("passes are not recorded as CUDA graphs (%s)", reason[:150])
                log.debug("because of", exc_info=True)
                self._graphs = None
                return function(*inputs)
        self.replayed += 1
        result = self._graphs[key](*inputs)
        return result.clone() if copied else result


def _inductor(graph: Any, inputs: Sequence[Any]) -> Any:
    """Compile as "inductor" does, with our error function."""
    from torch._inductor import compile_fx, decomposition

    replaced = {**decomposition.select_decomp_table(), torch.ops.aten.erf.default: error_function}
    return compile_fx.compile_fx(graph, inputs, decompositions=replaced)


def error_function(x: Tensor) -> Any:
    """Return erf(x) = sign(x)·(1 − (a₁t + … + a₅t⁵)·e^(−x²)), t = 1/(1 + p|x|), to 5e-7; for float32 alone.

    The compiler's own takes so much arithmetic that a GELU takes 2.5 times as long as reading and writing it does.

    Reference: Abramowitz and Stegun, *Handbook of Mathematical Functions*, 7.1.26.
    """
    if x.dtype != torch.float32:
        return NotImplemented
    size = x.abs()
    t = 1 / (1 + 0.3275911 * size)
    polynomial = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return torch.copysign(1 - polynomial * torch.exp(-size * size), x)


class Graph:
    """A function of tensors, recorded once; its inputs and its output keep their places in memory."""

    def __init__(self, function: Callable[..., Tensor], inputs: Sequence[Tensor], pool: Any) -> None:
        self._inputs = [value.clone() for value in inputs]
        self._function = function  # what it reads is at places that nothing else may take
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            function(*self._inputs)  # libraries and compilers do their first-time work outside of the recording
            # A recording that fails leaves CUDA in a bad state: what would make it fail is looked for beforehand.
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                function(*self._inputs)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self._graph, pool=pool):
                self._output = function(*self._inputs)
        except Exception:
            for generator in torch.cuda.default_generators:  # they believe that the recording goes on
                generator.graphsafe_set_state(generator.clone_state())
            raise

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Replay it on other inputs of the same shapes; the result is good until the next call."""
        for place, value in zip(self._inputs, inputs, strict=True):
            place.copy_(value, non_blocking=True)
        self._graph.replay()
        return self._output

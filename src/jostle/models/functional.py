"""The model as a function of its moving weights: one chain after another, or all of a group side by side.

`FunctionalModel` is the plain meaning of it: weights are substituted for the length of a call, the model itself stays
at w*, and everything can be differentiated. `SideBySide` gives a group of chains at once, through `torch.func.vmap`;
`jostle.models.in_place.InPlace` is the fast way for one chain at a time. All three give the same numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.func import functional_call, vmap

from jostle.data.datasets import Data, map_tensors
from jostle.losses import Batch, Loss, at_least_float32
from jostle.models.graphs import Graphs
from jostle.models.weights import MovingWeights
from jostle.ranks import Crew

log = logging.getLogger("jostle")

Observable = Callable[[nn.Module], Tensor]
Result = TypeVar("Result")


class ObservedBatch(NamedTuple):
    """A batch, which entries of its losses are recorded (flat indices; None where all are), and how many these are."""

    batch: Batch
    entries: Tensor | None
    columns: int

    def recorded(self, losses: Float[Tensor, "sample ..."]) -> Float[Tensor, " column"]:
        """Return the entries that are recorded."""
        return losses.flatten() if self.entries is None else losses.flatten()[self.entries]


class FunctionalModel:
    """Losses, gradients and observables of a model at given weights, one chain after another.

    Args:
        model: the model, in eval mode.
        moving: which of its weights move.
        bfloat16: compute matrix products in bfloat16 (autocast); weights, losses and sums keep their precision.

    Attributes:
        crew: the processes that hold the model together; this one alone, unless it is sharded.
    """

    def __init__(self, model: nn.Module, moving: MovingWeights, *, bfloat16: bool = False) -> None:
        self.model, self.moving, self.crew = model, moving, Crew()
        self.bfloat16 = bfloat16
        self._said_short = False
        self._places = places_of(model)
        self.device = next(model.parameters()).device
        # cuDNN has no backward pass for recurrent layers in eval mode, which is the mode sampled here.
        self._needs_plain_kernels = any(isinstance(module, nn.RNNBase) for module in model.modules())

    @property
    def tolerance(self) -> float:
        """How far two evaluations of the same thing may differ, relatively, by rounding."""
        eps = [torch.finfo(value.dtype).eps for value in self.model.parameters() if value.is_floating_point()]
        return min(0.03, 1000 * max(*eps, torch.finfo(torch.bfloat16).eps if self.bfloat16 else 0.0))

    def call(self, function: Callable[..., Tensor], flat: Float[Tensor, " weight"], *inputs: Any) -> Tensor:
        """Return ``function(model, *inputs)`` at one chain's weights, differentiable with respect to them."""
        return self.call_with(function, self.moving.unflatten(flat), *inputs)

    def call_with(self, function: Callable[..., Tensor], weights: Mapping[str, Tensor], *inputs: Any) -> Tensor:
        """Return ``function(model, *inputs)`` with some weights in place of the model's own, by name."""
        with self.precision():
            return called_with(self.model, self._places, function, weights, *inputs)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Compute as was asked for."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.bfloat16 else contextlib.nullcontext()

    def sample_losses(self, loss: Loss, flat: Float[Tensor, " weight"], batch: Batch) -> Float[Tensor, " sample"]:
        """Return one differentiable loss a sample at one chain's weights; a sequence's is the mean of its tokens'."""
        return sample_means(self.call(loss, flat, batch), loss, batch)

    @torch.no_grad()
    def evaluate(
        self, function: Callable[..., Tensor], weights: Float[Tensor, "chain weight"], *inputs: Any
    ) -> Float[Tensor, "chain ..."]:
        """Return ``function(model, *inputs)`` at each chain's weights."""
        return torch.stack([self.call(function, flat, *inputs) for flat in weights])

    def losses(
        self, loss: Loss, weights: Float[Tensor, "chain weight"], batches: Iterable[ObservedBatch]
    ) -> Float[Tensor, "chain column"]:
        """Return the recorded losses of all these batches, one after another, at each chain's weights."""
        parts = []
        for observed in batches:
            values = self.evaluate(loss, weights, observed.batch).flatten(1)
            parts.append(values if observed.entries is None else values[:, observed.entries])
        return at_least_float32(torch.cat(parts, dim=1))

    @torch.no_grad()  # otherwise the weights that do not move would tie every step into one growing graph
    def mean_loss_gradient(
        self, loss: Loss, weights: Float[Tensor, "chain weight"], data: Data, indices: list[np.ndarray]
    ) -> Float[Tensor, "chain weight"]:
        """Return the gradient of each chain's minibatch loss: each sequence's token mean, then the batch's mean."""
        gradients = []
        for flat, chosen in zip(weights, indices, strict=True):
            leaf = flat.detach().requires_grad_()
            with torch.enable_grad(), self.plain_kernels():
                value = self.sample_losses(loss, leaf, minibatch(data, chosen)).mean()
                gradients.append(torch.autograd.grad(value, leaf)[0])
        return torch.stack(gradients)

    def gather(self, flat: Float[Tensor, " weight"]) -> Float[Tensor, " whole_weight"]:
        """Return a vector whole, for whoever leads the crew to store."""
        return flat

    def let_go(self) -> None:
        """Hold on to no chain's weights."""

    def capture_now(self) -> bool:
        """Return whether anything is captured in graphs, which begins here."""
        return False

    def free_memory(self) -> None:
        """Give back what is kept for speed alone, when memory has run out."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def with_room(self, make: Callable[[], Result]) -> Result:
        """Return what a function makes; when memory runs out, once more without what is kept for speed alone."""
        with contextlib.suppress(torch.OutOfMemoryError):
            return make()
        # Only here: an error that is being handled holds on to the memory of what failed.
        self.free_memory()
        if not self._said_short:
            log.warning("out of memory: what is kept for speed alone is given up from here on")
            self._said_short = True
        return make()

    def plain_kernels(self) -> contextlib.AbstractContextManager[None]:
        """Do without cuDNN where it has no backward pass."""
        return torch.backends.cudnn.flags(enabled=False) if self._needs_plain_kernels else contextlib.nullcontext()


class SideBySide(FunctionalModel):
    """All chains of a group at once: many small computations become few larger ones.

    Args:
        *given: those of `FunctionalModel`.
        captured: whether what it computes is captured in graphs, once that is worth it: for models on a CPU that
            nothing but tensors goes into and comes out of.
        **named: those of `FunctionalModel`.
    """

    def __init__(self, *given: Any, captured: bool = False, **named: Any) -> None:
        super().__init__(*given, **named)
        self._graphs = Graphs() if captured else None

    def capture_now(self) -> bool:
        """Capture what is computed from here on at once, for a run that is long; return whether there is anything."""
        if self._graphs is not None:
            self._graphs.at_once = True
        return self._graphs is not None

    @torch.no_grad()
    def evaluate(
        self, function: Callable[..., Tensor], weights: Float[Tensor, "chain weight"], *inputs: Any
    ) -> Float[Tensor, "chain ..."]:
        """Return ``function(model, *inputs)`` at each chain's weights."""

        def at(weights: Tensor, *inputs: Any) -> Tensor:
            return vmap(lambda flat: self.call(function, flat, *inputs))(weights)

        return self._run(("evaluate", function), at, weights, *inputs)

    @torch.no_grad()
    def mean_loss_gradient(
        self, loss: Loss, weights: Float[Tensor, "chain weight"], data: Data, indices: list[np.ndarray]
    ) -> Float[Tensor, "chain weight"]:
        """Return the gradient of each chain's minibatch loss: each sequence's token mean, then the batch's mean."""
        whole = len(indices[0]) == len(data)
        batch = data.whole() if whole else data.batch(np.concatenate(indices))

        def mean_loss(flat: Tensor, batch: Batch) -> Tensor:
            return self.sample_losses(loss, flat, batch).mean()

        if not whole:
            shape = (len(indices), len(indices[0]))
            batch = map_tensors(batch, lambda tensor: tensor.unflatten(0, shape))

        def gradient(weights: Tensor, batch: Batch) -> Tensor:
            leaf = weights.detach().requires_grad_()
            with torch.enable_grad(), self.plain_kernels():
                # A chain's loss knows no other chain's weights, so the gradient of their sum is that of each; and the
                # way back holds up no other thread, as it would within `vmap`.
                total = vmap(mean_loss, in_dims=(0, None if whole else 0))(leaf, batch).sum()
                return torch.autograd.grad(total, leaf)[0]

        return self._run(("gradient", loss, whole), gradient, weights, batch)

    def _run(self, name: Hashable, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Return ``function(*inputs)``; functions of one name do the same."""
        return function(*inputs) if self._graphs is None else self._graphs.run(name, function, *inputs)


def places_of(model: nn.Module) -> dict[str, list[str]]:
    """Under which names each parameter and buffer is substituted: once in every module that has it.

    Where a module has two names itself, `functional_call` would substitute twice, take the first substitute for what
    was there, and leave it in the model.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[int, dict[tuple[int, str], str]] = {}
    named = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    for name, tensor in itertools.chain(*named):
        module, _, own = name.rpartition(".")
        found.setdefault(id(tensor), {}).setdefault((id(modules[module]), own), name)
    return {
        name: list(found[id(tensor)].values())
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers())
    }


class Called(nn.Module):
    """Any function of a model as a module, so that weights can be substituted while it runs."""

    def __init__(self, model: nn.Module, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, *inputs: Any) -> Tensor:
        """Call it."""
        return self.function(self.model, *inputs)


def minibatch(data: Data, indices: np.ndarray) -> Batch:
    """Return the samples at these indices; the whole set, made once, where that is all of them."""
    return data.whole() if len(indices) == len(data) else data.batch(indices)


def called_with(
    model: nn.Module,
    places: Mapping[str, Sequence[str]],
    function: Callable[..., Any],
    numbers: Mapping[str, Tensor],
    *inputs: Any,
) -> Any:
    """Return ``function(model, *inputs)`` with these parameters and buffers, by name, in the `places_of` the model."""
    placed = {f"model.{place}": value for name, value in numbers.items() for place in places[name]}
    return functional_call(Called(model, function), placed, inputs, tie_weights=False)


def sample_means(losses: Float[Tensor, "sample ..."], loss: Loss, batch: Batch) -> Float[Tensor, " sample"]:
    """Return one loss a sample; a sequence's is the mean of its real tokens'."""
    if losses.ndim == 1:
        return losses
    real = real_tokens(losses, loss, batch)
    return torch.where(real, losses, 0).sum(1) / real.sum(1)


def real_tokens(losses: Float[Tensor, "sample token"], loss: Loss, batch: Batch) -> Bool[Tensor, "sample token"]:
    """Return which entries of per-token losses count: all, where the loss does not say."""
    mask = token_mask(loss, batch)
    return torch.ones_like(losses, dtype=torch.bool) if mask is None else mask


def token_mask(loss: Loss, batch: Batch) -> Tensor | None:
    """Return which entries of a per-token loss are real, or None where the loss does not say."""
    method = getattr(loss, "token_mask", None)
    return None if method is None else method(batch)


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout off and freeze batch statistics; put every module back as it was afterwards."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in flags.items():
            module.training = training


def free_memory(device: torch.device) -> int | None:
    """Return how much memory a GPU has for us; None of anything else."""
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached

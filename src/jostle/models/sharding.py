"""A model that no GPU has room for: its weights are spread over several, and put together block by block when used.

FSDP2's `fully_shard` does that. Each rank of a crew has some rows of every parameter, and of everything that a chain
has for each weight. It evaluates its share of the examples, so that losses and gradients of all of them together are
those of the whole model.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from jostle.data.datasets import Data
from jostle.errors import InputError
from jostle.losses import Loss, at_least_float32
from jostle.models.functional import ObservedBatch, sample_means
from jostle.models.in_place import InPlace
from jostle.models.prefix import repeated_blocks
from jostle.models.weights import MovingWeights
from jostle.ranks import Crew


class Sharded(InPlace):
    """A model whose weights are spread over a crew; the one that was passed stays whole, where it is.

    Args:
        model: the model, at w*.
        moving: which of its weights move.
        crew: the ranks that are to hold it.
        bfloat16: compute matrix products in bfloat16 (autocast).
    """

    def __init__(self, model: nn.Module, moving: MovingWeights, crew: Crew, *, bfloat16: bool = False) -> None:
        assert crew.mesh is not None
        scalar = next((name for name, value in model.named_parameters() if value.ndim == 0), None)
        if scalar is not None:
            raise InputError("shards", got=f"a model whose {scalar} is a single number", expected="weights with rows")
        model = _twin(model, set(moving.names))
        # Gradients are summed over ranks as precisely as a chain moves, whatever the model computes in.
        policy = MixedPrecisionPolicy(reduce_dtype=moving.dtype)
        for block in repeated_blocks(model):
            fully_shard(block, mesh=crew.mesh, mp_policy=policy)
        # The root is a call of any function of the model, so that what the function itself looks at is put together,
        # too. After each call it is taken apart: otherwise the next one would find the weights of this one.
        self._root = _Root(model)
        fully_shard(self._root, mesh=crew.mesh, mp_policy=policy, reshard_after_forward=True)
        super().__init__(model, moving.shard(crew.rank, crew.count), bfloat16=bfloat16)
        self.crew = crew
        self.moving.center = self.moving.center.to(self.device)  # that of the whole model stays where it is
        self._prefix.frozen = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is to be given back."""

    def replay(self) -> None:
        """Do nothing: what ranks do together is not recorded."""

    def _written(self) -> list[Tensor]:
        return [_local(parameter) for parameter in self._parameters]

    def _run(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        value = self._root(function, *inputs)
        return value.full_tensor() if isinstance(value, DTensor) else value

    @torch.no_grad()
    def losses(
        self, loss: Loss, weights: Float[Tensor, "chain weight"], batches: Iterable[ObservedBatch]
    ) -> Float[Tensor, "chain column"]:
        """Return the recorded losses of all these batches; each rank evaluates one of as many as there are ranks."""
        (flat,) = weights
        self._place(flat)
        remaining, parts = iter(batches), []
        while turn := list(itertools.islice(remaining, self.crew.count)):
            # A rank for which there is none evaluates another's: all of them have to take part.
            own = turn[self.crew.rank if self.crew.rank < len(turn) else 0]
            with self.precision():
                values = at_least_float32(own.recorded(self._run(loss, own.batch)))
            parts += [
                values if number == self.crew.rank else values.new_zeros(other.columns)
                for number, other in enumerate(turn)
            ]
        return self.crew.sum(torch.cat(parts))[None]

    @torch.no_grad()
    def mean_loss_gradient(
        self, loss: Loss, weights: Float[Tensor, "chain weight"], data: Data, indices: list[np.ndarray]
    ) -> Float[Tensor, "chain weight"]:
        """Return this rank's rows of the gradient of the minibatch loss, of which it evaluates its share."""
        ((flat,), (chosen,)) = weights, indices
        self._place(flat)
        own = chosen[self.crew.rank :: self.crew.count]
        batch = data.batch(own if len(own) else chosen[:1])
        with self.plain_kernels():
            with torch.enable_grad(), self.precision():
                value = sample_means(self._run(loss, batch), loss, batch).mean()
                # Gradients are averaged over ranks, each of which has the mean of its own examples.
                value = self.crew.count * len(own) / len(chosen) * value
            value.backward()
        parts = []
        for parameter, size in zip(self._parameters, self.moving.sizes, strict=True):
            gradient = parameter.grad
            parts.append(flat.new_zeros(size) if gradient is None else _local(gradient).reshape(-1).to(flat.dtype))
            parameter.grad = None
        return torch.cat(parts)[None]

    def gather(self, flat: Float[Tensor, " weight"]) -> Float[Tensor, " whole_weight"]:
        """Return a vector whole, for whoever leads the crew, in the memory of the host; parameter by parameter."""
        assert self.crew.mesh is not None
        parts = []
        for part, shape in zip(flat.split(self.moving.sizes), self.moving.whole.shapes, strict=True):
            each = -(-shape[0] // self.crew.count) * (shape.numel() // shape[0])
            padded = torch.cat([part, part.new_zeros(each - len(part))])
            gathered = [torch.empty_like(padded) for _ in range(self.crew.count)]
            dist.all_gather(gathered, padded, group=self.crew.mesh.get_group())
            if self.crew.leads:
                parts.append(torch.cat(gathered)[: shape.numel()].cpu())
        return torch.cat(parts) if parts else flat.new_empty(0)


class _Root(nn.Module):
    """Any function of a model as the forward pass of a module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        # An observable may be a piece of the weights, whose memory is gone when they are taken apart.
        return function(self.model, *inputs).clone()


def _twin(model: nn.Module, moving: set[str]) -> nn.Module:
    """The same modules again, around the same weights, of which those alone that move want a gradient."""
    named = dict(model.named_parameters())
    shared = {id(value): nn.Parameter(value.detach(), requires_grad=name in moving) for name, value in named.items()}
    return copy.deepcopy(model, shared)


def _local(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()

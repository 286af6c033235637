"""The model as a function of its moving weights, and the checks that it is one.

The model itself is never changed: its own parameters stay w*, and the moving ones are substituted for the length of a
call. One chain after another, or all of a group side by side through `torch.func.vmap`: the same numbers.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from jostle.data import Data, map_tensors
from jostle.errors import InputError
from jostle.losses import Batch, Loss
from jostle.posterior import MovingWeights
from jostle.traces import Columns

Observable = Callable[[nn.Module], Tensor]

KEPT_BATCHES = 1 << 30
"""Batches of an observed set are kept on the device when they take fewer bytes than this together."""

PROBED_EXAMPLES = 8
"""How many examples the check for batch neighbours evaluates alone and together."""


class FunctionalModel:
    """Losses, gradients and observables of a model at given weights, for a group of chains."""

    def __init__(self, model: nn.Module, moving: MovingWeights, *, side_by_side: bool = False) -> None:
        self.model, self.moving, self.side_by_side = model, moving, side_by_side
        self.device = next(model.parameters()).device

    def _call(self, function: Callable[..., Tensor], flat: Float[Tensor, " weight"], *inputs: Any) -> Tensor:
        weights = {f"model.{name}": value for name, value in self.moving.unflatten(flat).items()}
        return functional_call(_Call(self.model, function), weights, inputs)

    @torch.no_grad()
    def evaluate(
        self, function: Callable[..., Tensor], weights: Float[Tensor, "chain weight"], *inputs: Any
    ) -> Float[Tensor, "chain ..."]:
        """Return ``function(model, *inputs)`` at each chain's weights."""
        if self.side_by_side:
            return vmap(lambda flat: self._call(function, flat, *inputs))(weights)
        return torch.stack([self._call(function, flat, *inputs) for flat in weights])

    def sample_losses(self, loss: Loss, flat: Float[Tensor, " weight"], batch: Batch) -> Float[Tensor, " sample"]:
        """Return one differentiable loss a sample at one chain's weights; a sequence's is the mean of its tokens'."""
        losses = self._call(loss, flat, batch)
        if losses.ndim == 1:
            return losses
        mask = token_mask(loss, batch)
        real = torch.ones_like(losses, dtype=torch.bool) if mask is None else mask
        return torch.where(real, losses, 0).sum(1) / real.sum(1)

    @torch.no_grad()  # otherwise the weights that do not move would tie every step into one growing graph
    def mean_loss_gradient(
        self, loss: Loss, weights: Float[Tensor, "chain weight"], data: Data, indices: list[np.ndarray]
    ) -> Float[Tensor, "chain weight"]:
        """Return the gradient of each chain's minibatch loss: each sequence's token mean, then the batch's mean."""

        def mean_loss(flat: Tensor, batch: Batch) -> Tensor:
            return self.sample_losses(loss, flat, batch).mean()

        whole = len(indices[0]) == len(data)
        if not self.side_by_side:
            gradients = []
            for flat, chosen in zip(weights, indices, strict=True):
                leaf = flat.detach().requires_grad_()
                with torch.enable_grad():
                    value = mean_loss(leaf, data.whole() if whole else data.batch(chosen))
                gradients.append(torch.autograd.grad(value, leaf)[0])
            return torch.stack(gradients)
        if whole:
            return vmap(grad(mean_loss), in_dims=(0, None))(weights, data.whole())
        shape = (len(indices), len(indices[0]))
        batch = map_tensors(data.batch(np.concatenate(indices)), lambda tensor: tensor.unflatten(0, shape))
        mapped = map_tensors(batch, lambda _: 0, otherwise=None)
        return vmap(grad(mean_loss), in_dims=(0, mapped))(weights, batch)


class _Call(nn.Module):
    """Any function of a model as a module, so that weights can be substituted while it runs."""

    def __init__(self, model: nn.Module, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, *inputs: Any) -> Tensor:
        return self.function(self.model, *inputs)


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


class Observer:
    """One observed data set: its columns, its losses at w*, and its losses at any other weights."""

    def __init__(self, model: FunctionalModel, loss: Loss, data: Data, batch_size: int) -> None:
        self._model, self._loss, self._data = model, loss, data
        self._indices = [
            np.arange(start, min(start + batch_size, len(data))) for start in range(0, len(data), batch_size)
        ]
        self._batches: list[Batch] | None = []
        self._entries: list[Tensor | None] = []
        center = model.moving.center[None]
        losses, lengths, positions, kept = [], [], [], 0
        for indices in self._indices:
            batch = data.batch(indices)
            values = check_losses(model.evaluate(loss, center, batch)[0], len(indices), f"loss on {data.name}")
            entries, counts, places = _real_entries(values, token_mask(loss, batch), data.name, int(indices[0]))
            self._entries.append(entries)
            losses.append(values.flatten() if entries is None else values.flatten()[entries])
            lengths.append(counts)
            positions.append(places)
            sizes: list[int] = []
            map_tensors(batch, lambda tensor, sizes=sizes: sizes.append(tensor.numel() * tensor.element_size()))
            kept += sum(sizes)
            if self._batches is not None:
                self._batches = [*self._batches, batch] if kept <= KEPT_BATCHES else None
        self.center_losses: Float[Tensor, " column"] = torch.cat(losses)
        if self._entries[0] is None:
            self.columns = Columns(len(data))
        else:
            offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
            self.columns = Columns(len(data), offsets, np.concatenate(positions))
        _require_finite(self.center_losses, self.columns, data.name)

    def __call__(self, weights: Float[Tensor, "chain weight"]) -> Float[Tensor, "chain column"]:
        """Return the loss of every column at these weights."""
        out = []
        for number, (indices, entries) in enumerate(zip(self._indices, self._entries, strict=True)):
            batch = self._data.batch(indices) if self._batches is None else self._batches[number]
            values = self._model.evaluate(self._loss, weights, batch).flatten(1)
            out.append(values if entries is None else values[:, entries])
        return torch.cat(out, dim=1)


def check_losses(losses: Tensor, length: int, what: str) -> Tensor:
    """Refuse what is not one loss a sample, or one a token."""
    if losses.ndim not in (1, 2) or len(losses) != length:
        raise InputError(
            what,
            got=f"shape {tuple(losses.shape)} for a batch of {length}",
            expected=f"({length},) or ({length}, tokens)",
            fix="return one loss a sample: reduction='none', no .mean()",
        )
    return losses


def _real_entries(
    losses: Tensor, mask: Tensor | None, name: str, first: int
) -> tuple[Tensor | None, np.ndarray, np.ndarray]:
    """Flat indices of a batch's real tokens, how many each sample has, and their positions."""
    if losses.ndim == 1:
        return None, np.empty(0, np.int64), np.empty(0, np.int64)
    if mask is None:
        mask = torch.ones_like(losses, dtype=torch.bool)
    counts = mask.sum(1).cpu().numpy()
    if (counts == 0).any():
        raise InputError(
            name,
            got=f"example {first + int(np.argmin(counts))} without a single scored token",
            expected="at least one in every example",
            fix="a sequence needs two tokens, and one label that is not masked",
        )
    entries = mask.flatten().nonzero()[:, 0]
    return entries, counts, (entries % mask.shape[1]).cpu().numpy()


def _require_finite(losses: Tensor, columns: Columns, name: str) -> None:
    bad = (~torch.isfinite(losses)).nonzero()[:, 0]
    if len(bad):
        column = int(bad[0])
        sample = column
        if columns.offsets is not None:
            sample = int(np.searchsorted(columns.offsets, column, side="right")) - 1
        raise InputError(
            f"loss at w* on {name}",
            got=f"{losses[column].item()} for example {sample} ({len(bad)} of {len(losses)} losses are not finite)",
            expected="finite losses at the checkpoint itself",
            fix="check that example and the model's precision",
        )


def check_neighbours(model: FunctionalModel, loss: Loss, data: Data) -> None:
    """Refuse a model whose loss on one example is random, or changes with what else is in the batch.

    Influence between two examples would otherwise be made by how they were batched.
    """
    count = min(PROBED_EXAMPLES, len(data))
    center = model.moving.center[None]

    def losses(indices: list[int]) -> list[Tensor]:
        batch = data.batch(indices)
        values = check_losses(model.evaluate(loss, center, batch)[0], len(indices), f"loss on {data.name}")
        mask = token_mask(loss, batch)
        return [row if mask is None else row[mask[i]] for i, row in enumerate(values)]

    together = losses(list(range(count)))
    again = losses(list(range(count)))
    tolerance = _tolerance(model)

    def differs(left: list[Tensor], right: list[Tensor]) -> int | None:
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            # Values that are not finite are for the check at w* to name.
            if not torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
                return index
        return None

    if (index := differs(together, again)) is not None:
        raise InputError(
            f"loss on {data.name}",
            got=f"two different values for example {index} from the same batch, in eval mode",
            expected="a deterministic loss",
            fix="take randomness out of the model's forward pass (dropout with training=True?)",
        )
    expected = "a loss that does not depend on the rest of the batch"
    fix = "use running statistics in eval mode (BatchNorm with track_running_stats=True), and mask padding"
    try:
        alone = [losses([index])[0] for index in range(count)]
        reversed_order = losses(list(reversed(range(count))))[::-1]
    except (RuntimeError, ValueError) as error:
        message = str(error).splitlines()[0]
        raise InputError(f"loss on {data.name}", got=f"{message!r} alone", expected=expected, fix=fix) from error
    for other in (alone, reversed_order):
        if (index := differs(together, other)) is not None:
            raise InputError(
                f"loss on {data.name}",
                got=f"{together[index].mean().item():.6g} for example {index} in a batch of {count} but "
                f"{other[index].mean().item():.6g} with other neighbours",
                expected=expected,
                fix=fix,
            )


def _tolerance(model: FunctionalModel) -> float:
    coarsest = max(torch.finfo(value.dtype).eps for value in model.model.parameters() if value.is_floating_point())
    return min(0.1, 1000 * coarsest)


def side_by_side_failure(model: FunctionalModel, loss: Loss, data: Data) -> str | None:
    """Try two chains side by side; return why they cannot run so, or None where they give the same numbers."""
    parallel = FunctionalModel(model.model, model.moving, side_by_side=True)
    weights = model.moving.center.expand(2, -1)
    count = min(2, len(data))
    indices = [np.arange(count), np.arange(count)[::-1].copy()]
    try:
        batch = data.batch(indices[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vmap's advice is for its developers
            pairs = [
                (model.evaluate(loss, weights, batch), parallel.evaluate(loss, weights, batch)),
                (
                    model.mean_loss_gradient(loss, weights, data, indices),
                    parallel.mean_loss_gradient(loss, weights, data, indices),
                ),
            ]
    except Exception as error:  # any model may hit any limit of vmap; the loop remains
        return f"{type(error).__name__}: {str(error).partition('. ')[0][:100]}"
    tolerance = _tolerance(model)
    if all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs):
        return None
    return "side by side, the model gives other numbers"

"""The model as a function of its moving weights, and the checks that it is one.

The model itself is never changed: its own parameters stay w*, and the moving ones are substituted for the length of a
call. One chain after another, or all of a group side by side through `torch.func.vmap`: the same numbers.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from jostle.data import Data, map_tensors
from jostle.errors import InputError
from jostle.losses import Batch, Loss, at_least_float32
from jostle.traces import Columns
from jostle.weights import MovingWeights

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
        # cuDNN has no backward pass for recurrent layers in eval mode, which is the mode sampled here.
        self._needs_plain_kernels = any(isinstance(module, nn.RNNBase) for module in model.modules())

    @property
    def tolerance(self) -> float:
        """How far two evaluations of the same thing may differ, relatively, by rounding."""
        eps = (torch.finfo(value.dtype).eps for value in self.model.parameters() if value.is_floating_point())
        return min(0.03, 1000 * max(eps))

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
                with torch.enable_grad(), torch.backends.cudnn.flags(enabled=not self._needs_plain_kernels):
                    value = mean_loss(leaf, data.whole() if whole else data.batch(chosen))
                    gradients.append(torch.autograd.grad(value, leaf)[0])
            return torch.stack(gradients)
        if whole:
            return vmap(grad(mean_loss), in_dims=(0, None))(weights, data.whole())
        shape = (len(indices), len(indices[0]))
        batch = map_tensors(data.batch(np.concatenate(indices)), lambda tensor: tensor.unflatten(0, shape))
        return vmap(grad(mean_loss))(weights, batch)


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
    """One observed data set: its columns, its losses at w*, and its losses at any other weights.

    Args:
        model: the model as a function of its weights.
        loss: what is observed.
        data: the data set.
        batch_size: examples in one forward pass.
        most: observe at most this many examples, evenly spaced.
    """

    def __init__(
        self, model: FunctionalModel, loss: Loss, data: Data, batch_size: int, *, most: int | None = None
    ) -> None:
        self._model, self._loss, self._data = model, loss, data
        indices = range(0, len(data), 1 if most is None else -(-len(data) // most))
        self._indices = [indices[start : start + batch_size] for start in range(0, len(indices), batch_size)]
        self._batches: list[Batch] | None = []
        self._entries: list[Tensor | None] = []
        center = model.moving.center[None]
        losses, lengths, positions, kept = [], [], [], 0
        for chosen in self._indices:
            batch = data.batch(chosen)
            values = check_losses(model.evaluate(loss, center, batch)[0], len(chosen), f"loss on {data.name}")
            entries, counts, places = _real_entries(values, loss, batch, data.name, chosen)
            self._entries.append(entries)
            losses.append(values.flatten() if entries is None else values.flatten()[entries])
            lengths.append(counts)
            positions.append(places)
            kept += _bytes_in(batch)
            if self._batches is not None:
                self._batches = [*self._batches, batch] if kept <= KEPT_BATCHES else None
        self.center_losses: Float[Tensor, " column"] = at_least_float32(torch.cat(losses))
        if self._entries[0] is None:
            self.columns = Columns(len(indices))
        else:
            offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
            self.columns = Columns(len(indices), offsets, np.concatenate(positions))
        _require_finite(self.center_losses, self.columns, indices, data.name)

    def __call__(self, weights: Float[Tensor, "chain weight"]) -> Float[Tensor, "chain column"]:
        """Return the loss of every column at these weights."""
        out = []
        for number, (indices, entries) in enumerate(zip(self._indices, self._entries, strict=True)):
            batch = self._data.batch(indices) if self._batches is None else self._batches[number]
            values = self._model.evaluate(self._loss, weights, batch).flatten(1)
            out.append(values if entries is None else values[:, entries])
        return at_least_float32(torch.cat(out, dim=1))


def _bytes_in(batch: Batch) -> int:
    sizes: list[int] = []
    map_tensors(batch, lambda tensor: sizes.append(tensor.numel() * tensor.element_size()))
    return sum(sizes)


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
    losses: Tensor, loss: Loss, batch: Batch, name: str, indices: range
) -> tuple[Tensor | None, np.ndarray, np.ndarray]:
    """Flat indices of a batch's real tokens, how many each sample has, and their positions in it."""
    if losses.ndim == 1:
        return None, np.empty(0, np.int64), np.empty(0, np.int64)
    mask = token_mask(loss, batch)
    if mask is None:
        mask = torch.ones_like(losses, dtype=torch.bool)
    counts = mask.sum(1).cpu().numpy()
    if (counts == 0).any():
        raise InputError(
            name,
            got=f"example {indices[int(np.argmin(counts))]} without a single scored token",
            expected="at least one in every example",
            fix="a sequence needs two tokens, and one label that is not masked",
        )
    entries = mask.flatten().nonzero()[:, 0]
    method = getattr(loss, "token_positions", None)
    positions = entries % mask.shape[1] if method is None else method(batch).flatten()[entries]
    return entries, counts, positions.cpu().numpy()


def _require_finite(losses: Tensor, columns: Columns, indices: range, name: str) -> None:
    bad = (~torch.isfinite(losses)).nonzero()[:, 0]
    if len(bad):
        column = int(bad[0])
        sample = column
        if columns.offsets is not None:
            sample = int(np.searchsorted(columns.offsets, column, side="right")) - 1
        raise InputError(
            f"loss at w* on {name}",
            got=f"{losses[column].item()} for example {indices[sample]} ({len(bad)} of {len(losses)} losses are not "
            "finite)",
            expected="finite losses at the checkpoint itself",
            fix="check that example and the model's precision",
        )


def check_neighbours(model: FunctionalModel, loss: Loss, data: Data) -> None:
    """Refuse a model whose loss on one example is random, or changes with what else is in the batch.

    Influence between two examples would otherwise be made by how they were batched.
    """
    what = f"loss on {data.name}"
    probed = data.spread(PROBED_EXAMPLES)
    center = model.moving.center[None]

    def losses(indices: list[int]) -> list[Tensor]:
        batch = data.batch(indices)
        values = check_losses(model.evaluate(loss, center, batch)[0], len(indices), what)
        mask = token_mask(loss, batch)
        return [row if mask is None else row[mask[i]] for i, row in enumerate(values)]

    try:
        together = losses(probed)
    except InputError:
        raise
    except Exception as error:  # whatever a user's model or loss may raise
        raise InputError(
            what,
            got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            expected="losses from loss(model, batch)",
            fix="check a batch against what the model takes: inputs in its precision, labels as whole numbers",
        ) from error
    again = losses(probed)
    tolerance = model.tolerance

    def differs(left: list[Tensor], right: list[Tensor]) -> int | None:
        for number, (a, b) in enumerate(zip(left, right, strict=True)):
            if a.shape != b.shape:
                raise InputError(
                    what,
                    got=f"{a.numel()} and {b.numel()} token losses for example {probed[number]} in two batches",
                    expected="the same tokens in every batch",
                    fix="give the loss a method token_mask(batch) that leaves padding out",
                )
            # Values that are not finite are for the check at w* to name.
            if not torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
                return number
        return None

    if (number := differs(together, again)) is not None:
        raise InputError(
            what,
            got=f"two different values for example {probed[number]} from the same batch, in eval mode",
            expected="a deterministic loss",
            fix="take randomness out of the model's forward pass (dropout with training=True?)",
        )
    expected = "a loss that does not depend on the rest of the batch"
    fix = "use running statistics in eval mode (BatchNorm with track_running_stats=True), and mask padding"
    try:
        alone = [losses([index])[0] for index in probed]
        reversed_order = losses(probed[::-1])[::-1]
    except InputError:
        raise
    except Exception as error:  # one that works in a batch and not alone depends on the batch
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(what, got=f"{message!r} alone", expected=expected, fix=fix) from error
    for other in (alone, reversed_order):
        if (number := differs(together, other)) is not None:
            raise InputError(
                what,
                got=f"{together[number].mean().item():.6g} for example {probed[number]} in a batch of {len(probed)}, "
                f"but {other[number].mean().item():.6g} with other neighbours",
                expected=expected,
                fix=fix,
            )


def check_gradient(model: FunctionalModel, loss: Loss, data: Data) -> None:
    """Refuse a loss from which no gradient, or none that is finite, reaches the weights."""
    center, expected = model.moving.center[None], "a finite gradient at w*"
    try:
        gradient = model.mean_loss_gradient(loss, center, data, [np.arange(min(2, len(data)))])
    except RuntimeError as error:
        raise InputError(
            f"gradient of the loss on {data.name}",
            got=str(error).splitlines()[0],
            expected=expected,
            fix="leave detach(), no_grad() and inference_mode() out of model, loss and call",
        ) from error
    if not torch.isfinite(gradient).all():
        raise InputError(f"gradient of the loss on {data.name}", got="values that are not finite", expected=expected)


def side_by_side_failure(
    model: FunctionalModel,
    *,
    observed: list[tuple[Loss, Data]],
    driven: tuple[Loss, Data],
    observables: list[Observable],
) -> str | None:
    """Try two chains side by side; return why they cannot run so, or None where they give the same numbers."""
    parallel = FunctionalModel(model.model, model.moving, side_by_side=True)
    # Unequal weights and unequal minibatches, so that chains that see each other's are noticed.
    generator = torch.Generator().manual_seed(0)
    jitter = torch.randn(2, model.moving.total, generator=generator, dtype=model.moving.dtype).to(model.device)
    weights = model.moving.center * (1 + 0.01 * jitter)
    loss, data = driven
    half = min(2, max(1, len(data) // 2))
    indices = [np.arange(half), np.arange(half) + (half if len(data) > 1 else 0)]
    if not _only_tensors(data.batch(indices[0])):
        return "batches hold more than tensors"
    calls: list[Callable[[FunctionalModel], Tensor]] = [lambda m: m.mean_loss_gradient(loss, weights, data, indices)]
    for recorded, seen in observed:
        batch = seen.batch(range(min(2, len(seen))))
        calls.append(lambda m, recorded=recorded, batch=batch: m.evaluate(recorded, weights, batch))
    calls += [lambda m, phi=phi: m.evaluate(phi, weights) for phi in observables]
    tolerance = model.tolerance
    for call in calls:
        expected = call(model)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # vmap's advice is for its developers
                got = call(parallel)
        except Exception as error:  # any model may hit any limit of vmap; the loop remains
            return f"{type(error).__name__}: {str(error).partition('. ')[0][:100]}"
        if not (got - expected).norm() <= tolerance * expected.norm():
            return "side by side, the model gives other numbers"
    return None


def _only_tensors(batch: Batch) -> bool:
    others: list[Any] = []

    def look(tree: Any) -> None:
        if isinstance(tree, Mapping):
            for value in tree.values():
                look(value)
        elif isinstance(tree, tuple | list):
            for value in tree:
                look(value)
        elif not isinstance(tree, Tensor):
            others.append(tree)

    look(batch)
    return not others

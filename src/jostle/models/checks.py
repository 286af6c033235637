"""What is tried on a model and its data before any sampling: is the loss a function of one example alone?"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jostle.data.datasets import Data, versions
from jostle.errors import InputError
from jostle.losses import Batch, Loss
from jostle.models.functional import FunctionalModel, Observable, SideBySide, token_mask

PROBED_EXAMPLES = 8
"""How many examples the check for batch neighbours evaluates alone and together."""


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


@contextlib.contextmanager
def in_words(what: str, count: int) -> Iterator[None]:
    """Say in one line what a user's model or loss raises."""
    try:
        yield
    except InputError:
        raise
    except torch.OutOfMemoryError as error:
        raise InputError(
            what,
            got=str(error).partition(". ")[0],
            expected=f"room on the device for the model and {count} example{'s' if count > 1 else ''}",
            fix="load the model in bfloat16, shorten the examples, or use another device",
        ) from error
    except Exception as error:
        raise InputError(
            what,
            got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            expected="losses from loss(model, batch)",
            fix="check a batch against what the model takes: inputs in its precision, labels as whole numbers",
        ) from error


@contextlib.contextmanager
def unchanged(batch: Batch, what: str) -> Iterator[None]:
    """Refuse a model or loss that changes a batch: it may be a view of the user's data, and is seen at every draw."""
    before = versions(batch)
    yield
    if not before.items() <= versions(batch).items():
        raise InputError(
            what,
            got="a model or loss that changes its input",
            expected="the same input at every draw",
            fix="let it work on a copy: x = x.clone() before x += ..., batch = dict(batch) before batch[...] = ...",
        )


def check_unchanged(model: FunctionalModel, loss: Loss, data: Data) -> None:
    """Refuse the same, found out on a copy of one example."""
    batch, what = data.batch([0]), f"loss on {data.name}"
    with in_words(what, 1), unchanged(batch, what):
        model.evaluate(loss, model.moving.center[None], batch)


def check_neighbours(model: FunctionalModel, loss: Loss, data: Data) -> None:
    """Refuse a model whose loss on one example is random, or changes with what else is in the batch.

    Influence between two examples would otherwise be made by how they were batched.
    """
    what = f"loss on {data.name}"
    probed = data.spread(PROBED_EXAMPLES)
    center = model.moving.center[None]

    def losses(indices: list[int]) -> list[Tensor]:
        batch = data.batch(indices)
        with unchanged(batch, what):  # a copy, here: whoever is refused has the data as it was
            values = check_losses(model.evaluate(loss, center, batch)[0], len(indices), what)
        mask = token_mask(loss, batch)
        return [row if mask is None else row[mask[i]] for i, row in enumerate(values)]

    with in_words(what, len(probed)):
        together = losses(probed)
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
    if not model.crew.all(torch.isfinite(gradient).all()):
        raise InputError(f"gradient of the loss on {data.name}", got="values that are not finite", expected=expected)


def vmap_differs(model: nn.Module, moving: Collection[str]) -> str | None:
    """Say of which gradients `torch.func.vmap` is known to give others, without an error, perhaps on few examples."""
    for name, module in model.named_modules():
        moves = isinstance(module, nn.Embedding | nn.EmbeddingBag) and f"{name}.weight" in moving
        if moves and module.padding_idx is not None:  # its row has no gradient, but has one in all but the first
            return f"{name} has a padding_idx, which side by side only the first would keep"
    return None


def side_by_side_failure(
    model: FunctionalModel,
    *,
    observed: list[tuple[Loss, Data]],
    driven: tuple[Loss, Data],
    observables: list[Observable],
) -> str | None:
    """Try two chains side by side; return why they cannot run so, or None where they give the same numbers."""
    parallel = SideBySide(model.model, model.moving, bfloat16=model.bfloat16)
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
            with warnings.catch_warnings(), _without_loops():
                warnings.simplefilter("ignore")  # vmap's advice is for its developers
                got = call(parallel)
        except Exception as error:  # any model may hit any limit of vmap; the loop remains
            return f"{type(error).__name__}: {str(error).partition('. ')[0][:100]}"
        if not (got - expected).norm() <= tolerance * expected.norm():
            return "side by side, the model gives other numbers"
    return None


@contextlib.contextmanager
def _without_loops() -> Iterator[None]:
    """Have vmap refuse what it would do by a loop over chains, slower than a loop of ours."""
    functorch: Any = vars(torch._C)["_functorch"]
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)


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

"""Labels that the model itself would give: the mean square of their gradients is the Fisher information.

Labels of tokens are drawn one by one, so that gradients of different tokens are uncorrelated, as those of real text are
not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from jostle.data.datasets import Data
from jostle.errors import InputError
from jostle.losses import IGNORED_LABEL, Batch, Loss
from jostle.models.functional import token_mask
from jostle.models.in_place import InPlace

TOGETHER, SEQUENCES_TOGETHER = 256, {"cuda": 64, "cpu": 8}
"""Examples whose labels are drawn at once; those of tokens, each of which has as many numbers as there are tokens."""


def relabelled(model: InPlace, loss: Any, data: Data, count: int, seed: int) -> list[Data]:
    """The examples with labels that the model gives them, so many times; none where a loss does not say how."""
    if not count or not hasattr(loss, "draw_labels"):
        return []
    generator, labels = torch.Generator().manual_seed(seed), []
    for batch in batches(model, loss, data):
        drawn = model.evaluate(
            lambda network, batch: loss.draw_labels(network, batch, count, generator), model.moving.center[None], batch
        )[0]
        mask = token_mask(loss, batch)
        labels += list(drawn) if mask is None else [row[:, real] for row, real in zip(drawn, mask, strict=True)]

    def collate(chosen: Sequence[int], number: int) -> Batch:
        batch = data.batch(chosen)
        mask, ours = token_mask(loss, batch), [labels[index][number] for index in chosen]
        if mask is None:
            return loss.relabelled(batch, torch.stack(ours))
        # Wherever a batch has its padding, the labels are those of the scored tokens in turn.
        spread = torch.full_like(mask, IGNORED_LABEL, dtype=torch.long)
        spread[mask] = torch.cat(ours)
        return loss.relabelled(batch, spread)

    return [
        Data(range(len(data)), data.name, collate=partial(collate, number=number), device=model.device)
        for number in range(len(labels[0]))
    ]


def these(data: Data, places: np.ndarray) -> Data:
    """Those examples alone."""
    return Data(range(len(places)), data.name, collate=lambda chosen: data.batch(places[chosen]))


def of_the_first(model: InPlace, loss: Loss, data: Data) -> Tensor:
    """The loss of the first example, or its losses: (1) or (1, token)."""
    return model.evaluate(loss, model.moving.center[None], data.batch(range(1)))[0]


def batches(model: InPlace, loss: Loss, data: Data) -> Iterator[Batch]:
    """Give all examples, a few at a time."""
    kind = "cuda" if model.device.type == "cuda" else "cpu"
    at_once = TOGETHER if of_the_first(model, loss, data).ndim == 1 else SEQUENCES_TOGETHER[kind]
    for start in range(0, len(data), at_once):
        yield data.batch(range(start, min(start + at_once, len(data))))


def loss_counts(model: InPlace, loss: Loss, data: Data) -> Float[Tensor, " sample"]:
    """How many losses each example has: one, or one for each of its tokens."""
    first = of_the_first(model, loss, data)
    if first.ndim == 1 or token_mask(loss, data.batch(range(1))) is None:
        if first.ndim > 1 and data.lengths is not None and np.ptp(data.lengths):
            raise InputError(
                "loss", got="one of tokens, that does not say which are padding", expected="a method token_mask(batch)"
            )
        return torch.full((len(data),), float(first.numel()))
    masks = (token_mask(loss, batch) for batch in batches(model, loss, data))
    return torch.cat([mask.sum(1).double().cpu() for mask in masks if mask is not None])

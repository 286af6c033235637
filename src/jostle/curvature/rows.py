"""How much of the curvature of an embedding's row one example has.

A word that one text of a thousand has is held by the curvature of that text alone: seldom, and then a thousandfold.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from jostle.curvature.labels import loss_counts, relabelled
from jostle.curvature.per_example import PerExample
from jostle.data.datasets import Data
from jostle.losses import LanguageHead, Loss
from jostle.models.in_place import InPlace
from jostle.models.weights import MovingWeights


def embeddings_of(model: nn.Module, moving: MovingWeights, loss: Loss, data: Data) -> list[str]:
    """The weights that move of which examples see some rows alone: embeddings, and the head of a language model."""
    head = LanguageHead.of(loss, model, data.batch(range(1)))
    found = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    found |= {id(head.linear.weight)} if head is not None else set()
    return [name for name, value in model.named_parameters() if id(value) in found and name in moving.slices]


def largest_in_rows(
    model: InPlace, loss: Loss, data: Data, reach: Float[Tensor, " weight"], shares: np.ndarray, seed: int
) -> Float[Tensor, " weight"]:
    """Return the trace of nωᵢ·R^½HᵢR^½ within each weight's row, of the example i that has most.

    It is 0 outside of embeddings. An estimate, by one draw of gradients g of labels that the model itself gives, or the
    real ones where a loss draws none: Hᵢ = Tᵢ·E[ggᵀ], with g of the mean of Tᵢ losses.
    """
    moving, largest = model.moving, torch.zeros_like(reach)
    names = embeddings_of(model.model, moving, loss, data)
    if not names:
        return largest
    labelled = next(iter(relabelled(model, loss, data, 1, seed)), data)
    counts = loss_counts(model, loss, data).to(reach)
    counts *= torch.from_numpy(shares * len(data)).to(counts)
    shapes = dict(zip(moving.names, moving.shapes, strict=True))
    each = PerExample(model, loss)
    each.scale = reach.sqrt()
    for some, rows in each(labelled, range(len(data))):
        for name in names:
            squares = rows[:, moving.slices[name]].unflatten(1, shapes[name]).square_().flatten(2).sum(2)
            most = (squares * counts[some.start : some.stop, None]).amax(0)
            own = largest[moving.slices[name]].view(shapes[name])
            torch.maximum(own, most.view(-1, *[1] * (len(shapes[name]) - 1)).expand_as(own), out=own)
    return largest

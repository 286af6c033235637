"""Gradient similarity: the baseline that every other method has to beat, and the BIF's limit of small perturbations.

    values[i, j] = −gᵢᵀgⱼ,   or −cos(gᵢ, gⱼ),   with gᵢ = ∇ℓᵢ(w*) over the weights that move.

Reference: Charpiat et al., *Input similarity from the neural network perspective*, 2019.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import nn

from jostle.curvature.per_example import BUFFER_BYTES, Gradients, PerExample, fingerprints_of, products
from jostle.data.datasets import Collate, Data
from jostle.losses import Loss
from jostle.losses import classification as classification_loss
from jostle.models.functional import eval_mode
from jostle.models.in_place import InPlace
from jostle.models.weights import MovingWeights, WeightSelection
from jostle.scores import Scores, timed


@timed
def gradient_similarity(
    model: nn.Module,
    train: Any,
    query: Any,
    *,
    loss: Loss | None = None,
    weights: WeightSelection = "all",
    cosine: bool = False,
    collate: Collate | None = None,
    buffer_bytes: int = BUFFER_BYTES,
) -> Scores:
    """Score every training example on every query by the similarity of their gradients at w*; negative helps.

    Exact: no projection, no approximation. Gradients are never all held at once: of one side as many as fit the buffer
    are, and those of the other side pass by; which is which is chosen so that the fewest are computed again.

    Args:
        model: the trained model, at w*.
        train: the training examples.
        query: the query examples.
        loss: as for `jostle.attribute`; per-token losses are averaged over their sequence.
        weights: which weights the gradients are of.
        cosine: divide by the lengths of both gradients.
        collate: makes a batch of a list of samples.
        buffer_bytes: what the gradients held at once may take.
    """
    loss = loss or classification_loss()
    moving = MovingWeights(model, weights)
    with eval_mode(model), InPlace(model, moving) as in_place:
        sets = {
            name: Data(source, name, collate=collate, device=in_place.device)
            for name, source in (("train", train), ("query", query))
        }
        each = PerExample(in_place, loss, buffer_bytes)
        left, right = (Gradients([(each, data)], unit=cosine) for data in sets.values())
        values = products(left, right, buffer_bytes)
        fingerprints = {name: data.fingerprint() for name, data in sets.items()}
    return Scores(
        values=np.negative(values, out=values),
        method="gradient cosine" if cosine else "gradient dot product",
        normalized=cosine,
        scale=None,
        provenance={"fingerprints": {**fingerprints, **fingerprints_of(model, moving)}},
    )


def gradient_self_influence(
    model: nn.Module,
    train: Any,
    *,
    loss: Loss | None = None,
    weights: WeightSelection = "all",
    collate: Collate | None = None,
) -> Float[np.ndarray, " train"]:
    """−‖gᵢ‖² of every training example: the diagonal of `gradient_similarity` of the training set on itself."""
    moving = MovingWeights(model, weights)
    with eval_mode(model), InPlace(model, moving) as in_place:
        data = Data(train, "train", collate=collate, device=in_place.device)
        gradients = PerExample(in_place, loss or classification_loss())
        squares = [part.square().sum(1) for _, part in gradients(data, range(len(data)))]
        return -torch.cat(squares).float().cpu().numpy()

"""How much each weight counts: the metric M of gᵢᵀMgⱼ, which is that of draws δ ~ N(0, M/γ).

It is found from v, the mean square of each weight's gradient over the training examples. `FirstOrder` multiplies
gradients by the root of M. Draws have it from the units in which weights are written: w = c·u, with u drawn alike for
all weights and c a number for each layer (`layers_alike`), and so has all else that is asked of such a model.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from jostle.attributors.gradients import PerExample, mean_squares
from jostle.data.datasets import Collate, Data
from jostle.errors import InputError
from jostle.losses import Loss
from jostle.losses import classification as classification_loss
from jostle.models.functional import eval_mode
from jostle.models.in_place import InPlace
from jostle.models.weights import MovingWeights, WeightSelection

Metric = Literal["isotropic", "layers", "adam"]

ADAM_STABILIZER = 1e-8
"""What Adam adds to √v: a weight whose gradients are smaller hardly moves."""


def scale_of(each: PerExample, data: Data, metric: Metric) -> Float[Tensor, " weight"]:
    """The root of M; 0 where nothing, or Adam, would move a weight."""
    squares = mean_squares(each, data)
    if metric == "layers":
        layers = _of_layers(each.moving, squares)
        sizes = torch.tensor(each.moving.sizes, device=squares.device)
        squares = layers.repeat_interleave(sizes)
        scale = torch.where(squares > 0, squares.rsqrt(), 0.0)
    else:
        size = squares.sqrt()
        scale = torch.where(size > ADAM_STABILIZER, size.rsqrt(), 0.0)
    return scale.to(each.moving.dtype)


def layers_alike(
    model: nn.Module,
    train: Any,
    *,
    loss: Loss | None = None,
    weights: WeightSelection = "all",
    collate: Collate | None = None,
) -> nn.Module:
    """Return the same model in units in which the gradients of all its tensors have one mean square.

    Whatever is asked of it, draws and gradients alike, then lets every layer count by as much: where a few have most of
    a gradient's length, as between batch norms, the others would have no say. A whole gradient's mean square stays what
    it was, so that losses of draws without a gradient move about as far at the same localization.

    Args:
        model: the trained model, at w*; it is copied.
        train: the training examples, whose gradients are taken once.
        loss: as for `jostle.attribute`.
        weights: which weights are to move. The copy keeps all others from it (they require no gradient), so that there
            ``"all"`` are these.
        collate: makes a batch of a list of samples.
    """
    moving = MovingWeights(model, weights)
    _require_untied(model, moving)
    with eval_mode(model), InPlace(model, moving) as in_place:
        data = Data(train, "train", collate=collate, device=in_place.device)
        squares = mean_squares(PerExample(in_place, loss or classification_loss()), data)
    if not torch.isfinite(squares).all():
        raise InputError("train", got="gradients that are no finite numbers", expected="finite ones")
    layers = _of_layers(moving, squares).tolist()
    alike = copy.deepcopy(model)
    for name, parameter in alike.named_parameters():
        parameter.requires_grad_(name in moving.names)
    for name, layer in zip(moving.names, layers, strict=True):
        module, _, own = name.rpartition(".")
        factor = math.sqrt(squares.mean().item() / layer) if layer else 1.0  # what nothing moves may stay as it is
        parametrize.register_parametrization(alike.get_submodule(module), own, _Times(factor))
    return alike


def _of_layers(moving: MovingWeights, squares: Float[Tensor, " weight"]) -> Float[Tensor, " layer"]:
    """The mean square of each tensor's gradients."""
    return torch.stack([layer.mean() for layer in squares.split(moving.sizes)])


def _require_untied(model: nn.Module, moving: MovingWeights) -> None:
    """A tensor that two modules share would be two after one of them is written in other units."""
    places = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name in moving.names:
        if places[id(model.get_parameter(name))] > 1:
            expected = "weights that belong to one module each"
            raise InputError(
                "weights", got=f"{name}, which several modules share", expected=expected, fix="leave it out"
            )


class _Times(nn.Module):
    """A weight in units of ``factor``."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, original: Tensor) -> Tensor:
        return self.factor * original

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / self.factor

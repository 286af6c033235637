"""How much each weight counts: the metric M of gᵢᵀMgⱼ, which is that of draws δ ~ N(0, M/γ).

It is found from v, the mean square of each weight's gradient over the training examples. `FirstOrder` multiplies
gradients by the root of M. Draws have it from the units in which weights are written: w = c·u, with u drawn alike for
all weights and c a number for each layer (`layers_alike`), and so have the gradients of such a model.

A layer is here one tensor of parameters. Where layers count alike, a weight of any of them counts as much on average,
so that a layer counts by how many weights it has.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from jostle.curvature.per_example import PerExample, mean_squares
from jostle.data.datasets import Collate, Data
from jostle.errors import InputError
from jostle.losses import Loss
from jostle.losses import classification as classification_loss
from jostle.models.functional import eval_mode
from jostle.models.in_place import InPlace
from jostle.models.weights import MovingWeights, WeightSelection, owners

Metric = Literal["isotropic", "layers", "adam"]

ADAM_STABILIZER = 1e-8
"""What Adam adds to √v: a weight whose gradients are smaller hardly moves."""


NEGLIGIBLE = 1e-5
"""Gradients that are smaller than those of another layer by this are rounding, as those of a key's bias in attention,
by which nothing moves; unless the layer's weights are as much larger, and so written in other units alone."""


def root_of_metric(each: PerExample, data: Data, metric: Metric) -> Float[Tensor, " weight"]:
    """By how much gradients are multiplied; 0 where nothing, or Adam, would move a weight."""
    squares = mean_squares(each, data)
    if metric == "layers":
        squares = _of_layers(each.moving, squares).repeat_interleave(torch.tensor(each.moving.sizes).to(squares.device))
        root = torch.where(squares > 0, squares.rsqrt(), 0.0)
    else:
        size = squares.sqrt()
        root = torch.where(size > ADAM_STABILIZER, size.rsqrt(), 0.0)
    return root.to(each.moving.dtype)


def layers_alike(
    model: nn.Module,
    train: Any,
    *,
    loss: Loss | None = None,
    weights: WeightSelection = "all",
    collate: Collate | None = None,
) -> nn.Module:
    """Return the same model in units in which the gradients of all its layers have one mean square.

    Draws around it, and gradients of it, then let a weight of any layer count as much: where a few layers have most of
    a gradient's length, as between batch norms, the others would have no say. The mean square of all gradients stays
    what it was, so that losses of draws without a gradient move about as far at the same localization.

    It is for this process: it cannot be pickled, and its ``state_dict`` does not say the units. EK-FAC, which asks
    modules and not weights, is not for it; and `FirstOrder` has ``metric="layers"`` for the model itself, by which it
    also tells κ.

    Args:
        model: the trained model, at w*; it is copied.
        train: the training examples, whose gradients are taken once.
        loss: as for `jostle.attribute`.
        weights: which weights are to move. The copy keeps all others from it (they require no gradient), so that there
            ``"all"`` are these.
        collate: makes a batch of a list of samples.

    Raises:
        InputError: gradients are no finite numbers, or modules share a weight that is to move.
    """
    moving = MovingWeights(model, weights)
    _require_untied(model, moving)
    with eval_mode(model), InPlace(model, moving) as in_place:
        data = Data(train, "train", collate=collate, device=in_place.device)
        squares = mean_squares(PerExample(in_place, loss or classification_loss()), data)
    if not torch.isfinite(squares).all():
        raise InputError("train", got="gradients that are no finite numbers", expected="finite ones")
    layers, sizes = _of_layers(moving, squares), torch.tensor(moving.sizes).to(squares.device)
    moved = layers > 0
    mean = (layers * sizes)[moved].sum() / sizes[moved].sum()
    # Of three digits, so that they are the same on the next day: the last ones of a GPU's sums are not.
    factors = [float(f"{factor:.3g}") for factor in torch.where(moved, (mean / layers).sqrt(), 1.0).tolist()]
    alike = copy.deepcopy(model)
    for name, parameter in alike.named_parameters():
        parameter.requires_grad_(name in moving.names)
    for name, factor in zip(moving.names, factors, strict=True):
        path, _, own = name.rpartition(".")
        module = alike.get_submodule(path)
        if parametrize.is_parametrized(module):  # by a class that it shares with the one it was copied from
            module.__class__ = type(type(module).__name__, (type(module),), {})
        parametrize.register_parametrization(module, own, _Times(factor))
    return alike


def _of_layers(moving: MovingWeights, squares: Float[Tensor, " weight"]) -> Float[Tensor, " layer"]:
    """The mean square of each layer's gradients; 0 where they are rounding."""
    found, weights = (
        torch.stack([layer.mean() for layer in values.split(moving.sizes)])
        for values in (squares, moving.center.double().square())
    )
    moves = [sizes > NEGLIGIBLE**2 * sizes.max() for sizes in (found, found * weights)]
    return torch.where(moves[0] | moves[1], found, 0.0)


def _require_untied(model: nn.Module, moving: MovingWeights) -> None:
    """A tensor that two modules share would be two after one of them is written in other units."""
    modules = owners(model)
    for name in moving.names:
        if modules[model.get_parameter(name)] > 1:
            shared, expected = f"{name}, which several modules share", "weights that belong to one module each"
            raise InputError("weights", got=shared, expected=expected, fix="leave it out")


class _Times(nn.Module):
    """A weight in units of ``factor``."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, original: Tensor) -> Tensor:
        return self.factor * original

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / self.factor

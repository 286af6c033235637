"""TRAK: influence in the linearized model, on randomly projected gradients.

With the margin f = log p/(1 − p) of each example, φᵢ = Pᵀ∇fᵢ its projected gradient, Φ the rows φᵢ of the training set,
and hⱼ = Pᵀ∇ℓⱼ the projected gradient of the query's loss,

    values[i, j] = hⱼᵀ(ΦᵀΦ)⁻¹φᵢ·(1 − pᵢ).

For a classification ∇ℓ = −(1 − p)∇f, so this is the paper's τ with the sign of `Scores`, times the query's (1 − pⱼ):
what is predicted is its loss, not its margin. With several checkpoints hⱼᵀ(ΦᵀΦ)⁻¹φᵢ and 1 − pᵢ are averaged over them,
separately, as in the paper.

Reference: Park et al., *TRAK: Attributing Model Behavior at Scale*, 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from jostle.curvature.per_example import BUFFER_BYTES, PerExample, examples_at_once
from jostle.data.datasets import Collate, Data
from jostle.errors import InputError
from jostle.losses import Batch, Loss, at_least_float32
from jostle.losses import classification as classification_loss
from jostle.models.functional import eval_mode, sample_means
from jostle.models.in_place import InPlace
from jostle.models.weights import MovingWeights, WeightSelection
from jostle.scores import Scores, timed

MOST_DIMENSIONS = 4096
BLOCK_BYTES = 256 << 20
"""What a block of the projection may take; it is made again whenever it is needed, and never held whole."""


@timed
def trak(
    model: nn.Module | Sequence[nn.Module],
    train: Any,
    query: Any,
    *,
    loss: Loss | None = None,
    weights: WeightSelection = "all",
    dimension: int | None = None,
    ridge: float = 0.0,
    collate: Collate | None = None,
    buffer_bytes: int = BUFFER_BYTES,
    seed: int = 0,
) -> Scores:
    """Score every training example on every query by TRAK; negative helps.

    Args:
        model: the trained model, or several (independently trained ones make TRAK better).
        train: the training examples.
        query: the query examples.
        loss: ``losses.classification()`` or ``losses.next_token()``: a margin needs a loss that is −log p. Of a
            sequence, margins and 1 − p are averaged over its tokens.
        weights: which weights the gradients are of.
        dimension: of the projection; default: a power of two, at most half of the training examples and of the weights,
            and at most 4,096.
        ridge: added to the diagonal of ΦᵀΦ, relative to its mean.
        collate: makes a batch of a list of samples.
        buffer_bytes: what the gradients held at once may take.
        seed: of the projection, random signs over √dimension; a GPU draws others than a CPU.

    Raises:
        InputError: a loss without a margin, or a ΦᵀΦ that cannot be inverted.
    """
    loss = loss or classification_loss()
    if not (hasattr(loss, "label_smoothing") or hasattr(loss, "token_mask")) or getattr(loss, "label_smoothing", 0):
        raise InputError(
            "loss", got=f"{loss}", expected="classification() or next_token(), of which TRAK knows the margin"
        )
    if dimension is not None and dimension < 1:
        raise InputError("dimension", got=dimension, expected="a positive number")
    checkpoints = [model] if isinstance(model, nn.Module) else list(model)
    if not checkpoints:
        raise InputError("model", got="no checkpoint", expected="at least one")
    products: list[Tensor] = []
    shares: list[Tensor] = []
    fingerprints: dict[str, str] = {}
    for checkpoint in checkpoints:
        moving = MovingWeights(checkpoint, weights)
        with eval_mode(checkpoint), InPlace(checkpoint, moving) as in_place:
            sets = {
                name: Data(source, name, collate=collate, device=in_place.device)
                for name, source in (("train", train), ("query", query))
            }
            for name, data in sets.items():
                _require_classes(name, data)
            fingerprints = {name: data.fingerprint() for name, data in sets.items()}
            dimension = dimension or _default_dimension(min(len(sets["train"]), moving.total))
            project = Projection(moving.total, dimension, seed, moving.center.new_empty(0, dtype=moving.dtype))
            features = _projected(in_place, Margin(loss), sets["train"], project, buffer_bytes).neg()
            targets = _projected(in_place, loss, sets["query"], project, buffer_bytes)
            products.append(_solve(features, targets, ridge))
            shares.append(_missing_probability(in_place, loss, sets["train"]))
    values = (torch.stack(products).mean(0) * torch.stack(shares).mean(0)[:, None]).float().cpu().numpy()
    return Scores(
        values=values,
        method="TRAK",
        provenance={
            "dimension": dimension, "ridge": ridge, "checkpoints": len(checkpoints), "seed": seed,
            "fingerprints": fingerprints,
        },
    )  # fmt: skip


@dataclass(frozen=True)
class Margin:
    """−f = log((1 − p)/p) = log(exp(ℓ) − 1) of a loss ℓ = −log p, token by token where the loss is."""

    loss: Loss

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return −f, one a sample or a token."""
        losses = at_least_float32(self.loss(model, batch))
        # What is masked is exactly 0, where the margin has no bound. A loss that rounds to 0 has no gradient either.
        clamped = losses.clamp(min=torch.finfo(losses.dtype).tiny ** 0.5)
        return clamped + torch.log(-torch.expm1(-clamped))

    def token_mask(self, batch: Batch) -> Tensor | None:
        """Say which tokens are scored, as the loss does."""
        mask = getattr(self.loss, "token_mask", None)
        return None if mask is None else mask(batch)


def _require_classes(name: str, data: Data) -> None:
    """Refuse weights of classes: their loss is no −log p either."""
    batch = data.batch([0])
    labels = None if isinstance(batch, dict) else batch[1]
    if isinstance(labels, Tensor) and labels.is_floating_point():
        raise InputError(name, got="labels that are weights of classes", expected="one class each, for a margin")


class Projection:
    """Random signs over √dimension, (weight, dimension), made from a seed block by block."""

    def __init__(self, weights: int, dimension: int, seed: int, like: Tensor) -> None:
        self.dimension, self._weights, self._seed, self._like = dimension, weights, seed, like
        self._rows = max(1, BLOCK_BYTES // (like.element_size() * dimension))

    def blocks(self) -> Iterator[tuple[slice, Float[Tensor, "weight dimension"]]]:
        """Give the rows of a block, and the block."""
        generator = torch.Generator(self._like.device).manual_seed(self._seed)
        for start in range(0, self._weights, self._rows):
            rows = slice(start, min(start + self._rows, self._weights))
            shape = (rows.stop - rows.start, self.dimension)
            bits = torch.randint(0, 2, shape, generator=generator, device=self._like.device, dtype=torch.int8)
            yield rows, (2 * bits - 1).to(self._like.dtype).div_(self.dimension**0.5)

    def __call__(self, gradients: Float[Tensor, "example weight"]) -> Float[Tensor, "example dimension"]:
        """Project rows."""
        result = gradients.new_zeros(len(gradients), self.dimension)
        for rows, block in self.blocks():
            result.addmm_(gradients[:, rows], block)
        return result


def _default_dimension(most: int) -> int:
    return min(MOST_DIMENSIONS, 1 << max(0, (most // 2).bit_length() - 1))


def _projected(
    model: InPlace, loss: Loss, data: Data, project: Projection, buffer_bytes: int
) -> Float[Tensor, "example dimension"]:
    """The projected gradients of all examples; as many whole ones as fit the buffer are projected together."""
    gradients = PerExample(model, loss, buffer_bytes)
    row_bytes = model.moving.total * model.moving.dtype.itemsize
    at_once = max(1, int(buffer_bytes / row_bytes) // gradients.at_once) * gradients.at_once
    parts = []
    for start in range(0, len(data), at_once):
        rows = range(start, min(start + at_once, len(data)))
        parts.append(project(torch.cat([part for _, part in gradients(data, rows)])))
    return torch.cat(parts)


@torch.no_grad()
def _missing_probability(model: InPlace, loss: Loss, data: Data) -> Float[Tensor, " example"]:
    """1 − p of each example, the mean over the tokens of a sequence."""
    parts = []
    at_once = examples_at_once(model.device)
    for start in range(0, len(data), at_once):
        batch = data.batch(range(start, min(start + at_once, len(data))))
        missing = -torch.expm1(-at_least_float32(model.evaluate(loss, model.moving.center[None], batch)[0]))
        parts.append(sample_means(missing, loss, batch))
    return torch.cat(parts).double()


def _solve(
    features: Float[Tensor, "train dimension"], targets: Float[Tensor, "query dimension"], ridge: float
) -> Float[Tensor, "train query"]:
    """Φ(ΦᵀΦ)⁻¹hⱼ in float64."""
    features, targets = features.double(), targets.double()
    gram = features.T @ features
    gram.diagonal().add_(ridge * gram.diagonal().mean())
    factor, failed = torch.linalg.cholesky_ex(gram)
    condition = factor.diagonal().min() / factor.diagonal().max()
    if failed or not condition > np.finfo(np.float32).eps:
        raise InputError(
            "trak",
            got=f"a kernel of {len(gram)} dimensions from {len(features)} examples that cannot be inverted",
            expected="more examples than dimensions, with gradients in as many directions",
            fix="lower dimension, or pass ridge=1e-3",
        )
    return features @ torch.cholesky_solve(targets.T, factor)

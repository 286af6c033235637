"""Per-sample and per-token losses; never reduced over the batch.

A loss is any ``f(model, batch) -> (B,)`` or ``(B, S)`` tensor. A per-token loss may also have a method
``token_mask(batch) -> (B, S)`` that says which of its entries are real (not padding, not prompt); without
one, all are. What the mask leaves out is neither recorded nor part of any mean. A method ``token_positions(batch)``
says where in its sequence each entry stands, where that is not its column (padding on the left).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from jostle.errors import InputError

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]

IGNORED_LABEL = -100
"""The label of a token that is read but not scored, as everywhere in PyTorch and Hugging Face."""


def classification(*, label_smoothing: float = 0.0) -> Loss:
    """Cross-entropy of each sample, ℓ(z; w) = −log p(y | x, w), for batches ``(inputs, labels)``.

    ``label_smoothing`` is for `potential_loss`: a model trained with it is sampled with it, while the
    recorded loss stays plain.
    """
    return _Classification(label_smoothing)


def regression(*, noise_variance: float = 1.0) -> Loss:
    """Gaussian negative log-likelihood of each sample, ℓ(z; w) = ‖y − f(x)‖² / 2σ², up to its constant.

    Batches are ``(inputs, targets)``.
    """
    if not noise_variance > 0:
        raise InputError("noise_variance", got=noise_variance, expected="a positive number")
    return _Regression(noise_variance)


def next_token() -> Loss:
    """Cross-entropy of each token given those before it: entry s is −log p(token s | tokens < s), shape (B, S).

    Batches are mappings with ``input_ids`` and, where needed, ``attention_mask`` (0 = padding) and ``labels``
    (−100 = read but not scored). Entry 0 has nothing before it and is masked out.
    """
    return _NextToken()


@dataclass(frozen=True)
class _Classification:
    label_smoothing: float

    def __call__(self, model: nn.Module, batch: Batch) -> Float[Tensor, " batch"]:
        inputs, labels = batch
        logits = at_least_float32(model(inputs))
        return F.cross_entropy(logits, labels, reduction="none", label_smoothing=self.label_smoothing)


@dataclass(frozen=True)
class _Regression:
    noise_variance: float

    def __call__(self, model: nn.Module, batch: Batch) -> Float[Tensor, " batch"]:
        inputs, targets = batch
        predictions = at_least_float32(model(inputs))
        if predictions.shape != targets.shape:
            raise InputError(
                "regression loss",
                got=f"predictions of shape {tuple(predictions.shape)} for targets of shape {tuple(targets.shape)}",
                expected="equal shapes",
                fix="add or squeeze a dimension of one of them, since broadcasting would mix examples",
            )
        squares = (predictions - targets).square()
        return squares.reshape(len(squares), -1).sum(1) / (2 * self.noise_variance)


@dataclass(frozen=True)
class _NextToken:
    def __call__(self, model: nn.Module, batch: Batch) -> Float[Tensor, "batch token"]:
        tokens = batch["input_ids"]
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        output = model(**inputs)
        logits = at_least_float32(output if isinstance(output, Tensor) else output.logits)
        # Flat, because cross-entropy over a middle dimension copies the logits and strides through them.
        predicted = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return F.pad(predicted.view(len(tokens), -1), (1, 0))

    def token_mask(self, batch: Mapping[str, Tensor]) -> Bool[Tensor, "batch token"]:
        tokens = batch["input_ids"]
        mask = torch.ones_like(tokens, dtype=torch.bool)
        if "attention_mask" in batch:
            real = batch["attention_mask"].bool()
            # A token is scored where it and the one it is predicted from are both real: left padding too.
            mask = real & F.pad(real[:, :-1], (1, 0))
        if "labels" in batch:
            mask = mask & (batch["labels"] != IGNORED_LABEL)
        mask[:, 0] = False
        return mask

    def token_positions(self, batch: Mapping[str, Tensor]) -> Int[Tensor, "batch token"]:
        tokens = batch["input_ids"]
        real = batch["attention_mask"] if "attention_mask" in batch else torch.ones_like(tokens)
        return real.long().cumsum(1) - 1


def at_least_float32(values: Tensor) -> Tensor:
    """Half-precision values as float32; wider ones as they are. Losses are never formed in half precision."""
    return values.to(torch.promote_types(values.dtype, torch.float32))

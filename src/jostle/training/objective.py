"""What a step of training minimizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from jostle.losses import Batch, Loss
from jostle.models.functional import real_tokens, sample_means

Alike = Literal["sequences", "tokens"]


@dataclass(frozen=True)
class Objective:
    """What a step minimizes: Σᵢ wᵢ·ℓᵢ / B of a batch of B or, where tokens count alike, Σᵢ wᵢ·Σₜ ℓᵢₜ / Σᵢ Tᵢ.

    What is divided by has no weights, so that an example of weight 0 takes no part of its batch with it.
    """

    loss: Loss
    count_alike: Alike

    def __call__(
        self,
        model: nn.Module,
        batch: Batch,
        weights: Float[Tensor, " sample"] | None = None,
        counted: int | None = None,
    ) -> Float[Tensor, ""]:
        """Return it for a batch, with these weights of its examples.

        ``counted`` is divided by in place of B or Σᵢ Tᵢ, where the batch is a part of a step that counts them all.
        """
        losses = self.loss(model, batch)
        if losses.ndim == 1 or self.count_alike == "sequences":
            means = sample_means(losses, self.loss, batch)
            means = means if weights is None else weights.to(means) * means
            return means.mean() if counted is None else means.sum() / counted
        real = real_tokens(losses, self.loss, batch)
        sums = torch.where(real, losses, 0).sum(1)
        return (sums if weights is None else weights.to(sums) * sums).sum() / (
            real.sum() if counted is None else counted
        )

    @property
    def in_full_precision(self) -> Objective:
        """The same without autocast."""
        return Objective(getattr(self.loss, "in_full_precision", self.loss), self.count_alike)

    def shares(self, losses: Float[Tensor, "sample ..."], batch: Batch) -> Float[Tensor, "sample ..."]:
        """Return what each loss, an example's or a token's, counts in it: 0 where it is none."""
        if losses.ndim == 1:
            return torch.full_like(losses, 1 / len(losses))
        real = real_tokens(losses, self.loss, batch)
        counted = real.sum() if self.count_alike == "tokens" else real.sum(1, keepdim=True) * len(losses)
        return real.to(losses.dtype) / counted

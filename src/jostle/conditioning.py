"""Reading influence at a larger n_beta than was sampled: the same draws, with the training losses held.

Draws that roam freely say which losses move together; trained anew, a model would not let the training losses move so
far. With K the covariance of the training losses ℓ over the draws and λ = λmax(K)/κ,

    Cov_κ(a, b) = Cov(a, b) − Cov(a, ℓ)·(K + λI)⁻¹·Cov(ℓ, b)

is the covariance of a and b when, besides, every training loss is held where it is with variance λ. Of losses that are
linear in the weights that is exact, and the same as adding Σᵢ gᵢgᵢᵀ/λ to the precision of the weights. For a
log-likelihood this sum (the empirical Fisher matrix) stands for the Hessian of Σᵢ ℓᵢ, so that κ is what it is in
`jostle.calibration`: n_beta·λmax = κ·localization, of what is added in reading.

In the space of draws it is a small linear map: with Z the centred training losses (draws × examples), Cov_κ is the
plain covariance of W^½·a and W^½·b, W = (I + κ·ZZᵀ/λmax(ZZᵀ))⁻¹.

Reference: Bishop, Etherton and Majumdar, *Adaptive sampling with the ensemble transform Kalman filter*, 2001.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from jostle.errors import InputError
from jostle.estimate import BUFFER_BYTES, Centering, Trace, around_mean, column_blocks

MOST_HELD = 4_096
"""Directions in which the losses can move: as many as draws or training examples, whichever are fewer. Finding them
takes a minute or two for so many."""


class Conditioning:
    """The map of the draws, made from the training losses.

    Attributes:
        draws: of all chains together.
        held: λ, the variance with which each training loss is held.
        between_chain_share: the share of the training losses' variance that lies between chains, before.
    """

    def __init__(self, train: Trace, chains: np.ndarray, kappa: float, centering: Centering = "pooled") -> None:
        if not (np.isfinite(kappa) and kappa > 0):
            raise InputError("kappa", got=kappa, expected="a positive number, such as 10; 0 reads what was sampled")
        self.draws = len(chains) * train.shape[1]
        examples = train.shape[2]
        if self.draws < 2 or min(self.draws, examples) > MOST_HELD:
            raise InputError(
                "kappa",
                got=f"{self.draws} draws of {examples} training examples",
                expected=f"two draws or more, and at most {MOST_HELD:,} of one of both",
                fix="read without kappa",
            )
        self._chains: np.ndarray = chains
        self._centering: Centering = centering
        self._directions, sizes, self.between_chain_share = self._moves(train)
        if not len(sizes):
            raise InputError("kappa", got="training losses that never moved", expected="losses that can be held")
        largest = sizes[-1].item()
        self.held = largest / (self.draws - 1) / kappa
        self._shrunk = (1 + kappa * sizes / largest).rsqrt()

    def _moves(self, train: Trace) -> tuple[Float[Tensor, "draws move"], Float[Tensor, " move"], float]:
        """The eigenvectors and eigenvalues of ZZᵀ, from it or from ZᵀZ, and the share of variance between chains."""
        width = max(1, BUFFER_BYTES // (32 * self.draws * getattr(train, "read_per_column", 1)))
        few = train.shape[2] < self.draws
        gram = torch.zeros(0 if few else self.draws, 0 if few else self.draws, dtype=torch.float64)
        kept, shares = [], []
        for _, columns in column_blocks(train, self._chains, width):
            values, share = around_mean(columns, self._centering)
            flat = values.flatten(0, 1).double()
            shares.append(share)
            if few:
                kept.append(flat)
            else:
                gram.addmm_(flat, flat.T)
        if few:
            losses = torch.cat(kept, 1)
            sizes, mixtures = torch.linalg.eigh(losses.T @ losses)
            directions = losses @ mixtures / sizes.clamp(min=torch.finfo(torch.float64).tiny).sqrt()
        else:
            sizes, directions = torch.linalg.eigh(gram)
        real = sizes > sizes[-1] * 1e-12  # the others are rounding, and nothing moves in them
        return directions[:, real], sizes[real], float(np.concatenate(shares).mean())

    def __call__(self, trace: Trace) -> Conditioned:
        """Return a trace, read through the map."""
        return Conditioned(self, trace)

    def apply(self, values: Float[np.ndarray, "chain draw column"]) -> Float[Tensor, "draws column"]:
        """Return losses of all chains, centred and mapped."""
        kept = torch.from_numpy(np.ascontiguousarray(values[self._chains]))
        flat = around_mean(kept, self._centering)[0].flatten(0, 1).double()
        along = self._directions.T @ flat
        return flat + self._directions @ ((self._shrunk - 1)[:, None] * along)


class Conditioned:
    """A trace whose draws were mapped, read lazily: one chain, for the map mixes them."""

    def __init__(self, conditioning: Conditioning, trace: Trace) -> None:
        self._conditioning, self._trace = conditioning, trace
        self.shape = (1, conditioning.draws, trace.shape[2])
        self.dtype = trace.dtype
        self.read_per_column = getattr(trace, "read_per_column", 1)
        """How many numbers are read for each one returned, at most."""

    def __getitem__(self, index: tuple[Any, Any, slice]) -> Float[np.ndarray, "chain draw column"]:
        chains, draws, columns = index
        mapped = self._conditioning.apply(np.asarray(self._trace[:, :, columns]))
        return mapped.numpy().astype(self.dtype)[None][chains, draws]

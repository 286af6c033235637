"""Every random number of a run, from counters instead of from history.

Minibatches depend on (seed, chain, step), noise on (seed, chain, step, parameter), and neither on anything else:
not on how many chains run side by side, on which weights move beside this one, or on an interruption. The CPU uses
NumPy's counter-based Philox generator; a CUDA device uses its own Philox generator, seeded from the same
counters, so the two kinds of device draw different noise from one seed.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from jostle.posterior import MovingWeights


@lru_cache(maxsize=None)
def _stream(name: str) -> int:
    """A 64-bit number for a name; unlike Python's hash, the same in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def _generator(seed: int, stream: str, chain: int, step: int) -> np.random.Generator:
    # The first counter word counts the numbers drawn; chain and step sit in words it never reaches.
    return np.random.Generator(
        np.random.Philox(key=[seed % 2**64, _stream(stream)], counter=[0, 0, chain, step])
    )


def minibatch(seed: int, chain: int, step: int, *, size: int, of: int) -> np.ndarray:
    """Return the indices of one minibatch, drawn without replacement; all of them, in order, where it is whole."""
    if size >= of:
        return np.arange(of)
    return _generator(seed, "minibatch", chain, step).choice(of, size, replace=False, shuffle=False)


def noise(
    seed: int, chains: list[int], step: int, moving: MovingWeights, device: torch.device
) -> Float[Tensor, "chain weight"]:
    """Return standard normal numbers for one step of these chains."""
    out = torch.empty(len(chains), moving.total, dtype=moving.dtype, device=device)
    for row, chain in zip(out, chains, strict=True):
        for part, name in zip(row.split(moving.sizes), moving.names, strict=True):
            if device.type == "cpu":
                generator = _generator(seed, name, chain, step)
                generator.standard_normal(out=part.numpy(), dtype=part.numpy().dtype)
            else:
                counters = f"{seed}/{chain}/{step}/{name}"
                own = torch.Generator(device).manual_seed(_stream.__wrapped__(counters) % 2**63)
                part.normal_(generator=own)
    return out

"""Every random number of a run, from counters instead of from history.

Minibatches depend on (seed, chain, step), noise on (seed, chain, step, parameter), and neither on anything else:
not on how many chains run side by side, on which weights move beside this one, or on an interruption. The CPU uses
NumPy's SFC64 generator, in a state that is a hash of these. A CUDA device uses its own, seeded from (seed, chain,
step), for all weights at once: the two kinds of device draw different noise from one seed, and on CUDA the noise of a
weight depends on which others move.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from jostle.models.weights import MovingWeights

BLOCK = 1 << 28
"""How many weights of a chain are moved at once on a CUDA device; part of what a seed means there."""

KIND = "SFC64"
"""Where the random numbers of a CPU, and all minibatches, come from; part of what a seed means."""

WORTH_THREADS = 1 << 17
"""From so many numbers on, several threads make a CPU's noise, each that of some chains."""


@functools.cache
def _threads(count: int, process: int) -> ThreadPoolExecutor:
    """Threads of this process, since a fork has none of its parent's."""
    return ThreadPoolExecutor(count, thread_name_prefix="jostle-noise")


def _words(seed: int, chain: int, step: int, stream: str) -> np.ndarray:
    """256 bits that belong to these; unlike Python's hash, the same in every process."""
    return np.frombuffer(hashlib.sha256(f"{seed}/{chain}/{step}/{stream}".encode()).digest(), "<u8")


class _Generator(threading.local):
    """A thread's generator, put at (seed, chain, step, stream) at a small part of the cost of making a new one."""

    def __init__(self) -> None:
        self._bits = np.random.SFC64(0)
        self._numbers = np.random.Generator(self._bits)

    def at(self, seed: int, chain: int, step: int, stream: str) -> np.random.Generator:
        # All of the state is hashed: no two streams meet, and none has to be run in.
        words = _words(seed, chain, step, stream)
        self._bits.state = {"bit_generator": KIND, "state": {"state": words}, "has_uint32": 0, "uinteger": 0}
        return self._numbers


_generator = _Generator()


def minibatches(seed: int, chains: Sequence[int], step: int, *, size: int, of: int) -> list[np.ndarray]:
    """Return the indices of each chain's minibatch, drawn without replacement; all, in order, where it is whole."""
    if size >= of:
        return [np.arange(of)] * len(chains)
    numbers = (_generator.at(seed, chain, step, "minibatch") for chain in chains)
    return [those.choice(of, size, replace=False, shuffle=False) for those in numbers]


def noise(
    seed: int,
    chains: list[int],
    step: int,
    moving: MovingWeights,
    device: torch.device,
    with_room: Callable[[Callable[[], Tensor]], Tensor] = lambda make: make(),
) -> Iterator[tuple[slice, Float[Tensor, "chain weight"]]]:
    """Give standard normal numbers for one step of these chains, as blocks of weights.

    On a CUDA device the weights come in blocks, so that the noise of a large model is never in memory as a whole;
    ``with_room`` makes the tensor of a block.
    """
    if device.type == "cpu":
        values = torch.empty(len(chains), moving.total, dtype=moving.dtype).numpy()

        def fill(row: np.ndarray, chain: int) -> None:
            for (name, part), size, kept in zip(moving.slices.items(), moving.whole.sizes, moving.kept, strict=True):
                numbers = _generator.at(seed, chain, step, f"noise/{name}")
                if size == part.stop - part.start:
                    numbers.standard_normal(out=row[part], dtype=row.dtype)
                else:  # the numbers of a shard are those that the whole parameter has there
                    row[part] = numbers.standard_normal(size, dtype=row.dtype)[kept]

        if values.size < WORTH_THREADS or torch.get_num_threads() == 1:
            for row, chain in zip(values, chains, strict=True):
                fill(row, chain)
        else:
            list(_threads(torch.get_num_threads(), os.getpid()).map(fill, values, chains))
        yield slice(0, moving.total), torch.from_numpy(values)
        return
    generators = [
        torch.Generator(device).manual_seed(int(_words(seed, chain, step, "noise")[0]) % 2**63) for chain in chains
    ]
    places, given = moving.places(), 0
    for start in range(0, moving.whole.total, BLOCK):
        stop = min(start + BLOCK, moving.whole.total)
        size = (len(chains), stop - start)
        block = with_room(functools.partial(torch.empty, size, dtype=moving.dtype, device=device))
        for row, generator in zip(block, generators, strict=True):
            row.normal_(generator=generator)
        if moving.whole is not moving:
            here = [slice(max(place.start, start) - start, min(place.stop, stop) - start) for place in places]
            parts = [block[:, part] for part in here if part.start < part.stop]
            if not parts:  # all of it is other ranks'
                continue
            block = torch.cat(parts, dim=1)
        yield slice(given, given + block.shape[1]), block
        given += block.shape[1]

"""What is read of the traces, in one pass and with bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jostle.estimate import BUFFER_BYTES
from jostle.traces.store import Traces

PROBED_SERIES = 32
"""How many losses and how many products R-hat and effective sizes are read from; each takes some milliseconds."""

PROBED_EXAMPLES = 256
"""How many training examples the agreement of scores is read from; and a quarter as many queries."""


@dataclass(frozen=True)
class Sample:
    """What is read of the traces: the mean loss at every draw, and some columns of both sides of the scores."""

    mean_loss: Float[np.ndarray, "chain draw"]
    """Over all training examples, of every chain; NaN where a failed chain recorded nothing."""
    center_loss: float
    chains: Int[np.ndarray, " healthy"]
    train: Float[np.ndarray, "healthy draw example"]
    other: Float[np.ndarray, "healthy draw query"]
    """Queries, or the components of the observables where there is no query set."""
    tokens: tuple[Float[np.ndarray, "healthy draw token"], Float[np.ndarray, "healthy draw token"]] | None
    """Single tokens of training sequences and of queries, where losses are per token."""
    temperature: Float[np.ndarray, "healthy draw"] | None = None
    """Where it was measured; NaN where a part of the run was not."""
    mirrored: bool = False
    """Whether chains are antithetic pairs, one after another."""

    @property
    def independent(self) -> Sample:
        """The chains that do not depend on each other: of an antithetic pair, the first."""
        if not self.mirrored:
            return self
        tokens = None if self.tokens is None else (self.tokens[0][::2], self.tokens[1][::2])
        parts = {"chains": self.chains[::2], "train": self.train[::2], "other": self.other[::2], "tokens": tokens,
                 "temperature": None if self.temperature is None else self.temperature[::2]}  # fmt: skip
        return replace(self, mirrored=False, **parts)

    @property
    def healthy_mean_loss(self) -> Float[np.ndarray, "healthy draw"]:
        """The mean loss of the chains that did not fail."""
        return self.mean_loss[self.chains]


def read_sample(traces: Traces, chains: Int[np.ndarray, " healthy"], *, mirrored: bool = False) -> Sample:
    """Read the traces once, a chunk at a time, and keep what the diagnostics need."""
    rows = traces.losses("train").shape[0] * traces.losses("train").shape[1]
    # A fixed share of the buffer for each of at most four kept arrays, so that long runs show fewer columns.
    room = max(1, BUFFER_BYTES // 8 // (8 * rows))
    train, tokens, mean_loss = _read_set(traces, "train", chains, min(PROBED_EXAMPLES, room), min(PROBED_SERIES, room))
    of_query = None
    if "query" in traces.sets:
        other, of_query, _ = _read_set(
            traces, "query", chains, min(PROBED_EXAMPLES // 4, room), min(PROBED_SERIES, room)
        )
    else:
        arrays = [traces.observable(name) for name in traces.observables]
        most = max(1, min(PROBED_EXAMPLES // 4, room) // len(arrays))
        parts = [np.asarray(array[:, :, :])[chains][:, :, spread(array.shape[2], most)] for array in arrays]
        other = np.concatenate(parts, axis=2).astype(np.float64)
    columns, center = traces.columns("train"), traces.center_losses("train").astype(np.float64)
    return Sample(
        mean_loss=mean_loss,
        center_loss=float(_sequence_means(center[None], columns.offsets).mean()),
        chains=chains,
        train=train,
        other=other,
        tokens=None if tokens is None or of_query is None else (tokens, of_query),
        temperature=np.asarray(traces.trace("temperature")[:])[chains, :, 0] if traces.keeps_temperature else None,
        mirrored=mirrored,
    )


def _read_set(
    traces: Traces, name: str, chains: np.ndarray, examples: int, tokens: int
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Some examples and some tokens of the healthy chains, (chain, draw, column), and every chain's mean loss."""
    losses, columns = traces.losses(name), traces.columns(name)
    picked, picked_tokens = spread(columns.samples, examples), spread(columns.total, tokens)
    shape = losses.shape[:2]
    mean_loss = np.full(shape, np.nan)
    kept = np.empty((*shape, len(picked)))
    kept_tokens = np.empty((*shape, len(picked_tokens))) if columns.per_token else None
    for chain, draws in _chunks(losses):
        values = np.asarray(losses[chain, draws])
        means = _sequence_means(values, columns.offsets)
        mean_loss[chain, draws] = means.mean(1, dtype=np.float64)
        kept[chain, draws] = means[:, picked]
        if kept_tokens is not None:
            kept_tokens[chain, draws] = values[:, picked_tokens]
    return kept[chains], None if kept_tokens is None else kept_tokens[chains], mean_loss


def _chunks(losses: Any) -> Iterator[tuple[int, slice]]:
    """The chunks of a trace along chains and draws: each is read once."""
    length = losses.chunks[1]
    for chain in range(losses.shape[0]):
        for start in range(0, losses.shape[1], length):
            yield chain, slice(start, min(start + length, losses.shape[1]))


def _sequence_means(values: np.ndarray, offsets: np.ndarray | None) -> np.ndarray:
    if offsets is None:
        return values
    return np.add.reduceat(values, offsets[:-1], axis=1, dtype=np.float64) / np.diff(offsets)


def spread(count: int, most: int) -> np.ndarray:
    """Evenly spaced indices."""
    return np.unique(np.linspace(0, count - 1, most).astype(int))

"""Observation: the losses of a whole data set at given weights, in columns that never change their order."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import time
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from jostle.data.datasets import Data, map_tensors
from jostle.errors import InputError
from jostle.losses import Batch, Loss, at_least_float32
from jostle.models.checks import check_losses, unchanged
from jostle.models.functional import FunctionalModel, ObservedBatch, token_mask
from jostle.models.in_place import InPlace
from jostle.traces.store import Columns

log = logging.getLogger("jostle")

KEPT_BATCHES = 1 << 30
"""Batches of an observed set are kept on the device when they take fewer bytes than this together."""

CPU_BATCH_SIZE = 256
"""Examples in one forward pass on a CPU, which has nothing to gain from larger ones."""

CREW_BATCH_SIZE = 8
"""The same on each of several processes that hold one model."""

BATCH_GROWTH, WORTHWHILE_GAIN = 4, 1.02
"""By what factor a batch is grown on a GPU, and how much faster it has to become."""


class Known(NamedTuple):
    """What need not be observed: the losses of these examples, from elsewhere."""

    examples: np.ndarray
    losses: Float[Tensor, "example ..."]


class _Table(NamedTuple):
    """Where losses are put by example and place in it, whether they were known or observed.

    Attributes:
        width: the places of an example.
        entries: of every column, where in the flat table it is.
    """

    width: int
    entries: Int[Tensor, " column"]


class Observer:
    """One observed data set: its columns, its losses at w*, and its losses at any other weights.

    Sequences of about the same length are observed together, so that little of a batch is padding; the columns stay in
    the order of the data set all the same.

    Args:
        model: the model as a function of its weights.
        loss: what is observed.
        data: the data set.
        batch_size: examples in one forward pass; None chooses it.
        most: observe at most this many examples, evenly spaced.
    """

    def __init__(
        self, model: FunctionalModel, loss: Loss, data: Data, batch_size: int | None, *, most: int | None = None
    ) -> None:
        self._loss, self._data = loss, data
        examples = np.arange(0, len(data), 1 if most is None else -(-len(data) // most))
        order = examples if data.lengths is None else examples[np.argsort(data.lengths[examples], kind="stable")]
        if batch_size is None:
            batch_size = choose_batch_size(model, loss, data, order)
        losses, counts, places = self._fit(model, order, batch_size)
        self._columns_in_order: Tensor | None = None
        if (order != examples).any():
            columns = _columns_in_order(order, counts if self._entries[0] is not None else np.ones_like(order))
            self._columns_in_order = torch.from_numpy(columns).to(model.device)
            if self._entries[0] is not None:
                counts, places = counts[np.argsort(order)], places[columns]
        self.center_losses: Float[Tensor, " column"] = self._in_order(losses[None])[0]
        if self._entries[0] is None:
            self.columns = Columns(len(examples))
        else:
            self.columns = Columns(len(examples), np.concatenate([[0], np.cumsum(counts)]), places)
        _require_finite(self.center_losses, self.columns, examples, data.name)

    def _fit(
        self, model: FunctionalModel, order: np.ndarray, batch_size: int
    ) -> tuple[Float[Tensor, " column"], np.ndarray, np.ndarray]:
        """`_arrange`, in smaller batches where memory runs out."""
        while True:
            try:
                return self._arrange(model, order, batch_size)
            except torch.OutOfMemoryError:
                if batch_size == 1 or model.crew.count > 1:  # others of a crew have not run out of it
                    raise
            # Only here: an error that is being handled holds on to the memory of what failed.
            batch_size = self._shrink(model)

    def _shrink(self, model: FunctionalModel) -> int:
        model.free_memory()
        size = -(-self.batch_size // 2)
        log.warning("out of memory: %s is observed in batches of %d from here on", self._data.name, size)
        return size

    def _arrange(
        self, model: FunctionalModel, order: np.ndarray, batch_size: int
    ) -> tuple[Float[Tensor, " column"], np.ndarray, np.ndarray]:
        """Make batches of the examples in this order; return their losses at w*, token counts and positions."""
        self.batch_size, self._order = batch_size, order
        self._indices = [_as_range(chosen) for chosen in np.split(order, range(batch_size, len(order), batch_size))]
        self._entries: list[Tensor | None] = []
        self._widths: list[int] = []
        self._table: _Table | None = None
        self._batches: list[ObservedBatch] | None = []
        center = model.moving.center[None]
        losses, lengths, positions, kept = [], [], [], 0
        for chosen in self._indices:
            batch = self._data.batch(chosen)
            what = f"loss on {self._data.name}"
            with unchanged(batch, what):
                values = check_losses(model.evaluate(self._loss, center, batch)[0], len(chosen), what)
            entries, counts, places = _real_entries(values, self._loss, batch, self._data.name, chosen)
            observed = _observed(batch, chosen, entries)
            self._entries.append(entries)
            self._widths.append(values.shape[1] if values.ndim > 1 else 1)
            losses.append(at_least_float32(observed.recorded(values)))
            lengths.append(counts)
            positions.append(places)
            kept += _bytes_in(batch)
            if self._batches is not None:
                self._batches = [*self._batches, observed] if kept <= KEPT_BATCHES else None
        return torch.cat(losses), np.concatenate(lengths), np.concatenate(positions)

    def observes(self, data: Data, loss: Loss) -> bool:
        """Whether this is what it observes, all of it, and its batches can be made on the device."""
        return self._data is data and self._loss is loss and len(self._order) == len(data) and data.on_device

    def __call__(
        self, model: FunctionalModel, weights: Float[Tensor, "chain weight"], known: Known | None = None
    ) -> Float[Tensor, "chain column"]:
        """Return the loss of every column at these weights; in smaller batches once memory has run out."""
        while True:
            batches = self._batches
            if batches is None:
                pairs = zip(self._indices, self._entries, strict=True)
                batches = (_observed(self._data.batch(chosen), chosen, entries) for chosen, entries in pairs)
            try:
                if known is not None:
                    return self._observe_others(model, weights, known)
                return self._in_order(model.losses(self._loss, weights, batches))
            except torch.OutOfMemoryError:
                if self.batch_size == 1 or model.crew.count > 1:
                    raise
            self._fit(model, self._order, self._shrink(model))

    def _observe_others(
        self, model: FunctionalModel, weights: Float[Tensor, "chain weight"], known: Known
    ) -> Float[Tensor, "chain column"]:
        """The same, of one chain some of whose losses are known."""
        assert isinstance(model, InPlace)
        assert len(weights) == 1
        if self._table is None:
            width = max(self._widths)
            parts = zip(self._indices, self._entries, self._widths, strict=True)
            entries = torch.from_numpy(np.concatenate([_in_table(*part, width) for part in parts])).to(model.device)
            self._table = _Table(width, self._in_order(entries[None])[0])
        is_known = np.zeros(len(self._data), bool)
        is_known[known.examples] = True
        parts = self._order[~is_known[self._order]], known.examples
        left, rows = (torch.from_numpy(those).to(model.device, non_blocking=True) for those in parts)
        losses = at_least_float32(known.losses.flatten(1) if known.losses.ndim > 1 else known.losses[:, None])
        losses = F.pad(losses, (0, self._table.width - losses.shape[1]))
        fill = functools.partial(self._fill, self._table)
        return model.evaluate_tensors(("others", id(self)), fill, weights[0], left, rows, losses)[None]

    def _fill(
        self,
        table: _Table,
        model: nn.Module,
        left: Int[Tensor, " other"],
        rows: Int[Tensor, " known"],
        losses: Float[Tensor, "known width"],
    ) -> Float[Tensor, " column"]:
        """The losses of all columns, from the examples that are left and those that are known.

        In shapes that do not depend on which these are: one recording holds for all draws.
        """
        filled = losses.new_zeros(len(self._order), table.width).index_copy_(0, rows, losses)
        size = _equal(len(left), self.batch_size)
        for first in range(0, len(left), size):
            some = left[first : first + size]
            # The last of these is at most as many places further on in the order as there are examples known.
            last = min(first + len(some) - 1 + len(rows), len(self._order) - 1)
            batch = self._data.gather(some, self._data.longest(self._order[last : last + 1]))
            values = at_least_float32(self._loss(model, batch))
            values = values if values.ndim > 1 else values[:, None]
            filled[:, : values.shape[1]].index_copy_(0, some, values)
        return filled.flatten()[table.entries]

    def _in_order(self, values: Float[Tensor, "chain column"]) -> Float[Tensor, "chain column"]:
        return values if self._columns_in_order is None else values[:, self._columns_in_order]


def _in_table(chosen: range | np.ndarray, entries: Tensor | None, width: int, of: int) -> Int[np.ndarray, " column"]:
    """Where the recorded entries of a batch of these examples, so wide, are in a table of all examples."""
    examples = np.asarray(chosen)
    if entries is None:
        return examples * of
    row, column = np.divmod(entries.cpu().numpy(), width)
    return examples[row] * of + column


def _observed(batch: Batch, chosen: range | np.ndarray, entries: Tensor | None) -> ObservedBatch:
    return ObservedBatch(batch, entries, len(chosen) if entries is None else len(entries))


def _as_range(indices: np.ndarray) -> range | np.ndarray:
    """Consecutive indices as a range, of which a batch is a view and no copy."""
    first, last = int(indices[0]), int(indices[-1])
    consecutive = last - first == len(indices) - 1 and (np.diff(indices) == 1).all()
    return range(first, last + 1) if consecutive else indices


def _columns_in_order(order: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Where each column of the data set's order stands, when examples come in this order with so many columns each."""
    starts = np.cumsum(counts) - counts
    spans = [range(int(starts[place]), int(starts[place] + counts[place])) for place in np.argsort(order)]
    return np.fromiter(itertools.chain.from_iterable(spans), np.int64)


def choose_batch_size(model: FunctionalModel, loss: Loss, data: Data, order: np.ndarray) -> int:
    """Grow the batch until examples per second stop rising, or memory ends.

    Tried on the examples that come last in the order: where that goes by length, the longest.
    """
    if model.crew.count > 1:  # where one may run out of memory and leave the others waiting
        return min(CREW_BATCH_SIZE, -(-len(order) // model.crew.count))
    if model.device.type != "cuda":
        return CPU_BATCH_SIZE
    center = model.moving.center[None]
    best, best_rate, size = 1, 0.0, 1
    while size < len(order):
        # Batches of equal size: a small rest costs as much as a whole one.
        size = _equal(len(order), BATCH_GROWTH * size)
        try:
            batch = data.batch(order[-size:])
            seconds = math.inf
            for _ in range(3):  # the first call loads kernels
                torch.cuda.synchronize()
                started = time.perf_counter()
                model.evaluate(loss, center, batch)
                torch.cuda.synchronize()
                seconds = min(seconds, time.perf_counter() - started)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            break
        rate = size / seconds
        if rate < WORTHWHILE_GAIN * best_rate:
            break
        best, best_rate = size, rate
    log.info("%s is observed in %d batches of %d", data.name, -(-len(order) // best), best)
    return best


def _equal(examples: int, size: int) -> int:
    """The size of about equal batches, of at most so many examples."""
    return -(-examples // -(-examples // size))


def _bytes_in(batch: Batch) -> int:
    sizes: list[int] = []
    map_tensors(batch, lambda tensor: sizes.append(tensor.numel() * tensor.element_size()))
    return sum(sizes)


def _real_entries(
    losses: Tensor, loss: Loss, batch: Batch, name: str, indices: range | np.ndarray
) -> tuple[Tensor | None, np.ndarray, np.ndarray]:
    """Flat indices of a batch's real tokens, how many each sample has, and their positions in it."""
    if losses.ndim == 1:
        return None, np.empty(0, np.int64), np.empty(0, np.int64)
    mask = token_mask(loss, batch)
    if mask is None:
        mask = torch.ones_like(losses, dtype=torch.bool)
    counts = mask.sum(1).cpu().numpy()
    if (counts == 0).any():
        raise InputError(
            name,
            got=f"example {indices[int(np.argmin(counts))]} without a single scored token",
            expected="at least one in every example",
            fix="a sequence needs two tokens, and one label that is not masked",
        )
    entries = mask.flatten().nonzero()[:, 0]
    method = getattr(loss, "token_positions", None)
    positions = entries % mask.shape[1] if method is None else method(batch).flatten()[entries]
    return entries, counts, positions.cpu().numpy()


def _require_finite(losses: Tensor, columns: Columns, indices: np.ndarray, name: str) -> None:
    bad = (~torch.isfinite(losses)).nonzero()[:, 0]
    if len(bad):
        column = int(bad[0])
        raise InputError(
            f"loss at w* on {name}",
            got=f"{losses[column].item()} for example {indices[columns.owner(column)]} ({len(bad)} of {len(losses)} "
            "losses are not finite)",
            expected="finite losses at the checkpoint itself",
            fix="check that example and the model's precision",
        )

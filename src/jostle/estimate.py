"""From traces to covariance, correlation and their Monte Carlo errors; blocked and streaming.

Everything here takes arrays of shape (chain, draw, column) that can be sliced: NumPy arrays, Zarr arrays, or
`jostle.traces.store.SequenceLosses`. Signs are plain statistics, +Cov; the sign of influence is put on in
`jostle.runs.run`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from jostle.errors import InputError

Centering = Literal["pooled", "within"]

BUFFER_BYTES = 256 << 20
"""What an estimate may allocate beyond its output."""

WORTH_A_GPU = 1 << 20
"""How many scores make it worth moving the traces to a GPU."""

AUTOCORRELATION_TIMES = 5
"""The length of a batch of draws, in autocorrelation times."""

SLOW = 0.95
"""Which quantile of the losses' autocorrelation times batches are long for."""

PROBED_SERIES = 64
"""How many series the autocorrelation time is read from."""

FEWEST_DRAWS = 10
"""From chains of fewer draws than this, no autocorrelation is read."""

FEWEST_BATCHES = 8
"""With fewer batches than this, a standard error says so."""

STRANGE = 0.05
"""The share of pairs at either end of the order that say nothing of others' tails: a loss that jumped once."""

ENOUGH_BATCHES = 120
"""More say hardly more about an error, and longer ones depend on each other less."""


class Trace(Protocol):
    """Anything of shape (chain, draw, column) that can be sliced."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(chains, draws, columns)."""
        ...

    @property
    def dtype(self) -> Any:
        """The type of a loss."""
        ...

    def __getitem__(self, index: Any, /) -> Any: ...


@dataclass(frozen=True)
class Estimate:
    """A matrix of covariances or correlations, and how well it is known."""

    values: Float[np.ndarray, "left right"]
    standard_error: Float[np.ndarray, "left right"] | None
    batches: int | None
    """Of draws, that the standard error is from."""
    remark: str | None
    """What whoever reads the standard error should be told: that it rests on too few batches, or too short ones."""
    between_chain_share: float
    """The share of the left columns' variance that lies between chains; about 1/(effective draws of a chain) when they
    agree."""
    by_tails: Callable[[], float] | None = None
    """Finds the degrees of freedom: called when they are read, for it takes longer than the errors of a few columns."""

    @cached_property
    def degrees_of_freedom(self) -> float | None:
        """Of the standard error, for Student's t: fewer than batches, the more so the heavier their tails are.

        Read at a κ, one less.
        """
        if self.batches is None:
            return None
        return float(self.batches - 1) if self.by_tails is None else self.by_tails()


def covariance(
    left: Trace,
    right: Trace,
    *,
    chains: np.ndarray | None = None,
    centering: Centering = "pooled",
    normalize: bool = False,
    standard_error: bool = False,
    batch_length: int | None = None,
    mirrored: bool = False,
    buffer_bytes: int = BUFFER_BYTES,
    out: np.ndarray | None = None,
    device: torch.device | str | None = None,
) -> Estimate:
    """Covariance of every left column with every right one, over all chains and draws.

    Pooled, as in the paper: Cov = Σ (a − ā)(b − b̄) / (CT − 1) with means over all chains. Within: each chain is
    centred at its own mean, and the divisor is C(T − 1). Normalized: the Pearson correlation.

    The standard error is a jackknife over batches of consecutive draws, each several autocorrelation times long,
    so that batches are nearly independent where draws are not; where a chain is shorter than that, a batch is a
    whole chain and the error is the one between chains, with at most C − 1 degrees of freedom.

    Args:
        left: (chain, draw, n).
        right: (chain, draw, q).
        chains: which chains to use; all by default.
        centering: around the pooled mean or each chain's own.
        normalize: return correlations.
        standard_error: also return the Monte Carlo standard error of every entry.
        batch_length: draws in a batch; measured from the traces where not given, and from what they were picked from.
        mirrored: chains are antithetic pairs, one after another: neither of two is left out without the other.
        buffer_bytes: what may be allocated beyond the output; of a GPU's memory, a quarter of what is free.
        out: an array (or memory map) of shape (n, q) to write into.
        device: where to compute; a GPU where there is one and the matrix is large enough to be worth the way there.

    Raises:
        InputError: fewer than two draws, or traces of different chains and draws.
    """
    check_centering(centering)
    kept = np.arange(left.shape[0])[slice(None) if chains is None else chains]
    if left.shape[:2] != right.shape[:2]:
        raise InputError("traces", got=f"{left.shape[:2]} and {right.shape[:2]}", expected="equal (chain, draw) shapes")
    draws = left.shape[1]
    groups = len(kept) if centering == "within" else 1
    if len(kept) * draws - groups < 1:
        raise InputError(
            "draws",
            got=f"{len(kept)} chains × {draws} draws",
            expected="at least two draws" + (" in each chain" if centering == "within" else ""),
            fix="raise draws",
        )
    n, q = left.shape[2], right.shape[2]
    if device is None:
        device = "cuda" if n * q >= WORTH_A_GPU and torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        buffer_bytes = max(buffer_bytes, torch.cuda.mem_get_info(device)[0] // 4)
    tile = _tile_widths(left, right, len(kept) * draws, errors=standard_error, buffer_bytes=buffer_bytes)
    batches, by_tails = None, None
    if standard_error:
        some_left, some_right = (spread_columns(trace, kept, PROBED_SERIES) for trace in (left, right))
        length = length_of_batch(some_left, some_right) if batch_length is None else batch_length
        batches = Batches(len(kept), draws, length, centering, together=2 if mirrored else 1)
        probed = some_left.astype(left.dtype), some_right.astype(right.dtype)
        by_tails = partial(batches.degrees_of_freedom, *probed, normalize=normalize)
    values = np.empty((n, q), left.dtype) if out is None else out
    errors = np.empty((n, q), left.dtype) if batches else None
    values_out, errors_out = torch.from_numpy(values), None if errors is None else torch.from_numpy(errors)
    shares = np.empty(n)
    for b, columns_b in column_blocks(right, kept, tile[1]):
        B, _ = around_mean(columns_b.to(device), centering)
        for a, columns_a in column_blocks(left, kept, tile[0]):
            A, share = around_mean(columns_a.to(device), centering)
            shares[a] = share
            tile_values = _moment(A, B, len(kept) * draws - groups, normalize)
            values_out[a, b] = tile_values
            if batches is not None and errors_out is not None:
                errors_out[a, b] = batches.standard_error(A, B, tile_values, normalize)
    if batches is None:
        return Estimate(values, None, None, None, mean_share(shares))
    return Estimate(values, errors, batches.count, batches.remark, mean_share(shares), by_tails)


class Standardized:
    """A trace in memory, every column centred and scaled to length 1: any correlation with it is a dot product.

    For asking again and again, as a viewer does: one row against everything costs one pass over memory. Columns that
    never moved are 0, and so is every correlation with them.
    """

    def __init__(self, trace: Trace, chains: np.ndarray | None = None, *, centering: Centering = "pooled") -> None:
        self._centering: Centering = centering
        self._kept = np.arange(trace.shape[0])[slice(None) if chains is None else chains]
        draws = len(self._kept) * trace.shape[1]
        # Columns by draws, so that a block of columns is one piece of memory.
        self._values = torch.empty(trace.shape[2], draws, dtype=torch.float32)
        self._lengths = torch.empty(trace.shape[2], dtype=torch.float64)
        width = max(1, BUFFER_BYTES // (32 * draws * getattr(trace, "read_per_column", 1)))
        for block, columns in column_blocks(trace, self._kept, width):
            unit, self._lengths[block] = self._unit(columns)
            self._values[block] = unit.T.float()

    def _unit(
        self, values: Float[Tensor, "chain draw column"]
    ) -> tuple[Float[Tensor, "draws column"], Float[Tensor, " column"]]:
        centered = around_mean(values, self._centering)[0].flatten(0, 1).double()
        lengths = centered.norm(dim=0)
        return centered / lengths.clamp(min=torch.finfo(torch.float64).tiny), lengths

    def unit(self, columns: Sequence[int] | slice) -> Float[np.ndarray, "column draws"]:
        """Return some columns as they are kept."""
        return self._values[columns].numpy()

    def centered(self, columns: Sequence[int] | slice) -> Float[np.ndarray, "chain draw column"]:
        """Return some columns as they were, but for their means; only the chains that were kept."""
        picked = self._values[columns].double() * self._lengths[columns][:, None]
        return picked.T.reshape(len(self._kept), -1, len(picked)).numpy()

    def correlation(self, series: Float[np.ndarray, "chain draw ..."]) -> Float[np.ndarray, "column ..."]:
        """Return the correlation of every column with one series, or with several; of all chains, or those kept."""
        values = np.asarray(series)
        if len(values) != len(self._kept):
            values = values[self._kept]
        unit, _ = self._unit(torch.from_numpy(np.ascontiguousarray(values.reshape(*values.shape[:2], -1))))
        return (self._values @ unit.float()).clamp(-1, 1).numpy().reshape(len(self._values), *values.shape[2:])


def check_centering(centering: str) -> None:
    """Require one that there is."""
    if centering not in ("pooled", "within"):
        raise InputError("centering", got=repr(centering), expected="'pooled' or 'within'")


def column_blocks(trace: Trace, chains: np.ndarray, width: int) -> Iterator[tuple[slice, Tensor]]:
    """Read a trace a few columns at a time: (chain, draw, column)."""
    every = np.array_equal(chains, np.arange(trace.shape[0]))
    for start in range(0, trace.shape[2], width):
        block = slice(start, min(start + width, trace.shape[2]))
        values = np.asarray(trace[:, :, block])
        yield block, torch.from_numpy(np.ascontiguousarray(values if every else values[chains]))


def _tile_widths(left: Trace, right: Trace, rows: int, *, errors: bool, buffer_bytes: int) -> tuple[int, int]:
    """How many columns of each side to take at once, so that both blocks and the tile between them fit the buffer."""
    itemsize = np.dtype(left.dtype).itemsize
    # Reading and centring hold a few copies of a block, one in float64; a sequence's column is read as its tokens.
    per_column = [
        rows * (7 * max(itemsize, 4) + itemsize * getattr(trace, "read_per_column", 1)) for trace in (left, right)
    ]
    # The jackknife holds a dozen arrays of a tile's size.
    per_entry = (12 if errors else 2) * itemsize
    wide_right = max(1, min(right.shape[2], int(buffer_bytes / 2 / per_column[1])))
    wide_left = max(1, min(left.shape[2], int(buffer_bytes / 2 / (per_column[0] + per_entry * wide_right))))
    return wide_left, wide_right


def around_mean(values: Float[Tensor, "chain draw column"], centering: Centering) -> tuple[Tensor, np.ndarray]:
    """Centred values, and of each column the share of its variance that lies between chains; NaN where it is still."""
    wide = values.double()
    chain_means = wide.mean(1, keepdim=True)
    mean = chain_means.mean(0, keepdim=True)
    total = (wide - mean).square().sum((0, 1))
    between = values.shape[1] * (chain_means - mean).square().sum((0, 1))
    centered = wide - (mean if centering == "pooled" else chain_means)
    # What is left of a loss that never moved is the rounding of its mean, which would correlate perfectly with others'.
    still = centered.abs().amax((0, 1)) <= 4 * torch.finfo(values.dtype).eps * mean[0, 0].abs()
    share = torch.where(still, torch.nan, between / total.clamp(min=torch.finfo(torch.float64).tiny))
    return torch.where(still, 0, centered).to(values.dtype), share.cpu().numpy()


def mean_share(shares: Float[np.ndarray, " column"]) -> float:
    """The mean share of the variance between chains, of the losses that moved; 0 where none did."""
    moved = shares[~np.isnan(shares)]
    return float(moved.mean()) if len(moved) else 0.0


def _moment(A: Tensor, B: Tensor, divisor: float, normalize: bool) -> Tensor:
    flat_a, flat_b = A.flatten(0, 1), B.flatten(0, 1)
    products = flat_a.T @ flat_b
    if not normalize:
        return products / divisor
    return _divide(products, flat_a.square().sum(0), flat_b.square().sum(0))


def _divide(products: Tensor, left_squares: Tensor, right_squares: Tensor) -> Tensor:
    """Correlation from sums of products; 0 where a loss never moved, since it then moves with nothing."""
    scale = (left_squares.clamp(min=0).sqrt()[:, None]) * right_squares.clamp(min=0).sqrt()[None, :]
    return torch.where(scale > 0, products / scale, 0.0).clamp(-1, 1)


class Batches:
    """The delete-one-batch jackknife over consecutive draws.

    With θ the estimate from all N draws and θ₍ⱼ₎ the one without batch j of mⱼ draws, hⱼ = N/mⱼ and
    dⱼ = (hⱼ − 1)(θ − θ₍ⱼ₎), the variance is (1/g)·Σⱼ (dⱼ − D)²/(hⱼ − 1) with D = Σⱼ dⱼ/hⱼ. For equal batches it is the
    usual jackknife, and for a covariance it is the batch-means error about the global mean, to leading order. Of chains
    that depend on each other (``together`` of them, side by side) a batch has the same draws of each.

    Reference: Busing, Meijer and van der Leeden, *Delete-m jackknife for unequal m*, 1999.
    """

    def __init__(self, chains: int, draws: int, length: int, centering: Centering, *, together: int = 1) -> None:
        per_chain = max(1, draws // length)
        if chains // together * per_chain < 2:
            per_chain = min(2, draws)
        edges = np.linspace(0, draws, per_chain + 1).round().astype(int)
        self.slices = [
            (slice(chain, chain + together), slice(start, stop))
            for chain in range(0, chains, together)
            for start, stop in itertools.pairwise(edges)
        ]
        self._chains, self._draws = chains, draws
        self._centering: Centering = centering
        self._within = centering == "within"
        self.count = len(self.slices)
        groups = chains if self._within else 1
        largest = together * max(stop - start for start, stop in itertools.pairwise(edges))
        if chains * draws - largest - groups < 1:
            raise InputError(
                "standard_error",
                got=f"{chains} chains × {draws} draws",
                expected="enough draws to leave a batch of them out",
                fix="raise draws",
            )
        self.remark: str | None = None
        if self.count < FEWEST_BATCHES or (draws // per_chain < length and per_chain > 1):
            self.remark = (
                f"standard errors rest on only {self.count} batches of {draws // per_chain} draws (the draws' "
                f"autocorrelation asks for batches of {length}, and an error for {FEWEST_BATCHES} of them); raise "
                "draws, thin or chains"
            )

    def standard_error(self, A: Tensor, B: Tensor, estimate: Tensor, normalize: bool) -> Tensor:
        """Return the standard error of one tile; A and B are centred, (chain, draw, column)."""
        weighted_squares, weighted_sum, D = (torch.zeros_like(estimate) for _ in range(3))
        weights = 0.0
        for h, d in self._deviations(A, B, estimate, normalize):
            weight = 1 / (h - 1)
            weights += weight
            weighted_squares += weight * d.square()
            weighted_sum += weight * d
            D += d / h
        variance = (weighted_squares - 2 * D * weighted_sum + weights * D.square()) / self.count
        return variance.clamp(min=0).sqrt()

    def degrees_of_freedom(
        self,
        left: Float[np.ndarray, "chain draw left"],
        right: Float[np.ndarray, "chain draw right"],
        *,
        normalize: bool,
    ) -> float:
        """2/(2/(g − 1) + e/g), for g batches whose dⱼ have an excess kurtosis of e.

        A variance of g values with such tails varies as much as one of so many with a normal distribution's: products
        of losses have heavy ones, and the few batches with the largest of them say most of an error. e is the mean of
        many pairs of columns, but for the strangest of them: that of a single pair is hardly known. Where both sides
        are the same these are variances, whose tails are the heaviest, or with ``normalize`` neighbours.
        """
        g = self.count
        if g < FEWEST_BATCHES:
            return g - 1
        A, B = (around_mean(torch.from_numpy(side), self._centering)[0].double() for side in (left, right))
        pairs = torch.arange(max(A.shape[2], B.shape[2]))
        A, B = A[:, :, pairs % A.shape[2]], B[:, :, pairs % B.shape[2]]
        for shift in (0, 1):
            excess = self._excess_kurtosis(A, B.roll(shift, 2), normalize)
            if len(excess):
                break
        cut = int(STRANGE * len(excess))
        heavy = float(np.sort(excess)[cut : len(excess) - cut].mean()) if len(excess) else 0.0
        return 2 / (2 / (g - 1) + heavy / g) if heavy > 0 else float(g - 1)

    def _excess_kurtosis(self, A: Tensor, B: Tensor, normalize: bool) -> Float[np.ndarray, " pair"]:
        """Of the dⱼ of column i of both, without the bias of few batches; of pairs in which there is any."""
        g = self.count
        estimate = _moment(A, B, self._chains * self._draws - (self._chains if self._within else 1), normalize)
        d = torch.stack([d.diagonal().clone() for _, d in self._deviations(A, B, estimate, normalize)])
        d -= d.mean(0)
        second, fourth = d.square().mean(0), d.pow(4).mean(0)
        some = second > torch.finfo(d.dtype).eps * estimate.diagonal().square()
        plain = (fourth[some] / second[some].square() - 3).numpy()
        return ((g + 1) * plain + 6) * (g - 1) / ((g - 2) * (g - 3))

    def _deviations(self, A: Tensor, B: Tensor, estimate: Tensor, normalize: bool) -> Iterator[tuple[float, Tensor]]:
        """Give hⱼ and dⱼ of every batch."""
        N = self._chains * self._draws
        products = A.flatten(0, 1).T @ B.flatten(0, 1)
        squares_a, squares_b = A.square().sum((0, 1)), B.square().sum((0, 1))
        for chains, draws in self.slices:
            a, b = A[chains, draws], B[chains, draws]
            m = a.shape[0] * a.shape[1]
            # Deleting a batch moves the mean of what it was centred with: its own chains', or everyone's.
            rest = self._draws - a.shape[1] if self._within else N - m
            sum_a, sum_b = (side.sum(1) if self._within else side.sum((0, 1))[None] for side in (a, b))
            shift = 1 / rest if rest else 0.0
            without = products - a.flatten(0, 1).T @ b.flatten(0, 1) - shift * sum_a.T @ sum_b
            if normalize:
                left = squares_a - a.square().sum((0, 1)) - shift * sum_a.square().sum(0)
                right = squares_b - b.square().sum((0, 1)) - shift * sum_b.square().sum(0)
                without = _divide(without, left, right)
            else:
                groups = (self._chains - (len(a) if rest == 0 else 0)) if self._within else 1
                without = without / (N - m - groups)
            h = N / m
            yield h, (h - 1) * (estimate - without)


def length_of_batch(
    left: Float[np.ndarray, "chain draw left"],
    right: Float[np.ndarray, "chain draw right"],
    *,
    most: int = ENOUGH_BATCHES,
) -> int:
    """Several autocorrelation times of the slow losses, and of the products that a covariance averages.

    Slow are those that one in twenty is slower than: every error of a matrix rests on the same batches, and losses that
    are forgotten late would have errors that are far too small. Where that would be more than so many batches, they are
    longer.
    """
    chains, draws = left.shape[:2]
    a, b = (side - side.mean((0, 1)) for side in (left, right))
    pairs = np.arange(max(a.shape[2], b.shape[2]))
    products = a[:, :, pairs % a.shape[2]] * b[:, :, pairs % b.shape[2]]
    longest = max(autocorrelation_time(series, SLOW) for series in (a, b, products))
    if math.isnan(longest):
        return draws
    return min(draws, math.ceil(max(AUTOCORRELATION_TIMES * longest, chains * draws / most)))


def spread_columns(trace: Trace, chains: np.ndarray, most: int) -> Float[np.ndarray, "chain draw column"]:
    """Some columns, evenly spaced, of some chains; read a few draws at a time, as they are stored.

    Where a trace is a few picked columns of a larger one, of that: what is measured by these does not depend on what is
    asked for.
    """
    trace = getattr(trace, "whole", trace)
    picked = np.unique(np.linspace(0, trace.shape[2] - 1, most).astype(int))
    per_draw = trace.shape[0] * trace.shape[2] * getattr(trace, "read_per_column", 1)
    step = max(1, BUFFER_BYTES // (32 * per_draw))
    parts = [
        np.asarray(trace[:, start : start + step, :])[chains][:, :, picked].astype(np.float64)
        for start in range(0, trace.shape[1], step)
    ]
    return np.concatenate(parts, axis=1)


def autocorrelation_time(series: Float[np.ndarray, "chain draw column"], quantile: float = 0.75) -> float:
    """Draws for each effective one, of the slower series (a quantile of their times); at least 1.

    That chains disagree counts: their means are then worth less than their draws. NaN where chains are too short to
    tell.
    """
    from arviz_stats.base.array import array_stats

    moving = series[:, :, series.std((0, 1)) > 0]
    if series.shape[1] < FEWEST_DRAWS or moving.shape[2] == 0:
        return math.nan
    effective = array_stats.ess(moving, chain_axis=0, draw_axis=1, method="mean")
    times = series.shape[0] * series.shape[1] / np.asarray(effective)
    times = times[np.isfinite(times)]
    return max(1.0, float(np.quantile(times, quantile))) if len(times) else math.nan


class StreamingCovariance:
    """The covariance without the traces: memory O(nq + n + q) for each chain that is open, however many draws.

    Draws are folded in by blocks, each centred at its own mean, by the parallel formula for co-moments:

        M ← M + M_block + (k·m/(k + m))·δaδbᵀ,   δ = difference of the two means, k and m draws.

    Sums of raw losses would cancel in float32, and so would sums of ℓ − ℓ(w*): with many weights moving, losses rise
    above their value at w* by many times their own spread. Losses enter as ℓ − ℓ(w*) all the same, which keeps the
    means small. A chain stays apart until it is finished, so one that fails leaves no mark.

    Reference: Chan, Golub and LeVeque, *Updating formulae and a pairwise algorithm for computing sample variances*,
    1979.
    """

    BLOCK = 32

    def __init__(self, left_center: Float[Tensor, " left"], right_center: Float[Tensor, " right"]) -> None:
        self._centers = {"left": left_center, "right": right_center}
        self._open: dict[int, dict[str, Tensor]] = {}
        self._pending: dict[int, list[tuple[Tensor, Tensor]]] = {}
        zeros = self._zeros()
        self.sums = (
            zeros
            | {f"within_{name}": zeros[name].clone() for name in _CO_MOMENTS}
            | {f"{side}_center": center for side, center in self._centers.items()}
            | {"chains": torch.zeros(())}
        )

    def _zeros(self) -> dict[str, Tensor]:
        left, right = self._centers["left"], self._centers["right"]
        zeros = {"products": left.new_zeros(len(left), len(right)), "draws": torch.zeros((), dtype=torch.float64)}
        for side, center in self._centers.items():
            for moment in ("mean", "squares"):
                zeros[f"{side}_{moment}"] = torch.zeros_like(center, dtype=torch.float64)
        return zeros

    def update(self, chain: int, left: Float[Tensor, " left"], right: Float[Tensor, " right"]) -> None:
        """Take in one draw of a chain."""
        pending = self._pending.setdefault(chain, [])
        pending.append((left, right))
        if len(pending) == self.BLOCK:
            self._fold(chain)

    def _fold(self, chain: int) -> None:
        sums = self._open.setdefault(chain, self._zeros())
        if not self._pending.get(chain):
            return
        pending = self._pending.pop(chain)
        draws = len(pending)
        left, right = (torch.stack(side) for side in zip(*pending, strict=True))
        values = {"left": left - self._centers["left"], "right": right - self._centers["right"]}
        means = {side: value.double().mean(0) for side, value in values.items()}
        centered = {side: value - means[side].to(value.dtype) for side, value in values.items()}
        folded = {"products": centered["left"].T @ centered["right"], "draws": torch.tensor(draws, dtype=torch.float64)}
        for side in values:
            folded[f"{side}_mean"] = means[side]
            folded[f"{side}_squares"] = centered[side].double().square().sum(0)
        _merge(sums, folded)

    def unfinished(self, chain: int) -> dict[str, Tensor]:
        """Return what is known of a chain that is still running, for its checkpoint."""
        state = dict(self._open.get(chain, {}))
        for side, draws in zip(("left", "right"), zip(*self._pending.get(chain, []), strict=True), strict=False):
            state[f"pending_{side}"] = torch.stack(draws)
        return state

    def restore(self, chain: int, state: dict[str, Tensor]) -> None:
        """Go on from `unfinished`."""
        pending = [state.get(f"pending_{side}", torch.empty(0)) for side in ("left", "right")]
        self._pending[chain] = list(zip(*pending, strict=True))
        sums = {name: value.clone() for name, value in state.items() if not name.startswith("pending_")}
        if sums:
            self._open[chain] = sums

    def finish(self, chain: int) -> None:
        """Add a finished chain to the total."""
        self._fold(chain)
        sums = self._open.pop(chain)
        for name in _CO_MOMENTS:
            self.sums[f"within_{name}"] += sums[name]
        _merge(self.sums, sums)
        self.sums["chains"] += 1

    def drop(self, chain: int) -> None:
        """Forget a chain that failed."""
        self._open.pop(chain, None)
        self._pending.pop(chain, None)

    def estimate(self, *, centering: Centering = "pooled", normalize: bool = False) -> Estimate:
        """Covariance or correlation of the finished chains; the same numbers as `covariance` of their traces."""
        return covariance_from_sums(self.sums, centering=centering, normalize=normalize)


_CO_MOMENTS = ("products", "left_squares", "right_squares")


def _merge(into: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Add the draws of one set of co-moments to another, in place."""
    k, m = into["draws"].item(), other["draws"].item()
    shift = {side: other[f"{side}_mean"] - into[f"{side}_mean"] for side in ("left", "right")}
    weight = k * m / (k + m)
    dtype = into["products"].dtype
    into["products"] += other["products"]
    into["products"].addr_((weight * shift["left"]).to(dtype), shift["right"].to(dtype))
    for side, difference in shift.items():
        into[f"{side}_squares"] += other[f"{side}_squares"] + weight * difference.square()
        into[f"{side}_mean"] += difference * (m / (k + m))
    into["draws"] += m


def _still(sums: dict[str, Tensor], side: str) -> Tensor:
    """Which losses move by no more than the rounding of their values."""
    if f"{side}_center" not in sums:  # of a run from before it was kept
        return torch.zeros_like(sums[f"{side}_mean"], dtype=torch.bool)
    rounding = torch.finfo(sums["products"].dtype).eps * (sums[f"{side}_center"] + sums[f"{side}_mean"])
    return sums[f"{side}_squares"] <= sums["draws"] * rounding.square()


def covariance_from_sums(
    sums: dict[str, Tensor], *, centering: Centering = "pooled", normalize: bool = False
) -> Estimate:
    """Finish the estimate of `StreamingCovariance` from its sums."""
    check_centering(centering)
    draws, chains = float(sums["draws"]), float(sums["chains"])
    freedom = draws - (1 if centering == "pooled" else chains)
    if freedom < 1:
        raise InputError("draws", got=int(draws), expected="at least two draws in finished chains", fix="raise draws")
    products, left, right = (sums[name if centering == "pooled" else f"within_{name}"] for name in _CO_MOMENTS)
    values = _divide(products, left.to(products.dtype), right.to(products.dtype)) if normalize else products / freedom
    # As in `around_mean`: a loss that moves by rounding alone moves with nothing.
    values[_still(sums, "left")] = 0
    values[:, _still(sums, "right")] = 0
    shares = 1 - sums["within_left_squares"] / sums["left_squares"].clamp(min=torch.finfo(torch.float64).tiny)
    shares[_still(sums, "left")] = torch.nan
    return Estimate(values.numpy(), None, None, None, mean_share(shares.numpy()))

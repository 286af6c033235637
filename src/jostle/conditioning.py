"""Reading influence at a larger n_beta than was sampled: the same draws, with the training losses held.

Draws that roam freely say which losses move together; trained anew, a model would not let the training losses move so
far. With K the covariance of the training losses ℓ over the draws and λ = λmax(K)/κ,

    Cov_κ(a, b) = Cov(a, b) − Cov(a, ℓ)·(K + λI)⁻¹·Cov(ℓ, b)

is the covariance of a and b when, besides, every training loss is held where it is with variance λ. Where the training
losses move most, their variance falls to 1/(1 + κ) of what was sampled.

Of losses that are linear in the weights this is exact, and the same as adding Σᵢ gᵢgᵢᵀ/λ to the precision of the
weights. For a log-likelihood that sum (the empirical Fisher matrix) stands for the Hessian of Σᵢ ℓᵢ. Of a language
model it is a sum over tokens, so these are held there, in strands (`jostle.traces.store.Strands`). So draws without a
gradient, read at κ, are to first order what `jostle.calibration` would sample: n_beta·λmax = κ·localization.
What was sampled at κ₀ > 0 already is multiplied: read at κ, it stands at about κ₀ + κ(1 + κ₀).

In the space of draws it is a linear map: with Z the centred training losses (draws × examples), Cov_κ is the plain
covariance of W^½·a and W^½·b, W = (I + κ·ZZᵀ/λmax(ZZᵀ))⁻¹.

What is held is what the draws know best. Where they are few and losses move in many directions, noise is left, and a
smaller κ is better: how well scores from halves of the chains agree says so (`supports`), without any retraining.

Reference: Bishop, Etherton and Majumdar, *Adaptive sampling with the ensemble transform Kalman filter*, 2001.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from jostle.errors import InputError
from jostle.estimate import (
    BUFFER_BYTES,
    PROBED_SERIES,
    Batches,
    Centering,
    Trace,
    around_mean,
    check_centering,
    column_blocks,
    covariance,
    length_of_batch,
    mean_share,
    spread_columns,
)

Kappa = float | Literal["auto"]

CHOICES = (10.0, 3.0, 1.0)
"""What ``"auto"`` chooses from; the largest that the draws support, or 0."""

LEAST_SUPPORT = 0.95
"""Of what is chosen. Fixed in `experiments.holding`."""

LITTLE_SUPPORT = 0.9
"""Below this, a κ that was asked for is warned of."""

FEWEST_IN_A_HALF = 10
"""Draws. With fewer there are so few directions that holding one of them changes nothing but a scale."""

PROBED_EXAMPLES = 256
"""How many training examples support is read from; and as many queries."""

MOST_MOVES = 4_096
"""In how many directions the losses may move: as many as draws or what is held, whichever are fewer. The time
that finding them takes grows with the third power."""

MOST_BATCHES = 20
"""That a jackknife leaves out, one after another: without each of them, all is done again."""

MOST_ENTRIES = 1 << 27
"""Of all of these directions, with an entry for each draw: 1 GiB, three times."""


class Moves:
    """How the training losses move: the eigenvectors and eigenvalues of ZZᵀ, from it or from ZᵀZ.

    Attributes:
        draws: of all chains together.
        between_chain_share: the share of the training losses' variance that lies between chains.
    """

    def __init__(self, train: Trace, chains: np.ndarray, centering: Centering = "pooled") -> None:
        check_centering(centering)
        self.draws, examples = len(chains) * train.shape[1], train.shape[2]
        fewer = min(self.draws, examples)
        if self.draws < 2 or fewer > MOST_MOVES or self.draws * fewer > MOST_ENTRIES:
            raise InputError(
                "kappa",
                got=f"{self.draws} draws of {examples} training examples",
                expected=f"two draws or more, of one of both at most {MOST_MOVES:,}, and draws × that {MOST_ENTRIES:,}",
                fix="read without kappa",
            )
        self._chains: np.ndarray = chains
        self._centering: Centering = centering
        gram = None if examples < self.draws else torch.zeros(self.draws, self.draws, dtype=torch.float64)
        kept, shares = [], []
        width = max(1, BUFFER_BYTES // (32 * self.draws * getattr(train, "read_per_column", 1)))
        for _, columns in column_blocks(train, chains, width):
            values, share = around_mean(columns, centering)
            flat = values.flatten(0, 1).double()
            shares.append(share)
            if gram is None:
                kept.append(flat)
            else:
                gram.addmm_(flat, flat.T)
        self._squared = gram is not None
        self._values = torch.cat(kept, 1) if gram is None else gram
        """ZZᵀ, or Z where there are fewer examples than draws."""
        self._total = float(gram.trace() if gram is not None else self._values.square().sum())
        self._rounding_of = 0.0
        if not self._total:
            raise InputError("kappa", got="training losses that never moved", expected="losses that can be held")
        self.between_chain_share = mean_share(np.concatenate(shares))

    @cached_property
    def _found(self) -> tuple[Tensor, Tensor]:
        return _directions(self._values, self._rounding_of, squared=self._squared)

    @property
    def directions(self) -> Float[Tensor, "draws move"]:
        """The eigenvectors."""
        return self._found[0]

    @property
    def sizes(self) -> Float[Tensor, " move"]:
        """The eigenvalues, the largest last."""
        return self._found[1]

    def among(self, rows: Bool[Tensor, " draws"]) -> Moves:
        """Those of some of the draws, as one chain around its own mean: nothing is read for them again."""
        values = self._values[rows]
        if self._squared:
            values = values[:, rows] - values[:, rows].mean(1, keepdim=True)
        some = object.__new__(Moves)
        some.draws, some.between_chain_share = int(rows.sum()), self.between_chain_share
        some._chains, some._centering = np.arange(1), "pooled"
        some._squared, some._values = self._squared, values - values.mean(0)
        some._total = some._rounding_of = self._total
        return some

    def centered(self, values: Float[np.ndarray, "chain draw column"]) -> Float[Tensor, "draws column"]:
        """Return losses of all chains as the moves see them."""
        kept = torch.from_numpy(np.ascontiguousarray(values[self._chains]))
        return around_mean(kept, self._centering)[0].flatten(0, 1).double()


def _directions(values: Tensor, total: float, *, squared: bool) -> tuple[Tensor, Tensor]:
    """Eigenvectors and eigenvalues of ZZᵀ, given it or Z; not those that are rounding, of them or of a ``total``."""
    wide = squared or values.shape[1] >= len(values)
    products = values if squared else values @ values.T if wide else values.T @ values
    if not torch.isfinite(products).all():
        raise InputError(
            "kappa", got="losses so large that their products are infinite", expected="chains that stay near w*"
        )
    sizes, directions = torch.linalg.eigh(products)
    if not wide:  # those are mixtures of the columns
        directions = values @ directions / sizes.clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    real = sizes > max(float(sizes[-1]), total) * 1e-12
    return directions[:, real], sizes[real]


class Conditioned:
    """A trace whose draws were mapped, read lazily: one chain, for the map mixes them."""

    def __init__(self, trace: Trace, moves: Moves, kappa: float) -> None:
        self._trace, self._moves = trace, moves
        self._shrunk = (1 + kappa * moves.sizes / moves.sizes[-1]).rsqrt()
        self.shape = (1, moves.draws, trace.shape[2])
        self.dtype = trace.dtype
        self.read_per_column = getattr(trace, "read_per_column", 1)
        """How many numbers are read for each one returned, at most."""

    def __getitem__(self, index: tuple[Any, Any, slice]) -> Float[np.ndarray, "chain draw column"]:
        chains, draws, columns = index
        flat = self._moves.centered(np.asarray(self._trace[:, :, columns]))
        along = self._moves.directions.T @ flat
        mapped = flat + self._moves.directions @ ((self._shrunk - 1)[:, None] * along)
        return mapped.numpy().astype(self.dtype)[None][chains, draws]


class LeftOut:
    """A trace as one chain, without some consecutive draws of some chains."""

    def __init__(self, trace: Trace, chains: np.ndarray, left_out: tuple[slice, slice]) -> None:
        self._trace, self._chains = trace, chains
        self._kept = np.ones((len(chains), trace.shape[1]), bool)
        self._kept[left_out] = False
        self.shape = (1, int(self._kept.sum()), trace.shape[2])
        self.dtype = trace.dtype
        self.read_per_column = getattr(trace, "read_per_column", 1)
        """How many numbers are read for each one returned, at most."""

    def __getitem__(self, index: tuple[Any, Any, slice]) -> Float[np.ndarray, "chain draw column"]:
        chains, draws, columns = index
        return np.asarray(self._trace[:, :, columns])[self._chains][self._kept][None][chains, draws]


def supports(
    train: Trace,
    other: Trace,
    chains: np.ndarray,
    kappas: Sequence[float],
    *,
    together: int = 1,
    moves: Moves | None = None,
) -> dict[float, float] | None:
    """What the draws support: at every κ, √reliability of the scores over √reliability of what was sampled.

    With r the correlation, over training examples (the mean over queries), of scores from one half of the chains with
    those from the other (of the draws, where there is one chain), 2r/(1 + r) is the reliability of the scores from all
    draws, and its root is what noise leaves of their correlation with anything else, such as retraining. None where
    there are too few draws to tell. ``together`` chains side by side depend on each other. ``moves`` are those of all
    these chains, where they are known.

    Reference: Spearman, *Correlation calculated from faulty data*, and Brown, *Some experimental results in the
    correlation of mental abilities*, both 1910.
    """
    count, draws = len(chains), train.shape[1]
    halves = torch.zeros(2, count, draws, dtype=torch.bool)
    if count >= 2 * together:
        half = count // together // 2 * together
        halves[0, :half] = halves[1, count - half :] = True
    else:
        half = draws // 2
        halves[0, :, :half] = halves[1, :, draws - half :] = True
    if halves[0].sum() < FEWEST_IN_A_HALF:
        return None
    try:
        moves = moves or Moves(train, chains)
    except InputError:  # nothing moved, or there are too many draws to hold
        return None
    probed = [
        torch.from_numpy(spread_columns(trace, chains, PROBED_EXAMPLES)).flatten(0, 1) for trace in (train, other)
    ]
    kept: dict[float, list[np.ndarray]] = {}
    for rows in halves.flatten(1):
        part = moves.among(rows)
        directions, sizes = part.directions, part.sizes
        if not len(sizes):
            return None
        sides = [side[rows] - side[rows].mean(0) for side in probed]
        plain, along = sides[0].T @ sides[1], [directions.T @ side for side in sides]
        for kappa in {0.0, *kappas}:
            held = kappa * sizes / (sizes[-1] + kappa * sizes)
            values = (plain - along[0].T @ (held[:, None] * along[1])).numpy()
            kept.setdefault(kappa, []).append(values - values.mean(0))
    roots = {kappa: _root_of_reliability(*scores) for kappa, scores in kept.items()}
    return {kappa: roots[kappa] / roots[0.0] if roots[0.0] else 0.0 for kappa in kappas}


def most_supported(found: Mapping[float, float] | None) -> float:
    """The largest κ of `CHOICES` that draws support, or 0."""
    return next((kappa for kappa in CHOICES if found and found[kappa] >= LEAST_SUPPORT), 0.0)


def _root_of_reliability(first: Float[np.ndarray, "train query"], second: Float[np.ndarray, "train query"]) -> float:
    """√(2r/(1 + r)) of centred scores from two halves."""
    lengths = np.sqrt((first**2).sum(0) * (second**2).sum(0))
    moved = lengths > 0
    r = float(((first * second).sum(0)[moved] / lengths[moved]).mean()) if moved.any() else 0.0
    return math.sqrt(2 * r / (1 + r)) if r > 0 else 0.0


def jackknife_error(
    moves: Moves, left: Trace, right: Trace, chains: np.ndarray, kappa: float, *, mirrored: bool, **options: Any
) -> tuple[Float[np.ndarray, "left right"], Batches]:
    """The standard error of every entry, and the batches it is from; pooled.

    A jackknife over batches of consecutive draws, as that of `jostle.estimate.covariance`: without each of them the
    losses are held anew. Batches are as long as the draws' autocorrelation asks for, and longer where these would be
    more than `MOST_BATCHES`; each chain has one at least.
    """
    draws = left.shape[1]
    length = length_of_batch(
        *(spread_columns(trace, chains, PROBED_SERIES) for trace in (left, right)), most=MOST_BATCHES
    )
    batches = Batches(len(chains), draws, length, "pooled", together=2 if mirrored else 1)
    total = np.zeros((left.shape[2], right.shape[2]))
    squares = np.zeros_like(total)
    for left_out in batches.slices:
        rows = torch.ones(len(chains), draws, dtype=torch.bool)
        rows[left_out] = False
        some = moves.among(rows.flatten())
        sides = (Conditioned(LeftOut(side, chains, left_out), some, kappa) for side in (left, right))
        values = covariance(*sides, **options).values.astype(np.float64)
        total += values
        squares += values**2
    count = batches.count
    variance = (count - 1) / count * np.maximum(squares - total**2 / count, 0.0)
    return np.sqrt(variance).astype(left.dtype), batches


def check_kappa(kappa: Any) -> None:
    """Require what losses can be held with."""
    if isinstance(kappa, str) and kappa == "auto":
        return
    if isinstance(kappa, bool) or not isinstance(kappa, numbers.Real) or not 0 <= float(kappa) < math.inf:
        raise InputError(
            "kappa",
            got=repr(kappa),
            expected="a positive number, such as 10, or 'auto', or 0: as it was sampled",
        )

"""Second moments of the gradients at a checkpoint: an estimate, and whether an optimizer's are alike.

So a wrong file, or a wrong order of parameters in it, is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy import stats
from torch import Tensor

from jostle.data.datasets import Data
from jostle.errors import EstimateWarning, InputError, warn
from jostle.losses import Loss
from jostle.models.functional import FunctionalModel, real_tokens, sample_means
from jostle.models.weights import MovingWeights
from jostle.training.description import Count, Training

BATCHES = 16
"""Of which the mean is taken: a single root is known to 18 % where gradients are mostly noise."""

LARGEST_RATIO = 3.0
"""By how much the means of √v̂ may differ."""
LARGEST_LAG = 30.0
"""How much larger a given one may be, with a word: it remembers a thousand steps, and in short or long trainings alike
the gradients of those may have been far larger than they are at the checkpoint."""
LIKELY, LEAST = 0.48, 0.4
"""Rank correlations below which a word is said, and second moments are refused. Those of a training from random weights
have been seen at 0.43 and 0.45, as the gradients that they remember were others; those in another tensor's place at
0.35."""
FEW = 16
"""Examples, with fewer of which an estimate is too rough to refuse what was given."""
SAMPLE = 1_000_000
"""Weights of which ranks are compared, where there are more."""
ALL = "all weights"


class MomentComparison(NamedTuple):
    """Given second moments beside estimated ones, over the weights at which the estimate saw a gradient.

    Attributes:
        name: of a parameter, or ``"all weights"``.
        ratio: mean √given / mean √estimated; NaN where the estimate saw no gradient.
        rank_correlation: Spearman's; NaN where one of them is constant.
    """

    name: str
    ratio: float
    rank_correlation: float


def estimate_second_moments(
    model: FunctionalModel,
    loss: Loss,
    data: Data,
    training: Training,
    *,
    batches: int = BATCHES,
    at_once: int | None = None,
    seed: int = 0,
) -> Float[Tensor, " weight"]:
    """Return v̂ at the checkpoint: the mean over random batches of (c·ĝ)², in the order of the weights that move.

    ĝ is the gradient of the mean loss of a batch as large as in training, over its tokens or its sequences as
    ``training.count_alike`` says. Of Adam, whose decay λ is part of the gradient, it is (c·ĝ + λw)². Batches are dealt
    as in an epoch, without an example twice; where the data are a part of what was trained on (``training.total``),
    they are drawn with replacement, as that part stands for all. Where no batch has a gradient, it is 0.

    Args:
        model: in eval mode, at the checkpoint.
        loss: that was trained with.
        data: examples of the training.
        training: how it was.
        batches: how many; fewer where one has all the data.
        at_once: examples that go through the model together; a whole batch by default.
        seed: of the batches.

    Example:
        >>> estimated = estimate_second_moments(model, losses.next_token(), train, training)
    """
    size, partly = training.batch_size or len(data), training.total is not None
    if not partly and size >= len(data):
        size, batches = len(data), 1
    decay = training.rates_and_decay(model.moving)[1] * model.moving.center if training.optimizer == "adam" else 0.0
    total = torch.zeros_like(model.moving.center, dtype=model.moving.dtype)
    for chosen in _dealt(len(data), size, batches, partly, seed):
        gradient = _gradient(model, loss, data, chosen, training.count_alike, at_once or size)
        total += gradient.mul_(training.clip_factor).add_(decay).square_()
    return total / batches


def _dealt(count: int, size: int, batches: int, replaced: bool, seed: int) -> Iterator[np.ndarray]:
    """Random batches: with examples replaced, or as epochs deal them."""
    random, left = np.random.default_rng(seed), np.empty(0, dtype=int)
    for _ in range(batches):
        if replaced:
            yield random.integers(count, size=size)
            continue
        if len(left) < size:
            left = random.permutation(count)
        yield left[:size]
        left = left[size:]


def _gradient(
    model: FunctionalModel, loss: Loss, data: Data, chosen: np.ndarray, count_alike: Count, at_once: int
) -> Float[Tensor, " weight"]:
    """The gradient of a batch's mean loss, over tokens or over sequences, a part of the batch at a time."""
    leaf = model.moving.center.detach().to(model.moving.dtype, copy=True).requires_grad_()
    total, count = torch.zeros_like(leaf, requires_grad=False), 0
    for part in np.array_split(chosen, -(-len(chosen) // at_once)):
        batch = data.batch(part)
        with torch.enable_grad(), model.plain_kernels():
            losses = model.call(loss, leaf, batch)
            if losses.ndim == 1 or count_alike == "sequences":
                summed, terms = sample_means(losses, loss, batch).sum(), len(part)
            else:
                real = real_tokens(losses, loss, batch)
                summed, terms = torch.where(real, losses, 0).sum(), int(real.sum())
            total += torch.autograd.grad(summed, leaf)[0]
        count += terms
    return total / count


def compare_second_moments(
    given: Float[Tensor, " weight"], estimated: Float[Tensor, " weight"], moving: MovingWeights
) -> list[MomentComparison]:
    """Compare them for each parameter, and for all weights in the last row.

    Weights at which the estimate is 0, such as embeddings of tokens that its batches have not, are left out: they say
    nothing of what was given.
    """
    rows = [_row(name, given[place], estimated[place]) for name, place in moving.slices.items()]
    return [*rows, _row(ALL, given, estimated)]


def require_similar_moments(rows: Sequence[MomentComparison]) -> None:
    """Refuse second moments that are off over all weights, or have another order within the middle one of the tensors.

    Single tensors may be off: some are small, and rarely used ones are estimated badly from a few batches. All weights
    together may look right where tensors are in each other's place, since some are larger than others; within them,
    nothing does.
    """
    whole = next(row for row in rows if row.name == ALL)
    within = [row.rank_correlation for row in rows if row.name != ALL and not math.isnan(row.rank_correlation)]
    middle = float(np.median(within)) if within else whole.rank_correlation
    if math.isnan(whole.rank_correlation):  # of a single weight, or of weights that are all alike
        return
    least = min(whole.rank_correlation, middle)
    if least >= LEAST and 1 / LARGEST_RATIO <= whole.ratio <= LARGEST_LAG:
        if whole.ratio > LARGEST_RATIO or least < LIKELY:
            warn(
                f"the optimizer's second moments have roots {whole.ratio:.3g} times as large as gradients at the "
                f"checkpoint have, with a rank correlation of {least:.2f}: they remember steps when gradients were "
                "others, or belong to another checkpoint",
                EstimateWarning,
            )
        return
    raise InputError(
        "second_moments",
        got=f"roots {whole.ratio:.3g} times as large as those that the gradients at the checkpoint have, with a rank "
        f"correlation of {whole.rank_correlation:.2f} ({middle:.2f} within tensors)",
        expected=f"a ratio of 1/{LARGEST_RATIO:g} to {LARGEST_LAG:g}, and rank correlations of at least {LEAST:g}",
        fix="check that the optimizer, batch_size and clipping are this model's. If so, it has changed a lot "
        "since: have moments estimated (jostle solve --estimate-moments; in Python, "
        "dataclasses.replace(training, second_moments=None))",
    )


def _row(name: str, given: Float[Tensor, " weight"], estimated: Float[Tensor, " weight"]) -> MomentComparison:
    sampled = [_sample(values) for values in (given, estimated)]
    place = sampled[1] > 0
    pair = [values[place].double().sqrt() for values in sampled]
    if not len(pair[1]):
        return MomentComparison(name, float("nan"), float("nan"))
    ratio = float(pair[0].mean() / pair[1].mean())
    return MomentComparison(name, ratio, _rank_correlation(*(values.cpu().numpy() for values in pair)))


def _sample(values: Float[Tensor, " weight"]) -> Float[Tensor, " some"]:
    """As many as are worth ranking, the same of both."""
    if len(values) <= SAMPLE:
        return values
    random = torch.Generator().manual_seed(0)
    return values[torch.randint(len(values), (SAMPLE,), generator=random).to(values.device)]


def _rank_correlation(given: Float[np.ndarray, " weight"], estimated: Float[np.ndarray, " weight"]) -> float:
    """Spearman's, by ranks: NaN where all of one are alike."""
    if np.ptp(given) == 0 or np.ptp(estimated) == 0:
        return float("nan")
    return float(np.corrcoef(stats.rankdata(given), stats.rankdata(estimated))[0, 1])

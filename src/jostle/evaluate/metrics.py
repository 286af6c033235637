"""Do scores predict what retraining does?

A score is the change of a query's loss for extra weight on an example (negative helps), up to a positive factor.
Trained on a subset D, every example outside of it loses its weight, so the loss of query j is

    φⱼ(D) ≈ φⱼ(all) − Σ_{i∉D} τᵢⱼ = constantⱼ + Σ_{i∈D} τᵢⱼ,

with the sign as stored. Constants and the positive factor do not matter to a rank correlation over subsets. In a bank
of drops, φⱼ(all) is known from a training with the same seed, batches and order: there the change itself is predicted,
and the factor is measured as a slope.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float

from jostle.errors import ChainsFailedError, InputError
from jostle.evaluate.bank import Bank, require_bank
from jostle.evaluate.inputs import Given, scores_of
from jostle.evaluate.subsets import DROPS
from jostle.runs.run import Run
from jostle.scores import Scores

Per = Literal["query", "subset"]
Correlation = Literal["spearman", "pearson"]

BOOTSTRAP = 200
NORMAL_95 = 1.96
CONTROL_MARK = " (control)"
BLOCK_BYTES = 256 << 20
"""What of a trace or of scores is in memory at once in double precision."""
ROWS_AT_ONCE = 4_096
SHOWN_SHARES = (0.1, 0.2, 0.5)
"""After how much of the training set what was found is told."""
CONSTANT = 1e-12
"""A variance of no more of the squares than this is rounding."""


@dataclass(frozen=True)
class Measured:
    """A number with its bootstrap standard error.

    Attributes:
        value: the number.
        standard_error: over resampled queries and retrainings; NaN where there is too little to know it from.
        each: what it is the mean of, where it is one: a correlation for each query, or for each subset.
        replicates: its value for each time that they were resampled.
        resampled: of what, and how; None where there is nothing to compare.
    """

    value: float
    standard_error: float
    each: Float[np.ndarray, " one"] = field(default_factory=lambda: np.empty(0), repr=False)
    replicates: Float[np.ndarray, " resample"] = field(default_factory=lambda: np.empty(0), repr=False)
    resampled: tuple[Any, ...] | None = field(default=None, repr=False)

    def __sub__(self, other: Measured) -> Measured:
        """How much larger this is, of two methods on one bank with one seed of the bootstrap.

        Its error is that of the difference. For methods that are alike it is smaller than either's: queries and
        subsets that are good to one are good to the other.
        """
        if self.resampled is None or self.resampled != other.resampled:
            expected = "two of lds(), of slope(), or of removal(), with the same bank and the same other arguments"
            raise InputError("a difference", got="what was not resampled alike", expected=expected)
        replicates = self.replicates - other.replicates
        return Measured(self.value - other.value, _spread(replicates), replicates=replicates, resampled=self.resampled)

    @property
    def interval(self) -> tuple[float, float]:
        """95 %, by the normal approximation."""
        half = NORMAL_95 * self.standard_error
        return self.value - half, self.value + half

    def __format__(self, sign: str) -> str:
        known = np.isfinite(self.standard_error)
        return f"{self.value:{sign}.3f} ± {f'{NORMAL_95 * self.standard_error:.3f}' if known else '?'}"

    def __str__(self) -> str:
        return format(self)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, for JSON, which has no NaN."""
        known = np.isfinite(self.standard_error)
        error, interval = (self.standard_error, list(self.interval)) if known else (None, None)
        return {"value": self.value, "standard_error": error, "interval": interval}


def lds(
    bank: Bank,
    scores: Given,
    *,
    per: Per = "query",
    correlation: Correlation = "spearman",
    bootstrap: int = BOOTSTRAP,
    seed: int = 0,
) -> Measured:
    """The linear datamodeling score: how well summed scores rank the losses of retrained models.

    ``per="query"`` (the headline): for each query, the rank correlation over subsets, averaged over queries. It asks
    which subsets are good for this query, as Park et al. (TRAK, 2023) do. ``per="subset"`` is the equation of the
    paper: for each subset, the rank correlation over queries. A predictor that knows nothing but how hard each query
    is does well there; see the control `jostle.attributors.query_difficulty`.

    Args:
        bank: retrainings on random subsets, on all examples but one, or with small random sets left out (drops). Of
            drops, what is ranked is the change from the training of the same seed with nothing left out.
        scores: of the bank's training examples on its queries; a bare array of them will do.
        per: over what one correlation is taken.
        correlation: of ranks, or of values.
        bootstrap: how many times queries and subsets are resampled for the standard error.
        seed: of the bootstrap.

    Raises:
        InputError: scores of other data or of another size, or constant ones.
    """
    require_bank(bank)
    if bank.subsets.kind == "removal":
        raise InputError(
            "bank", got="a bank of removals", expected="random subsets, or all but one", fix="use removal()"
        )
    given = scores_of(scores)
    bank.check(given)
    predicted = [predicted_losses(bank, given)]
    return lds_of(predicted, real_losses(bank), per=per, correlation=correlation, bootstrap=bootstrap, seed=seed)[0]


def slope(bank: Bank, scores: Given, *, pooled: bool = False, bootstrap: int = BOOTSTRAP, seed: int = 0) -> Measured:
    """How much a loss really changes for each unit of predicted change, when small sets are left out.

    For each query, least squares with an intercept of the real change on the predicted one over drops,

        bⱼ = Cov_D(Δⱼ, pⱼ) / Var_D(pⱼ),   pⱼ(D) = −Σ_{i∉D} τᵢⱼ;

    the number is the median over queries. Scores whose unit is nats have a slope of 1; of others it says what their
    unit is. Noise in the predictions makes it smaller. A query whose predictions are constant counts as 0.

    Args:
        bank: retrainings with random sets left out (`random_drops`).
        scores: of the bank's training examples on its queries; a bare array of them will do.
        pooled: one least squares for all queries together, each with its own intercept,
            Σⱼ Cov(Δⱼ, pⱼ) / Σⱼ Var(pⱼ): queries whose predictions vary most weigh most.
        bootstrap: how many times queries and drops are resampled for the standard error.
        seed: of the bootstrap.

    Raises:
        InputError: another bank, scores of other data or of another size, or constant ones.
    """
    require_bank(bank)
    if bank.subsets.kind != DROPS:
        raise InputError("bank", got=f"subsets of kind {bank.subsets.kind!r}", expected="those of random_drops()")
    given = scores_of(scores)
    bank.check(given)
    predicted = [predicted_losses(bank, given)]
    return slopes_of(predicted, real_losses(bank), pooled=pooled, bootstrap=bootstrap, seed=seed)[0]


def leave_one_out_correlation(
    bank: Bank,
    scores: Given,
    *,
    correlation: Correlation = "spearman",
    bootstrap: int = BOOTSTRAP,
    seed: int = 0,
) -> Measured:
    """For each query, the correlation over removed examples of the predicted and the real change of its loss; the mean.

    Without example i the loss should change by −τᵢⱼ. That is the LDS of the subsets "all but one".
    """
    require_bank(bank)
    if bank.subsets.kind != "leave-one-out":
        raise InputError("bank", got=f"subsets of kind {bank.subsets.kind!r}", expected="those of leave_one_out()")
    return lds(bank, scores, correlation=correlation, bootstrap=bootstrap, seed=seed)


def predicted_losses(bank: Bank, scores: Scores) -> Float[np.ndarray, "subset query"]:
    """Σ_{i∈D} τᵢⱼ for every subset D and query j: the predicted losses, up to what does not depend on the subset.

    Of drops, −Σ_{i∉D} τᵢⱼ: the predicted change.
    """
    members = bank.subsets.members.astype(np.float64) - (bank.subsets.kind == DROPS)
    train, queries = scores.values.shape
    predicted = np.zeros((len(members), queries))
    rows = max(1, BLOCK_BYTES // (8 * queries))
    for start in range(0, train, rows):
        block = slice(start, start + rows)
        predicted += members[:, block] @ scores.values[block].astype(np.float64)
    # A constant column is the size of the subset alone; summed in some order it would get ranks from rounding.
    constant = (scores.values == scores.values[0]).all(0)
    predicted[:, constant] = members.sum(1)[:, None] * scores.values[0, constant].astype(np.float64)
    return predicted


def real_losses(bank: Bank) -> Float[np.ndarray, "subset seed query"]:
    """What is predicted: the losses or, of drops, their change from the training of the same seed on all examples.

    NaN where a retraining is missing, and of drops where nothing is left out.
    """
    losses = bank.values()
    if bank.subsets.kind != DROPS:
        return losses
    whole = bank.subsets.members.all(1)
    without, *_ = losses[whole] if whole.any() else [np.full(losses.shape[1:], np.nan)]
    if not np.isfinite(without).any():
        raise InputError("bank", got="no finished training with nothing left out", expected="it, to compare with")
    changes = losses.astype(np.float64) - without
    changes[whole] = np.nan
    return changes


def repeatability(bank: Bank) -> float | None:
    """The mean correlation, per query over subsets, of the losses from half of the seeds with those from the others.

    None where there is one seed. Where it is low, subsets hardly matter against the randomness of training, and no
    method can have a high LDS.
    """
    require_bank(bank)
    losses = real_losses(bank)
    halves = losses[:, 0::2], losses[:, 1::2]
    both = [np.isfinite(half[:, :, 0]).any(1) for half in halves]
    rows = both[0] & both[1] if halves[1].shape[1] else np.zeros(len(losses), bool)
    if rows.sum() < 3:
        return None
    first, second = (_ranks(np.nanmean(half[rows], axis=1).T) for half in halves)
    return float(correlations(first, second, np.ones((rows.sum(), 1))).mean())


def lds_of(
    predictions: Sequence[Float[np.ndarray, "subset query"]],
    losses: Float[np.ndarray, "subset seed query"],
    *,
    per: Per,
    correlation: Correlation = "spearman",
    bootstrap: int,
    seed: int,
) -> list[Measured]:
    """The LDS of several methods at once: what is resampled is the same for all.

    A subset is drawn with the mean of its seeds, whose noise it carries: seeds drawn again would count that twice.
    """
    if per not in ("query", "subset"):
        raise InputError("per", got=repr(per), expected="'query' or 'subset'")
    finished, losses = _finished(losses)
    subsets, queries = losses.shape
    of_subsets, of_queries = _resamples(subsets, queries, bootstrap, seed)

    def ranked(values: Float[np.ndarray, "subset query"]) -> Float[np.ndarray, "row column"]:
        """One correlation a row; Spearman's is Pearson's of ranks."""
        rows = values.T if per == "query" else values
        return _ranks(rows) if correlation == "spearman" else np.ascontiguousarray(rows)

    # Ranks are those among all subsets, not among the resampled ones: a difference of order 1/subsets, of a spread.
    columns, rows = (of_subsets, of_queries) if per == "query" else (of_queries, of_subsets)

    guessed, real = [ranked(predicted[finished]) for predicted in predictions], ranked(losses)
    once = np.ones((real.shape[1], 1))
    each = [correlations(one, real, once)[:, 0] for one in guessed]
    replicates = [_resampled_mean(one, real, columns, rows) for one in guessed]
    alike = (per, correlation, bootstrap, seed, losses.shape, zlib.crc32(losses.tobytes()))
    return [
        Measured(float(one.mean()), _spread(found), one, found, alike)
        for one, found in zip(each, replicates, strict=True)
    ]


def slopes_of(
    predictions: Sequence[Float[np.ndarray, "subset query"]],
    changes: Float[np.ndarray, "subset seed query"],
    *,
    pooled: bool,
    bootstrap: int,
    seed: int,
) -> list[Measured]:
    """The slope of several methods at once: what is resampled is the same for all."""
    finished, changes = _finished(changes)
    drops, queries = changes.shape
    of_drops, of_queries = _resamples(drops, queries, bootstrap, seed)
    once = np.ones((drops, 1)), np.ones((queries, 1))
    alike = ("slope", pooled, bootstrap, seed, changes.shape, zlib.crc32(changes.tobytes()))
    found = []
    for predicted in predictions:
        pair = np.ascontiguousarray(predicted[finished].T), np.ascontiguousarray(changes.T)
        each, (value,) = _slopes(*pair, *once, pooled)
        replicates = _slopes(*pair, of_drops, of_queries, pooled)[1]
        found.append(Measured(float(value), _spread(replicates), each[:, 0], replicates, alike))
    return found


def _slopes(
    predicted: Float[np.ndarray, "query drop"],
    real: Float[np.ndarray, "query drop"],
    of_drops: Float[np.ndarray, "drop resample"],
    of_queries: Float[np.ndarray, "query resample"],
    pooled: bool,
) -> tuple[Float[np.ndarray, "query resample"], Float[np.ndarray, " resample"]]:
    """The slope of each query, and of all, where drops and queries count as often as they were drawn."""
    covariance, variance, _ = _moments(predicted, real, of_drops)
    each = np.where(variance > 0, covariance / np.where(variance > 0, variance, 1), 0.0)
    if pooled:
        total = (of_queries * variance).sum(0)
        return each, np.where(total > 0, (of_queries * covariance).sum(0) / np.where(total > 0, total, 1), 0.0)
    often = of_queries.astype(int)
    return each, np.array([np.median(np.repeat(*both)) for both in zip(each.T, often.T, strict=True)])


def _finished(
    losses: Float[np.ndarray, "subset seed query"],
) -> tuple[Bool[np.ndarray, " subset"], Float[np.ndarray, "finished query"]]:
    """Which subsets were trained on, and the means of their seeds."""
    finished = np.asarray(np.isfinite(losses[:, :, 0]).any(1))
    if finished.sum() < 3:
        raise InputError("bank", got=f"{finished.sum()} finished subsets", expected="at least 3 to correlate over")
    return finished, _seed_means(losses[finished].astype(np.float64))


def _resamples(
    subsets: int, queries: int, bootstrap: int, seed: int
) -> tuple[Float[np.ndarray, "subset resample"], Float[np.ndarray, "query resample"]]:
    """How often each subset and each query is drawn, each time that they are drawn again."""
    generator = np.random.default_rng(seed)
    of_subsets, of_queries = np.empty((subsets, bootstrap)), np.empty((queries, bootstrap))
    for index in range(bootstrap):
        for drawn in (of_subsets, of_queries):
            count = len(drawn)
            drawn[:, index] = generator.multinomial(count, np.full(count, 1 / count))
    return of_subsets, of_queries


def _resampled_mean(
    left: Float[np.ndarray, "row column"],
    right: Float[np.ndarray, "row column"],
    columns: Float[np.ndarray, "column resample"],
    rows: Float[np.ndarray, "row resample"],
) -> Float[np.ndarray, " resample"]:
    """The mean correlation of two rows, where both rows and columns count as often as they were drawn."""
    total = np.zeros(rows.shape[1])
    for start in range(0, len(left), ROWS_AT_ONCE):
        block = slice(start, start + ROWS_AT_ONCE)
        total += (correlations(left[block], right[block], columns) * rows[block]).sum(0)
    return total / rows.sum(0)


def correlations(
    left: Float[np.ndarray, "row column"],
    right: Float[np.ndarray, "row column"],
    weights: Float[np.ndarray, "column resample"],
) -> Float[np.ndarray, "row resample"]:
    """Pearson's correlation of each pair of rows, where column k counts ``weights[k]`` times; 0 for a constant row."""
    product, *variances = _moments(left, right, weights)
    both = variances[0] * variances[1]
    return np.where(both > 0, product / np.sqrt(np.where(both > 0, both, 1)), 0.0)


def _moments(
    left: Float[np.ndarray, "row column"],
    right: Float[np.ndarray, "row column"],
    weights: Float[np.ndarray, "column resample"],
) -> tuple[Float[np.ndarray, "row resample"], ...]:
    """The covariance of each pair of rows and their variances, 0 where they are rounding, with columns so weighted."""
    share = weights / weights.sum(0)
    # Around the mean of all, so that what is taken off for that of the resampled is small.
    a, b = (one - one.mean(1, keepdims=True) for one in (left, right))
    mean_a, mean_b = a @ share, b @ share
    product = (a * b) @ share - mean_a * mean_b
    a **= 2
    b **= 2
    variances = []
    for squares, mean in ((a @ share, mean_a), (b @ share, mean_b)):
        variance = squares - mean**2
        variances.append(np.where(variance > CONSTANT * squares, variance, 0.0))
    return product, *variances


def _spread(replicates: Sequence[float] | Float[np.ndarray, " resample"]) -> float:
    known = np.asarray(replicates)[np.isfinite(replicates)]
    return float(np.std(known, ddof=1)) if len(known) > 1 else float("nan")


@dataclass(frozen=True)
class Detection:
    """How well a suspicion finds mislabelled examples.

    Attributes:
        auroc: the probability that a mislabelled example is more suspicious than another.
        inspected: shares of the training set, most suspicious first; those that are equally suspicious at once.
        found: the share of the mislabelled examples among them.
    """

    auroc: Measured
    inspected: Float[np.ndarray, " point"] = field(repr=False)
    found: Float[np.ndarray, " point"] = field(repr=False)

    def __str__(self) -> str:
        found = ", ".join(f"{self.found_at(share):.0%} in the first {share:.0%}" for share in SHOWN_SHARES)
        return f"AUROC {self.auroc}; of the wrong labels {found}"

    def found_at(self, share: float) -> float:
        """Return the share of mislabelled examples found after inspecting a share of the training set.

        Of equally suspicious ones it is the mean over all orders.
        """
        return float(np.interp(share, self.inspected, self.found))


def mislabel_detection(
    self_influence: Float[np.ndarray, " train"],
    mislabelled: Bool[np.ndarray, " train"],
    *,
    bootstrap: int = BOOTSTRAP,
    seed: int = 0,
) -> Detection:
    """Rank training examples by how strongly they influence themselves, and see where the mislabelled ones stand.

    Args:
        self_influence: τᵢᵢ with the sign of `Scores`: the most negative is the most suspicious, since a wrong label is
            one that only its own example supports.
        mislabelled: which labels are wrong.
        bootstrap: how many times examples are resampled for the standard error.
        seed: of the bootstrap.
    """
    suspicion, wrong = -np.asarray(self_influence, np.float64), np.asarray(mislabelled)
    if not np.isin(wrong, (0, 1)).all():
        raise InputError("mislabelled", got="other numbers than 0 and 1", expected="booleans, true for a wrong label")
    wrong = wrong.astype(bool)
    if suspicion.shape != wrong.shape or suspicion.ndim != 1:
        raise InputError("mislabelled", got=f"shape {wrong.shape}", expected=f"shape {suspicion.shape}, as the scores")
    if not wrong.any() or wrong.all():
        raise InputError("mislabelled", got=f"{wrong.sum()} of {len(wrong)}", expected="some, and not all")
    if not np.isfinite(suspicion).all():
        raise InputError("self_influence", got="values that are not finite", expected="finite ones")
    if np.ptp(suspicion) == 0:
        raise InputError("self_influence", got="the same value for every example", expected="values that differ")
    generator = np.random.default_rng(seed)

    def auroc(bad: np.ndarray, good: np.ndarray) -> float:
        above = _ranks(np.concatenate([bad, good]))[: len(bad)].sum() - len(bad) * (len(bad) + 1) / 2
        return float(above / (len(bad) * len(good)))

    groups = suspicion[wrong], suspicion[~wrong]
    # Within each group, so that no replicate lacks one of them.
    replicates = [auroc(*(generator.choice(group, len(group)) for group in groups)) for _ in range(bootstrap)]
    _, tie = np.unique(-suspicion, return_inverse=True)
    inspected, found = (
        np.append(0, np.bincount(tie, one).cumsum()) / one.sum() for one in (np.ones(len(wrong)), wrong)
    )
    return Detection(Measured(auroc(*groups), _spread(replicates)), inspected, found)


def self_influence(run: Run, *, normalize: bool = False) -> Float[np.ndarray, " train"]:
    """−Var(ℓᵢ) of every training example over the draws; divided by its mean loss over the draws if ``normalize``."""
    chains = run.healthy_chains
    if len(chains) == 0:
        raise ChainsFailedError("every chain of this run failed; it has no self-influence")
    if len(chains) * run.draws < 2:
        raise InputError("draws", got=1, expected="at least two draws in finished chains", fix="raise draws")
    losses = run.traces.sequence_losses("train")
    read = np.prod(losses.shape[:2]) * getattr(losses, "read_per_column", 1)
    block = max(1, int(BLOCK_BYTES // (8 * read)))
    parts = []
    for start in range(0, losses.shape[2], block):
        values = np.asarray(losses[:, :, start : start + block])[chains].astype(np.float64)
        flat = values.reshape(-1, values.shape[2])
        variance = flat.var(0, ddof=1)
        # A loss that is 0 at every draw has no variance either.
        parts.append(variance / np.maximum(flat.mean(0), np.finfo(np.float64).tiny) if normalize else variance)
    return -np.concatenate(parts)


@dataclass(frozen=True)
class Removal:
    """What taking away the most helpful examples does, by method.

    Attributes:
        counts: how many examples were taken away.
        rise: for each method, the mean over its queries of the rise in the query's loss, for each count.
        brittle: for each method, the share of the queries that were right at first and wrong after so many removals
            or fewer; of blind ones, the share of repeats. What did not finish does not count, and NaN is what nothing
            is known of. None without an observable ``"margin"``.
        fewest: for each method and query, the smallest count that made the query wrong, of blind removals in at least
            half of the repeats; None where none did.
        right: how many queries were right at first: what ``brittle`` has shares of.
    """

    counts: list[int]
    rise: dict[str, list[Measured]]
    brittle: dict[str, list[float]] | None
    fewest: dict[str, dict[int, int | None]] | None
    right: int | None = None

    def __str__(self) -> str:
        return "\n\n".join(map(aligned, self.tables))

    @property
    def tables(self) -> list[list[list[str]]]:
        """The rise and, where it is known, the brittleness: rows of cells, the first of them a heading."""
        rises = [[_marked(name), *map(str, rise)] for name, rise in self.rise.items()]
        tables = [[["rise in the query's loss", *(f"{count:,} removed" for count in self.counts)], *rises]]
        if self.brittle is not None:
            shares = [
                [_marked(name), *("?" if np.isnan(share) else f"{share:.0%}" for share in all_)]
                for name, all_ in self.brittle.items()
            ]
            heading = f"turned wrong, of {self.right} right"
            tables.append([[heading, *(f"{count:,} or fewer" for count in self.counts)], *shares])
        return tables


def _marked(method: str) -> str:
    return method + CONTROL_MARK if method == "random" else method


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table of plain text: names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        [name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))]
        for name, *cells in rows
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)


def removal(bank: Bank, *, bootstrap: int = BOOTSTRAP, seed: int = 0) -> Removal:
    """Compare removing what helps a query most with removing as many examples picked blindly.

    The bank's subsets are those of `removals`. Where it keeps an observable ``"margin"`` (one number a query, positive
    where the model is right), also say how few removals turn a right answer into a wrong one: the brittleness.

    Errors of the rise are those of other queries, other blind picks, and another training on all examples, which every
    rise is measured from. What one method's rise is above another's, or above the blind one,
    ``rise["mine"][0] - rise["random"][0]``, does not depend on that training, and has an error of its own.
    """
    require_bank(bank)
    labels = bank.subsets.labels
    if bank.subsets.kind != "removal":
        raise InputError("bank", got=f"subsets of kind {bank.subsets.kind!r}", expected="those of removals()")
    methods = list(dict.fromkeys(label["method"] for label in labels if label["k"]))
    counts = sorted({label["k"] for label in labels if label["k"]})
    queries = sorted({label["query"] for label in labels if "query" in label})
    losses = bank.values()
    if not np.isfinite(losses[0]).any():
        raise InputError("bank", got="no retraining on all examples", expected="it, to compare with")
    rise = _rises(losses.astype(np.float64), labels, methods, counts, queries, bootstrap, seed)
    if "margin" not in bank.observables:
        return Removal(counts, rise, None, None)
    margins = bank.values("margin")
    if margins.shape[2:] != (bank.about["queries"],):
        got = f"margins of shape {margins.shape[2:]}"
        raise InputError("bank", got=got, expected=f"one for each of {bank.about['queries']} queries")
    margins = _seed_means(margins)
    brittle: dict[str, list[float]] = {}
    fewest: dict[str, dict[int, int | None]] = {}
    right = [query for query in queries if margins[0, query] > 0]
    for method in methods:
        turned = {query: _turned(margins, labels, method, counts, query) for query in right}
        by_count = zip(*turned.values(), strict=True) if turned else [()] * len(counts)
        brittle[method] = _means_of_finite([np.array(shares, float) for shares in by_count]).tolist()
        fewest[method] = dict.fromkeys(queries) | {
            query: next((k for k, share in zip(counts, shares, strict=True) if share >= 0.5), None)
            for query, shares in turned.items()
        }
    return Removal(counts, rise, brittle, fewest, len(right))


def _rises(
    values: Float[np.ndarray, "subset seed query"],
    labels: Sequence[Any],
    methods: Sequence[str],
    counts: Sequence[int],
    queries: Sequence[int],
    bootstrap: int,
    seed: int,
) -> dict[str, list[Measured]]:
    """The rise of each method for each count, all from the same resampled queries, repeats and first training.

    A query brings the noise of the retraining that was done for it, and a repeat that of its own: no seed of those is
    drawn again. The training on all examples is one for all, so its noise is that of seeds.
    """
    generator, losses = np.random.default_rng(seed), _seed_means(values)
    alike = ("removal", bootstrap, seed, values.shape, zlib.crc32(values.tobytes()))
    blind = {k: [row for row, one in enumerate(labels) if (one["method"], one["k"]) == ("random", k)] for k in counts}
    groups = [one[np.isfinite(one).all(1)] for one in values]
    seeded = any(len(group) > 1 for group in groups)
    if not seeded:
        # Blind removals of the fewest stand in for seeds: they differ by those, and by the examples besides.
        groups = [losses[rows][np.isfinite(losses[rows]).all(1)] for rows in blind.values()]
        groups = [group for group in groups if len(group) > 1][:1]
    noise = [(group - group.mean(0)) * np.sqrt(len(group) / (len(group) - 1)) for group in groups if len(group) > 1]
    noise = np.concatenate([one[:, queries] for one in noise] or [np.zeros((1, len(queries)))])
    known = seeded or (len(groups) > 0 and len(queries) > 1)

    def often(count: int) -> Float[np.ndarray, "resample one"]:
        """Draw one fewer than there are, whose mean varies as that of all does in reality."""
        return generator.multinomial(max(count - 1, 1), np.full(count, 1 / count), size=bootstrap).astype(float)

    def again(row: int) -> Float[np.ndarray, "resample query"]:
        """By how much the losses of a subset differ if it is trained on with other seeds."""
        seeds = int(np.isfinite(values[row, :, 0]).sum())
        return noise[generator.integers(len(noise), size=(bootstrap, seeds))].mean(1)

    of_queries, at_first = often(len(queries)), again(0)
    rise: dict[str, list[Measured]] = {method: [] for method in methods}
    for k, method in itertools.product(counts, methods):
        rises = _means_of_finite([_after(losses, labels, method, k, query) for query in queries]) - losses[0, queries]
        real = np.isfinite(rises)
        if not real.any():
            raise InputError("bank", got=f"no finished removal of {k} by {method}", expected="at least one")
        changes = rises - at_first
        if method == "random":
            after = losses[np.ix_(blind[k], queries)]
            after = after[np.isfinite(after).all(1)]
            drawn = often(len(after))
            changes += drawn @ after / drawn.sum(1, keepdims=True) - after.mean(0)
            enough = len(after) > 1
        elif len(queries) == 1:
            row = next(row for row, one in enumerate(labels) if (one["method"], one["k"]) == (method, k))
            changes, enough = changes + again(row), seeded
        else:
            enough = real.sum() > 1
        weights = of_queries * real
        with np.errstate(invalid="ignore"):
            replicates = (weights * np.where(real, changes, 0)).sum(1) / weights.sum(1)
        replicates = replicates if enough else np.full(bootstrap, np.nan)
        error = _spread(replicates) if known else float("nan")
        rise[method].append(Measured(float(rises[real].mean()), error, rises, replicates, alike))
    return rise


def _turned(values: np.ndarray, labels: Sequence[Any], method: str, counts: Sequence[int], query: int) -> list[float]:
    """For each count, the share of the repeats in which so many removals, or fewer, made a query's margin negative.

    Each repeat counts by itself: the mean of several margins is steadier than one, and would turn too seldom. NaN
    where none of this count finished.
    """
    after = np.array([_after(values, labels, method, k, query) for k in counts])
    turned = np.where(np.isfinite(after), np.logical_or.accumulate(after < 0), np.nan)
    return _means_of_finite([*turned]).tolist()


def _after(
    values: Float[np.ndarray, "subset query"], labels: Sequence[Any], method: str, k: int, query: int
) -> Float[np.ndarray, " repeat"]:
    """A query's values without k examples: those of the method for it, or blind ones; NaN for a missing repeat."""
    rows = [
        row
        for row, label in enumerate(labels)
        if label["method"] == method and label["k"] == k and label.get("query", query) == query
    ]
    return values[rows, query]


def _means_of_finite(groups: Sequence[np.ndarray]) -> Float[np.ndarray, " group"]:
    return np.array([np.mean(group[np.isfinite(group)]) if np.isfinite(group).any() else np.nan for group in groups])


def _seed_means(values: Float[np.ndarray, "subset seed query"]) -> Float[np.ndarray, "subset query"]:
    finite = np.isfinite(values)
    total = np.where(finite, values, 0).sum(1)
    return np.where(finite.any(1), total / np.maximum(finite.sum(1), 1), np.nan)


def _ranks(values: Float[np.ndarray, "... value"]) -> Float[np.ndarray, "... value"]:
    """The ranks of values along the last axis, of equal ones their mean."""
    from scipy.stats import rankdata  # takes a second, which processes that only train can do without

    return rankdata(values, axis=-1)

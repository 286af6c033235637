"""Whether the scores of a run can be trusted: numbers, and a verdict in words.

Everything is read off the recorded losses, in one pass and with bounded memory: the mean loss at every draw, and a
few columns, evenly spaced. A trace shows what losses did; it cannot show what they did not visit. `docs/diagnostics.md`
says what each number means, and why its thresholds are where they are.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from jostle.estimate import (
    BUFFER_BYTES,
    FEWEST_DRAWS,
    autocorrelation_time,
    covariance,
    covariance_from_sums,
)
from jostle.traces import Traces

Level = Literal["good", "doubtful", "unreliable"]
LEVELS: tuple[Level, ...] = ("good", "doubtful", "unreliable")

PROBED_SERIES = 32
"""How many losses and how many products R-hat and effective sizes are read from; each takes some milliseconds."""

PROBED_EXAMPLES = 256
"""How many training examples the agreement of scores is read from; and a quarter as many queries."""

ENOUGH_DRAWS, FEWEST_EFFECTIVE = 100, 25
"""The Monte Carlo error of a correlation is about 1/√(effective draws): 0.1, and 0.2."""

R_HAT_DOUBTFUL, R_HAT_UNRELIABLE = 1.1, 1.3
"""Perfect chains with 100 effective draws among them reach 1.08 by chance; 1.01 asks for some thousand."""

AGREEMENT_DOUBTFUL, AGREEMENT_UNRELIABLE = 1 / 2, 1 / 3
"""Of scores from halves of the draws. By Spearman and Brown's formula 2r/(1 + r), two thirds and one half of the
differences between the scores from all draws are then signal."""

MOST_TIMES_THE_DRAWS = 20
"""Who would need more draws than this many times those there are is told something else."""

DRIFT_ERRORS = 5.0
"""Of the mean loss between the first quarter and the last half of the chains, in standard errors."""

RISE_DOUBTFUL, RISE_UNRELIABLE = 2.0, 5.0
"""Of the mean loss above w*, in nats; what knows nothing of 10 classes has a loss of 2.3."""

RUNAWAY_SPREADS = 8.0
"""How far above the draws before it, in their robust standard deviations, a chain that runs away has come."""

SPREAD_GROWTH = 6.0
"""By how much the spread of the mean loss may grow from the middle to the last third of the chains."""

HOT = 1.5
"""How far above d/2 a learning coefficient may lie: no target that is quadratic around w* gives more than d/2."""

TAIL = (0.05, 0.95)


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

    @property
    def healthy_mean_loss(self) -> Float[np.ndarray, "healthy draw"]:
        """The mean loss of the chains that did not fail."""
        return self.mean_loss[self.chains]


@dataclass(frozen=True)
class Reason:
    """One thing that is wrong: how bad, what was measured, and what to do about it."""

    level: Level
    kind: str
    number: float | None
    finding: str
    advice: str


def read_sample(traces: Traces, chains: Int[np.ndarray, " healthy"]) -> Sample:
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
        parts = [np.asarray(array[:, :, :])[chains][:, :, _spread(array.shape[2], most)] for array in arrays]
        other = np.concatenate(parts, axis=2).astype(np.float64)
    columns, center = traces.columns("train"), traces.center_losses("train").astype(np.float64)
    return Sample(
        mean_loss=mean_loss,
        center_loss=float(_sequence_means(center[None], columns.offsets).mean()),
        chains=chains,
        train=train,
        other=other,
        tokens=None if tokens is None or of_query is None else (tokens, of_query),
    )


def _read_set(
    traces: Traces, name: str, chains: np.ndarray, examples: int, tokens: int
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Some examples and some tokens of the healthy chains, (chain, draw, column), and every chain's mean loss."""
    losses, columns = traces.losses(name), traces.columns(name)
    picked, picked_tokens = _spread(columns.samples, examples), _spread(columns.total, tokens)
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


def _spread(count: int, most: int) -> np.ndarray:
    """Evenly spaced indices."""
    return np.unique(np.linspace(0, count - 1, most).astype(int))


def diagnose(config: Mapping[str, Any], manifest: Mapping[str, Any], sample: Sample | None) -> dict[str, Any]:
    """Return the diagnostics of a run that kept its traces; ``sample`` is None where every chain failed."""
    found = _begin(config, manifest)
    if sample is None:
        return found | {"verdict": _verdict(config, found)}
    total = sample.train.shape[0] * sample.train.shape[1]
    found |= {"mean_loss_at_center": sample.center_loss, "mean_loss": float(sample.healthy_mean_loss.mean())}
    found["rise"] = found["mean_loss"] - found["mean_loss_at_center"]
    train, other = moving(sample.train), moving(sample.other)
    found["unmoved_share"] = 1 - train.shape[2] / sample.train.shape[2]
    products = pair_products(train, other)
    groups = {
        "losses": np.concatenate([_some(train, PROBED_SERIES // 2), _some(other, PROBED_SERIES // 2)], axis=2),
        "products": products,
        "mean_loss_series": sample.healthy_mean_loss[:, :, None],
    }
    if sample.tokens is not None:
        tokens = [moving(side) for side in sample.tokens]
        some = [_some(side, PROBED_SERIES // 2) for side in tokens]
        groups |= {"tokens": np.concatenate(some, axis=2), "token_products": pair_products(*tokens)}
    found |= {name: convergence(series) for name, series in groups.items()}
    slowest = autocorrelation_time(_some(train, PROBED_SERIES)) if train.shape[2] else math.nan
    # The error of a covariance is that of the mean of its products, chains that disagree included; the losses' own
    # autocorrelation is the slower one as a rule, and counts as well.
    averaged = found["products"]["ess_bulk"]
    if math.isnan(slowest) or averaged is None:
        found |= {"autocorrelation_time": None, "effective_draws": None}
        if train.shape[1] < FEWEST_DRAWS:
            found["remarks"].append(f"chains of {train.shape[1]} draws are too short to tell how many are effective")
    else:
        found |= {"autocorrelation_time": slowest, "effective_draws": min(total / slowest, averaged)}
    found["between_chain_share"] = between_chain_share(train)
    found["drift"] = drift(sample.healthy_mean_loss)
    found["runaway"] = runaway(sample, config, manifest)
    found["agreement"] = agreement(sample)
    found["local_learning_coefficient"] = learning_coefficient(
        config, manifest, found["rise"], _standard_error(sample.healthy_mean_loss)
    )
    return found | {"verdict": _verdict(config, found)}


def _begin(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "failed_chains": manifest["failed_chains"],
        "remarks": list(manifest["remarks"]),
        "chains": config["chains"] - len(manifest["failed_chains"]),
        "draws": config["draws"],
    }


def diagnose_sums(
    config: Mapping[str, Any], manifest: Mapping[str, Any], sums: Mapping[str, Tensor], center: Tensor
) -> dict[str, Any]:
    """Return what the sums of a run without traces tell: mean losses, and the share of the variance between chains.

    Chains that agree have means that differ by their Monte Carlo error alone, so of C chains with N effective draws in
    all the share of the variance between them is about (C − 1)/N. That estimates N, roughly: it rests on C − 1 degrees
    of freedom, and shared drift does not show in it. ``center`` are the losses at w*, by example or by token.
    """
    found = _begin(config, manifest)
    rise = float(sums["left_mean"].mean())
    share = covariance_from_sums(dict(sums)).between_chain_share
    # Of sequences only the rise is known: which token belongs to which is not kept.
    known = len(center) == len(sums["left_mean"])
    center_loss = float(center.double().mean()) if known else None
    found |= {
        "mean_loss_at_center": center_loss,
        "mean_loss": None if center_loss is None else center_loss + rise,
        "rise": rise,
        "between_chain_share": share,
        "effective_draws_by_share": (found["chains"] - 1) / share if share > 0 and found["chains"] > 1 else None,
        "local_learning_coefficient": learning_coefficient(config, manifest, rise, None),
        "unknown": ["r_hat", "ess", "drift", "agreement", "autocorrelation_time", "effective_draws"],
    }
    return found | {"verdict": _verdict(config, found)}


def moving(series: Float[np.ndarray, "chain draw column"]) -> Float[np.ndarray, "chain draw moved"]:
    """The columns that moved by more than the rounding of a float32."""
    if series.size == 0:
        return series
    spread, size = np.ptp(series, axis=(0, 1)), np.abs(series).max((0, 1))
    return series[:, :, spread > 8 * np.finfo(np.float32).eps * size]


def _some(series: np.ndarray, most: int) -> np.ndarray:
    return series[:, :, _spread(series.shape[2], most)] if series.shape[2] else series


def pair_products(
    left: Float[np.ndarray, "chain draw left"], right: Float[np.ndarray, "chain draw right"]
) -> Float[np.ndarray, "chain draw pair"]:
    """(a − ā)(b − b̄) of some pairs of columns: what a covariance averages over draws."""
    if not left.shape[2] or not right.shape[2]:
        return left[:, :, :0]
    pairs = min(PROBED_SERIES, left.shape[2] * right.shape[2])
    a = _spread_over(left.shape[2], pairs)
    # Each left column with another right one: steps through both that do not keep pace.
    b = (np.arange(pairs) * max(1, right.shape[2] // 3 + 1)) % right.shape[2]
    return (left - left.mean((0, 1)))[:, :, a] * (right - right.mean((0, 1)))[:, :, b]


def _spread_over(count: int, places: int) -> np.ndarray:
    return np.linspace(0, count - 1, places).astype(int)


def convergence(series: Float[np.ndarray, "chain draw column"]) -> dict[str, Any]:
    """Rank-normalized split R-hat, bulk and tail ESS: of the worse quarter of the columns, and of the worst one.

    A single chain is compared with itself, in halves. None where chains are too short.

    Reference: Vehtari et al., *Rank-normalization, folding, and localization: an improved R̂ for assessing convergence
    of MCMC*, 2021; computed by arviz-stats.
    """
    names = ("r_hat", "r_hat_max", "ess_bulk", "ess_bulk_min", "ess_tail", "ess_tail_min")
    if series.shape[1] < FEWEST_DRAWS or series.shape[2] == 0:
        return {"columns": series.shape[2]} | dict.fromkeys(names)
    r_hat = split_r_hat(series)
    bulk, tail = effective_sizes(series, "bulk"), effective_sizes(series, "tail")
    numbers = (
        np.quantile(r_hat, 0.75), r_hat.max(), np.quantile(bulk, 0.25), bulk.min(), np.quantile(tail, 0.25), tail.min()
    )  # fmt: skip
    return {"columns": series.shape[2]} | {name: _plain(value) for name, value in zip(names, numbers, strict=True)}


def split_r_hat(series: Float[np.ndarray, "chain draw column"]) -> Float[np.ndarray, " column"]:
    """Rank-normalized split R-hat of every column."""
    from arviz_stats.base.array import array_stats

    if series.shape[0] == 1:
        half = series.shape[1] // 2
        series = np.stack([series[0, :half], series[0, -half:]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(array_stats.rhat(series, chain_axis=0, draw_axis=1, method="rank"))


def effective_sizes(
    series: Float[np.ndarray, "chain draw column"], method: Literal["bulk", "tail", "mean"]
) -> Float[np.ndarray, " column"]:
    """The effective number of draws of every column."""
    from arviz_stats.base.array import array_stats

    prob = TAIL if method == "tail" else None
    return np.asarray(array_stats.ess(series, chain_axis=0, draw_axis=1, method=method, prob=prob))


def _standard_error(mean_loss: Float[np.ndarray, "chain draw"]) -> float | None:
    """The Monte Carlo error of the mean over all draws."""
    from arviz_stats.base.array import array_stats

    if mean_loss.shape[1] < FEWEST_DRAWS or np.ptp(mean_loss) == 0:
        return None
    return _plain(array_stats.mcse(mean_loss, chain_axis=0, draw_axis=1, method="mean"))


def between_chain_share(series: Float[np.ndarray, "chain draw column"]) -> float | None:
    """The share of the variance that lies between chains; about 1/(effective draws of a chain) when they agree."""
    if not series.size:
        return None
    total = series.var((0, 1))
    between = series.mean(1).var(0)
    return _plain(np.mean(between / total))


def drift(mean_loss: Float[np.ndarray, "chain draw"]) -> dict[str, Any]:
    """How far the mean loss moves from the first quarter of the chains to their last half.

    In nats, and in standard errors; the spread is taken around each part's own mean in each chain, since otherwise a
    drift would excuse itself.
    """
    draws = mean_loss.shape[1]
    if draws < 4 * FEWEST_DRAWS:
        return {"change": None, "standard_errors": None}
    first, last = mean_loss[:, : draws // 4], mean_loss[:, draws // 2 :]
    variance = 0.0
    for part in (first, last):
        residual = part - part.mean(1, keepdims=True)
        effective = min(effective_sizes(residual[:, :, None], "mean")[0], part.size) if np.ptp(residual) else part.size
        variance += residual.var() / effective
    change = last.mean() - first.mean()
    return {"change": float(change), "standard_errors": _plain(change / math.sqrt(variance)) if variance else None}


def runaway(sample: Sample, config: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The chains whose mean loss, at the end, is far above anything that the first halves of the chains held.

    ``excess`` is how far the last tenth of a chain lies above the median of all first halves, in their robust standard
    deviations; ``spread_growth`` by how much the spread of the mean loss grows from the middle to the last third.
    """
    losses = sample.healthy_mean_loss
    draws = losses.shape[1]
    nothing: dict[str, Any] = {"chains": [], "excess": None, "spread_growth": None, "before": None, "level": None}
    if draws < 2 * FEWEST_DRAWS or np.ptp(losses) == 0:
        return nothing
    before = losses[:, : draws // 2]
    middle = float(np.median(before))
    spread = 1.4826 * float(np.median(np.abs(before - middle)))
    level = losses[:, -max(3, draws // 10) :].mean(1)
    excess = (level - middle) / max(spread, np.finfo(np.float64).tiny)
    # Of a skewed distribution a few draws lie far out; the mean of many does not lie beyond the farthest of them.
    beyond = level - middle > 1.5 * (before.max() - middle)
    third = draws // 3
    deviations = [part.std(1) for part in (losses[:, third : 2 * third], losses[:, -third:])]
    growth = float(np.median(deviations[1] / np.maximum(deviations[0], np.finfo(np.float64).tiny)))
    away = (excess > RUNAWAY_SPREADS) & beyond
    if growth > SPREAD_GROWTH and level.mean() > before.max():
        away |= deviations[1] > SPREAD_GROWTH * deviations[0]
    # Chains that have only begun to leave w* rise as well. They have not gone anywhere yet that the target does not.
    memory, rise = _memory(config), level - sample.center_loss
    if memory is not None and _steps(config) < memory:
        hot = 2 * config["posterior"]["n_beta"] * rise > 2 * HOT * manifest["moving_weights"]
        away &= hot | (rise > RISE_DOUBTFUL)
    return {
        "chains": sample.chains[away].tolist(),
        "excess": _plain(excess.max()),
        "spread_growth": _plain(growth),
        "before": middle,
        "level": _plain(level.max()),
    }


def half_scores(sample: Sample) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Correlations of the same pairs from two halves: of every chain's draws, and of the chains."""
    chains, draws = sample.train.shape[:2]
    halves: dict[str, tuple[Any, Any]] = {}
    if draws >= 2 * 2:
        halves["halves"] = (np.s_[:, : draws // 2], np.s_[:, draws - draws // 2 :])
    if chains >= 2 and draws >= 2:
        halves["chains"] = (np.s_[: chains // 2], np.s_[chains - chains // 2 :])

    def scores(half: Any) -> np.ndarray:
        return covariance(sample.train[half], sample.other[half], normalize=True, device="cpu").values

    return {name: (scores(one), scores(other)) for name, (one, other) in halves.items()}


def agreement(sample: Sample) -> dict[str, Any]:
    """How alike the rankings are that two halves of the draws give, and two halves of the chains.

    ``spearman`` is the rank correlation over training examples, ``top_overlap`` the share of the ``top`` most helpful
    ones of one half that are so in the other; medians over queries, of evenly spaced examples.
    """
    examples = sample.train.shape[2]
    top = min(10, max(1, examples // 5))
    found: dict[str, Any] = {"top": top, "examples": examples}
    scores = half_scores(sample)
    for name in ("halves", "chains"):
        if name not in scores or examples < 3:
            found[name] = {"spearman": None, "top_overlap": None}
            continue
        first, second = scores[name]
        best = [np.argsort(-half, axis=0, kind="stable")[:top] for half in (first, second)]
        overlap = [len(np.intersect1d(a, b)) / top for a, b in zip(best[0].T, best[1].T, strict=True)]
        ranks = _spearman(first, second)
        found[name] = {
            "spearman": _plain(np.nanmedian(ranks)) if np.isfinite(ranks).any() else None,
            "top_overlap": float(np.mean(overlap)),
        }
    return found


def _spearman(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Of every pair of columns; NaN where one is constant."""
    from scipy.stats import rankdata

    a, b = (rankdata(side, axis=0) for side in (first, second))
    a, b = a - a.mean(0), b - b.mean(0)
    with np.errstate(invalid="ignore"):
        return (a * b).sum(0) / np.sqrt((a**2).sum(0) * (b**2).sum(0))


def learning_coefficient(
    config: Mapping[str, Any], manifest: Mapping[str, Any], rise: float, error: float | None
) -> dict[str, Any]:
    """The local learning coefficient λ̂ = nβ·(E[L̄] − L̄(w*)), under the localized posterior that was sampled.

    It is the trace's for free where the loss that drives the chain is the one recorded, and the training examples
    are the sampling data (or stand for them: then ``of`` says so). Around a minimum that is quadratic it is
    ½·tr(nβH̄(nβH̄ + γ)⁻¹), half the number of directions in which the loss, and not the localization, holds the
    chain; ``temperature_at_least`` = 2λ̂/d is then at most 1 at the target's temperature. The temperature itself
    cannot be read from losses: most weights may feel nothing but the localization, and losses do not show those.

    Reference: Lau et al., *The Local Learning Coefficient: A Singularity-Aware Complexity Measure*, 2023.
    """
    n_beta, same_data = config["posterior"]["n_beta"], _same_data(manifest)
    if not n_beta or manifest["scale"] is None:
        why = "no loss drives the chain (n_beta = 0)" if not n_beta else "another loss drives the chain"
        return {"value": None, "standard_error": None, "of": why, "temperature_at_least": None}
    value = n_beta * rise
    return {
        "value": value,
        "standard_error": None if error is None else n_beta * error,
        "of": "the sampling data" if same_data else "the training examples, if they stand for the sampling data",
        "temperature_at_least": 2 * value / manifest["moving_weights"],
    }


def _same_data(manifest: Mapping[str, Any]) -> bool:
    fingerprints = manifest["fingerprints"]
    return fingerprints["train"] == fingerprints["sampling_data"]


def _verdict(config: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """The worst level of all reasons, and the reasons, causes before what follows from them."""
    reasons = list(_reasons(config, found))
    level = LEVELS[max((LEVELS.index(reason.level) for reason in reasons), default=0)]
    return {"level": level, "summary": _summary(level, reasons, found), "reasons": [asdict(r) for r in reasons]}


def _summary(level: Level, reasons: list[Reason], found: Mapping[str, Any]) -> str:
    if level == "good":
        effective, halves = found["effective_draws"], found["agreement"]["halves"]
        return (
            f"good: {effective:.0f} effective draws (± {effective**-0.5:.2f} on a correlation), "
            f"R-hat {max(found['losses']['r_hat'], found['products']['r_hat']):.2f}, "
            f"halves of the draws agree (Spearman {halves['spearman']:.2f}, {halves['top_overlap']:.0%} of the top "
            f"{found['agreement']['top']})"
        )
    worst = next(reason for reason in reasons if reason.level == level)
    opening = "doubtful" if level == "doubtful" else "these scores are not reliable"
    return f"{opening}: {worst.finding}; {worst.advice}"


def _reasons(config: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Reason]:
    failed, chains = found["failed_chains"], found["chains"]
    step_size = config["sampler"].get("step_size")
    smaller = "lower --step-size" + (f" (to about {_two_digits(step_size / 4)})" if step_size else "")
    for failure in failed:
        yield Reason(
            "unreliable" if 2 * len(failed) >= config["chains"] else "doubtful",
            "failed chain",
            failure["step"],
            f"chain {failure['chain']} failed at step {failure['step']}: {failure['reason']}",
            f"{smaller}, or raise --localization: the chains that are left stand at the same brink",
        )
    if chains == 0:
        return
    if found.get("unmoved_share") == 1:
        yield Reason(
            "unreliable",
            "no movement",
            0.0,
            "no loss moved by more than rounding",
            "raise --step-size, or lower --localization",
        )
        return
    unstable = False
    for reason in _unstable(found, chains, smaller):
        unstable = True
        yield reason
    if "unknown" in found:
        yield _without_traces(found)
        return
    # What an unstable chain lacks is a smaller step: neither burn-in nor thinning nor more draws would help it.
    if not unstable:
        yield from _too_short(config, found)
        yield from _disagreement(config, found)
    if chains == 1:
        yield Reason(
            "doubtful",
            "few chains",
            chains,
            "a single chain cannot show that it missed something",
            "sample with --chains 4",
        )


def _unstable(found: Mapping[str, Any], chains: int, smaller: str) -> Iterator[Reason]:
    """Chains that left, or are leaving, what they should sample."""
    away = found.get("runaway", {}).get("chains", [])
    if away:
        trail = found["runaway"]
        where = f"{trail['level']:.4g} at the end, around {trail['before']:.4g} in the first half"
        if 2 * len(away) >= chains:
            finding = f"the mean loss grows without end (mean loss {where}): the step size is too large to be stable"
        else:
            finding = f"chain {_listed(away)} runs away late (mean loss {where})"
        yield Reason("unreliable", "runaway", trail["excess"], finding, smaller)
    coefficient = found["local_learning_coefficient"]
    heat = coefficient["temperature_at_least"]
    error = coefficient["standard_error"] or 0.0
    if heat is not None and heat > HOT and (1 - 1 / heat) * coefficient["value"] > 4 * error and not away:
        yield Reason(
            "unreliable" if heat > 2 * HOT else "doubtful",
            "too hot",
            heat,
            f"n_beta times the rise of the mean loss is {heat:.3g} times half the number of weights, the most that a "
            "quadratic loss allows: the step (or the noise of small batches) heats the chain",
            smaller,
        )
    rise, center = found["rise"], abs(found["mean_loss_at_center"] or 0.0)
    if rise > max(RISE_DOUBTFUL, center / 2):
        yield Reason(
            "unreliable" if rise > max(RISE_UNRELIABLE, 2 * center) else "doubtful",
            "left the neighbourhood",
            rise,
            f"the mean loss is {rise:.3g} nats above w*: the chain left the neighbourhood",
            f"{smaller} or raise --localization",
        )


def _too_short(config: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Reason]:
    """Chains that have not gone far enough: R-hat, drift, effective draws."""
    effective, draws, thin = found["effective_draws"], config["draws"], config["thin"]
    total = found["chains"] * draws
    if effective is None:
        yield Reason(
            "unreliable" if total < FEWEST_EFFECTIVE else "doubtful",
            "too few draws",
            draws,
            f"chains of {draws} draws are too short to tell how many are effective",
            f"raise --draws to {ENOUGH_DRAWS} or more",
        )
        return
    # Chains that disagree need the slower of both times: their own, and the one that their disagreement shows.
    slowest = max(found["autocorrelation_time"], total / effective)
    steps, memory = _steps(config), _memory(config)
    burn_in = _two_digits(max(config["burn_in"] + 3 * slowest * thin, 3 * memory if memory else 0))
    reasons = []
    if effective < ENOUGH_DRAWS:
        advice = []
        if slowest > 2:
            wanted = _two_digits(max(thin * slowest, memory if memory and memory > steps else 0))
            advice.append(f"raise --thin to {'at least' if effective < 5 * found['chains'] else 'about'} {wanted}")
        # Draws that are one autocorrelation time apart are worth about three quarters of independent ones.
        if 0.75 * total < ENOUGH_DRAWS:
            advice.append(f"raise --draws to {_two_digits(ENOUGH_DRAWS / 0.75 / found['chains'])}")
        reasons.append(
            Reason(
                "unreliable" if effective < FEWEST_EFFECTIVE else "doubtful",
                "few effective draws",
                effective,
                f"{effective:.0f} effective draws of {total} (± {effective**-0.5:.2f} on a correlation)",
                " and ".join(advice) or "raise --thin",
            )
        )
    r_hat = max(found["losses"]["r_hat"], found["products"]["r_hat"], found["mean_loss_series"]["r_hat"] or 1)
    # Halves of a few draws differ by chance.
    if r_hat > R_HAT_DOUBTFUL and draws >= 4 * FEWEST_DRAWS:
        reasons.append(
            Reason(
                "unreliable" if r_hat > R_HAT_UNRELIABLE else "doubtful",
                "chains disagree",
                r_hat,
                f"chains disagree with each other or with themselves (R-hat {r_hat:.2f})",
                f"raise --burn-in to about {burn_in}, and --thin",
            )
        )
    moved = found["drift"]
    if moved["standard_errors"] is not None and abs(moved["standard_errors"]) > DRIFT_ERRORS:
        direction = "rises" if moved["change"] > 0 else "falls"
        reasons.append(
            Reason(
                "doubtful",
                "drift",
                moved["standard_errors"],
                f"the mean loss still {direction} along the chains (by {abs(moved['change']):.2g} nats, "
                f"{abs(moved['standard_errors']):.0f} standard errors)",
                f"raise --burn-in to about {burn_in}",
            )
        )
    # By itself it is no reason: where curvature holds every direction that matters, chains forget sooner.
    if reasons and memory is not None and steps < memory:
        yield Reason(
            "unreliable",
            "hardly left w*",
            steps / memory,
            f"chains have hardly left w*: {steps} steps, and forgetting it takes up to 2/(step size · localization) = "
            f"{memory:.3g}",
            f"raise --thin to about {_two_digits(memory)}, or take longer steps",
        )
    yield from reasons


def _disagreement(config: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Reason]:
    """Halves that rank differently."""
    for name, what in (("halves", "the first and the last half of the draws"), ("chains", "two halves of the chains")):
        between = found["agreement"][name]
        rank, overlap = between["spearman"], between["top_overlap"]
        if rank is None:
            continue
        # Where most scores are near 0 their order is noise, and the few that are not may be sure all the same.
        chance = found["agreement"]["top"] / found["agreement"]["examples"]
        agreed = max(rank, (overlap - chance) / (1 - chance))
        if agreed >= AGREEMENT_DOUBTFUL:
            continue
        level: Level = "unreliable" if agreed < AGREEMENT_UNRELIABLE else "doubtful"
        # Spearman and Brown's formula again: how many times the draws would bring a half up to the threshold.
        factor = AGREEMENT_DOUBTFUL / (1 - AGREEMENT_DOUBTFUL) * (1 - agreed) / max(agreed, 0.01)
        if found["effective_draws"] is None or found["effective_draws"] < ENOUGH_DRAWS:
            advice = "get more effective draws"
        elif factor > MOST_TIMES_THE_DRAWS:
            advice = "their scores hardly differ: lower --localization, or move other --weights, rather than draw more"
        else:
            advice = f"raise --draws to about {_two_digits(config['draws'] * factor)}"
        yield Reason(
            level,
            "scores disagree",
            rank,
            f"{what} rank training examples differently (Spearman {rank:.2f}; {overlap:.0%} of the top "
            f"{found['agreement']['top']} in common)",
            advice,
        )
        return


def _without_traces(found: Mapping[str, Any]) -> Reason:
    effective, share = found["effective_draws_by_share"], found["between_chain_share"]
    hint = (
        "" if effective is None else f"; {share:.2g} of the variance lies between chains, as with about {effective:.0f}"
    )
    few = effective is not None and effective < FEWEST_EFFECTIVE
    return Reason(
        "unreliable" if few else "doubtful",
        "no traces",
        effective,
        f"without traces nobody can tell how many draws are effective{hint}",
        "sample with keep='traces', if only for a short run at the same settings",
    )


def _steps(config: Mapping[str, Any]) -> int:
    """The step of the last draw."""
    return config["burn_in"] + (config["draws"] - 1) * config["thin"]


def _memory(config: Mapping[str, Any]) -> float | None:
    """2/(εγ): the steps in which SGLD forgets where the localization alone holds it; None for rules that differ."""
    posterior, sampler = config["posterior"], config["sampler"]
    pull = posterior["localization"] + posterior["prior_precision"]
    alike = sampler["name"] in ("SGLD", "LeimkuhlerMatthews", "OrnsteinUhlenbeck")
    return 2 / (sampler["step_size"] * pull) if alike and pull else None


def _two_digits(value: float) -> str:
    """A number to set: rounded up to two digits, so that nobody takes it for exact."""
    if value <= 0 or not math.isfinite(value):
        return "more"
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    rounded = math.ceil(value / unit - 1e-9) * unit
    return f"{rounded:.2g}" if rounded < 1 else f"{math.ceil(rounded - 1e-9):d}"


def _listed(chains: list[int]) -> str:
    return " and ".join(map(str, chains))


def _plain(value: Any) -> float | None:
    """A Python number, or None where there is none."""
    return float(value) if np.isfinite(value) else None

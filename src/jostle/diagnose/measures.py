"""The numbers: each a function of the losses that were read, and of nothing that was decided about them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from jostle.diagnose.sample import PROBED_SERIES, Sample, spread
from jostle.diagnose.thresholds import (
    FEWEST_EFFECTIVE,
    R_HAT_UNRELIABLE,
    RISE_DOUBTFUL,
    RUNAWAY_SPREADS,
    SPREAD_GROWTH,
    TOO_HOT,
)
from jostle.estimate import FEWEST_DRAWS, autocorrelation_time, covariance
from jostle.samplers.protocol import steps_to_forget

TAIL = (0.05, 0.95)

THE_SAME = 1 - 1e-4
"""A loss that correlates by so much with another one is the same."""


def moving(series: Float[np.ndarray, "chain draw column"]) -> Float[np.ndarray, "chain draw moved"]:
    """The columns that moved by more than the rounding of a float32."""
    if series.size == 0:
        return series
    spread, size = np.ptp(series, axis=(0, 1)), np.abs(series).max((0, 1))
    return series[:, :, spread > 8 * np.finfo(np.float32).eps * size]


def some(series: np.ndarray, most: int) -> np.ndarray:
    """At most so many columns, evenly spaced."""
    return series[:, :, spread(series.shape[2], most)] if series.shape[2] else series


def effective_draws(sample: Sample, quantile: float = 0.75) -> tuple[float | None, float | None]:
    """Draws for each effective one, of the slower losses; and how many draws are effective. None if too few to tell.

    The error of a covariance is that of the mean of its products, chains that disagree included; the losses' own
    autocorrelation is the slower one as a rule, and counts as well. ``quantile`` says how slow: the upper quartile is
    what most losses are worth, 0.95 what nearly all are.
    """
    sides = [some(side, PROBED_SERIES) for side in (moving(sample.train), moving(sample.other))]
    products = pair_products(*sides)
    if products.shape[1] < FEWEST_DRAWS or products.shape[2] == 0:
        return None, None
    # Where chains stand is for the products and for R-hat to judge: of losses, only how soon a chain forgets them.
    slowest = max(autocorrelation_time(side - side.mean(1, keepdims=True), quantile) for side in sides)
    averaged = float(np.quantile(effective_sizes(products, "bulk"), 1 - quantile))
    if math.isnan(slowest) or math.isnan(averaged):
        return None, None
    return slowest, min(sample.train.shape[0] * sample.train.shape[1] / slowest, averaged)


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

    ``slow_share`` of the columns would be called unreliable by themselves. A single chain is compared with itself, in
    halves. None where chains are too short.

    Reference: Vehtari et al., *Rank-normalization, folding, and localization: an improved R̂ for assessing convergence
    of MCMC*, 2021; computed by arviz-stats.
    """
    names = ("r_hat", "r_hat_max", "ess_bulk", "ess_bulk_min", "ess_tail", "ess_tail_min", "slow_share")
    if series.shape[1] < FEWEST_DRAWS or series.shape[2] == 0:
        return {"columns": series.shape[2]} | dict.fromkeys(names)
    r_hat = split_r_hat(series)
    bulk, tail = effective_sizes(series, "bulk"), effective_sizes(series, "tail")
    numbers = (
        np.quantile(r_hat, 0.75), r_hat.max(), np.quantile(bulk, 0.25), bulk.min(), np.quantile(tail, 0.25), tail.min(),
        np.mean((r_hat > R_HAT_UNRELIABLE) | (bulk < FEWEST_EFFECTIVE)),
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


def mean_error(mean_loss: Float[np.ndarray, "chain draw"]) -> float | None:
    """The Monte Carlo error of the mean over all draws."""
    from arviz_stats.base.array import array_stats

    if mean_loss.shape[1] < FEWEST_DRAWS or np.ptp(mean_loss) == 0:
        return None
    return _plain(array_stats.mcse(mean_loss, chain_axis=0, draw_axis=1, method="mean"))


def temperature(readings: Float[np.ndarray, "chain draw"] | None) -> dict[str, Any]:
    """Of the chains, by `jostle.chains.thermometer`: 1 at the target's, with its Monte Carlo error; None if unknown.

    Chains that are much too hot are so in bursts, of which a few make up the mean, and its error as well. So a reading
    counts for no more than 10 robust standard deviations from the median, beyond which the target has next to none.
    """
    if readings is None or not np.isfinite(readings).all():
        return {"value": None, "standard_error": None, "coolest_chain": None}
    middle = np.median(readings)
    reach = 10 * 1.4826 * np.median(np.abs(readings - middle))
    counted = np.clip(readings.astype(np.float64), middle - reach, middle + reach)
    coolest = float(counted.mean(1).min()) if len(counted) > 1 else None
    return {"value": float(counted.mean()), "standard_error": mean_error(counted), "coolest_chain": coolest}


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
    memory, rise = memory_in_steps(config), level - sample.center_loss
    if memory is not None and last_step(config) < memory:
        hot = 2 * config["posterior"]["n_beta"] * rise > 2 * TOO_HOT * manifest["moving_weights"]
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

    ``spearman`` is the rank correlation over training examples (the median over queries), ``top_overlap`` the share of
    the ``top`` most helpful ones of one half that are so in the other, ``harmful_overlap`` the same of the most harmful
    (means over queries); of evenly spaced examples that moved, but for those that are the query itself.
    """
    sample = replace(sample, train=moving(sample.train), other=moving(sample.other))
    examples = sample.train.shape[2]
    top = min(10, max(1, examples // 5))
    found: dict[str, Any] = {"top": top, "examples": examples}
    scores = half_scores(sample) if examples >= 3 and sample.other.shape[2] else {}
    for name in ("halves", "chains"):
        spearman, helpful, harmful = _alike(*scores[name], top) if name in scores else (np.array([np.nan]),) * 3
        known = np.isfinite(spearman)
        found[name] = {
            "spearman": float(np.median(spearman[known])) if known.any() else None,
            "top_overlap": float(helpful[known].mean()) if known.any() else None,
            "harmful_overlap": float(harmful[known].mean()) if known.any() else None,
        }
    return found


def _alike(
    first: Float[np.ndarray, "train query"], second: Float[np.ndarray, "train query"], top: int
) -> Float[np.ndarray, "measure query"]:
    """Of the scores from two halves: `_alike_columns` of each query, without examples that are the query itself."""
    other = np.minimum(np.abs(first), np.abs(second)) < THE_SAME  # these are sure
    whole = other.all(0)
    found = np.full((3, first.shape[1]), np.nan)
    found[:, whole] = _alike_columns(first[:, whole], second[:, whole], top)
    for query in np.flatnonzero(~whole & (other.sum(0) >= max(3, top))):
        kept = other[:, query]
        found[:, [query]] = _alike_columns(first[kept][:, [query]], second[kept][:, [query]], top)
    return found


def _alike_columns(
    first: Float[np.ndarray, "train query"], second: Float[np.ndarray, "train query"], top: int
) -> Float[np.ndarray, "measure query"]:
    """Rank correlation of columns, and how many of the largest and of the smallest they share."""
    one, two = (np.argsort(side, axis=0, kind="stable") for side in (first, second))
    shared = [(one[part][:, None] == two[part][None]).sum((0, 1)) / top for part in (np.s_[-top:], np.s_[:top])]
    return np.stack([_spearman(first, second), *shared])


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
    chain.

    Reference: Lau et al., *The Local Learning Coefficient: A Singularity-Aware Complexity Measure*, 2023.
    """
    n_beta, same_data = config["posterior"]["n_beta"], _same_data(manifest)
    if not n_beta or manifest["scale"] is None:
        why = "no loss drives the chain (n_beta = 0)" if not n_beta else "another loss drives the chain"
        return {"value": None, "standard_error": None, "of": why}
    value = n_beta * rise
    return {
        "value": value,
        "standard_error": None if error is None else n_beta * error,
        "of": "the sampling data" if same_data else "the training examples, if they stand for the sampling data",
    }


def _same_data(manifest: Mapping[str, Any]) -> bool:
    fingerprints = manifest["fingerprints"]
    return fingerprints["train"] == fingerprints["sampling_data"]


def last_step(config: Mapping[str, Any]) -> int:
    """The step of the last draw."""
    return config["burn_in"] + (config["draws"] - 1) * config["thin"]


def memory_in_steps(config: Mapping[str, Any]) -> float | None:
    """In how many steps a chain forgets where only localization and prior hold it; None for rules that differ."""
    posterior, sampler = config["posterior"], config["sampler"]
    pull = posterior["localization"] + posterior["prior_precision"]
    if not pull:
        return None
    if sampler["name"] in ("SGLD", "LeimkuhlerMatthews", "OrnsteinUhlenbeck", "BAOAB", "SGNHT"):
        return steps_to_forget(sampler["step_size"], pull, sampler.get("friction"))
    return None


def _plain(value: Any) -> float | None:
    """A Python number, or None where there is none."""
    return float(value) if np.isfinite(value) else None

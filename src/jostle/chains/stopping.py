"""When a run has drawn enough: rounds of draws, and what is measured after each of them.

Chains that run one after another cannot be judged together before each has some draws. So a run that may stop early
goes in rounds, each a quarter longer than what there is, and all chains reach the end of one before any begins the
next. Where a round ends depends on nothing but the numbers of draws: whoever interrupts the run, or repeats it, stops
at the same draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from jostle.config import Config
from jostle.diagnose import THE_SAME, effective_draws, read_sample, spread
from jostle.estimate import FEWEST_BATCHES, SLOW, covariance
from jostle.traces.store import Traces

FIRST_ROUND = 20
"""Draws of each chain before anything is measured."""

GROWTH = 1.25
"""By how much the draws grow from round to round: a run stops at most a quarter later than it could."""

STRONGEST, MOST_QUERIES = 10, 64
"""Of each of so many queries, evenly spaced, the error is that of its so many strongest scores."""


def next_round(config: Config, draws: int, *, seconds: float = 0.0) -> int:
    """Return at how many draws the next round ends; where that is no more than there are, time is up.

    Args:
        config: the run's configuration.
        draws: how many each chain has.
        seconds: what they took.
    """
    if not config.stops_early:
        return config.draws
    most = min(config.draws, max(FIRST_ROUND, math.ceil(GROWTH * draws)))
    if config.minutes is None or draws == 0:
        return most
    left = 60 * config.minutes - seconds
    return min(most, draws + max(0, int(left / (seconds / draws))))


def reached(config: Config, measured: Mapping[str, float | None]) -> bool:
    """Whether everything that the run was to go on until has come."""

    def enough(name: str, wanted: float) -> bool:
        value = measured[name]
        return value is not None and (value >= wanted if name == "ess" else value <= wanted)

    return bool(config.until) and all(enough(name, wanted) for name, wanted in (config.until or {}).items())


def measure(config: Config, traces: Traces, chains: np.ndarray) -> dict[str, float | None]:
    """Return what the run is to go on until, as it stands; None where the draws are too few to tell."""
    found: dict[str, float | None] = {}
    for name in config.until or {}:
        found[name] = _effective(config, traces, chains) if name == "ess" else _error(config, traces, chains)
    return found


def _effective(config: Config, traces: Traces, chains: np.ndarray) -> float | None:
    sample = read_sample(traces, chains, mirrored=config.antithetic).independent
    return effective_draws(sample, SLOW)[1]  # of nearly all: whoever sets a goal wants it reached


def _error(config: Config, traces: Traces, chains: np.ndarray) -> float | None:
    """The standard error (root mean square) of the strongest correlations of each query."""
    estimate = covariance(
        traces.sequence_losses("train"),
        _columns_of_queries(traces),
        chains=chains,
        normalize=True,
        standard_error=True,
        mirrored=config.antithetic,
    )
    if estimate.batches is None or estimate.batches < FEWEST_BATCHES:
        return None
    assert estimate.standard_error is not None
    # An example that is the query itself is the strongest, and sure from the first draws.
    sizes = np.where(np.abs(estimate.values) < THE_SAME, np.abs(estimate.values), -1.0)
    strongest = np.argsort(-sizes, axis=0, kind="stable")[:STRONGEST]
    errors = np.take_along_axis(estimate.standard_error, strongest, axis=0).astype(np.float64)
    other = np.take_along_axis(sizes, strongest, axis=0) >= 0
    return float(np.sqrt(np.mean(errors[other] ** 2))) if other.any() else None


def _columns_of_queries(traces: Traces) -> np.ndarray:
    """Some of the queries or, without any, of the components of the observables: (chain, draw, column)."""
    if "query" in traces.sets:
        whole = np.asarray(traces.sequence_losses("query")[:, :, :])
    else:
        whole = np.concatenate([np.asarray(traces.observable(name)[:]) for name in traces.observables], axis=2)
    return whole[:, :, spread(whole.shape[2], MOST_QUERIES)]

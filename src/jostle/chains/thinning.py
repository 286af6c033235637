"""Steps between draws, chosen so that a second of sampling gives the most effective draws.

A short pilot walks the first steps of the run's own chains, with the same random numbers, and looks at a few examples
after each of them; then it is thrown away, and the run begins anew. Its choice depends on how long things took, so it
is kept with the run and stays what it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jostle.chains.chain import Dynamics
from jostle.chains.execution import timed
from jostle.chains.observing import Observer
from jostle.chains.progress import duration
from jostle.diagnose import moving, pair_products

log = logging.getLogger("jostle")

PROBED_EXAMPLES = 32
"""How many examples of each set a pilot looks at, evenly spaced."""

FEWEST_STEPS, MOST_STEPS = 200, 20_000
"""Of a pilot, after the burn-in; of these, the last half is used."""

PILOT_SHARE = 0.1
"""The share of the time of all observations that a pilot may take, where it needs more than the fewest steps."""

SHORT_PILOT = 10.0
"""Seconds. One that lasts longer than this, and than half of the run, is not begun."""

ENOUGH_TIMES = 30
"""A pilot is long enough when the half that is used has lasted for so many autocorrelation times."""

USUAL_THIN = 10
"""Steps between draws where there is no pilot, or it shows nothing: all chains failed in it, or no loss moved."""


@dataclass(frozen=True)
class Thinning:
    """What was chosen, and why."""

    thin: int
    autocorrelation_time: float | None
    """In steps, of the slower losses and products."""
    step_seconds: float
    observation_seconds: float
    pilot_steps: int

    def __str__(self) -> str:
        if not self.pilot_steps:
            return f"thin {self.thin}: a pilot would take longer than half of the run"
        if self.autocorrelation_time is None:
            return f"thin {self.thin}: the pilot showed nothing that moved and stayed finite"
        return (
            f"thin {self.thin}: a step takes {duration(self.step_seconds)}, an observation "
            f"{duration(self.observation_seconds)}, and a draw stands for {self.autocorrelation_time:.3g} steps "
            f"(pilot of {self.pilot_steps} steps)"
        )


def choose_thin(
    dynamics: Dynamics,
    probes: Mapping[str, Observer],
    *,
    at_once: int,
    interrupted: Callable[[], bool] = lambda: False,
    tell: Callable[[str], None] = lambda what: None,
) -> Thinning:
    """Run a pilot and choose from what it shows.

    Args:
        dynamics: how chains move, in the way in which the run will move them.
        probes: observers of a few examples.
        at_once: how many chains run side by side.
        interrupted: asked between steps.
        tell: is told of every step.

    Raises:
        KeyboardInterrupt: when ``interrupted()``.
    """
    config = dynamics.config
    group = dynamics.start(list(range(at_once)))
    seen: list[dict[str, np.ndarray]] = []
    wanted = FEWEST_STEPS

    def walk(steps: int) -> None:
        for _ in range(steps):
            if dynamics.model.crew.any(interrupted()):
                raise KeyboardInterrupt
            last = max(config.burn_in, group.step - len(seen)) + wanted
            tell(f"a pilot for the steps between draws, step {group.step + 1:,} of {last:,}")
            dynamics.advance(group)

    def look() -> dict[str, np.ndarray]:
        return {name: value.cpu().numpy() for name, value in dynamics.observe(group, probes).items()}

    walk(1)  # the first of everything is slow
    step = timed(dynamics, lambda: walk(5))[1] / 5
    dynamics.observe(group)
    observation = dynamics.beside_steps(timed(dynamics, lambda: dynamics.observe(group))[1], step)
    look()
    glance = timed(dynamics, look)[1]
    # The run's observations, by all groups of chains, one after another.
    draws = -(-config.chains // at_once) * config.draws
    planned, usual = draws * observation, draws * (observation + USUAL_THIN * step)
    if config.burn_in * step + FEWEST_STEPS * (step + glance) > max(SHORT_PILOT, usual / 2):
        chosen = Thinning(USUAL_THIN, None, step, observation, 0)
        log.info("%s", chosen)
        return chosen
    walk(max(0, config.burn_in - group.step))
    most = int(np.clip(PILOT_SHARE * planned / (step + glance), FEWEST_STEPS, MOST_STEPS))
    while True:
        while len(seen) < wanted:
            walk(1)
            seen.append(look())
        series = _series(seen[len(seen) // 2 :])
        thin, slowest = best_thin(series, step_seconds=step, observation_seconds=observation)
        if slowest is None or len(seen) >= min(most, 2 * ENOUGH_TIMES * slowest):
            break
        wanted = min(most, 2 * len(seen))
    chosen = Thinning(thin, slowest, step, observation, len(seen))
    log.info("%s", chosen)
    return chosen


def _series(seen: Sequence[dict[str, np.ndarray]]) -> list[np.ndarray]:
    """Losses and products of the chains that stayed finite: (chain, step, column)."""
    train, *others = (np.stack([one[name] for one in seen], axis=1).astype(np.float64) for name in seen[0])
    other = np.concatenate(others, axis=2)
    finite = np.isfinite(train).all((1, 2)) & np.isfinite(other).all((1, 2))
    if not finite.any():
        return []
    train, other = moving(train[finite]), moving(other[finite])
    losses = np.concatenate([train, other], axis=2)
    return [losses, pair_products(train, other)]


def best_thin(
    groups: Sequence[Float[np.ndarray, "chain step column"]], *, step_seconds: float, observation_seconds: float
) -> tuple[int, float | None]:
    """Return the k with the most effective draws a second, and the autocorrelation time in steps; or the default, None.

    Draws k steps apart are worth 1/τₖ independent ones, τₖ = 1 + 2·Σⱼ ρ(jk), and cost k steps and an observation:

        k = argmax 1/(τₖ·(observation + k·step)).

    τₖ is that of the slower columns (their upper quartile), of the slowest group.
    """
    curves = [autocorrelations(series) for series in groups if series.shape[0] and series.shape[2]]
    if not curves:
        return USUAL_THIN, None
    longest = max(len(curve) for curve in curves)
    thins = np.arange(1, longest + 1)
    times = np.ones(longest)
    for curve in curves:
        for k in thins[: len(curve)]:
            time_of_columns = np.maximum(1, 1 + 2 * curve[k::k].sum(0))
            times[k - 1] = max(times[k - 1], float(np.quantile(time_of_columns, 0.75)))
    rate = 1 / (times * (observation_seconds + thins * step_seconds))
    return int(thins[rate.argmax()]), float(times[0])


def autocorrelations(series: Float[np.ndarray, "chain step column"]) -> Float[np.ndarray, "lag column"]:
    """ρ at every lag up to half the steps, of all chains together: 1 − (W − Aₜ)/var⁺, cut off where it turns to noise.

    W is the mean variance within chains, Aₜ the mean autocovariance, and var⁺ adds the variance between chains' means.
    From the first pair of lags on whose sum is not positive, all are 0.

    References: Geyer, *Practical Markov Chain Monte Carlo*, 1992 (the cut); Vehtari et al., 2021 (many chains).
    """
    from scipy.fft import irfft, next_fast_len, rfft

    chains, steps, _ = series.shape
    means = series.mean(1, keepdims=True)
    size = next_fast_len(2 * steps)
    spectrum = rfft(series - means, n=size, axis=1)
    products = np.asarray(irfft(np.abs(np.asarray(spectrum)) ** 2, n=size, axis=1))
    covariances = products[:, : steps // 2].mean(0) / steps
    within = covariances[0] * steps / (steps - 1)
    total = covariances[0] + (means[:, 0].var(0, ddof=1) if chains > 1 else 0.0)
    rho = 1 - (within - covariances) / total
    rho[0] = 1.0
    pairs = rho[: len(rho) // 2 * 2].reshape(-1, 2, rho.shape[1]).sum(1)
    kept = np.repeat(np.logical_and.accumulate(pairs > 0, axis=0), 2, axis=0)
    return np.where(kept, rho[: len(kept)], 0.0)

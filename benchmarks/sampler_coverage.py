"""How often the nominal 95 % intervals of an estimate hold the value that its sampler tends to, for every sampler.

    python -m benchmarks.sampler_coverage

Repetitions are the columns of one trace: each is a few chains on a quadratic potential, with the losses of two
examples. Their covariance and its standard error come from `jostle.estimate.covariance`, which also chooses the length
of the batches; the interval is the one of Student's t with the degrees of freedom that it reports. What is not within
94 to 96 % is measured again, with other draws and five times as many repetitions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import scipy.stats
import torch

import jostle
from benchmarks.environment import write_record
from benchmarks.linear_chain import LinearChain, simulate
from jostle.estimate import covariance
from jostle.samplers import Sampler

RECORD = Path(__file__).parent / "records" / "sampler_coverage.json"
N_BETA, LOCALIZATION = 24.0, 20.0
LEAST, MOST, MORE = 0.94, 0.96, 5
COLUMNS_AT_ONCE = 100
"""Repetitions in one call: it computes the covariance of each with every other, and only those with itself are used."""


def losses_and_hessian() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients and Hessians at w* of two losses (of a linear regression), and the Hessian of the mean loss."""
    generator = np.random.default_rng(0)
    X = generator.normal(size=(24, 3)) * np.linspace(0.7, 1.3, 3)
    residuals = 0.5 * generator.normal(size=24)
    hessians = np.einsum("ia,ib->iab", X, X) / 0.25
    return (residuals[:, None] * X / 0.25)[:2], hessians[:2], hessians.mean(0)


def samplers(largest: float) -> dict[str, Sampler]:
    """Every rule with a step of 1/(largest curvature); RMSprop's, which is divided by √V̂ + 1, with twice that."""
    step = 1 / largest
    return {
        "SGLD": jostle.SGLD(step_size=step),
        "LeimkuhlerMatthews": jostle.LeimkuhlerMatthews(step_size=step),
        "OrnsteinUhlenbeck": jostle.OrnsteinUhlenbeck(step_size=step),
        "BAOAB": jostle.BAOAB(step_size=step),
        "SGNHT": jostle.SGNHT(step_size=step),
        "RMSpropSGLD": jostle.RMSpropSGLD(step_size=2 * step, smoothing=0.9, stabilizer=1.0),
        "Gaussian": jostle.Gaussian(),
    }


def names() -> list[str]:
    return list(samplers(1.0))


QUANTITIES = {
    "covariance": ((0, 1), False),
    "variance": ((0, 0), False),
    "correlation": ((0, 1), True),
}
"""Of which two losses, and whether normalized."""


def coverage(
    name: str, *, repetitions: int, chains: int, draws: int, thin: int, quantities: Iterable[str] = QUANTITIES,
    seed: int = 0,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """How often the intervals of a sampler's estimates hold what they tend to."""
    gradients, hessians, H = losses_and_hessian()
    posterior = jostle.Posterior(n_beta=0.0 if name == "Gaussian" else N_BETA, localization=LOCALIZATION)
    sampler = samplers(float(np.linalg.eigvalsh(posterior.n_beta * H)[-1]) + LOCALIZATION)[name]
    weights = simulate(
        sampler, H, posterior, chains=repetitions * chains, draws=draws, burn_in=60, thin=thin, seed=seed
    )
    quadratic = torch.einsum("cta,iab,ctb->ict", weights, torch.from_numpy(hessians), weights)
    losses = torch.einsum("cta,ia->ict", weights, torch.from_numpy(gradients)) + quadratic / 2
    # (example, chain, draw, repetition): repetitions become columns.
    traces = losses.unflatten(1, (repetitions, chains)).permute(0, 2, 3, 1).numpy()
    exact = None
    if name not in ("SGNHT", "RMSpropSGLD"):
        sigma = LinearChain.of(sampler, H, posterior).weight_covariance()
        curved = hessians @ sigma
        exact = gradients @ sigma @ gradients.T + 0.5 * np.einsum("iab,jba->ij", curved, curved)
    result = {}
    for what in quantities:
        (i, j), normalize = QUANTITIES[what]
        values, errors, freedoms = [], [], []
        for start in range(0, repetitions, COLUMNS_AT_ONCE):
            columns = slice(start, start + COLUMNS_AT_ONCE)
            left, right = (np.ascontiguousarray(traces[example][:, :, columns]) for example in (i, j))
            estimate = covariance(left, right, standard_error=True, normalize=normalize)
            assert estimate.standard_error is not None
            values.append(np.diagonal(estimate.values))
            errors.append(np.diagonal(estimate.standard_error))
            freedoms.append(np.full(left.shape[2], estimate.degrees_of_freedom))
        value, error, freedom = (np.concatenate(parts) for parts in (values, errors, freedoms))
        if exact is None:
            # Not known in closed form; all repetitions together know it far better than one of them.
            truth = value.mean()
        else:
            truth = exact[i, j] / np.sqrt(exact[i, i] * exact[j, j]) if normalize else exact[i, j]
        result[what] = {
            "coverage": float((np.abs(value - truth) < scipy.stats.t.ppf(0.975, freedom) * error).mean()),
            "degrees_of_freedom": float(freedom.mean()),
            "mean_error_over_true_error": float(error.mean() / value.std()),
            "bias_in_errors_of_one_repetition": float((value.mean() - truth) / value.std()),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repetitions", type=int, default=2000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # (draws, thin): few and many that are nearly independent, and many that are not.
    settings = [(100, 4), (400, 4), (1600, 1)]
    started, rows, again = time.perf_counter(), {}, {}
    print(f"{'4 chains':20} {'draws, thin':>12}  {'  '.join(QUANTITIES)}   (share of intervals, nominal 0.95)")
    for name in names():
        for draws, thin in settings:
            measured = coverage(name, repetitions=arguments.repetitions, chains=4, draws=draws, thin=thin)
            rows[row := f"{name}, {draws} draws, thin {thin}"] = measured
            shown = "  ".join(f"{measured[what]['coverage']:{len(what)}.4f}" for what in measured)
            print(f"{name:20} {f'{draws}, {thin}':>12}  {shown}", flush=True)
            for what in [what for what in measured if not LEAST <= measured[what]["coverage"] <= MOST]:
                more = MORE * arguments.repetitions
                found = coverage(name, repetitions=more, chains=4, draws=draws, thin=thin, quantities=[what], seed=1)[
                    what
                ]
                again[f"{row}, {what}"] = {**found, "repetitions": more}
                print(f"{'':20} again: {what} {found['coverage']:.4f}", flush=True)
    record = {
        "workload": f"{arguments.repetitions} repetitions each of a quadratic potential in 3 weights, 4 chains",
        "nominal": 0.95,
        "standard_error_of_a_coverage": float(np.sqrt(0.95 * 0.05 / arguments.repetitions)),
        "seconds": round(time.perf_counter() - started, 1),
        "results": rows,
        "again": again,
    }
    if arguments.repetitions >= 2000:
        write_record(RECORD, record)


if __name__ == "__main__":
    main()

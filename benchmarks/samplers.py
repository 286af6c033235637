"""Effective draws a step and an observation, and distance from the posterior, of every sampler at its best step.

    python -m benchmarks.samplers

A linear regression, whose localized posterior is Gaussian and on which the rules are linear: autocorrelations and
stationary covariances are exact (`benchmarks.linear_chain`). What is estimated is the matrix of covariances of all
examples' losses, to first order in the weights, C = GΣGᵀ. Its squared error from N draws with autocovariance Rₖ is
(1/N)·Σₖ [(tr PRₖ)² + tr(PRₖPRₖ)] with P = GᵀG; effective draws are how many independent ones have the same error.
Beside those for exact gradients stand the ones measured on simulated chains; for the thermostat, which is not linear,
all are measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

import jostle
from benchmarks.environment import write_record
from benchmarks.linear_chain import LinearChain, Minibatches, simulate
from jostle.samplers import Sampler

RECORD = Path(__file__).parent / "records" / "samplers.json"
SAMPLES, WEIGHTS, BATCH_SIZE, LOCALIZATION = 200, 10, 20, 100.0
ALLOWED = 0.05
"""How far from the posterior's covariances a step may lead, relatively; among these steps the fastest is best."""
STEPS = np.geomspace(0.01, 3.6, 25)
"""Step sizes that are tried, in units of 1/(largest curvature); from 4 on the rules are unstable."""
LONG_STEPS = np.geomspace(0.01, 300, 40)
"""The same for the rule that may be stable at any step."""
FEW_STEPS = (0.1, 0.4, 1.0, 2.0)
"""The same where each has to be simulated."""
CHAINS, DRAWS, BURN_IN = 300, 300, 500


@dataclass(frozen=True)
class Problem:
    """A regression whose curvature nβλ falls from ``steepness``·γ by a factor of 1,000."""

    steepness: float

    @cached_property
    def design(self) -> np.ndarray:
        generator = np.random.default_rng(0)
        X = np.linalg.qr(generator.normal(size=(SAMPLES, WEIGHTS)))[0] * np.sqrt(SAMPLES)
        return X * np.sqrt(np.geomspace(1, 1e-3, WEIGHTS))

    @cached_property
    def gradients(self) -> np.ndarray:
        """At the minimum, of residuals with variance 1."""
        residuals = np.random.default_rng(1).normal(size=SAMPLES)
        residuals -= self.design @ np.linalg.lstsq(self.design, residuals, rcond=None)[0]
        return self.design * residuals[:, None]

    @cached_property
    def products(self) -> np.ndarray:
        """P = GᵀG."""
        return self.gradients.T @ self.gradients

    @cached_property
    def hessians(self) -> np.ndarray:
        return np.einsum("ia,ib->iab", self.design, self.design)

    @cached_property
    def posterior(self) -> jostle.Posterior:
        return jostle.Posterior(n_beta=self.steepness * LOCALIZATION, localization=LOCALIZATION)

    @cached_property
    def hessian(self) -> np.ndarray:
        return self.hessians.mean(0)

    @cached_property
    def precision(self) -> np.ndarray:
        return self.posterior.n_beta * self.hessian + LOCALIZATION * np.eye(WEIGHTS)

    def minibatches(self, *, controlled: bool) -> Minibatches:
        gradients = np.zeros_like(self.gradients) if controlled else self.gradients
        return Minibatches(gradients, self.hessians, BATCH_SIZE)

    def distance(self, covariance: np.ndarray) -> float:
        """‖GΣGᵀ − GA⁻¹Gᵀ‖/‖GA⁻¹Gᵀ‖."""
        P, exact = self.products, np.linalg.inv(self.precision)
        return float(np.sqrt(_size(P, covariance - exact) / _size(P, exact)))

    def cosine(self, covariance: np.ndarray) -> float:
        """Of the two matrices of covariances, as vectors: what is left of the distance when scale does not matter."""
        P, exact = self.products, np.linalg.inv(self.precision)
        inner = np.trace(P @ covariance @ P @ exact)
        return float(inner / np.sqrt(_size(P, covariance) * _size(P, exact)))

    def spread(self, R: np.ndarray) -> float:
        """(tr PR)² + tr(PRPR)."""
        P = self.products
        return float(np.trace(P @ R) ** 2 + np.trace(P @ R @ P @ R))


def _size(P: np.ndarray, D: np.ndarray) -> float:
    return float(np.trace(P @ D @ P @ D))


def effective(problem: Problem, chain: LinearChain, noise: Minibatches | None, thin: int = 1) -> float:
    """Effective draws for each draw."""
    M, state = np.linalg.matrix_power(chain.M, thin), chain.stationary(noise)
    alone = total = problem.spread(state[:WEIGHTS, :WEIGHTS])
    for _ in range(100_000):
        state = M @ state
        more = 2 * problem.spread(state[:WEIGHTS, :WEIGHTS])
        total += more
        if abs(more) < 1e-7 * total:
            break
    return alone / total


def measured(problem: Problem, sampler: Sampler, noise: Minibatches | None, thin: int = 1) -> dict[str, float]:
    """The same from chains, with the distance from the posterior."""
    posterior = problem.posterior if sampler != jostle.Gaussian() else jostle.Posterior(n_beta=0, localization=100)
    weights = simulate(
        sampler,
        problem.hessian,
        posterior,
        chains=CHAINS,
        draws=DRAWS,
        burn_in=BURN_IN,
        thin=thin,
        gradient_noise=noise,
    ).numpy()
    moments = np.einsum("cta,ctb->cab", weights, weights) / DRAWS
    mean, P = moments.mean(0), problem.products
    error = float(np.mean([_size(P, moment - mean) for moment in moments])) * CHAINS / (CHAINS - 1)
    return {
        "distance": problem.distance(mean),
        "distance_error": float(np.sqrt(error / CHAINS / _size(P, mean))),
        "effective_draws_per_step": problem.spread(mean) / DRAWS / error,
    }


RULES: dict[str, tuple[Callable[[float], Sampler], Iterable[float]]] = {
    "SGLD": (lambda step: jostle.SGLD(step_size=step), STEPS),
    "LeimkuhlerMatthews": (lambda step: jostle.LeimkuhlerMatthews(step_size=step), STEPS),
    "OrnsteinUhlenbeck": (lambda step: jostle.OrnsteinUhlenbeck(step_size=step), LONG_STEPS),
    "BAOAB": (lambda step: jostle.BAOAB(step_size=step), STEPS),
    "BAOAB, friction 3": (lambda step: jostle.BAOAB(step_size=step, friction=3.0), STEPS),
    "SGNHT": (lambda step: jostle.SGNHT(step_size=step), FEW_STEPS),
}


def best(problem: Problem, name: str, noise: Minibatches | None) -> dict[str, Any] | None:
    """The step with the most effective draws that keeps the distance; None where no step that is tried does."""
    make, steps = RULES[name]
    largest = float(np.linalg.eigvalsh(problem.precision)[-1])
    found: dict[str, Any] | None = None
    for step in steps:
        sampler = make(step / largest)
        if name == "SGNHT":
            row = measured(problem, sampler, noise)
            draws, distance = row["effective_draws_per_step"], row["distance"]
        else:
            chain = LinearChain.of(sampler, problem.hessian, problem.posterior)
            if not chain.is_stable():
                continue
            try:
                distance = problem.distance(chain.weight_covariance(noise))
            except ValueError:
                continue
            draws = effective(problem, chain, noise) if distance <= ALLOWED else 0.0
        if distance <= ALLOWED and (found is None or draws > found["effective_draws_per_step"]):
            found = {
                "step_in_units_of_the_largest_curvature": step,
                "distance": distance,
                "effective_draws_per_step": draws,
            }
    if found is None:
        return None
    sampler = make(found["step_in_units_of_the_largest_curvature"] / largest)
    if name == "SGNHT":
        tenth = None if noise else measured(problem, sampler, noise, thin=10)["effective_draws_per_step"]
    else:
        if noise is None:
            found["measured"] = measured(problem, sampler, noise)
        tenth = effective(problem, LinearChain.of(sampler, problem.hessian, problem.posterior), noise, thin=10)
    return found | {"effective_draws_per_observation_at_thin_10": tenth}


def control(problem: Problem) -> dict[str, Any]:
    covariance = np.eye(WEIGHTS) / LOCALIZATION
    return {
        "distance": problem.distance(covariance),
        "cosine": problem.cosine(covariance),
        "effective_draws_per_step": 1.0,
        "effective_draws_per_observation_at_thin_10": 1.0,
        "measured": measured(problem, jostle.Gaussian(), None),
    }


def show(name: str, row: dict[str, Any] | None) -> None:
    if row is None:
        print(f"  {name:22} no step keeps the distance")
        return
    step = row.get("step_in_units_of_the_largest_curvature")
    seen = row["measured"]["effective_draws_per_step"] if "measured" in row else None
    tenth = row["effective_draws_per_observation_at_thin_10"]
    cells = [
        f"{step:.3g}" if step else "-",
        f"{row['distance']:.1%}",
        f"{row['effective_draws_per_step']:.4f}",
        "-" if seen is None else f"{seen:.4f}",
        "-" if tenth is None else f"{tenth:.3f}",
    ]
    print(f"  {name:22}" + "".join(f"{cell:>10}" for cell in cells), flush=True)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "").parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    results: dict[str, dict[str, Any]] = {}
    for steepness in (0.5, 30.0):
        problem = Problem(steepness)
        gradients = {
            "exact gradients": None,
            "minibatches": problem.minibatches(controlled=False),
            "minibatches, control variates": problem.minibatches(controlled=True),
        }
        for kind, noise in gradients.items():
            title = f"largest nβλ = {steepness:g}γ, {kind}"
            print(f"{title}\n  {'':22} {'ε·λmax':>9}{'distance':>10}{'per step':>10}{'measured':>10}{'thin 10':>10}")
            rows = results[title] = {}
            for name in RULES:
                rows[name] = best(problem, name, noise)
                show(name, rows[name])
            if noise is None:
                rows["Gaussian"] = control(problem)
                show("Gaussian", rows["Gaussian"])
    record = {
        "workload": f"linear regression, {WEIGHTS} weights, {SAMPLES} examples, minibatches of {BATCH_SIZE}",
        "allowed_distance": ALLOWED,
        "seconds": round(time.perf_counter() - started, 1),
        "results": results,
    }
    write_record(RECORD, record)


if __name__ == "__main__":
    main()

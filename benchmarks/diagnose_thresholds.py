"""Which thresholds of the diagnostics tell scores that are right from scores that are not, where the truth is known.

    python -m benchmarks.diagnose_thresholds

A linear regression, sampled by full-batch SGLD with many steps, thinnings and numbers of draws, several runs
of four chains each. A run's scores are compared with the exact correlations of the posterior: how well they rank the
training examples (Spearman, median over queries), and how far off they are (root mean square). The same run's
diagnostics know nothing of the truth. For each number, runs are sorted into what it calls good, doubtful and
unreliable, beside the truth of each; other thresholds stand beside those that are used.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import jostle
from benchmarks.environment import write_record
from benchmarks.linear_chain import simulate
from jostle.diagnose import Sample, diagnose
from jostle.diagnose.measures import _spearman as spearman
from jostle.estimate import covariance

RECORD = Path(__file__).parent / "records" / "diagnose_thresholds.json"
SAMPLES, WEIGHTS, QUERIES, CHAINS, RUNS = 60, 6, 12, 4, 3
STEPS, THINS, DRAWS, BURN_IN = (0.02, 0.2, 1.0, 3.0, 3.9), (1, 8), (10, 25, 100, 300), 50
"""Steps are in units of 1/(largest curvature); SGLD is stable below 4."""
ACCEPTABLE = 0.9
"""Scores that rank training examples as the truth does to this Spearman correlation."""
CANDIDATES: dict[str, tuple[float, ...]] = {
    "effective_draws": (10, 25, 50, 100, 200),
    "r_hat": (1.03, 1.05, 1.1, 1.2, 1.3),
    "agreement": (0.2, 1 / 3, 0.5, 0.7, 0.8),
}


class Problem:
    """ℓᵢ(w) = (rᵢ − xᵢᵀw)²/2 around w* = 0, the minimum; the curvature falls over a factor of ``condition``."""

    def __init__(self, condition: float, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.X = generator.normal(size=(SAMPLES, WEIGHTS)) * np.sqrt(np.geomspace(1, 1 / condition, WEIGHTS))
        residuals = generator.normal(size=SAMPLES)
        self.residuals = residuals - self.X @ np.linalg.lstsq(self.X, residuals, rcond=None)[0]
        self.hessian = self.X.T @ self.X / SAMPLES
        self.posterior = jostle.Posterior(n_beta=100.0, localization=10.0)
        self.precision = 100.0 * self.hessian + 10.0 * np.eye(WEIGHTS)
        self.largest = float(np.linalg.eigvalsh(self.precision)[-1])

    def losses(self, weights: torch.Tensor) -> np.ndarray:
        return (self.residuals - weights.numpy() @ self.X.T) ** 2 / 2

    def truth(self) -> np.ndarray:
        """Correlations of the losses under the posterior: gᵢᵀΣgⱼ + ½(xᵢᵀΣxⱼ)², exactly."""
        S = self.X @ np.linalg.inv(self.precision) @ self.X.T
        C = np.outer(self.residuals, self.residuals) * S + 0.5 * S**2
        return (C / np.sqrt(np.outer(np.diag(C), np.diag(C))))[:, :QUERIES]


def judge(problem: Problem, step: float, thin: int, draws: int, seed: int) -> list[dict[str, Any]]:
    """One row for each of some runs at a setting: what is true of its scores, and what the diagnostics say."""
    sampler = jostle.SGLD(step_size=step / problem.largest)
    settings: dict[str, Any] = {"draws": draws, "burn_in": BURN_IN, "thin": thin}
    weights = simulate(sampler, problem.hessian, problem.posterior, chains=CHAINS * RUNS, seed=seed, **settings)
    losses, truth, rows = problem.losses(weights), problem.truth(), []
    # Along all of the few directions there are: (w − w*)·∇U(w)/d.
    temperature = ((weights.numpy() @ problem.precision) * weights.numpy()).mean(2)
    config = settings | {
        "chains": CHAINS,
        "batch_size": SAMPLES,
        "posterior": {"n_beta": 100.0, "localization": 10.0, "prior_precision": 0.0},
        "sampler": {"name": "SGLD", "step_size": sampler.step_size},
    }
    manifest = {
        "failed_chains": [], "remarks": [], "scale": 100.0 / SAMPLES, "moving_weights": WEIGHTS,
        "fingerprints": {"train": "a", "sampling_data": "a"},
    }  # fmt: skip
    for first in range(0, len(losses), CHAINS):
        values = losses[first : first + CHAINS]
        sample = Sample(
            mean_loss=values.mean(2), center_loss=float((problem.residuals**2).mean() / 2), chains=np.arange(CHAINS),
            train=values, other=values[:, :, :QUERIES], tokens=None,
            temperature=temperature[first : first + CHAINS],
        )  # fmt: skip
        found = diagnose(config, manifest, sample)
        scores = covariance(values, values[:, :, :QUERIES], normalize=True, device="cpu").values
        agreed = [found["agreement"][name]["spearman"] for name in ("halves", "chains")]
        rows.append(
            {
                "spearman": float(np.median(spearman(scores, truth))),
                "error": float(np.sqrt(np.mean((scores - truth) ** 2))),
                "level": found["verdict"]["level"],
                "kinds": sorted({reason["kind"] for reason in found["verdict"]["reasons"]}),
                "effective_draws": found["effective_draws"],
                "r_hat": _largest(found[name]["r_hat"] for name in ("losses", "products", "mean_loss_series")),
                "agreement": None if None in agreed else min(agreed),
            }
        )
    return rows


def _largest(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def truth_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many, and how right their scores are."""
    if not rows:
        return {"runs": 0}
    spearmans = [row["spearman"] for row in rows]
    return {
        "runs": len(rows),
        "acceptable": float(np.mean([value >= ACCEPTABLE for value in spearmans])),
        "spearman_10_50_90": [round(float(value), 3) for value in np.quantile(spearmans, (0.1, 0.5, 0.9))],
        "error_50_90": [round(float(value), 3) for value in np.quantile([row["error"] for row in rows], (0.5, 0.9))],
    }


def separation(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Of the runs on either side of each candidate threshold, the share that is acceptable in truth."""
    known = [row for row in rows if row[name] is not None]
    found = {}
    for threshold in CANDIDATES[name]:
        passes = [(row[name] <= threshold) == (name == "r_hat") for row in known]
        sides = {True: [], False: []}
        for row, passed in zip(known, passes, strict=True):
            sides[passed].append(row["spearman"] >= ACCEPTABLE)
        right = np.mean(sides[True]) if sides[True] else None, np.mean(sides[False]) if sides[False] else None
        found[f"{threshold:.3g}"] = {
            "passing": len(sides[True]),
            "acceptable_of_passing": None if right[0] is None else round(float(right[0]), 3),
            "acceptable_of_others": None if right[1] is None else round(float(right[1]), 3),
        }
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "").parse_args()
    torch.set_num_threads(1)
    started, rows = time.perf_counter(), []
    grid = itertools.product(STEPS, THINS, DRAWS)
    for seed, (step, thin, draws) in enumerate(grid):
        rows += judge(Problem(30.0, seed=0), step, thin, draws, seed=seed)
    levels = {level: truth_of([row for row in rows if row["level"] == level]) for level in ("good", "doubtful", "unreliable")}  # fmt: skip # noqa: E501
    reasons = {
        kind: truth_of([row for row in rows if kind in row["kinds"]])
        for kind in sorted({kind for row in rows for kind in row["kinds"]})
    }
    record = {
        "workload": f"linear regression, {WEIGHTS} weights, {SAMPLES} examples, curvature over a factor of 30; "
        f"SGLD, {CHAINS} chains; {len(rows)} runs",
        "acceptable": f"Spearman with the exact correlations of at least {ACCEPTABLE}",
        "seconds": round(time.perf_counter() - started, 1),
        "levels": levels,
        "reasons": reasons,
        "thresholds": {name: separation(rows, name) for name in CANDIDATES},
    }
    for title in ("levels", "reasons", "thresholds"):
        print(title)
        for name, row in record[title].items():
            print(f"  {name}: {row}")
    write_record(RECORD, record)


if __name__ == "__main__":
    main()

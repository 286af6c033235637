"""Chains that are too hot, told by the rise without a gradient: against linear regressions, where all of it is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jostle
from jostle import diagnose
from jostle.chains.observing import Observer
from jostle.chains.without_gradient import rise_without_gradient
from jostle.data.datasets import Data
from jostle.models.functional import FunctionalModel
from jostle.models.weights import MovingWeights
from reference import LinearGaussian

LOSS = jostle.losses.regression(noise_variance=0.25)

FLAT = LinearGaussian.random(samples=20, weights=200, n_beta=0.6, localization=8)
"""Of 200 weights the losses see 20: chains may be far too hot in these long before 2λ̂/d is above 1."""

LARGEST = float(np.linalg.eigvalsh(FLAT.precision)[-1])


def sample_run(
    problem: LinearGaussian, step_size: float, *, sampler: Any = None, out: Path | None = None, **changes: Any
) -> jostle.Run:
    X, y = problem.data
    settings: dict[str, Any] = {"chains": 4, "draws": 100, "burn_in": 100, "thin": 10, "batch_size": 10**6}
    return jostle.attribute(
        problem.model(), (X, y), (X[:6], y[:6]), loss=LOSS, out=out, progress=False,
        posterior=jostle.Posterior(n_beta=problem.n_beta, localization=problem.localization),
        sampler=sampler or jostle.SGLD(step_size=step_size), **(settings | changes),
    )  # fmt: skip


def too_hot(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [reason for reason in found["verdict"]["reasons"] if reason["kind"] == "too hot"]


def exact_rise(problem: LinearGaussian, step_size: float) -> float:
    """Of SGLD at a finite step, where w* is a minimum: ½·tr(H̄Σ)."""
    return 0.5 * float(np.trace(problem.mean_hessian @ problem.sgld_covariance(step_size)))


# What is measured


@pytest.mark.parametrize(("off_minimum", "prior_precision"), [(0.0, 0.0), (0.3, 0.0), (0.3, 4.0)])
def test_mean_and_free_energy_are_those_of_the_gaussian(off_minimum: float, prior_precision: float) -> None:
    """E_q[L̄] = L̄(μ) + tr(H̄)/2κ and E[exp(−nβ·F̂)] = E_q[exp(−nβ·L̄)], a Gaussian integral; κ = γ + λ, μ = γw*/κ."""
    problem = LinearGaussian.random(samples=12, weights=4, n_beta=12, localization=40, off_minimum=off_minimum)
    model, (X, y) = problem.model(), problem.data
    functional = FunctionalModel(model, MovingWeights(model, "all"))
    observer = Observer(functional, LOSS, Data((X, y), "train", device=functional.device), None)
    posterior = jostle.Posterior(n_beta=12, localization=40, prior_precision=prior_precision)
    found = [rise_without_gradient(functional, observer, posterior, draws=400, seed=seed) for seed in range(400)]
    H, pull = problem.mean_hessian, 40 + prior_precision

    def mean_loss(w: np.ndarray) -> float:
        return float(((problem.y - problem.X @ w) ** 2).mean() / 0.5)

    middle = problem.center * 40 / pull
    expected = mean_loss(middle) + np.trace(H) / 2 / pull - mean_loss(problem.center)
    means = np.array([one["mean"] for one in found if one])
    assert len(means) == 400
    error = means.std(ddof=1) / np.sqrt(len(means))
    assert abs(means.mean() - expected) < 4 * error < 0.05
    assert np.mean([one["standard_error"] ** 2 for one in found if one]) == pytest.approx(means.var(ddof=1), rel=0.3)
    # L̄ is quadratic around its minimum m; exp(−nβ·L̄) under q is a product of two Gaussians.
    minimum = np.linalg.lstsq(problem.X, problem.y, rcond=None)[0]
    apart, both = middle - minimum, np.linalg.inv(np.linalg.inv(12 * H) + np.eye(4) / pull)
    free = mean_loss(minimum) - mean_loss(problem.center)
    free += (0.5 * np.linalg.slogdet(np.eye(4) + 12 * H / pull)[1] + 0.5 * apart @ both @ apart) / 12
    ratios = np.exp(-12 * (np.array([one["free_energy"] for one in found if one]) - free))
    error = ratios.std(ddof=1) / np.sqrt(len(ratios))
    assert abs(ratios.mean() - 1) < 4 * error < 0.3
    assert free < expected


def test_what_drives_the_chain_has_to_be_what_is_recorded_and_worth_its_cost() -> None:
    measured = sample_run(FLAT, 0.4 / LARGEST, draws=50, thin=1).manifest["rise_without_gradient"]
    assert (measured["draws"], measured["examples"]) == (8, 20)  # 4 % of 200 draws
    X, y = FLAT.data
    others: list[dict[str, Any]] = [
        {"draws": 49},
        {"potential_loss": jostle.losses.regression(noise_variance=0.25)},
        {"sampling_data": (X[:15], y[:15])},
    ]
    for changes in others:
        settings: dict[str, Any] = {"draws": 50, "thin": 1}
        run = sample_run(FLAT, 0.4 / LARGEST, **(settings | changes))
        assert run.manifest["rise_without_gradient"] is None
        assert run.diagnostics()["rise_without_gradient"] is None
    control = jostle.attribute(FLAT.model(), (X, y), (X, y), loss=LOSS, sampler=jostle.Gaussian(), progress=False)
    assert control.manifest["rise_without_gradient"] is None


def test_no_number_of_the_chains_changes_and_it_is_measured_once(tmp_path: Path) -> None:
    """Chains of 49 draws, for which nothing is measured, are the first 49 draws of those for which it is."""
    plain = sample_run(FLAT, 0.4 / LARGEST, draws=49, thin=2, out=tmp_path / "plain")
    run = sample_run(FLAT, 0.4 / LARGEST, draws=60, thin=2, out=tmp_path / "run")
    assert plain.manifest["rise_without_gradient"] is None
    for name in ("train", "query"):
        np.testing.assert_array_equal(plain.traces.losses(name)[:], run.traces.losses(name)[:, :49])
    before = run.manifest["rise_without_gradient"]
    extended = sample_run(FLAT, 0.4 / LARGEST, draws=80, thin=2, out=tmp_path / "run")
    assert extended.manifest["draws"] == 80
    assert extended.manifest["rise_without_gradient"] == before
    assert before["draws"] == 9
    # A run that began before any of this is not measured, and is judged by the rest.
    later = sample_run(FLAT, 0.4 / LARGEST, draws=70, thin=2, out=tmp_path / "plain")
    assert later.manifest["rise_without_gradient"] is None


# Verdicts


@pytest.mark.parametrize("keep", ["traces", "covariance"])
def test_a_step_that_heats_few_of_many_directions_is_noticed(keep: Any) -> None:
    """3.95 of 4 to the limit: more than five times the rise of the target, of which 2λ̂/d shows nothing."""
    step = 3.95 / LARGEST
    target = exact_rise(FLAT, 1e-9)
    assert exact_rise(FLAT, step) > 5 * target
    for seed in range(3):
        found = sample_run(FLAT, step, seed=seed, keep=keep, thin=20).diagnostics()
        assert found["local_learning_coefficient"]["temperature_at_least"] < 1
        assert found["rise"] > 3 * target
        (reason,) = too_hot(found)
        assert reason["level"] in found["verdict"]["level"]
        assert reason["settings"] == {"step_size": pytest.approx(step / 4, rel=0.1)}
        assert "small batches" not in reason["finding"]  # they are whole
        assert reason["number"] == pytest.approx(found["rise"] / found["rise_without_gradient"]["free_energy"])


def test_healthy_chains_are_never_too_hot() -> None:
    """Weak losses and strong ones, w* at the minimum and off it, few directions and many: SGLD at steps a tenth too wide
    along the steepest, and rules without that error."""
    for n_beta, localization, off_minimum, weights in (
        (0.6, 8, 0.0, 200), (20, 8, 0.0, 200), (20, 8, 0.2, 200), (2, 300, 0.0, 40), (200, 300, 0.1, 40), (12, 8, 0.0, 4),
    ):  # fmt: skip
        problem = LinearGaussian.random(
            samples=20, weights=weights, n_beta=n_beta, localization=localization, off_minimum=off_minimum
        )
        steepest = float(np.linalg.eigvalsh(problem.precision)[-1])
        for sampler in (
            jostle.SGLD(step_size=0.4 / steepest),
            jostle.BAOAB(step_size=1 / steepest),
            jostle.LeimkuhlerMatthews(step_size=1 / steepest),
        ):
            run = sample_run(problem, 0, sampler=sampler, seed=weights, thin=5)
            found = run.diagnostics(support=False)
            assert run.manifest["rise_without_gradient"]["draws"] == 16
            assert not too_hot(found), (n_beta, localization, sampler, found["verdict"]["summary"])


def test_silent_where_the_rise_without_a_gradient_is_unknown_or_endless() -> None:
    run = sample_run(FLAT, 3.95 / LARGEST, thin=20)
    config, manifest, sample = run.config, run.manifest, diagnose.read_sample(run.traces, run.healthy_chains)
    assert too_hot(diagnose.diagnose(config, manifest, sample))
    measured = manifest["rise_without_gradient"]
    wide = measured | {"mean": None, "standard_error": None, "free_energy": 1e4}
    old = {name: value for name, value in manifest.items() if name != "rise_without_gradient"}
    for other in (old, manifest | {"rise_without_gradient": None}, manifest | {"rise_without_gradient": wide}):
        assert not too_hot(diagnose.diagnose(config, other, sample))

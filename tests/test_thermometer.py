"""The temperature of the chains against linear regressions, where the covariance of every chain is known."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import jostle
from jostle.chains import thermometer
from jostle.cli import app
from reference import LinearGaussian

LOSS = jostle.losses.regression(noise_variance=0.25)

FLAT = LinearGaussian.random(samples=20, weights=200, n_beta=0.6, localization=8)
"""Of 200 weights the losses see 20."""

LARGEST = float(np.linalg.eigvalsh(FLAT.precision)[-1])


def sample_run(
    problem: LinearGaussian, step_size: float, *, sampler: Any = None, prior_precision: float = 0.0, **changes: Any
) -> jostle.Run:
    X, y = problem.data
    settings: dict[str, Any] = {"chains": 4, "draws": 100, "burn_in": 100, "thin": 10, "batch_size": 10**6}
    posterior = jostle.Posterior(
        n_beta=problem.n_beta, localization=problem.localization, prior_precision=prior_precision
    )
    return jostle.attribute(
        problem.model(), (X, y), (X[:6], y[:6]), loss=LOSS, progress=False, posterior=posterior,
        sampler=sampler or jostle.SGLD(step_size=step_size), **(settings | changes),
    )  # fmt: skip


def too_hot(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [reason for reason in found["verdict"]["reasons"] if reason["kind"] == "too hot"]


def readings(run: jostle.Run) -> np.ndarray:
    return np.asarray(run.traces.trace("temperature")[:])[:, :, 0]


# What is measured


SMALL = LinearGaussian.random(samples=24, weights=6, n_beta=24, localization=8, off_minimum=0.2)
STEEPEST = float(np.linalg.eigvalsh(SMALL.precision)[-1])


@pytest.mark.parametrize(("step", "batch_size"), [(0.2, 24), (2.5, 24), (1.0, 4)])
def test_temperature_is_that_of_the_chains_own_covariance(step: float, batch_size: int) -> None:
    """With as many directions as weights it is tr(ΣA)/d, for the stationary covariance Σ of SGLD at a finite step."""
    step_size = step / STEEPEST
    covariance = SMALL.minibatch_covariance(step_size, batch_size)
    expected = np.trace(covariance @ SMALL.precision) / 6
    run = sample_run(SMALL, step_size, chains=32, draws=100, thin=5, batch_size=batch_size)
    found = run.diagnostics(support=False)["temperature"]
    assert found["standard_error"] < 0.05 * expected
    assert abs(found["value"] - expected) < 4 * found["standard_error"] + 0.01 * expected
    assert (expected > 1.2) == (step > 0.5)


@pytest.mark.parametrize("prior_precision", [0.0, 5.0])
def test_chains_without_an_error_of_the_step_have_the_targets_temperature(prior_precision: float) -> None:
    """w* is no minimum of the losses, and a prior pulls elsewhere: neither matters."""
    for sampler in (jostle.BAOAB(step_size=2 / STEEPEST), jostle.LeimkuhlerMatthews(step_size=2 / STEEPEST)):
        run = sample_run(SMALL, 0, sampler=sampler, prior_precision=prior_precision, chains=32, draws=75, thin=5)
        found = run.diagnostics(support=False)["temperature"]
        assert abs(found["value"] - 1) < 4 * found["standard_error"] < 0.15


def test_directions_lean_towards_what_the_losses_see() -> None:
    """20 of 200 directions are held by the losses; those of the thermometer are mostly of them, and orthogonal."""
    run = sample_run(FLAT, 0.4 / LARGEST)
    assert np.isfinite(readings(run)).all()
    gradients = FLAT.mean_hessian @ np.random.default_rng(0).standard_normal((200, 8))
    directions = thermometer.directions_of(
        lambda number: thermometer.torch.tensor(gradients[:, number]).float(), 8, 200, jostle.ranks.Crew()
    )
    assert directions is not None
    found = directions.double().numpy()
    np.testing.assert_allclose(found @ found.T, np.eye(8), atol=0.02)
    seen = np.linalg.svd(FLAT.X, full_matrices=False)[2]
    np.testing.assert_allclose(((found @ seen.T) ** 2).sum(1), 1, atol=0.02)


@pytest.mark.parametrize("rank", [1, 2])
def test_gradients_that_are_all_alike_give_no_more_directions_than_there_are(rank: int) -> None:
    """What is left of them along no other is rounding, along which nothing is hot."""
    generator = np.random.default_rng(0)
    basis, weights = generator.standard_normal((rank, 1000)), generator.standard_normal((8, rank))
    directions = thermometer.directions_of(
        lambda number: thermometer.torch.tensor(weights[number] @ basis).float(), 8, 1000, jostle.ranks.Crew()
    )
    assert directions is not None
    assert len(directions) == rank
    problem = LinearGaussian.random(samples=rank, weights=200, n_beta=0.6, localization=8)
    step = 3.95 / float(np.linalg.eigvalsh(problem.precision)[-1])
    assert too_hot(sample_run(problem, step, draws=50).diagnostics(support=False))


def test_large_models_have_fewer_directions_of_fewer_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    step, value = 3.95 / LARGEST, []
    for most, together in ((1 << 30, 1 << 28), (1 << 30, 150), (150, 150)):
        monkeypatch.setattr(thermometer, "MOST_IN_ONE", most)
        monkeypatch.setattr(thermometer, "MOST_TOGETHER", together)
        monkeypatch.setitem(thermometer.BLOCKS, "cpu", 64)
        found = sample_run(FLAT, step, draws=50).diagnostics(support=False)["temperature"]
        value.append(found["value"])
    all_of_them, one, part_of_one = value
    assert min(all_of_them, one) > 1.5
    assert 1.1 < part_of_one < all_of_them  # what is hot is partly elsewhere
    healthy = sample_run(FLAT, 0.2 / LARGEST).diagnostics(support=False)["temperature"]
    assert abs(healthy["value"] - 1) < 4 * healthy["standard_error"] + 0.1


# What it does to a run: nothing


@pytest.mark.parametrize("at_once", [1, 4])
def test_no_number_of_the_chains_changes(at_once: int, tmp_path: Path) -> None:
    """A run of less than 25 steps has no thermometer, and is the beginning of one that has."""
    settings: dict[str, Any] = {"burn_in": 0, "thin": 2, "batch_size": 5, "chains_at_once": at_once}
    plain = sample_run(FLAT, 0.4 / LARGEST, draws=4, out=tmp_path / "plain", **settings)
    run = sample_run(FLAT, 0.4 / LARGEST, draws=40, out=tmp_path / "run", **settings)
    assert (plain.traces.keeps_temperature, run.traces.keeps_temperature) == (False, True)
    assert plain.diagnostics()["temperature"] == dict.fromkeys(("value", "standard_error", "coolest_chain"))
    for name in ("train", "query"):
        np.testing.assert_array_equal(plain.traces.losses(name)[:], run.traces.losses(name)[:, :4])
    before = readings(run)
    extended = sample_run(FLAT, 0.4 / LARGEST, draws=60, out=tmp_path / "run", **settings)
    np.testing.assert_array_equal(readings(extended)[:, :40], before)
    assert np.isfinite(readings(extended)).all()
    # One that was begun without goes on without.
    later = sample_run(FLAT, 0.4 / LARGEST, draws=60, out=tmp_path / "plain", **settings)
    assert not later.traces.keeps_temperature
    np.testing.assert_array_equal(later.traces.losses("train")[:], extended.traces.losses("train")[:])


def test_without_a_gradient_there_is_no_temperature() -> None:
    X, y = FLAT.data
    control = jostle.attribute(FLAT.model(), (X, y), (X, y), loss=LOSS, sampler=jostle.Gaussian(), progress=False)
    assert not control.traces.keeps_temperature
    assert control.diagnostics()["temperature"]["value"] is None


# Verdicts


@pytest.mark.parametrize(("keep", "seeds"), [("traces", 3), ("covariance", 1)])
def test_a_step_that_heats_few_of_many_directions_is_noticed(keep: Any, seeds: int) -> None:
    """3.95 of 4 to the limit."""
    step = 3.95 / LARGEST
    for seed in range(seeds):
        found = sample_run(FLAT, step, seed=seed, keep=keep).diagnostics()
        (reason,) = too_hot(found)
        assert found["temperature"]["value"] > 1.5
        assert (reason["level"], found["verdict"]["level"]) == ("unreliable", "unreliable")
        asked = {"step_size": step / 8, "thin": 8 * 10, "burn_in": 8 * 100}
        assert reason["settings"] == pytest.approx(asked, rel=0.1)
        assert "small batches" not in reason["finding"]  # they are whole
        assert reason["number"] == found["temperature"]["value"]


def test_small_batches_that_heat_are_noticed() -> None:
    problem = LinearGaussian.random(samples=200, weights=12, n_beta=200, localization=8, off_minimum=0.1)
    step = 0.5 / float(np.linalg.eigvalsh(problem.precision)[-1])
    whole = sample_run(problem, step, draws=50, thin=20, batch_size=200).diagnostics()
    assert not too_hot(whole)
    (reason,) = too_hot(sample_run(problem, step, draws=50, thin=20, batch_size=2).diagnostics())
    assert "small batches" in reason["finding"]
    assert reason["advice"].endswith("; or, if it is the noise, raise --batch-size (to about 200)")  # there are no more


def test_the_batches_that_hot_chains_are_told_are_enough_where_it_is_their_noise() -> None:
    problem = LinearGaussian.random(samples=200, weights=12, n_beta=200, localization=8, off_minimum=0.1)
    step = 0.25 / float(np.linalg.eigvalsh(problem.precision)[-1])
    (reason,) = too_hot(sample_run(problem, step, draws=50, thin=40, batch_size=2).diagnostics(support=False))
    told = re.search(r"; or, if it is the noise, raise --batch-size \(to about (\d+)\)$", reason["advice"])
    assert told, reason["advice"]
    assert 16 < int(told[1]) < 150
    # Whether it is, a temperature does not tell; a shorter step helps in either case.
    assert reason["settings"].keys() == {"step_size", "thin", "burn_in"}
    found = sample_run(problem, step, draws=50, thin=40, batch_size=int(told[1])).diagnostics(support=False)
    assert not too_hot(found)
    assert found["temperature"]["value"] < 1.2


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
            found = sample_run(problem, 0, sampler=sampler, seed=weights, draws=60, thin=3).diagnostics(support=False)
            assert 0.5 < found["temperature"]["value"] < 1.3
            assert not too_hot(found), (n_beta, localization, sampler, found["verdict"]["summary"])


def test_few_draws_do_not_hide_how_hot_chains_are(tmp_path: Path) -> None:
    """Too few to follow a chain, but chains can be told apart: what is said first would otherwise be more of the same."""
    hot, healthy = dict.fromkeys((3, 9), 0), dict.fromkeys((3, 9), 0)
    for seed in range(6):
        for step, count in ((3.95 / LARGEST, hot), (0.2 / LARGEST, healthy)):
            for draws in count:  # the same run goes on, which has the draws of a new one
                run = sample_run(FLAT, step, draws=draws, seed=seed, out=tmp_path / f"{step}, {seed}")
                count[draws] += bool(too_hot(run.diagnostics(support=False)))
    assert hot == {3: 6, 9: 6}
    assert healthy == {3: 0, 9: 0}


def test_a_rule_without_a_step_size_that_is_too_hot_is_told_so() -> None:
    class Mine(jostle.SGLD):
        """Its step under another name."""

    run = sample_run(FLAT, 0, sampler=Mine(step_size=3.95 / LARGEST))
    config = run.config
    del config["sampler"]["step_size"]
    (reason,) = too_hot(run.diagnostics())
    assert (reason["advice"], reason["settings"]) == ("raise --localization", {})


def test_losses_beyond_all_bounds_are_judged(tmp_path: Path) -> None:
    """Finite, but not their products: in words, and not in warnings of arithmetic."""
    sampler, out = jostle.BAOAB(step_size=1 / STEEPEST), tmp_path / "run"
    with pytest.warns(jostle.errors.ChainFailedWarning):
        run = sample_run(SMALL, 0, sampler=sampler, batch_size=1, chains=4, draws=100, out=out)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = run.diagnostics()
    assert found["verdict"]["level"] == "unreliable"
    result = CliRunner().invoke(app, ["diagnose", str(out)])
    assert (result.exit_code, result.stderr) == (0, "")
    assert "these scores are not reliable: " in result.stdout

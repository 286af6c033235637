"""Diagnostics: numbers against known processes, and a verdict that is right about good runs and about bad ones."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import jostle
from jostle import diagnose
from jostle.cli import app
from jostle.diagnose import Sample, plots
from jostle.errors import ChainFailedWarning
from jostle.posterior import Potential
from jostle.presets import RISE
from jostle.traces.store import Columns, Traces
from reference import LinearGaussian
from test_traces import language_run

PROBLEM = LinearGaussian.random(samples=12, weights=4, n_beta=12, localization=8)
LARGEST = float(np.linalg.eigvalsh(PROBLEM.precision)[-1])
SEEDS, CHAINS = 20, 4
GOOD = {"draws": 100, "burn_in": 100, "thin": 25}

StepSize = float | Callable[[int], np.ndarray]


def config(step_size: float, **changes: Any) -> dict[str, Any]:
    posterior = {"n_beta": PROBLEM.n_beta, "localization": PROBLEM.localization, "prior_precision": 0.0}
    sampler = {"name": "SGLD", "step_size": step_size}
    return {"posterior": posterior, "sampler": sampler, "chains": CHAINS, **GOOD, **changes}


MANIFEST: dict[str, Any] = {
    "failed_chains": [], "remarks": [], "scale": 1.0, "moving_weights": 4,
    "fingerprints": {"train": "a", "sampling_data": "a"},
}  # fmt: skip


def walk(
    step_size: StepSize, *, draws: int, burn_in: int, thin: int, chains: int = SEEDS * CHAINS, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Losses along full-batch SGLD, written out in NumPy for many chains at once: (chain, draw, example).

    And the temperature along all four directions, (w − w*)·∇U(w)/4.
    """
    generator = np.random.default_rng(seed)
    A, center = PROBLEM.precision, PROBLEM.center
    w = np.repeat(center[None], chains, 0)
    losses, temperature = np.empty((chains, draws, len(PROBLEM.y))), np.empty((chains, draws))
    for step in range(burn_in + draws * thin):
        if step >= burn_in and (step - burn_in) % thin == 0:
            draw = (step - burn_in) // thin
            losses[:, draw] = (PROBLEM.y - w @ PROBLEM.X.T) ** 2 / (2 * PROBLEM.noise_variance)
            temperature[:, draw] = ((w - center) * ((w - PROBLEM.mode) @ A)).sum(1) / 4
        epsilon = step_size(step)[:, None] if callable(step_size) else step_size
        w = w - epsilon / 2 * (w - PROBLEM.mode) @ A + np.sqrt(epsilon) * generator.normal(size=w.shape)
    return losses, temperature


def simulate(step_size: StepSize, **settings: int) -> np.ndarray:
    return walk(step_size, **settings)[0]


def sample_of(losses: np.ndarray, temperature: np.ndarray | None = None) -> Sample:
    center = (PROBLEM.y - PROBLEM.X @ PROBLEM.center) ** 2 / (2 * PROBLEM.noise_variance)
    return Sample(
        mean_loss=losses.mean(2), center_loss=float(center.mean()), chains=np.arange(len(losses)),
        train=losses, other=losses[:, :, :6], tokens=None, temperature=temperature,
    )  # fmt: skip


def judge(step_size: StepSize, nominal: float | None = None, **settings: int) -> list[dict[str, Any]]:
    """The diagnostics of many runs of four chains: chains are independent, so any four of them are a run."""
    settings = GOOD | settings
    losses, temperature = walk(step_size, **settings)
    known = config(nominal if callable(step_size) else step_size, batch_size=12, **settings)
    runs = [slice(first, first + CHAINS) for first in range(0, len(losses), CHAINS)]
    return [diagnose.diagnose(known, MANIFEST, sample_of(losses[run], temperature[run])) for run in runs]


def kinds(found: dict[str, Any]) -> set[str]:
    return {reason["kind"] for reason in found["verdict"]["reasons"]}


@pytest.fixture
def fewer_series(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty runs of each setting: fewer series are quicker, and the harder test."""
    for module in (diagnose, diagnose.measures):
        monkeypatch.setattr(module, "PROBED_SERIES", 8)


# Verdicts


@pytest.mark.usefixtures("fewer_series")
@pytest.mark.parametrize(
    ("step", "settings"),
    [(0.5, {}), (0.5, {"draws": 60, "thin": 100}), (1.0, {"draws": 400, "thin": 6})],
    ids=["usual", "short and well thinned", "long steps"],
)
def test_good_runs_are_called_good(step: float, settings: dict[str, int]) -> None:
    for found in judge(step / LARGEST, **settings):
        assert found["verdict"]["level"] == "good", found["verdict"]["summary"]
        assert re.match(
            r"good: \d+ effective draws \(± 0\.\d\d on a correlation\), R-hat 1\.\d\d", found["verdict"]["summary"]
        )
        assert found["verdict"]["reasons"] == []


@pytest.mark.usefixtures("fewer_series")
def test_good_runs_that_hardly_moved_are_hinted_at() -> None:
    """The same run with losses that move less: correlations, and so the verdict, are what they were."""
    usual = sample_of(simulate(1 / LARGEST, chains=CHAINS, **GOOD))
    rise = float(usual.mean_loss.mean()) - usual.center_loss
    for share, hinted in ((1.0, False), (0.0031 / rise, False), (0.0029 / rise, True), (-0.0029 / rise, True)):
        losses = usual.center_loss + share * (usual.train - usual.center_loss)
        found = diagnose.diagnose(config(1 / LARGEST), MANIFEST, sample_of(losses))
        assert found["verdict"]["level"] == "good"
        assert found["rise"] == pytest.approx(share * rise)
        assert (found["verdict"]["hint"] is not None) == hinted
        if hinted:
            assert f"the mean loss is {found['rise']:+.1g} nats from its value at w*" in found["verdict"]["hint"]
            assert "jostle run --auto" in found["verdict"]["hint"]


@pytest.mark.usefixtures("fewer_series")
def test_good_runs_that_went_far_are_hinted_at() -> None:
    """The same run, with losses that move more: what is usual is said, and about where it would be."""
    usual = sample_of(simulate(1 / LARGEST, chains=CHAINS, **GOOD))
    rise, center = float(usual.mean_loss.mean()) - usual.center_loss, 9.0
    known = config(1 / LARGEST)
    for far, hinted in ((1.98, False), (2.02, True), (2.8, True), (4.6, False)):
        losses = center + far / rise * (usual.train - usual.center_loss)
        sample = dataclasses.replace(sample_of(losses), center_loss=center)
        found = diagnose.diagnose(known, MANIFEST | {"scale": None}, sample)
        hint = found["verdict"]["hint"]
        assert found["rise"] == pytest.approx(far)
        assert (found["verdict"]["level"] == "good") == (far < 4.5)  # half of the loss: a verdict, and no hint
        assert (hint is not None) == hinted
        if hint is not None:
            assert f"the mean loss is {far:+.2g} nats from its value at w*" in hint
            nearer = float(hint.rpartition("--localization ")[2].rstrip(")"))
            assert nearer == pytest.approx(PROBLEM.localization * far / RISE, rel=0.1)
    control = known | {"sampler": {"name": "Gaussian"}}
    found = diagnose.diagnose(control, MANIFEST | {"scale": None}, sample)
    assert found["verdict"]["reasons"][0]["advice"] == "raise --localization"  # it has no step to lower


@pytest.mark.usefixtures("fewer_series")
def test_a_step_beyond_the_stable_one_is_noticed_while_all_is_finite() -> None:
    for found in judge(4.02 / LARGEST):
        assert found["verdict"]["level"] == "unreliable"
        assert "the step size is too large to be stable" in found["verdict"]["summary"]
        assert re.search(r"lower --step-size \(to about [\d.e-]+\)", found["verdict"]["summary"])
        # What it needs is a smaller step, and nothing else is suggested.
        assert not kinds(found) & {
            "few effective draws",
            "chains disagree",
            "drift",
            "hardly left w*",
            "scores disagree",
        }


@pytest.mark.usefixtures("fewer_series")
def test_a_step_just_below_the_stable_one_is_too_hot() -> None:
    """Stationary, mixing well, halves that agree: only the temperature gives it away, 5.9 of the target's 1."""
    for found in judge(3.8 / LARGEST):
        assert found["verdict"]["level"] == "unreliable"
        assert kinds(found) == {"too hot"}
        assert re.search(r"the chains are [\d.]+ ± [\d.]+ times as hot as what", found["verdict"]["summary"])
        assert 4 < found["temperature"]["value"] < 8
        assert found["agreement"]["halves"]["spearman"] > 0.8
        assert found["losses"]["r_hat"] < 1.1


@pytest.mark.usefixtures("fewer_series")
def test_the_step_and_the_thinning_that_hot_chains_are_told_are_enough() -> None:
    hot = judge(3.8 / LARGEST)
    asked = hot[0]["verdict"]["settings"]
    assert asked["thin"] == pytest.approx(8 * GOOD["thin"], rel=0.05)  # SGLD forgets in proportion
    followed = judge(asked["step_size"], thin=int(asked["thin"]), burn_in=int(asked["burn_in"]))
    assert all(not kinds(found) for found in followed)
    before, after = (np.mean([found["effective_draws"] for found in each]) for each in (hot, followed))
    assert after > 0.8 * before


@pytest.mark.usefixtures("fewer_series")
@pytest.mark.parametrize("burn_in", [0, 60])
def test_tiny_steps_without_thinning_have_hardly_left(burn_in: int) -> None:
    for found in judge(0.01 / LARGEST, thin=1, burn_in=burn_in):
        assert found["verdict"]["level"] == "unreliable"
        assert found["verdict"]["summary"].startswith("these scores are not reliable: chains have hardly left w*: ")
        assert {"few effective draws", "chains disagree"} <= kinds(found)
        assert found["effective_draws"] < 25


@pytest.mark.usefixtures("fewer_series")
def test_the_thinning_it_asks_for_is_enough() -> None:
    asked = []
    for found in judge(0.1 / LARGEST, thin=1):
        assert found["verdict"]["level"] == "unreliable"
        reason = next(reason for reason in found["verdict"]["reasons"] if reason["kind"] == "few effective draws")
        assert reason["number"] == found["effective_draws"] < 25
        assert f"{found['effective_draws']:.0f} effective draws of 4 × 100" in reason["finding"]
        asked.append(int(re.search(r"raise --thin to (?:about|at least) (\d+)", reason["advice"]).group(1)))
    thin = int(np.median(asked))
    # The slowest loss forgets as exp(−ελt/2): twice that time is what an effective draw takes, or a few times more.
    slowest = 4 / (0.1 * np.linalg.eigvalsh(PROBLEM.precision)[0] / LARGEST)
    assert slowest / 4 < thin < 6 * slowest
    assert all(found["verdict"]["level"] == "good" for found in judge(0.1 / LARGEST, thin=thin))


@pytest.mark.usefixtures("fewer_series")
def test_where_only_draws_are_missing_the_run_is_extended() -> None:
    """Chains that have arrived, and draws that are worth a third each: as many again are cheaper than another run."""
    every = judge(0.5 / LARGEST, draws=60, thin=8)
    missing = {}
    for number, found in enumerate(every):
        if kinds(found) != {"few effective draws"}:
            continue
        if found["effective_draws"] > 70:
            missing[number] = found["verdict"]["settings"]
            assert missing[number].keys() == {"draws"}
            assert re.search(r"; raise --draws to \d+$", found["verdict"]["summary"])
            told = diagnose.command({"source": {}}, found["verdict"], Path("a"))
            assert told == f"jostle extend a --draws {missing[number]['draws']:.0f}"
        elif found["effective_draws"] < 60:  # more draws than another run would have, with more steps between them
            assert found["verdict"]["settings"].keys() == {"thin"}
    assert len(missing) > 3
    # The same chains, longer.
    extended = judge(0.5 / LARGEST, draws=int(max(asked["draws"] for asked in missing.values())), thin=8)
    good = [extended[number]["verdict"]["level"] == "good" for number in missing]
    assert np.mean(good) > 0.8


@pytest.mark.usefixtures("fewer_series")
def test_too_few_draws() -> None:
    for found in judge(0.2 / LARGEST, draws=12, thin=100):
        assert found["verdict"]["level"] in ("doubtful", "unreliable")
        assert "few effective draws" in kinds(found)
        assert re.search(r"raise --draws to \d+", found["verdict"]["summary"])
    for found in judge(0.2 / LARGEST, draws=4):
        assert found["effective_draws"] is None
        assert found["verdict"]["level"] == "unreliable"
        assert "chains of 4 draws are too short to tell" in found["verdict"]["summary"]


def of_traces(train: np.ndarray, other: np.ndarray, tokens: Any = None) -> dict[str, Any]:
    """The diagnostics of losses that come from anywhere."""
    sample = Sample(
        mean_loss=train.mean(2), center_loss=float(train.mean()), chains=np.arange(len(train)),
        train=train, other=other, tokens=tokens,
    )  # fmt: skip
    return diagnose.diagnose(config(0.01, draws=train.shape[1]), MANIFEST | {"scale": None}, sample)


def factors(generator: np.random.Generator, *counts: int) -> list[np.ndarray]:
    """Losses of several sets that move with the same few directions."""
    directions = generator.normal(size=(4, 200, 8))
    return [directions @ generator.normal(size=(8, count)) for count in counts]


def test_a_slow_minority_is_not_good() -> None:
    """A fifth of the examples, and none of the queries, has not converged; of the quarter that is judged most have."""
    for seed in range(5):
        generator = np.random.default_rng(seed)
        train, query = factors(generator, 140, 20)
        apart = 5 * generator.normal(size=(4, 1, 14))
        slow = generator.permutation(140)[:28]
        train[:, :, slow] += np.concatenate([apart, -apart], axis=2)  # the mean loss does not show it
        found = of_traces(train, query)
        assert found["losses"]["slow_share"] > 0
        assert kinds(found) & {"some are slow", "few effective draws"}, found["verdict"]["summary"]
        whole = of_traces(*factors(generator, 140, 20))
        assert whole["losses"]["slow_share"] == 0
        assert whole["verdict"]["level"] == "good", whole["verdict"]["summary"]


def test_a_few_that_are_slow_are_said() -> None:
    generator = np.random.default_rng(0)
    train, query = factors(generator, 32, 32)
    train[:, :, [0]] += 5 * generator.normal(size=(4, 1, 1))
    found = of_traces(train, query)
    assert kinds(found) == {"some are slow"}
    assert re.search(r"doubtful: \d% of the (losses|scores) have not converged", found["verdict"]["summary"])


@pytest.mark.parametrize("moving", [6, 12, 40])
def test_noise_is_not_good_because_most_examples_never_move(moving: int) -> None:
    """Those that do not move tie at 0, and a ranking that puts them in their order agrees with itself."""
    for seed in range(10):
        generator = np.random.default_rng(seed)
        train = np.full((4, 200, 200), 0.4)
        train[:, :, generator.permutation(200)[:moving]] += 0.1 * generator.normal(size=(4, 200, moving))
        assert of_traces(train, generator.normal(size=(4, 200, 20)))["verdict"]["level"] == "unreliable"


@pytest.mark.parametrize("examples", [9, 20, 40])
def test_noise_is_not_good_because_queries_are_training_examples(examples: int) -> None:
    for seed in range(10):
        losses = np.random.default_rng(seed).normal(size=(4, 200, examples))
        assert of_traces(losses, losses)["verdict"]["level"] == "unreliable"


def test_the_most_helpful_may_be_settled_alone() -> None:
    """Ten examples go with each query, and the other 190 with nothing: these are in no order."""
    generator = np.random.default_rng(0)
    query, rest = generator.normal(size=(4, 200, 20)), generator.normal(size=(4, 200, 200))
    found = of_traces(0.6 * np.repeat(query, 10, axis=2) + 0.8 * rest, query)
    between = found["agreement"]["halves"]
    assert between["top_overlap"] > 0.95
    assert between["harmful_overlap"] < 0.2
    assert found["verdict"]["level"] == "doubtful"
    assert kinds(found) == {"only the most helpful"}
    assert "trust the most helpful ones alone" in found["verdict"]["summary"]
    # With as many that go against it, both ends are settled: good, but not for the order of the rest.
    against = 0.6 * np.repeat(query, 10, axis=2) * np.tile([1, -1], 100) + 0.8 * rest
    found = of_traces(np.concatenate([against, generator.normal(size=(4, 200, 100))], axis=2), query)
    assert found["verdict"]["level"] in ("good", "doubtful")


def test_tokens_that_have_not_converged_are_said() -> None:
    generator = np.random.default_rng(0)
    train, query = factors(generator, 40, 6)
    tokens = 0.05 * generator.normal(size=(4, 200, 30)) + generator.normal(size=(4, 1, 30))
    found = of_traces(train, query, (tokens, tokens))
    assert found["verdict"]["level"] == "doubtful"
    assert "single tokens have not converged" in found["verdict"]["summary"]
    assert of_traces(train, query, factors(generator, 30, 30))["verdict"]["level"] == "good"


def test_two_training_examples_have_no_ranking() -> None:
    found = of_traces(*factors(np.random.default_rng(0), 2, 6))
    assert found["agreement"]["halves"]["spearman"] is None
    assert found["verdict"]["level"] == "doubtful"
    assert "2 training examples that move are too few" in found["verdict"]["summary"]


def test_queries_that_never_move() -> None:
    [train] = factors(np.random.default_rng(0), 30)
    found = of_traces(train, np.full((4, 200, 5), 0.3))
    assert found["verdict"]["level"] == "unreliable"
    assert "no query's loss moved" in found["verdict"]["summary"]


@pytest.mark.usefixtures("fewer_series")
@pytest.mark.parametrize("late", [0.7, 0.85])
def test_one_chain_that_diverges_late_is_named(late: float) -> None:
    """The third chain of every run takes steps beyond the stable one in the last part; all stays finite."""
    last = GOOD["burn_in"] + GOOD["draws"] * GOOD["thin"]
    usual, unstable = 1.0 / LARGEST, 4.2 / LARGEST
    third = np.arange(SEEDS * CHAINS) % CHAINS == 2

    def step_size(step: int) -> np.ndarray:
        return np.where(third & (step > late * last), unstable, usual)

    for found in judge(step_size, usual):
        assert found["verdict"]["level"] == "unreliable"
        assert found["runaway"]["chains"] == [2]
        assert "chain 2 runs away late" in found["verdict"]["summary"]


@pytest.mark.usefixtures("fewer_series")
def test_a_missing_burn_in_is_noticed() -> None:
    """Chains that start far out and take their time: drift and R-hat, with a burn-in to set."""
    found_all = judge(0.05 / LARGEST, burn_in=0, thin=3)
    for found in found_all:
        assert found["verdict"]["level"] != "good"
    asked = [reason["advice"] for found in found_all for reason in found["verdict"]["reasons"]]
    assert sum("raise --burn-in to about" in advice for advice in asked) > SEEDS / 2


def test_far_from_the_checkpoint() -> None:
    generator = np.random.default_rng(0)
    losses = 40 + generator.normal(size=(4, 100, 12))
    found = diagnose.diagnose(config(1e-3), MANIFEST | {"scale": None}, sample_of(losses))
    assert found["verdict"]["level"] == "unreliable"
    assert re.search(
        r"the mean loss is 3\d\.\d nats above w\*: the chain left the neighbourhood; lower --step-size .* or raise --localization",
        found["verdict"]["summary"],
    )


def test_losses_that_do_not_move_and_chains_too_few() -> None:
    still = np.ones((4, 50, 12))
    found = diagnose.diagnose(config(1e-3), MANIFEST, sample_of(still))
    assert "no loss moved by more than rounding; raise --step-size" in found["verdict"]["summary"]
    one = simulate(1.0 / LARGEST, chains=1, **GOOD | {"draws": 400})
    found = diagnose.diagnose(config(1.0 / LARGEST, chains=1, draws=400), MANIFEST, sample_of(one))
    assert found["verdict"]["level"] == "doubtful"
    assert kinds(found) == {"few chains"}
    assert "sample with --chains 4" in found["verdict"]["summary"]
    assert found["losses"]["r_hat"] < 1.05  # of one chain's own halves
    json.dumps(found, allow_nan=False)


def test_scores_that_are_noise_are_not_reliable() -> None:
    """Many effective draws of losses that have nothing to do with each other: nothing to rank."""
    generator = np.random.default_rng(0)
    losses = 0.4 + 0.1 * generator.normal(size=(4, 200, 60))
    sample = dataclasses.replace(sample_of(losses), train=losses[:, :, :40], other=losses[:, :, 40:])
    found = diagnose.diagnose(config(0.01, draws=200), MANIFEST | {"scale": None}, sample)
    assert kinds(found) == {"scores disagree"}
    assert found["verdict"]["level"] == "unreliable"
    assert re.search(
        r"rank training examples differently \(Spearman -?0\.\d\d; \d+% of the 8 most", found["verdict"]["summary"]
    )


# Numbers


def autoregressive(rho: float, *, chains: int = 8, draws: int = 2000, columns: int = 12) -> np.ndarray:
    generator = np.random.default_rng(1)
    values = np.empty((chains, draws, columns))
    values[:, 0] = generator.normal(size=(chains, columns))
    noise = math.sqrt(1 - rho**2) * generator.normal(size=values.shape)
    for t in range(1, draws):
        values[:, t] = rho * values[:, t - 1] + noise[:, t]
    return values


@pytest.mark.parametrize("rho", [0.0, 0.6, 0.9])
def test_effective_sizes_of_autoregressive_processes(rho: float) -> None:
    """Of a mean there are N(1 − ρ)/(1 + ρ) effective draws; of a covariance, whose products decay as ρ², more."""
    series = autoregressive(rho)
    total = series.shape[0] * series.shape[1]
    sizes = diagnose.effective_sizes(series, "bulk")
    np.testing.assert_allclose(np.median(sizes), total * (1 - rho) / (1 + rho), rtol=0.1)
    products = diagnose.pair_products(series[:, :, :6], series[:, :, 6:])
    sizes = diagnose.effective_sizes(products, "mean")
    np.testing.assert_allclose(np.median(sizes), total * (1 - rho**2) / (1 + rho**2), rtol=0.1)
    assert diagnose.split_r_hat(series).max() < 1.03


def test_r_hat_of_chains_that_disagree() -> None:
    """Chains N(±δ, 1): W = 1 and B/n = δ², so R-hat is √(1 + δ²·C/(C − 1)), for normal draws also of their ranks."""
    generator = np.random.default_rng(2)
    delta, chains = 0.3, 8
    offsets = np.where(np.arange(chains) % 2, delta, -delta)[:, None, None]
    series = generator.normal(size=(chains, 4000, 6)) + offsets
    halves = 2 * chains
    np.testing.assert_allclose(diagnose.split_r_hat(series), math.sqrt(1 + delta**2 * halves / (halves - 1)), rtol=0.01)
    share = diagnose.between_chain_share(series)
    assert share == pytest.approx(delta**2 / (1 + delta**2), rel=0.05)
    numbers = diagnose.convergence(series)
    assert numbers["r_hat"] <= numbers["r_hat_max"]
    assert numbers["ess_bulk"] < 0.05 * series.shape[0] * series.shape[1]


def test_drift_is_in_standard_errors() -> None:
    """Without a drift the number is standard normal; a drift of a tenth of a standard deviation is what it is."""
    generator = np.random.default_rng(3)
    z = [diagnose.drift(generator.normal(size=(4, 400)))["standard_errors"] for _ in range(200)]
    assert np.std(z) == pytest.approx(1, abs=0.2)
    assert abs(np.mean(z)) < 0.3
    ramp = generator.normal(size=(4, 2000)) + np.linspace(0, 1, 2000)
    found = diagnose.drift(ramp)
    assert found["change"] == pytest.approx(0.75 - 0.125, abs=0.1)
    assert found["standard_errors"] == pytest.approx(0.625 / math.sqrt((1 / 2000 + 1 / 4000) * (1 + 1 / 100)), rel=0.2)


def test_learning_coefficient_is_half_the_trace() -> None:
    """λ̂ = nβ·(E[L̄] − L̄(w*)) = ½·tr(nβH̄·Σ), with Σ of the finite step, and of a small step ½·tr(nβH̄·A⁻¹)."""
    for step, draws in ((1.2, 500), (0.2, 500)):
        losses = simulate(step / LARGEST, burn_in=200, thin=6, draws=draws, chains=40, seed=4)
        known = config(step / LARGEST, chains=40, burn_in=200, thin=6, draws=draws)
        found = diagnose.diagnose(known, MANIFEST, sample_of(losses))["local_learning_coefficient"]
        covariance = PROBLEM.sgld_covariance(step / LARGEST)
        exact = 0.5 * np.trace(PROBLEM.n_beta * PROBLEM.mean_hessian @ covariance)
        assert abs(found["value"] - exact) < 4 * found["standard_error"]
        assert found["standard_error"] < 0.03 * exact
    infinitesimal = 0.5 * np.trace(PROBLEM.n_beta * PROBLEM.mean_hessian @ np.linalg.inv(PROBLEM.precision))
    assert found["value"] == pytest.approx(infinitesimal, rel=0.1)


# Runs


def sample_run(out: Path | None = None, *, sampler: Any = None, **changes: Any) -> jostle.Run:
    settings: dict[str, Any] = {"chains": CHAINS, "draws": 60, "burn_in": 30, "thin": 8, "batch_size": 10**6}
    X, y = PROBLEM.data
    return jostle.attribute(
        PROBLEM.model(), (X, y), (X[:6], y[:6]), loss=jostle.losses.regression(noise_variance=0.25), out=out,
        posterior=jostle.Posterior(n_beta=PROBLEM.n_beta, localization=PROBLEM.localization),
        sampler=sampler or jostle.SGLD(step_size=1.2 / LARGEST), progress=False, **(settings | changes),
    )  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_run(tmp_path_factory.mktemp("good") / "run").directory


def test_a_real_run(good: Path) -> None:
    found = jostle.load(good).diagnostics()
    assert found["verdict"]["level"] == "good"
    assert {
        "failed_chains", "remarks", "mean_loss_at_center", "mean_loss", "autocorrelation_time", "effective_draws",
    } <= found.keys()  # fmt: skip
    losses = np.asarray(jostle.load(good).traces.losses("train")[:])
    assert found["mean_loss"] == pytest.approx(losses.mean(), rel=1e-12)
    assert found["rise"] == pytest.approx(losses.mean() - found["mean_loss_at_center"], rel=1e-9)
    exact = 0.5 * np.trace(PROBLEM.n_beta * PROBLEM.mean_hessian @ PROBLEM.sgld_covariance(1.2 / LARGEST))
    coefficient = found["local_learning_coefficient"]
    assert abs(coefficient["value"] - exact) < 4 * coefficient["standard_error"]
    assert coefficient["of"] == "the sampling data"
    json.dumps(found, allow_nan=False)


class LateStep(jostle.SGLD):
    """SGLD whose third chain explodes late: its weights are thrown out of the finite numbers."""

    def init(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        chain = torch.arange(len(weights))[:, None]
        return {"chain": chain, "age": torch.zeros_like(chain)}

    def step(
        self, weights: torch.Tensor, mean_loss_gradient: torch.Tensor, noise: torch.Tensor,
        statistics: dict[str, torch.Tensor], potential: Potential, *, burning_in: bool,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
        moved, _ = super().step(weights, mean_loss_gradient, noise, {}, potential, burning_in=burning_in)
        chain, age = statistics["chain"], statistics["age"] + 1
        return torch.where((chain == 2) & (age > 310), moved * math.inf, moved), {"chain": chain, "age": age}


def test_failed_chains_are_named_with_when_and_why(tmp_path: Path) -> None:
    with pytest.warns(ChainFailedWarning, match="chain 2 failed at step"):
        run = sample_run(tmp_path / "run", sampler=LateStep(step_size=1.2 / LARGEST), chains_at_once=CHAINS)
    found = run.diagnostics(plot=tmp_path / "picture.svg")
    step = run.manifest["failed_chains"][0]["step"]
    assert step in (311, 318)  # found at once, or when it is observed
    reason = found["verdict"]["reasons"][0]
    assert (reason["level"], reason["number"]) == ("doubtful", step)
    assert (
        f"chain 2 failed at step {step}: weights left the finite numbers; lower --step-size"
        in found["verdict"]["summary"]
    )
    assert found["chains"] == 3
    assert f"chain 2, failed at step {step}" in (tmp_path / "picture.svg").read_text()


def test_a_step_that_makes_nan(tmp_path: Path) -> None:
    with pytest.raises(jostle.ChainsFailedError):
        sample_run(tmp_path / "run", sampler=jostle.SGLD(step_size=40 / LARGEST), draws=40, thin=20)
    found = jostle.load(tmp_path / "run").diagnostics(plot=tmp_path / "nan.png")
    assert found["verdict"]["level"] == "unreliable"
    assert re.search(
        r"chain 0 failed at step \d+: .*left the finite numbers; lower --step-size \(to about",
        found["verdict"]["summary"],
    )
    assert len(found["verdict"]["reasons"]) == CHAINS
    result = CliRunner().invoke(app, ["diagnose", str(tmp_path / "run")])
    assert result.exit_code == 0
    assert "chain 3 failed at step" in result.stdout


def test_tokens_and_sequences() -> None:
    run = language_run()
    found = run.diagnostics()
    losses = run.traces.to_xarray("train").losses.mean("token")
    assert found["mean_loss"] == pytest.approx(float(losses.mean()), rel=1e-9)
    assert 8 < found["tokens"]["ess_bulk"] < 240
    assert found["token_products"]["columns"] > 4
    json.dumps(found, allow_nan=False)


def test_what_cannot_be_known_without_traces(good: Path, tmp_path: Path) -> None:
    kept, summed = jostle.load(good).diagnostics(), sample_run(keep="covariance")
    found = summed.diagnostics()
    assert found["mean_loss"] == pytest.approx(kept["mean_loss"], rel=1e-9)
    assert found["between_chain_share"] == pytest.approx(kept["between_chain_share"], rel=1e-6)
    coefficient = found["local_learning_coefficient"]
    assert coefficient["value"] == pytest.approx(kept["local_learning_coefficient"]["value"], rel=1e-9)
    assert coefficient["standard_error"] is None
    assert kept["effective_draws"] / 5 < found["effective_draws_by_share"] < 5 * kept["effective_draws"]
    assert "effective_draws" in found["unknown"]
    assert found["verdict"]["level"] == "doubtful"
    assert "without traces nobody can tell how many draws are effective" in found["verdict"]["summary"]
    assert "sample with keep='traces'" in found["verdict"]["summary"]
    with pytest.raises(jostle.InputError, match=r"^plot: got keep='covariance'"):
        summed.diagnostics(plot=tmp_path / "x.png")
    tokens = language_run(keep="covariance", draws=4).diagnostics()
    assert tokens["mean_loss"] is None
    assert tokens["rise"] == pytest.approx(language_run(draws=4).diagnostics()["rise"], rel=1e-6)


def test_another_loss_drives_the_chain_and_other_data() -> None:
    X, y = PROBLEM.data
    other = sample_run(potential_loss=jostle.losses.regression(noise_variance=0.5), draws=10, thin=1).diagnostics()
    assert other["local_learning_coefficient"]["value"] is None
    assert other["local_learning_coefficient"]["of"] == "another loss drives the chain"
    more = sample_run(sampling_data=(X[:8], y[:8]), draws=10, thin=1).diagnostics()
    assert more["local_learning_coefficient"]["of"] == "the training examples, if they stand for the sampling data"


def test_observables_instead_of_queries() -> None:
    run = jostle.attribute(
        PROBLEM.model(), PROBLEM.data, loss=jostle.losses.regression(noise_variance=0.25), draws=20, thin=2, progress=False,
        observables={"weights": lambda model: model.weight.flatten(), "norm": lambda model: model.weight.norm()[None]},
        posterior=jostle.Posterior(n_beta=12, localization=8), sampler=jostle.SGLD(step_size=1.2 / LARGEST),
    )  # fmt: skip
    found = run.diagnostics()
    assert found["losses"]["columns"] == 12 + 5
    assert found["agreement"]["halves"]["spearman"] is not None


def test_large_traces_are_read_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are kept, not traces: what is held of 60 MB is a tenth of the buffer that it is allowed."""
    import tracemalloc

    chains, draws, columns = 3, 400, 12_000
    traces = Traces.create(
        tmp_path / "traces.zarr", chains=chains, steps=range(draws), dtype=np.dtype(np.float32),
        sets={"train": Columns(columns), "query": Columns(20)}, observables={},
    )  # fmt: skip
    generator = np.random.default_rng(0)
    for chain in range(chains):
        for name, width in (("train", columns), ("query", 20)):
            traces.record(name, [chain], 0, generator.normal(size=(1, draws, width)).astype(np.float32))
    traces.record_center("train", np.zeros(columns, np.float32))
    monkeypatch.setattr(diagnose.sample, "BUFFER_BYTES", 8 << 20)
    tracemalloc.start()
    sample = diagnose.read_sample(Traces(tmp_path / "traces.zarr"), np.array([0, 2]))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sample.train.shape == (2, draws, (8 << 20) // 8 // (8 * chains * draws))
    assert most < 40e6  # a few copies of a chunk of 8 MB while it is read, and what is kept
    expected = np.asarray(traces.losses("train")[:]).astype(np.float64).mean(2)
    np.testing.assert_allclose(sample.mean_loss, expected, rtol=1e-6, atol=1e-9)


def test_a_run_is_diagnosed_once(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = jostle.load(good)
    first = run.diagnostics(support=False)
    expected = copy.deepcopy(first)
    monkeypatch.delattr("jostle.runs.run.diagnose")
    first["verdict"]["level"] = first["losses"]["r_hat"] = "changed by whoever asked"
    assert run.diagnostics(support=False) == expected
    assert run.diagnostics().items() > expected.items()


# Commands and pictures


def test_diagnose_command(good: Path) -> None:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["diagnose", str(good)])
    assert result.exit_code == 0
    assert result.stdout.startswith("good: ")
    for row in (
        "effective draws",
        "R-hat",
        "drift of the mean loss",
        "learning coefficient",
        "temperature",
        "Spearman",
    ):
        assert row in result.stdout
    as_json = CliRunner().invoke(app, ["diagnose", str(good), "--json"])
    found = json.loads(as_json.stdout)
    assert found["verdict"]["level"] == "good"
    assert found == json.loads(json.dumps(jostle.load(good).diagnostics()))
    assert "Examples" in CliRunner().invoke(app, ["diagnose", "--help"]).stdout


def test_a_call_ends_with_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    """In a line, in the words of Python; what calibration tries out has none, nor has a call that is to be quiet."""
    model, data = torch.nn.Linear(3, 2), (torch.randn(12, 3), torch.arange(12) % 2)
    settings: dict[str, Any] = {"sampler": jostle.Gaussian(), "chains": 2, "draws": 8}
    run = jostle.attribute(model, data, data, **settings)
    verdict = run.diagnostics()["verdict"]["summary"]
    assert "raise --draws to" in verdict
    assert capsys.readouterr().err == f"jostle: {verdict.replace('--draws', 'draws')}\n"
    assert diagnose.in_python("raise --burn-in to about 3, and --thin") == "raise burn_in to about 3, and thin"
    jostle.attribute(model, data, data, **settings, progress=False)
    jostle.calibrate(model, data, data, batch_size=12)
    assert capsys.readouterr().err == ""


def test_every_run_ends_with_a_verdict(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch, jostle\n"
        "def build():\n"
        "    torch.manual_seed(0)\n"
        "    X, y = torch.randn(8, 3), torch.randn(8, 1)\n"
        "    return {'model': torch.nn.Linear(3, 1), 'train': (X, y), 'query': (X[:2], y[:2]),\n"
        "            'loss': jostle.losses.regression()}\n"
    )
    arguments = ["run", tmp_path / "run", "--task", f"{tmp_path / 'mine.py'}:build", "--draws", 20, "--thin", 1]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.stderr
    assert re.match(r"these scores are not reliable: \d+ effective draws of 4 × 20 .* raise --thin to", result.stdout)
    assert "4 × 20" in result.stdout
    assert result.stdout.endswith(f"more: jostle diagnose {tmp_path / 'run'}\n")


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")])
def test_pictures(good: Path, tmp_path: Path, name: str, magic: bytes) -> None:
    result = CliRunner().invoke(app, ["diagnose", str(good), "--plot", str(tmp_path / name)])
    assert result.exit_code == 0, result.stderr
    content = (tmp_path / name).read_bytes()
    assert content.startswith(magic)
    assert len(content) > 20_000


def test_pictures_that_cannot_be_drawn(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["diagnose", str(good), "--plot", str(tmp_path / "a.bmp")])
    assert (result.exit_code, result.stderr) == (
        2, "jostle: plot: got a.bmp, expected a name ending in .png, .svg, .pdf\n",
    )  # fmt: skip
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["diagnose", str(good), "--plot", str(tmp_path / "a.png")])
    assert (result.exit_code, result.stderr) == (
        2, "jostle: plot: got no matplotlib, expected the packages of the extra 'plots'; pip install 'jostle[plots]'\n",
    )  # fmt: skip
    assert not list(tmp_path.iterdir())

"""Every rule against the law it should sample: read off the rule itself, and sampled through a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import sampler_coverage
from benchmarks.linear_chain import LinearChain, Minibatches, Noise, simulate
from torch import Tensor, nn

import jostle
from jostle.chains import randomness
from jostle.chains.chain import Dynamics, Group, full_gradient
from jostle.data.datasets import Data
from jostle.models.functional import FunctionalModel
from jostle.models.weights import MovingWeights
from reference import LinearGaussian
from test_ground_truth import flat_weights, sample, weight_covariance, z_scores

HESSIAN = np.array([[2.0, 0.5, 0.0], [0.5, 1.0, 0.2], [0.0, 0.2, 0.3]])
POSTERIOR = jostle.Posterior(n_beta=10, localization=6, prior_precision=2)
PULL = 8.0
PRECISION = 10 * HESSIAN + PULL * np.eye(3)


def law(name: str, A: np.ndarray, pull: float, step_size: float) -> np.ndarray:
    """The stationary covariance that a rule's docstring states, for exact gradients."""
    unit = np.eye(len(A))
    if name == "SGLD":
        return np.linalg.inv(A @ (unit - step_size * A / 4))
    if name == "OrnsteinUhlenbeck":
        return np.linalg.inv(A @ (unit - (A - pull * unit) / pull * np.tanh(step_size * pull / 4)))
    return np.linalg.inv(A)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.95])
@pytest.mark.parametrize("name", ["SGLD", "LeimkuhlerMatthews", "OrnsteinUhlenbeck", "BAOAB"])
def test_stated_laws_solve_the_lyapunov_equation(name: str, share: float) -> None:
    """Up to the largest stable step, 4/(largest curvature)."""
    step_size = share * 4 / np.linalg.eigvalsh(PRECISION)[-1]
    for settings in [{"friction": 0.2}, {"friction": 1.0}, {"friction": 30.0}] if name == "BAOAB" else [{}]:
        chain = LinearChain.of(getattr(jostle, name)(step_size=step_size, **settings), HESSIAN, POSTERIOR)
        assert chain.is_stable()
        np.testing.assert_allclose(chain.weight_covariance(), law(name, PRECISION, PULL, step_size), rtol=1e-8)


@pytest.mark.parametrize("name", ["SGLD", "LeimkuhlerMatthews", "BAOAB"])
def test_beyond_the_largest_step_nothing_is_stable(name: str) -> None:
    step_size = 4.01 / np.linalg.eigvalsh(PRECISION)[-1]
    assert not LinearChain.of(getattr(jostle, name)(step_size=step_size), HESSIAN, POSTERIOR).is_stable()


def test_ornstein_uhlenbeck_is_stable_where_the_pull_outweighs_the_curvature() -> None:
    step_size = 1e3
    held = jostle.Posterior(n_beta=0.99 * PULL / np.linalg.eigvalsh(HESSIAN)[-1], localization=PULL)
    steep = jostle.Posterior(n_beta=1.01 * PULL / np.linalg.eigvalsh(HESSIAN)[-1], localization=PULL)
    rule = jostle.OrnsteinUhlenbeck(step_size=step_size)
    chain = LinearChain.of(rule, HESSIAN, held)
    assert chain.is_stable()
    assert not LinearChain.of(rule, HESSIAN, steep).is_stable()
    A = held.n_beta * HESSIAN + PULL * np.eye(3)
    np.testing.assert_allclose(chain.weight_covariance(), law("OrnsteinUhlenbeck", A, PULL, step_size), rtol=1e-8)
    rule.check(steep.potential(torch.zeros(3)), burn_in=0)  # nobody can know the curvature beforehand


def test_friction_1_is_best_for_what_only_the_pull_holds() -> None:
    """In a direction without curvature of its own, momentum forgets fastest at friction 1, and far faster than SGLD."""
    flat, held, step_size = np.zeros((1, 1)), jostle.Posterior(n_beta=10, localization=PULL), 0.01 / PULL

    def memory(sampler: jostle.Sampler) -> float:
        return float(-1 / np.log(np.abs(np.linalg.eigvals(LinearChain.of(sampler, flat, held).M)).max()))

    memories = {f: memory(jostle.BAOAB(step_size=step_size, friction=f)) for f in (0.5, 0.8, 1.0, 1.25, 2.0)}
    assert min(memories, key=memories.__getitem__) == 1.0
    assert memories[1.0] == pytest.approx(1 / np.sqrt(step_size * PULL), rel=0.1)
    assert memory(jostle.SGLD(step_size=step_size)) == pytest.approx(2 / (step_size * PULL), rel=0.01)
    overdamped = LinearChain.of(jostle.LeimkuhlerMatthews(step_size=step_size), HESSIAN, POSTERIOR)
    heavy = LinearChain.of(jostle.BAOAB(step_size=step_size, friction=1e3), HESSIAN, POSTERIOR)
    for k in (1, 5):  # at infinite friction the two are one
        left, right = (np.linalg.matrix_power(c.M, k) @ c.stationary() for c in (overdamped, heavy))
        np.testing.assert_allclose(left[:3, :3], right[:3, :3], rtol=1e-8)


@pytest.mark.parametrize("name", ["LeimkuhlerMatthews", "OrnsteinUhlenbeck", "BAOAB", "SGNHT"])
def test_sampled_losses_have_the_stated_law(name: str) -> None:
    """At a step where SGLD would be far off."""
    problem = LinearGaussian.random(samples=24, weights=3, n_beta=24, localization=60, off_minimum=0.4)
    step_size = 1.2 / np.linalg.eigvalsh(problem.precision)[-1]
    run = sample(problem, getattr(jostle, name)(step_size=step_size), chains=32, draws=300)
    scores = run.influence(standard_error=True)
    truth = problem.loss_covariance(law(name, problem.precision, 60, step_size))
    assert np.abs(z_scores(scores, truth)).max() < 4
    assert np.abs(z_scores(scores, problem.loss_covariance(problem.sgld_covariance(step_size)))).max() > 6


def test_the_gaussian_control_is_exact() -> None:
    """Precision γ + λ, mean γw*/(γ + λ), and no draw knows another."""
    problem = LinearGaussian.random(samples=24, weights=3, n_beta=0, localization=30)
    run = jostle.attribute(
        problem.model(), problem.data, problem.data, loss=jostle.losses.regression(noise_variance=0.25),
        observables={"weights": flat_weights}, sampler=jostle.Gaussian(), chains=16, draws=1000,
        posterior=jostle.Posterior(n_beta=0, localization=30, prior_precision=10), progress=False,
    )  # fmt: skip
    expected = np.eye(3) / 40
    weights = weight_covariance(run)
    assert weights.standard_error is not None
    assert (np.abs(weights.values - expected) / weights.standard_error).max() < 4
    drawn = np.asarray(run.traces.observable("weights")[:])
    assert (np.abs(drawn.mean((0, 1)) - 0.75 * problem.center) * np.sqrt(16_000 * 40)).max() < 4
    successive = np.mean((drawn - drawn.mean((0, 1)))[:, 1:] * (drawn - drawn.mean((0, 1)))[:, :-1], axis=(0, 1)) * 40
    assert np.abs(successive).max() < 4 / np.sqrt(16_000)
    assert (run.config["burn_in"], run.config["thin"]) == (1, 1)  # neither w* itself, nor steps between
    there = LinearGaussian(problem.X, problem.y, 0.25, 0.75 * problem.center, 0, 30)
    assert np.abs(z_scores(run.influence(standard_error=True), there.loss_covariance(expected))).max() < 4


def test_the_control_needs_nothing_but_its_name() -> None:
    problem = LinearGaussian.random(samples=10, weights=3, n_beta=0, localization=30)
    about: Any = {"loss": jostle.losses.regression(), "chains": 2, "draws": 3, "progress": False}
    named, given = (
        jostle.attribute(problem.model(), problem.data, problem.data, **about, **settings)
        for settings in (
            {"sampler": jostle.Gaussian()},
            {"sampler": jostle.Gaussian(), "posterior": jostle.Posterior(n_beta=0, localization=1e4), "burn_in": 1, "thin": 1},
        )
    )  # fmt: skip
    assert named.config == given.config
    np.testing.assert_array_equal(named.traces.losses("train")[:], given.traces.losses("train")[:])
    other = jostle.attribute(problem.model(), problem.data, problem.data, **about, sampler=jostle.SGLD(step_size=1e-5))
    assert (other.config["burn_in"], other.config["thin"], other.config["posterior"]["n_beta"]) == (0, 10, 200)


def minibatches(problem: LinearGaussian, batch_size: int, *, controlled: bool = False) -> Minibatches:
    gradients = problem.sample_gradients(problem.mode)
    if controlled:
        gradients = gradients - problem.sample_gradients(problem.center)
    return Minibatches(gradients, problem.sample_hessians, batch_size)


def posterior_of(problem: LinearGaussian) -> jostle.Posterior:
    return jostle.Posterior(n_beta=problem.n_beta, localization=problem.localization)


def minibatch_law(problem: LinearGaussian, sampler: jostle.Sampler, noise: Minibatches) -> np.ndarray:
    return LinearChain.of(sampler, problem.mean_hessian, posterior_of(problem)).weight_covariance(noise)


def second_moments(
    sampler: jostle.Sampler, H: np.ndarray, posterior: jostle.Posterior, noise: Noise
) -> tuple[np.ndarray, np.ndarray]:
    """Of the weights of many chains, and their standard errors; the mode is at 0."""
    weights = simulate(
        sampler, H, posterior, chains=500, draws=150, burn_in=200, thin=6, gradient_noise=noise
    ).numpy()  # fmt: skip
    moments = np.einsum("cta,ctb->cab", weights, weights) / weights.shape[1]
    return moments.mean(0), moments.std(0) / np.sqrt(len(moments))


@pytest.mark.parametrize("name", ["LeimkuhlerMatthews", "OrnsteinUhlenbeck", "BAOAB"])
def test_minibatches_add_the_noise_of_the_lyapunov_equation(name: str) -> None:
    problem = LinearGaussian.random(samples=40, weights=2, n_beta=40, localization=20, seed=2)
    noise = minibatches(problem, 4)
    step_size = 0.25 / np.linalg.eigvalsh(problem.precision)[-1]
    # What is read off SGLD is what is derived by hand for it elsewhere.
    derived = problem.minibatch_covariance(step_size, 4)
    np.testing.assert_allclose(minibatch_law(problem, jostle.SGLD(step_size=step_size), noise), derived, rtol=1e-9)
    sampler = getattr(jostle, name)(step_size=step_size)
    moments, error = second_moments(sampler, problem.mean_hessian, posterior_of(problem), noise)
    assert np.abs((moments - minibatch_law(problem, sampler, noise)) / error).max() < 4
    assert np.abs((moments - law(name, problem.precision, 20, step_size)) / error).max() > 8


def test_the_thermostat_absorbs_gradient_noise() -> None:
    """Normal noise of a size that nobody tells the rule: 18 % too much variance without a thermostat, none with it."""
    H, posterior = np.diag(np.linspace(0.5, 2.0, 10)), jostle.Posterior(n_beta=10, localization=10)
    A = 10 * np.diag(H) + 10
    step_size = 0.05 / A[-1]

    def noise(weights: Tensor, generator: torch.Generator) -> Tensor:
        return 0.03 / np.sqrt(step_size) * torch.randn(weights.shape, generator=generator, dtype=torch.float64)

    def excess(sampler: jostle.Sampler) -> tuple[np.ndarray, np.ndarray]:
        moments, error = second_moments(sampler, H, posterior, noise)
        return np.diagonal(moments) * A - 1, np.diagonal(error) * A

    plain, error = excess(jostle.BAOAB(step_size=step_size))
    assert plain.mean() == pytest.approx(0.18, abs=0.015)
    assert (plain / error).min() > 8
    absorbed, error = excess(jostle.SGNHT(step_size=step_size))
    assert np.abs(absorbed / error).max() < 4
    assert abs(absorbed.mean()) < 0.012


def test_the_thermostat_absorbs_the_noise_of_minibatches() -> None:
    """Every example looks along one axis and all axes are alike, so that the noise has no direction."""
    X, center = np.concatenate([np.eye(4), -np.eye(4)] * 8) * 2, np.array([1.0, -1.0, 0.5, 2.0])
    residuals = 0.6 * np.where(np.arange(64) < 32, 1, -1)
    problem = LinearGaussian(X, X @ center + residuals, 0.25, center, 30, 60)
    np.testing.assert_allclose(problem.mode, center, rtol=1e-9)
    noise, step_size = minibatches(problem, 8), 0.04 / np.linalg.eigvalsh(problem.precision)[-1]
    posterior_covariance = np.linalg.inv(problem.precision)
    settings = problem.mean_hessian, posterior_of(problem), noise
    heated, error = second_moments(jostle.BAOAB(step_size=step_size), *settings)
    assert np.abs((heated - minibatch_law(problem, jostle.BAOAB(step_size=step_size), noise)) / error).max() < 4
    assert np.diagonal((heated - posterior_covariance) / error).min() > 8
    absorbed, error = second_moments(jostle.SGNHT(step_size=step_size), *settings)
    assert np.abs((absorbed - posterior_covariance) / error).max() < 4


def test_control_variates_leave_the_noise_that_curvature_makes() -> None:
    """The noise at w* is gone; that of (H_B − H̄)(w − w*) stays, and the Lyapunov equation says how much it is."""
    problem = LinearGaussian.random(samples=40, weights=2, n_beta=40, localization=20, off_minimum=0.1, seed=2)
    sampler = jostle.LeimkuhlerMatthews(step_size=0.5 / np.linalg.eigvalsh(problem.precision)[-1])
    run = sample(problem, sampler, batch_size=4, chains=32, thin=4, draws=200, burn_in=40, control_variates=True)
    weights = weight_covariance(run)
    assert weights.standard_error is not None
    expected = minibatch_law(problem, sampler, minibatches(problem, 4, controlled=True))
    assert (np.abs(weights.values - expected) / weights.standard_error).max() < 4
    plain = minibatch_law(problem, sampler, minibatches(problem, 4))
    assert (np.abs(weights.values - plain) / weights.standard_error).max() > 8
    posterior_covariance = np.linalg.inv(problem.precision)
    assert np.linalg.norm(expected - posterior_covariance) < 0.4 * np.linalg.norm(plain - posterior_covariance)


class Location(nn.Module):
    """A mean to be estimated: ℓᵢ(w) = ‖w − xᵢ‖²/2, whose Hessian is the same for every example."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64))


def location_loss(model: Location, batch: tuple[Tensor]) -> Tensor:
    return (model.place - batch[0]).square().sum(1) / 2


def location_run(**settings: Any) -> np.ndarray:
    data = (torch.randn(22, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64),)
    defaults: dict[str, Any] = {
        "posterior": jostle.Posterior(n_beta=20, localization=5), "sampler": jostle.BAOAB(step_size=0.02),
        "chains": 3, "draws": 20, "thin": 3, "progress": False, "batch_size": 4,
    }  # fmt: skip
    run = jostle.attribute(Location(), data, data, loss=location_loss, **(defaults | settings))
    return np.asarray(run.traces.losses("train")[:])


def test_with_equal_hessians_control_variates_leave_no_noise_at_all() -> None:
    whole = location_run(batch_size=22)
    np.testing.assert_allclose(location_run(control_variates=True), whole, rtol=1e-9)
    np.testing.assert_allclose(location_run(control_variates=True, chains_at_once=1), whole, rtol=1e-9)
    assert np.abs(location_run() - whole).max() > 0.1
    np.testing.assert_array_equal(location_run(batch_size=22, control_variates=True), whole)  # nothing to control


def test_control_variates_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"control_variates": True, "chains_at_once": 1, "sampler": jostle.SGNHT(step_size=0.02)}
    whole = location_run(**settings)
    observe, left = Dynamics.observe, 30

    def faulty(self: Dynamics, group: Group) -> dict[str, Tensor]:
        nonlocal left
        left -= 1
        if left == 0:
            raise RuntimeError("power cut")
        return observe(self, group)

    monkeypatch.setattr(Dynamics, "observe", faulty)
    with pytest.raises(RuntimeError, match="power cut"):
        location_run(**settings, out=tmp_path / "run", checkpoint_seconds=0.0)
    np.testing.assert_array_equal(location_run(**settings, out=tmp_path / "run"), whole)


def test_the_full_gradient_does_not_depend_on_its_batches() -> None:
    problem = LinearGaussian.random(samples=23, weights=3, n_beta=1, localization=1, off_minimum=1.0)
    model = problem.model()
    functional, data = FunctionalModel(model, MovingWeights(model, "all")), Data(problem.data, "train")
    loss, expected = jostle.losses.regression(noise_variance=0.25), problem.sample_gradients(problem.center).mean(0)
    for batch_size in (1, 5, 23, 100):
        np.testing.assert_allclose(full_gradient(functional, loss, data, batch_size), expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["LeimkuhlerMatthews", "BAOAB", "SGNHT"])
def test_blocks_of_weights_do_not_change_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a huge model does on a GPU; a thermostat sees all weights of its chain all the same."""
    settings: dict[str, Any] = {"sampler": getattr(jostle, name)(step_size=0.02)}
    whole = location_run(**settings)
    noise = randomness.noise

    def in_blocks(*arguments: Any) -> Iterator[tuple[slice, Tensor]]:
        for _, values in noise(*arguments):
            yield from ((slice(part, part + 2), values[:, part : part + 2]) for part in range(0, values.shape[1], 2))

    monkeypatch.setattr(randomness, "noise", in_blocks)
    np.testing.assert_allclose(location_run(**settings), whole, rtol=1e-12)


@pytest.mark.parametrize("name", sampler_coverage.names())
def test_intervals_cover_what_they_should(name: str) -> None:
    """2,000 repetitions; the binomial error of a coverage is 0.005. The longer record is in benchmarks/records/."""
    settings: dict[str, Any] = {"repetitions": 2000, "chains": 4, "draws": 100, "thin": 4}
    measured = sampler_coverage.coverage(name, **settings, quantities=["covariance"])["covariance"]
    assert measured["coverage"] == pytest.approx(0.95, abs=0.015)
    assert measured["mean_error_over_true_error"] == pytest.approx(1, abs=0.06)

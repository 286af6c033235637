"""Estimates against closed forms, each within its own Monte Carlo error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import jostle
import reference
from jostle import estimate
from reference import LinearGaussian

Record = Callable[..., None]

REGRESSION = jostle.losses.regression(noise_variance=0.25)


def flat_weights(model: nn.Module) -> Tensor:
    return torch.cat([value.reshape(-1) for value in model.parameters()])


def sample(problem: LinearGaussian, sampler: jostle.Sampler, **settings: object) -> jostle.Run:
    posterior = jostle.Posterior(n_beta=problem.n_beta, localization=problem.localization)
    defaults: dict[str, object] = {"chains": 64, "draws": 400, "burn_in": 100, "thin": 3, "batch_size": 10**6}
    return jostle.attribute(
        problem.model(),
        problem.data,
        problem.data,
        loss=REGRESSION,
        observables={"weights": flat_weights},
        posterior=posterior,
        sampler=sampler,
        progress=False,
        **(defaults | settings),  # type: ignore[arg-type]
    )


def z_scores(scores: jostle.Scores, truth: np.ndarray) -> np.ndarray:
    """Standard errors between −Cov as estimated and Cov as known."""
    assert scores.standard_error is not None
    return (scores.values + truth) / scores.standard_error


def against(scores: jostle.Scores, truth: np.ndarray) -> dict[str, float]:
    """How far an estimate is from the truth, next to how far its Monte Carlo error lets it be."""
    assert scores.standard_error is not None
    size = np.linalg.norm(truth)
    return {
        "largest_distance_in_standard_errors": np.abs(z_scores(scores, truth)).max(),
        "relative_error": np.linalg.norm(scores.values + truth) / size,
        "relative_standard_error": np.linalg.norm(scores.standard_error) / size,
    }


def weight_covariance(run: jostle.Run) -> estimate.Estimate:
    trace = run.traces.observable("weights")
    return estimate.covariance(trace, trace, standard_error=True)


@pytest.mark.parametrize("off_minimum", [0.0, 0.4], ids=["at a minimum", "off a minimum"])
def test_sgld_samples_its_finite_step_gaussian(off_minimum: float, record: Record) -> None:
    problem = LinearGaussian.random(samples=24, weights=3, n_beta=24, localization=20, off_minimum=off_minimum)
    step_size = 1.2 / np.linalg.eigvalsh(problem.precision)[-1]
    scores = sample(problem, jostle.SGLD(step_size=step_size)).influence(standard_error=True)
    truth = problem.loss_covariance(problem.sgld_covariance(step_size))
    record(**against(scores, truth))
    assert np.abs(z_scores(scores, truth)).max() < 4
    # The errors are small enough to tell the finite step from the infinitesimal one.
    infinitesimal = problem.loss_covariance(np.linalg.inv(problem.precision))
    assert np.abs(z_scores(scores, infinitesimal)).max() > 8
    if off_minimum:
        at_center = LinearGaussian(problem.X, problem.y, 0.25, problem.center, problem.n_beta, 1e12)
        naive = at_center.loss_covariance(problem.sgld_covariance(step_size))
        assert np.abs(z_scores(scores, naive)).max() > 8


@pytest.mark.parametrize("off_minimum", [0.0, 0.4], ids=["at a minimum", "off a minimum"])
def test_rmsprop_sgld_with_a_frozen_preconditioner(off_minimum: float, record: Record) -> None:
    problem = LinearGaussian.random(samples=24, weights=3, n_beta=24, localization=20, off_minimum=off_minimum, seed=1)
    burn_in, chains, smoothing, stabilizer = 150, 32, 0.99, 0.05
    step_size = 0.5 / np.linalg.eigvalsh(problem.precision)[-1]
    sampler = jostle.RMSpropSGLD(
        step_size=step_size, smoothing=smoothing, stabilizer=stabilizer, freeze_after_burn_in=True
    )
    run = sample(problem, sampler, chains=chains, draws=800, burn_in=burn_in)
    # Each chain froze its own G: replay the burn-ins to know them.
    moving = jostle.models.weights.MovingWeights(problem.model(), "all")
    truths = []
    for chain in range(chains):
        w, V = problem.center.copy(), np.zeros(3)
        for t in range(burn_in):
            g = problem.sample_gradients(w).mean(0)
            V = smoothing * V + (1 - smoothing) * g**2
            G = 1 / (np.sqrt(V / (1 - smoothing ** (t + 1))) + stabilizer)
            noise = next(jostle.chains.randomness.noise(0, [chain], t, moving, torch.device("cpu")))[1][0].numpy()
            drift = problem.n_beta * g + problem.localization * (w - problem.center)
            w = w - step_size / 2 * G * drift + np.sqrt(step_size * G) * noise
        covariance = problem.preconditioned_covariance(step_size, G)
        M = np.eye(3) - step_size / 2 * np.diag(G) @ problem.precision
        np.testing.assert_allclose(covariance, reference.stationary_covariance(M, step_size * np.diag(G)), rtol=1e-9)
        truths.append(problem.loss_covariance(covariance))
    scores = run.influence(standard_error=True)
    record(**against(scores, np.mean(truths, axis=0)))
    assert np.abs(z_scores(scores, np.mean(truths, axis=0))).max() < 4
    plain = problem.loss_covariance(problem.sgld_covariance(step_size))
    assert np.abs(z_scores(scores, plain)).max() > 8


def test_minibatches_add_the_noise_of_the_lyapunov_equation(record: Record) -> None:
    problem = LinearGaussian.random(samples=40, weights=2, n_beta=40, localization=20, seed=2)
    step_size, batch_size = 0.25 / np.linalg.eigvalsh(problem.precision)[-1], 4
    run = sample(problem, jostle.SGLD(step_size=step_size), batch_size=batch_size, thin=10, draws=300)
    expected = problem.minibatch_covariance(step_size, batch_size)
    weights = weight_covariance(run)
    assert weights.standard_error is not None
    assert (np.abs(weights.values - expected) / weights.standard_error).max() < 4
    full = problem.sgld_covariance(step_size)
    assert (np.abs(weights.values - full) / weights.standard_error).max() > 8
    scores = run.influence(standard_error=True)
    record(**against(scores, problem.loss_covariance(expected)))
    assert np.abs(z_scores(scores, problem.loss_covariance(expected))).max() < 4


def test_error_falls_with_the_root_of_the_draws(record: Record) -> None:
    problem = LinearGaussian.random(samples=8, weights=3, n_beta=24, localization=20)
    step_size = 1.2 / np.linalg.eigvalsh(problem.precision)[-1]
    # Every chain is an independent repetition.
    run = sample(problem, jostle.SGLD(step_size=step_size), draws=632, thin=4)
    truth = problem.loss_covariance(problem.sgld_covariance(step_size))
    losses = np.asarray(run.traces.losses("train")[:])
    lengths = np.array([20, 63, 200, 632])
    errors = [
        np.sqrt(np.mean([(reference.covariance(c[None, :T], c[None, :T]) - truth) ** 2 for c in losses]))
        for T in lengths
    ]
    slope = np.polyfit(np.log(lengths), np.log(errors), 1)[0]
    record(slope=slope, error_ratio_over_32_times_the_draws=errors[0] / errors[-1])
    assert slope == pytest.approx(-0.5, abs=0.06)
    assert errors[0] / errors[-1] == pytest.approx(31.6**0.5, rel=0.2)


def test_the_global_bif_with_a_prior() -> None:
    """γ = 0 and a prior N(0, 1/λ): the posterior is that of ridge regression."""
    problem = LinearGaussian.random(samples=24, weights=3, n_beta=24, localization=0.0, seed=3)
    prior = 8.0
    A = problem.precision + prior * np.eye(3)
    mode = np.linalg.solve(A, problem.n_beta * (problem.X.T @ problem.y) / len(problem.y) / 0.25)
    step_size = 0.8 / np.linalg.eigvalsh(A)[-1]
    run = jostle.attribute(
        problem.model(),
        problem.data,
        problem.data,
        loss=REGRESSION,
        observables={"weights": flat_weights},
        posterior=jostle.Posterior(n_beta=24, localization=0, prior_precision=prior),
        sampler=jostle.SGLD(step_size=step_size),
        chains=64, draws=400, burn_in=100, thin=3, batch_size=24, progress=False,
    )  # fmt: skip
    expected = np.linalg.inv(A @ (np.eye(3) - step_size * A / 4))
    weights = weight_covariance(run)
    assert weights.standard_error is not None
    assert (np.abs(weights.values - expected) / weights.standard_error).max() < 4
    means = np.asarray(run.traces.observable("weights")[:]).mean(1)
    error = means.std(0, ddof=1) / np.sqrt(len(means))
    assert (np.abs(means.mean(0) - mode) / error).max() < 4


class Logistic(nn.Module):
    """Two-class logistic regression as a classifier with logits (0, xᵀw)."""

    def __init__(self, weights: np.ndarray) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.from_numpy(weights))

    def forward(self, inputs: Tensor) -> Tensor:
        logit = inputs @ self.weights
        return torch.stack([torch.zeros_like(logit), logit], dim=-1)


def logistic_problem(samples: int, seed: int = 0) -> tuple[Logistic, Tensor, Tensor]:
    """Data from the model itself, and the model at its maximum-likelihood weights (by Newton's method)."""
    generator = np.random.default_rng(seed)
    X = np.concatenate([generator.normal(size=(samples, 3)), np.ones((samples, 1))], axis=1)
    y = (generator.random(samples) < 1 / (1 + np.exp(-X @ np.array([1.0, -0.7, 0.4, 0.2])))).astype(np.int64)
    w = np.zeros(4)
    for _ in range(50):
        p = 1 / (1 + np.exp(-X @ w))
        w -= np.linalg.solve((X * (p * (1 - p))[:, None]).T @ X + 1e-9 * np.eye(4), X.T @ (p - y))
    return Logistic(w), torch.from_numpy(X), torch.from_numpy(y)


def test_reweighting_an_example_moves_the_expectation_by_the_covariance(record: Record) -> None:
    """dE[φⱼ]/dβᵢ = −(nβ/n)·Cov(ℓᵢ, φⱼ), by sampling again with the same random numbers."""
    model, X, y = logistic_problem(40)
    delta, example = 0.2, 7
    queries = (X[:10], y[:10])
    classification = jostle.losses.classification()

    def weighted(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return batch[2] * classification(model, batch[:2])

    settings: dict[str, Any] = {
        "posterior": jostle.Posterior(n_beta=40, localization=5), "sampler": jostle.LeimkuhlerMatthews(step_size=2e-2),
        "chains": 128, "draws": 100, "burn_in": 40, "thin": 4, "batch_size": 40, "progress": False,
    }  # fmt: skip

    def run_with(extra: float) -> jostle.Run:
        weights = torch.ones(len(X), dtype=torch.float64)
        weights[example] += extra
        driven = {"sampling_data": (X, y, weights), "potential_loss": weighted}
        return jostle.attribute(model, (X, y), queries, **driven, **settings)

    plain = jostle.attribute(model, (X, y), queries, **settings).influence(standard_error=True)
    assert plain.scale == pytest.approx(1.0)
    assert plain.standard_error is not None
    up, down = (np.asarray(run_with(sign * delta).traces.losses("query")[:]).mean(1) for sign in (1, -1))
    response = (up - down) / (2 * delta)  # (chain, query): chains are independent repetitions
    measured, error = response.mean(0), response.std(0, ddof=1) / np.sqrt(len(response))
    predicted = plain.scale * plain.values[example]
    combined = np.hypot(error, plain.scale * plain.standard_error[example])
    record(
        largest_distance_in_standard_errors=(np.abs(measured - predicted) / combined).max(),
        relative_error=np.linalg.norm(measured - predicted) / np.linalg.norm(measured),
        relative_standard_error=np.linalg.norm(combined) / np.linalg.norm(measured),
    )
    assert (np.abs(measured - predicted) / combined).max() < 4
    # The effect is seen clearly, so a wrong sign or scale would be too.
    assert (np.abs(measured) / combined).max() > 15


def test_bif_tends_to_the_damped_influence_function(record: Record) -> None:
    """Non-singular model, n → ∞: −β·Cov → −gᵀ(nH̄ + (γ/β)I)⁻¹g (appendix A of the paper)."""
    distance = {}
    for samples in (20, 80, 640):
        model, X, y = logistic_problem(samples, seed=4)
        picked = (X[:20], y[:20])
        posterior = jostle.Posterior(n_beta=samples, localization=1.0)
        settings = {"posterior": posterior, "sampling_data": (X, y)}
        first = jostle.attributors.exact_influence(model, picked, picked, **settings)
        H = torch.func.hessian(
            lambda w, model=model, X=X, y=y: nn.functional.cross_entropy(
                torch.func.functional_call(model, {"weights": w}, (X,)), y, reduction="sum"
            )
        )(model.weights.detach())
        np.testing.assert_allclose(
            first.scale * first.values,
            -(g := _gradients(model, *picked)) @ np.linalg.inv(H.numpy() + np.eye(4)) @ g.T,
            rtol=1e-8,
        )
        largest = np.linalg.eigvalsh(H.numpy())[-1] + 1
        run = jostle.attribute(
            model, picked, picked, **settings,
            sampler=jostle.LeimkuhlerMatthews(step_size=0.5 / largest),
            chains=128, draws=60, burn_in=20, thin=4, batch_size=10**6, progress=False,
        )  # fmt: skip
        bif = run.influence(standard_error=True)
        assert bif.scale == first.scale == 1.0
        assert bif.standard_error is not None
        distance[samples] = np.linalg.norm(first.values - bif.values) / np.linalg.norm(bif.values)
        correlation = np.corrcoef(bif.values.ravel(), first.values.ravel())[0, 1]
        ratio = (bif.values * first.values).sum() / (first.values**2).sum()
        error = np.linalg.norm(bif.standard_error) / np.linalg.norm(bif.values)
        record(**{
            f"n={samples}: correlation": correlation, f"n={samples}: ratio": ratio,
            f"n={samples}: relative_distance": distance[samples], f"n={samples}: relative_standard_error": error,
        })  # fmt: skip
    # At the largest n the two agree; on the way there they come together.
    assert correlation > 0.99
    assert ratio == pytest.approx(1, abs=0.03)
    assert distance[20] > distance[80] > 1.5 * distance[640]
    assert distance[20] > 2 * distance[640]


def test_second_order_term_of_the_laplace_expansion(record: Record) -> None:
    """Under N(w*, I/γ) the covariance of curved losses is nearer to gᵀΣg + ½tr(HΣHΣ) than to gᵀΣg."""
    model, X, y = logistic_problem(30, seed=5)
    picked = (X[:12], y[:12])
    # Without a gradient and with εγ = 2 every step forgets the last: independent draws of N(w*, 2/γ).
    run = jostle.attribute(
        model, picked, picked,
        posterior=jostle.Posterior(n_beta=0, localization=6), sampler=jostle.SGLD(step_size=1 / 3),
        chains=16, draws=4000, burn_in=1, thin=1, progress=False,
    )  # fmt: skip
    bif = run.influence(standard_error=True)
    gaussian = jostle.Posterior(n_beta=0, localization=3)
    first, second = (
        jostle.attributors.exact_influence(model, picked, picked, posterior=gaussian, order=order) for order in (1, 2)
    )
    distance = [np.linalg.norm(other.values - bif.values) / np.linalg.norm(bif.values) for other in (first, second)]
    assert bif.standard_error is not None
    error = np.linalg.norm(bif.standard_error) / np.linalg.norm(bif.values)
    record(first_order_distance=distance[0], second_order_distance=distance[1], relative_standard_error=error)
    # What is left is of the same order in Σ: products of first and third derivatives, which the expansion's sum holds.
    assert distance[1] < 0.8 * distance[0]
    assert distance[0] - distance[1] > 4 * error


def _gradients(model: Logistic, X: Tensor, y: Tensor) -> np.ndarray:
    p = torch.sigmoid(X @ model.weights.detach())
    return ((p - y)[:, None] * X).numpy()


def test_laplace_expansion_is_exact_for_linear_regression() -> None:
    """Order 2 of the expansion equals gᵀΣg + ½tr(HΣHΣ), also where w* is not a minimum."""
    problem = LinearGaussian.random(samples=10, weights=3, n_beta=30, localization=7, off_minimum=0.5)
    scores = jostle.attributors.exact_influence(
        problem.model(), problem.data, problem.data, loss=REGRESSION, order=2, newton_steps=1,
        posterior=jostle.Posterior(n_beta=30, localization=7),
    )  # fmt: skip
    np.testing.assert_allclose(
        scores.values, -problem.loss_covariance(np.linalg.inv(problem.precision)), rtol=1e-10, atol=1e-12
    )
    assert scores.scale == pytest.approx(3.0)


def test_exact_influence_of_some_weights() -> None:
    """Where only the last layer moves, its gradients and Hessian are all there is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)).double()
    X, y = torch.randn(9, 3, dtype=torch.float64), torch.arange(9) % 2
    posterior = jostle.Posterior(n_beta=9, localization=2, weights="2.*")
    scores = jostle.attributors.exact_influence(model, (X, y), (X, y), posterior=posterior)
    features = torch.tanh(model[0](X)).detach()
    p = torch.softmax(model(X), 1).detach()
    g = torch.einsum("nc,nf->ncf", p - nn.functional.one_hot(y, 2), features).flatten(1)
    curvature = torch.diag_embed(p) - torch.einsum("nc,nd->ncd", p, p)
    H = torch.einsum("ncd,nf,ng->ncfdg", curvature, features, features).mean(0).reshape(8, 8)
    expected = -g @ torch.linalg.inv(9 * H + 2 * torch.eye(8)) @ g.T
    np.testing.assert_allclose(scores.values, expected, rtol=1e-9)


@pytest.mark.parametrize("batch_size", [5, 10**6], ids=["minibatches", "full batch"])
def test_algorithm_1_line_by_line(batch_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    X, y = torch.randn(12, 3, dtype=torch.float64), torch.arange(12) % 3
    train, query = (X, y), (X[:4] + 0.1, y[:4])
    settings = {"step_size": 1e-3, "n_beta": 30.0, "localization": 50.0}
    expected = reference.algorithm_1(
        model, train, query, jostle.losses.classification(), **settings,
        batch_size=batch_size, chains=3, draws=6, seed=11,
    )  # fmt: skip
    run = jostle.attribute(
        model, train, query,
        posterior=jostle.Posterior(n_beta=30, localization=50), sampler=jostle.SGLD(step_size=1e-3),
        chains=3, draws=6, thin=1, batch_size=batch_size, seed=11, progress=False,
    )  # fmt: skip
    np.testing.assert_allclose(run.influence().values, expected, rtol=1e-9, atol=1e-15)

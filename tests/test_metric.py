"""The posterior in a metric, and without the linear term of the loss: its law, and what it comes to as nβ grows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from experiments.digits_retraining import digits
from torch import Tensor, nn
from torch.func import jacrev, vmap

import jostle
from jostle.attributors import exact_influence
from jostle.chains import randomness
from jostle.chains.chain import Dynamics, full_gradient
from jostle.chains.observing import Observer
from jostle.curvature.gauss_newton import GaussNewton
from jostle.data.datasets import Data
from jostle.models import in_place
from jostle.models.functional import FunctionalModel
from jostle.models.in_place import InPlace
from jostle.models.weights import MovingWeights
from jostle.runs.integrity import examine
from jostle.runs.layout import read_metric
from jostle.samplers.protocol import steps_to_forget
from reference import LinearGaussian
from test_ground_truth import flat_weights, weight_covariance
from test_sharing import classifier
from test_sharing import settings as sharing_settings
from test_ways import OnePlace

REGRESSION = jostle.losses.regression(noise_variance=0.25)

ALIKE = LinearGaussian.random(samples=24, weights=5, n_beta=24, localization=100, off_minimum=0.4)
"""Well-conditioned, as it is in units of the metric."""

D = np.geomspace(1e-2, 1e2, 5)[[3, 0, 4, 1, 2]]

STRETCHED = LinearGaussian(ALIKE.X * np.sqrt(D), ALIKE.y, 0.25, ALIKE.center / np.sqrt(D), 24, 100)
"""The same in w: D, and the curvature, are over four decades."""

STEEPEST = float(np.linalg.eigvalsh(ALIKE.precision)[-1])


def sample(problem: LinearGaussian, sampler: jostle.Sampler, **settings: Any) -> jostle.Run:
    """Of the problem, in a metric where one is given."""
    given = {name: settings.pop(name) for name in ("metric", "linear_term") if name in settings}
    n_beta = 0.0 if isinstance(sampler, jostle.Gaussian) else problem.n_beta
    posterior = jostle.Posterior(n_beta=n_beta, localization=problem.localization, **given)
    defaults: dict[str, Any] = {"chains": 3, "draws": 20, "burn_in": 10, "thin": 3, "batch_size": 10**6}
    return jostle.attribute(
        problem.model(), problem.data, problem.data, loss=REGRESSION, observables={"weights": flat_weights},
        posterior=posterior, sampler=sampler, progress=False, **(defaults | settings),
    )  # fmt: skip


def weights_of(run: jostle.Run) -> np.ndarray:
    return np.asarray(run.traces.observable("weights")[:])


# --- the law ---


class Anchored(jostle.SGLD):
    """A user's own rule, which is also pulled to where it began."""

    def init(self, weights: Tensor) -> dict[str, Tensor]:
        return {"began": weights.clone()}

    def step(self, weights: Tensor, *others: Any, **named: Any) -> tuple[Tensor, dict[str, Tensor]]:
        moved, statistics = super().step(weights, *others, **named)
        return moved + 0.1 * (statistics["began"] - weights), statistics


@pytest.mark.parametrize(
    "sampler",
    [
        jostle.SGLD(step_size=0.5 / STEEPEST),
        jostle.LeimkuhlerMatthews(step_size=0.5 / STEEPEST),
        jostle.OrnsteinUhlenbeck(step_size=0.5 / STEEPEST),
        jostle.RMSpropSGLD(step_size=0.1 / STEEPEST, stabilizer=0.1, freeze_after_burn_in=True),
        jostle.BAOAB(step_size=0.5 / STEEPEST),
        jostle.SGNHT(step_size=0.5 / STEEPEST),
        jostle.Gaussian(),
        Anchored(step_size=0.5 / STEEPEST),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_every_rule_does_in_a_metric_what_it_does_in_its_units(sampler: jostle.Sampler) -> None:
    """The same weights written in units in which D is the identity, and no metric: the same losses, draw by draw."""
    metric = torch.from_numpy(D)
    thin = 1 if isinstance(sampler, jostle.Gaussian) else 3
    for settings in ({"thin": thin}, {"thin": thin, "batch_size": 5, "control_variates": True, "chains_at_once": 1}):
        stretched, alike = sample(STRETCHED, sampler, metric=metric, **settings), sample(ALIKE, sampler, **settings)
        np.testing.assert_allclose(
            stretched.traces.losses("train")[:], alike.traces.losses("train")[:], rtol=1e-8, atol=1e-10
        )
        np.testing.assert_allclose(weights_of(stretched) * np.sqrt(D), weights_of(alike), rtol=1e-8, atol=1e-10)
        if not isinstance(sampler, jostle.Gaussian):  # whose directions are rounded to bfloat16
            temperatures = (run.traces.trace("temperature")[:] for run in (stretched, alike))
            np.testing.assert_allclose(*temperatures, rtol=0.03, atol=0.03)


@pytest.mark.parametrize(
    ("name", "step", "thin"), [("SGLD", 0.2, 10), ("LeimkuhlerMatthews", 1.0, 5), ("BAOAB", 1.0, 3)]
)
def test_quadratic_losses_have_the_covariance_of_the_posterior(name: str, step: float, thin: int) -> None:
    """(nβH + γD)⁻¹, in a tenth of the steps in which a rule without a metric would forget where it began."""
    sampler = getattr(jostle, name)(step_size=step / STEEPEST)
    run = sample(
        STRETCHED, sampler, metric=torch.from_numpy(D), chains=32, draws=50, thin=thin, burn_in=5 * thin,
        batch_size=23, control_variates=True,
    )  # fmt: skip
    A = 24 * STRETCHED.mean_hessian + 100 * np.diag(D)
    curvatures = np.linalg.eigvalsh(A)
    assert steps_to_forget(4 / curvatures[-1], curvatures[0]) > 10 * thin * 55
    found, truth = weight_covariance(run), np.linalg.inv(A)
    assert found.standard_error is not None
    distance = np.abs(found.values - truth) / found.standard_error
    assert distance.max() < 4
    # The errors are small enough to tell metrics apart.
    other = np.linalg.inv(24 * STRETCHED.mean_hessian + 100 * np.diag(np.sqrt(D)))
    assert (np.abs(found.values - other) / found.standard_error).max() > 8


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batch_size": 12, "chains_at_once": 1},
        {"batch_size": 5},
        {"batch_size": 5, "control_variates": True},
        {"batch_size": 5, "control_variates": True, "chains_at_once": 1},
    ],
    ids=str,
)
def test_without_its_linear_term(settings: dict[str, Any]) -> None:
    """As with a loss from which it was taken by hand."""
    slope = torch.from_numpy(STRETCHED.sample_gradients(STRETCHED.center).mean(0))

    def by_hand(model: nn.Linear, batch: Sequence[Tensor]) -> Tensor:
        return REGRESSION(model, batch) - model.weight[0] @ slope

    sampler, metric = jostle.SGLD(step_size=0.5 / STEEPEST), torch.from_numpy(D)
    run = sample(STRETCHED, sampler, metric=metric, linear_term=False, **settings)
    assert ("chains_at_once" in settings) or run.manifest["execution"]["chains_at_once"] > 1
    same = sample(STRETCHED, sampler, metric=metric, potential_loss=by_hand, **settings)
    np.testing.assert_allclose(weights_of(run), weights_of(same), rtol=1e-8)
    with_it = sample(STRETCHED, sampler, metric=metric, **settings)
    assert np.abs(weights_of(run) - weights_of(with_it)).max() > 0.1


@pytest.mark.parametrize("recorded", [False, True])
def test_gradients_without_the_linear_term(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they come with a draw's losses, and where a pass writes over what the last one gave, as on a GPU."""
    monkeypatch.setattr(in_place, "Graph", OnePlace)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    model, train, _, loss = classifier()
    moving, data = MovingWeights(model, "all"), Data(train, "train")
    plain = FunctionalModel(model, moving)
    whole = full_gradient(plain, loss, data, len(data))
    posterior = jostle.Posterior(n_beta=20, localization=100, linear_term=False)
    with InPlace(model, moving) as fast:
        if recorded:
            fast.replay()
        for controlled in (False, True):
            config = sharing_settings(posterior=posterior, control_variates=controlled)
            dynamics = Dynamics(
                fast, config, sampling_data=data, potential_loss=loss, observables={},
                observers={"train": Observer(plain, loss, data, 4)},
            )  # fmt: skip
            assert dynamics.needs_center_gradient != controlled
            dynamics.center_gradient = None if controlled else whole
            group = dynamics.start([0])
            dynamics.advance(group)
            chosen = randomness.minibatches(config.seed, [0], group.step, size=config.batch_size, of=len(data))
            here, there = (
                plain.mean_loss_gradient(loss, weights, data, chosen)
                for weights in (group.weights, moving.center[None])
            )
            expected = here - (there if controlled else whole)
            torch.testing.assert_close(dynamics.gradient(group), expected, rtol=1e-10, atol=1e-10)
            if dynamics.can_share_passes:
                dynamics.shares_passes = True
                dynamics.observe(group)
                torch.testing.assert_close(group.ahead, expected, rtol=1e-10, atol=1e-10)
            assert dynamics.shares_passes != controlled


# --- what it comes to as nβ grows ---


CLASSES = (3, 5, 8)
TRAIN, QUERIES = 60, 20


def few_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Three that look alike, in 4 × 4 pixels."""
    (X, y), _ = digits()
    kept = torch.isin(y, torch.tensor(CLASSES))
    X = F.avg_pool2d(X[kept].view(-1, 1, 8, 8), 2).flatten(1).double()
    y = torch.searchsorted(torch.tensor(CLASSES), y[kept])
    last = TRAIN + QUERIES
    return (X[:TRAIN], y[:TRAIN]), (X[TRAIN:last], y[TRAIN:last])


@dataclass
class Checkpoint:
    """A model somewhere on its way, and its closed form Gᵢᵀ(H + D)⁻¹gⱼ/n."""

    model: nn.Module
    metric: Tensor

    def __post_init__(self) -> None:
        self.train, self.query = few_digits()
        loss = jostle.losses.classification()
        moving = MovingWeights(self.model, "all")
        self.functional = FunctionalModel(self.model, moving)
        self.G, self.g = (
            jacrev(lambda flat, data=data: self.functional.sample_losses(loss, flat, data))(moving.center)
            for data in (self.train, self.query)
        )
        with GaussNewton(self.model, "all", loss, Data(self.train, "train")) as curvature:
            self.precision = curvature.dense() + torch.diag(self.metric)
        self.truth = (self.G @ torch.linalg.solve(self.precision, self.g.T) / TRAIN).numpy()


def trained(model: nn.Module, steps: int, rate: float) -> nn.Module:
    X, y = few_digits()[0]
    optimizer = torch.optim.SGD(model.parameters(), rate)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(X), y).backward()
        optimizer.step()
    return model


def spread_metric(weights: int, largest: float) -> Tensor:
    """Over four decades, in no order."""
    order = torch.randperm(weights, generator=torch.Generator().manual_seed(0))
    return torch.logspace(-4, 0, weights, dtype=torch.float64)[order] * largest


@dataclass
class Compared:
    """Independent estimates of one matrix with what it should be."""

    slope: float
    slope_error: float
    correlation: float
    distance: float
    """‖E[estimate] − truth‖/‖truth‖, with what Monte Carlo errors add to it taken out."""
    noise: float
    """What they add: ‖error‖/‖truth‖."""

    @classmethod
    def of(cls, estimates: np.ndarray, truth: np.ndarray) -> Compared:
        mean, size = estimates.mean(0), np.linalg.norm(truth)
        noise = float((estimates.var(0, ddof=1) / len(estimates)).sum()) / size**2
        slopes = np.einsum("cij,ij->c", estimates, truth) / size**2
        return cls(
            float(slopes.mean()),
            float(slopes.std(ddof=1) / np.sqrt(len(slopes))),
            float(np.corrcoef(mean.ravel(), truth.ravel())[0, 1]),
            float(np.sqrt(max(0, np.linalg.norm(mean - truth) ** 2 / size**2 - noise))),
            float(np.sqrt(noise)),
        )


def covariances(train: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Of every chain, around the mean of all: (chain, train, query)."""
    train, query = train - train.mean((0, 1)), query - query.mean((0, 1))
    return np.einsum("cti,ctj->cij", train, query) / train.shape[1]


def test_draws_of_a_convex_loss_come_to_the_closed_form() -> None:
    """At a checkpoint that is no minimum: without the linear term, and nowhere near with it."""
    linear = nn.Linear(16, 3, dtype=torch.float64)
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    checkpoint = Checkpoint(trained(linear, 5, 0.5), spread_metric(51, 10.0))
    unit = checkpoint.metric.rsqrt()
    steepest = float(torch.linalg.eigvalsh(unit[:, None] * checkpoint.precision * unit)[-1])

    def compared(n_beta: float, chains: int, **settings: Any) -> Compared:
        run = jostle.attribute(
            checkpoint.model, checkpoint.train, checkpoint.query, chains=chains, draws=80, thin=4, burn_in=40,
            posterior=jostle.Posterior(n_beta=n_beta, localization=n_beta, metric=checkpoint.metric, **settings),
            sampler=jostle.BAOAB(step_size=2 / (n_beta * steepest)), batch_size=TRAIN, progress=False,
        )  # fmt: skip
        train, query = (np.asarray(run.traces.losses(name)[:], np.float64) for name in ("train", "query"))
        return Compared.of(covariances(train, query) * n_beta / TRAIN, checkpoint.truth)

    near, far = compared(1e6, 64, linear_term=False), compared(10, 32, linear_term=False)
    assert abs(near.slope - 1) < 4 * near.slope_error < 0.06
    assert near.correlation > 0.99
    assert near.distance < 0.05
    assert far.distance > 0.3
    assert abs(far.slope - 1) > 6 * far.slope_error
    elsewhere = compared(1e6, 16)
    assert elsewhere.distance > 0.5
    assert abs(elsewhere.slope - 1) > 20 * elsewhere.slope_error


def test_exact_draws_through_a_network_come_to_the_closed_form() -> None:
    """With an error that falls as 1/nβ; and where the linear part of losses is known exactly, from far fewer draws."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    checkpoint = Checkpoint(trained(network, 300, 0.5), spread_metric(123, 1.0))
    loss, center = jostle.losses.classification(), checkpoint.functional.moving.center
    factor = torch.linalg.cholesky(checkpoint.precision)
    generator = torch.Generator().manual_seed(0)

    def compared(n_beta: float, *, antithetic: bool) -> tuple[Compared, Compared]:
        """Of 20 × 400 draws as they are; and with the covariance of the linear parts as it is known in its place."""
        noise = torch.randn(20, 200 if antithetic else 400, 123, generator=generator, dtype=torch.float64)
        noise = torch.cat([noise, -noise], dim=1) if antithetic else noise
        away = torch.linalg.solve_triangular(factor.T, noise.flatten(0, 1).T, upper=True).T / n_beta**0.5
        seen, linear = [], []
        for data, gradients in ((checkpoint.train, checkpoint.G), (checkpoint.query, checkpoint.g)):
            losses = vmap(lambda flat, data=data: checkpoint.functional.sample_losses(loss, flat, data))(center + away)
            seen.append(losses.view(20, 400, -1).numpy())
            linear.append((away @ gradients.T).view(20, 400, -1).numpy())
        plain, of_linear = (covariances(*sides) * n_beta / TRAIN for sides in (seen, linear))
        known = plain - of_linear + checkpoint.truth
        return Compared.of(plain, checkpoint.truth), Compared.of(known, checkpoint.truth)

    plain, known = compared(1e8, antithetic=False)
    assert abs(plain.slope - 1) < 4 * plain.slope_error < 0.1
    assert plain.correlation > 0.99
    assert known.slope == pytest.approx(1, abs=0.003)
    # Where losses are almost linear, almost all of the noise is that of linear parts: so many draws are as good as one.
    plain, known = compared(1e6, antithetic=False)
    assert (plain.noise / known.noise) ** 2 > 20
    # In pairs around w*, what is left of it is of higher order yet: errors can be told apart that fall as 1/nβ.
    errors = [compared(n_beta, antithetic=True)[1] for n_beta in (1e5, 1e6, 1e7)]
    assert (plain.noise / errors[1].noise) ** 2 > 500
    assert errors[0].distance > 10 * errors[0].noise
    for wider, narrower in itertools.pairwise(errors):
        assert wider.distance / narrower.distance == pytest.approx(10, rel=0.25)


# --- a run in a metric ---


X = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(9) % 2
METRIC = torch.logspace(-2, 2, 8, dtype=torch.float64)


def small_run(
    out: Path | None = None, *, metric: Any = METRIC, linear_term: bool = False, **changes: Any
) -> jostle.Run:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "train": (X, Y), "query": (X[:2], Y[:2]), "chains": 2, "draws": 6, "thin": 2, "burn_in": 1, "batch_size": 4,
        "posterior": jostle.Posterior(n_beta=20, localization=10, metric=metric, linear_term=linear_term),
        "sampler": jostle.SGNHT(step_size=1e-3), "progress": False,
    }  # fmt: skip
    return jostle.attribute(nn.Linear(3, 2).double(), out=out, **(settings | changes))


def losses(run: jostle.Run) -> np.ndarray:
    return np.concatenate([run.traces.losses(name)[:] for name in ("train", "query")], axis=2)


@pytest.mark.parametrize("settings", [{}, {"chains_at_once": 1}, {"control_variates": True}], ids=str)
def test_killed_resumed_and_extended(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = losses(small_run(**settings))
    observe, left = Dynamics.observe, 5

    def faulty(self: Dynamics, *arguments: Any) -> dict[str, Tensor]:
        nonlocal left
        left -= 1
        if left == 0:
            raise RuntimeError("power cut")
        return observe(self, *arguments)

    out = tmp_path / "run"
    monkeypatch.setattr(Dynamics, "observe", faulty)
    with pytest.raises(RuntimeError, match="power cut"):
        small_run(out, checkpoint_seconds=0.0, **settings)
    resumed = small_run(out, **settings)
    np.testing.assert_array_equal(losses(resumed), whole)
    # More draws, then more queries, in the metric that the run has kept.
    kept = read_metric(out)
    assert kept is not None
    assert torch.equal(kept, METRIC)
    extended = small_run(out, metric=kept, draws=9, query=(X[:5], Y[:5]), **settings)
    np.testing.assert_array_equal(losses(extended)[:, :6, :11], whole)
    at_once = losses(small_run(draws=9, query=(X[:5], Y[:5]), **settings))
    np.testing.assert_allclose(losses(extended), at_once, rtol=1e-12)
    assert jostle.load(out).config["posterior"]["linear_term"] is False
    assert examine(out) == []


def test_the_metric_by_the_names_of_parameters() -> None:
    """A tensor for each, or one number; of weights that do not move, nothing is asked."""
    whole = losses(small_run())
    named = {"weight": METRIC[:6].view(2, 3), "bias": METRIC[6:]}
    np.testing.assert_array_equal(losses(small_run(metric=named)), whole)
    one, alike = {"weight": 0.1, "bias": 7}, torch.tensor([0.1] * 6 + [7.0] * 2, dtype=torch.float64)
    np.testing.assert_array_equal(losses(small_run(metric=one)), losses(small_run(metric=alike)))
    posterior = jostle.Posterior(n_beta=20, localization=10, weights="bias", metric=named)
    only_bias = losses(small_run(posterior=posterior))
    again = jostle.Posterior(n_beta=20, localization=10, weights="bias", metric=METRIC[6:])
    np.testing.assert_array_equal(only_bias, losses(small_run(posterior=again)))
    ones = small_run(metric=torch.ones(8), linear_term=True)
    np.testing.assert_allclose(losses(ones), losses(small_run(metric=None, linear_term=True)), rtol=1e-9)


def test_a_weight_of_infinite_metric_stays() -> None:
    held = METRIC.clone()
    held[[1, 7]] = torch.inf
    run = small_run(metric=held, observables={"weights": flat_weights}, draws=30)
    moved = np.ptp(np.asarray(run.traces.observable("weights")[:]), axis=(0, 1))
    assert (moved[[1, 7]] < 1e-12).all()
    assert (np.delete(moved, [1, 7]) > 1e-3).all()


def test_another_posterior_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    small_run(out)
    for other in (None, METRIC * 2):
        with pytest.raises(jostle.InputError, match=r"metric: got .* for .*run, a run in a metric, .*read_metric"):
            small_run(out, metric=other)
    with pytest.raises(jostle.InputError, match=r"posterior.linear_term False there, None now"):
        small_run(out, linear_term=True)
    small_run(tmp_path / "without", metric=None, linear_term=True)
    assert "metric" not in jostle.load(tmp_path / "without").config["posterior"]
    assert read_metric(tmp_path / "without") is None
    with pytest.raises(jostle.InputError, match=r"posterior.metric None there, [0-9a-f]+ now"):
        small_run(tmp_path / "without", linear_term=True)
    damaged = bytearray((out / "metric.safetensors").read_bytes())
    damaged[-1] ^= 1
    (out / "metric.safetensors").write_bytes(bytes(damaged))
    assert [finding.kind for finding in examine(out)] == ["damaged"]


# --- bad input ---


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (torch.ones(7), r"metric: got shape \(7,\), expected \(8,\), a number for each of the 8 weights that move"),
        (-METRIC, r"metric: got -0.01 for a weight of 'weight', expected positive numbers"),
        ({"weight": 1.0, "bias": 0.0}, r"metric: got 0 for a weight of 'bias', expected positive numbers"),
        ({"weight": float("nan"), "bias": 1.0}, r"metric: got nan for a weight of 'weight'"),
        ({"weight": 1.0}, r"metric: got nothing for 'bias', expected"),
        ({"weight": torch.ones(3, 2), "bias": 1.0}, r"metric: got shape \(3, 2\) for 'weight', expected .*\(2, 3\)"),
        ({"weight": "one", "bias": 1.0}, r"metric: got a str for 'weight', expected a tensor"),
        (2.0, r"metric: got a float, expected a tensor, or a mapping"),
    ],
)
def test_bad_metrics(metric: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(jostle.InputError, match=message):
        small_run(tmp_path / "run", metric=metric)
    assert not (tmp_path / "run").exists()


def test_what_knows_no_metric_refuses_one() -> None:
    with pytest.raises(jostle.InputError, match=r"prior_precision: got 1 with a metric, expected 0"):
        jostle.Posterior(n_beta=1, localization=1, metric=METRIC, prior_precision=1)
    with pytest.raises(jostle.InputError, match=r"linear_term: got 'no', expected True or False"):
        jostle.Posterior(n_beta=1, localization=1, linear_term="no")  # type: ignore[arg-type]
    posteriors = (
        jostle.Posterior(n_beta=1, localization=1, metric=METRIC),
        jostle.Posterior(n_beta=1, localization=1, linear_term=False),
    )
    for posterior in posteriors:
        with pytest.raises(jostle.InputError, match=r"posterior: got (one with a metric|linear_term=False)"):
            exact_influence(nn.Linear(3, 2).double(), (X, Y), (X, Y), posterior=posterior)

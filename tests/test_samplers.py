"""Each rule against its equation, transcribed."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import jostle
from jostle.errors import ChainFailedWarning, ChainsFailedError, SamplerWarning
from jostle.posterior import Posterior, Potential

CENTER = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
POSTERIOR = Posterior(n_beta=7.0, localization=3.0, prior_precision=0.5)


def steps(sampler: jostle.Sampler, count: int, burn_in: int = 0) -> tuple[np.ndarray, list[Tensor], list[Tensor]]:
    """A few steps of two chains with made-up gradients."""
    generator = torch.Generator().manual_seed(0)
    gradients, noises = (
        [torch.randn(2, 3, generator=generator, dtype=torch.float64) for _ in range(count)] for _ in range(2)
    )
    weights = CENTER.repeat(2, 1)
    statistics = sampler.init(weights)
    path = [weights]
    for t in range(count):
        weights, statistics = sampler.step(
            weights, gradients[t], noises[t], statistics, POSTERIOR.potential(CENTER), burning_in=t < burn_in
        )
        path.append(weights)
    return np.stack([w.numpy() for w in path]), gradients, noises


def drift(w: np.ndarray, g: np.ndarray) -> np.ndarray:
    return 7.0 * g + 3.0 * (w - CENTER.numpy()) + 0.5 * w


def test_sgld_is_the_papers_update() -> None:
    path, gradients, noises = steps(jostle.SGLD(step_size=0.01), 5)
    for t in range(5):
        w, g, xi = path[t], gradients[t].numpy(), noises[t].numpy()
        np.testing.assert_allclose(path[t + 1], w - 0.005 * drift(w, g) + np.sqrt(0.01) * xi, rtol=1e-12)


@pytest.mark.parametrize("correction", [True, False])
@pytest.mark.parametrize("frozen_from", [None, 3])
def test_rmsprop_sgld_is_its_equation(correction: bool, frozen_from: int | None) -> None:
    sampler = jostle.RMSpropSGLD(
        step_size=0.01, smoothing=0.9, stabilizer=0.05, bias_correction=correction,
        freeze_after_burn_in=frozen_from is not None,
    )  # fmt: skip
    path, gradients, noises = steps(sampler, 6, burn_in=frozen_from or 0)
    V, updates = np.zeros((2, 3)), 0
    for t in range(6):
        w, g, xi = path[t], gradients[t].numpy(), noises[t].numpy()
        if frozen_from is None or t < frozen_from:
            V, updates = 0.9 * V + 0.1 * g**2, updates + 1
        corrected = V / (1 - 0.9**updates) if correction else V
        G = 1 / (np.sqrt(corrected) + 0.05)
        np.testing.assert_allclose(path[t + 1], w - 0.005 * G * drift(w, g) + np.sqrt(0.01 * G) * xi, rtol=1e-12)


def test_devinterp_preset() -> None:
    """V starts at 0, is not corrected, and e = 0.1, as in devinterp 2.0.1's RMSprop preconditioner."""
    path, gradients, noises = steps(jostle.RMSpropSGLD.devinterp(step_size=0.01), 4)
    V = np.zeros((2, 3))
    for t in range(4):
        w, g, xi = path[t], gradients[t].numpy(), noises[t].numpy()
        V = 0.99 * V + 0.01 * g**2
        G = 1 / (np.sqrt(V) + 0.1)
        np.testing.assert_allclose(path[t + 1], w - 0.005 * G * drift(w, g) + np.sqrt(0.01 * G) * xi, rtol=1e-12)


def test_gaussian_is_its_equation() -> None:
    path, _, noises = steps(jostle.Gaussian(), 3)
    for t in range(3):
        expected = 3.0 / 3.5 * CENTER.numpy() + noises[t].numpy() / np.sqrt(3.5)
        np.testing.assert_allclose(path[t + 1], expected, rtol=1e-12)


def test_leimkuhler_matthews_is_its_equation() -> None:
    path, gradients, noises = steps(jostle.LeimkuhlerMatthews(step_size=0.01), 5)
    last = np.zeros((2, 3))
    for t in range(5):
        w, g, xi = path[t], gradients[t].numpy(), noises[t].numpy()
        expected = w - 0.005 * drift(w, g) + np.sqrt(0.01) * (last + xi) / 2
        np.testing.assert_allclose(path[t + 1], expected, rtol=1e-12)
        last = xi


@pytest.mark.parametrize("step_size", [0.01, 3.0])
def test_ornstein_uhlenbeck_is_its_equation(step_size: float) -> None:
    path, gradients, noises = steps(jostle.OrnsteinUhlenbeck(step_size=step_size), 5)
    mean, decay = 3.0 / 3.5 * CENTER.numpy(), np.exp(-step_size * 3.5 / 2)
    for t in range(5):
        w, g, xi = path[t], gradients[t].numpy(), noises[t].numpy()
        force = -7.0 * g * (1 - decay) / 3.5
        expected = mean + (w - mean) * decay + force + np.sqrt((1 - decay**2) / 3.5) * xi
        np.testing.assert_allclose(path[t + 1], expected, rtol=1e-11)


def test_ornstein_uhlenbeck_without_a_pull_is_sgld() -> None:
    weights, gradient, noise = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    potential = Posterior(n_beta=7.0, localization=0.0).potential(torch.zeros(5, dtype=torch.float64))
    moved = [
        rule(step_size=0.01).step(weights, gradient, noise, {}, potential, burning_in=False)[0]
        for rule in (jostle.OrnsteinUhlenbeck, jostle.SGLD)
    ]
    np.testing.assert_allclose(*moved, rtol=1e-12)


def test_baoab_is_the_textbook_splitting() -> None:
    """With its two half kicks, the second of which knows the gradient of the next step."""
    path, gradients, noises = steps(jostle.BAOAB(step_size=0.01, friction=0.7), 6)
    h, c = 0.1, np.exp(-2 * 0.7 * np.sqrt(3.5) * 0.1)
    w = path[0]
    p = -h / 2 * drift(w, gradients[0].numpy())  # at rest, but for the second half kick of a step that ended here
    for t in range(5):
        p = p - h / 2 * drift(w, gradients[t].numpy())
        w = w + h / 2 * p
        p = c * p + np.sqrt(1 - c**2) * noises[t].numpy()
        w = w + h / 2 * p
        np.testing.assert_allclose(path[t + 1], w, rtol=1e-10)
        p = p - h / 2 * drift(w, gradients[t + 1].numpy())


def test_sgnht_is_its_equation() -> None:
    path, gradients, noises = steps(jostle.SGNHT(step_size=0.01, friction=0.7), 6)
    h, pull = 0.1, 3.5
    put_in = 2 * 0.7 * np.sqrt(pull)
    w, p, zeta = path[0], np.zeros((2, 3)), np.full((2, 1), put_in)
    for t in range(6):
        p = p - h * drift(w, gradients[t].numpy())
        w = w + h / 2 * p
        zeta = zeta + h / 2 * pull * (np.mean(p**2, axis=1, keepdims=True) - 1)
        p = np.exp(-zeta * h) * p + np.sqrt(put_in * (1 - np.exp(-2 * zeta * h)) / zeta) * noises[t].numpy()
        zeta = zeta + h / 2 * pull * (np.mean(p**2, axis=1, keepdims=True) - 1)
        w = w + h / 2 * p
        np.testing.assert_allclose(path[t + 1], w, rtol=1e-10)


@pytest.mark.parametrize("zeta", [-1e-9, 0.0, 1e-9, -3.0])
def test_a_thermostat_may_pass_through_zero(zeta: float) -> None:
    """The noise's variance, 2Γ·(1 − e^(−2ζh))/(2ζ), is 2Γh at ζ = 0."""
    h, potential = 0.1, Posterior(n_beta=0.0, localization=4.0).potential(torch.zeros(4, dtype=torch.float64))
    # Momenta of ±1 have the temperature at which the first measurement changes nothing.
    momentum = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)
    statistics = {"momentum": momentum, "excess_friction": torch.tensor([[zeta - 4.0]], dtype=torch.float64)}
    _, after = jostle.SGNHT(step_size=h**2).step(
        torch.zeros(1, 4, dtype=torch.float64), momentum, torch.ones_like(momentum), statistics, potential,
        burning_in=False,
    )  # fmt: skip
    variance = 8 * h if abs(zeta) < 1e-6 else 4 * (1 - np.exp(-2 * zeta * h)) / zeta
    np.testing.assert_allclose(after["momentum"], np.exp(-zeta * h) * momentum + np.sqrt(variance), rtol=1e-7)


@pytest.mark.parametrize("rule", [jostle.LeimkuhlerMatthews, jostle.BAOAB, jostle.SGNHT, jostle.OrnsteinUhlenbeck])
def test_a_step_changes_none_of_its_arguments(rule: type) -> None:
    sampler = rule(step_size=0.01)
    weights, gradient, noise = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    statistics = {name: torch.rand_like(value) for name, value in sampler.init(weights).items()}
    before = [value.clone() for value in (weights, gradient, noise, *statistics.values())]
    sampler.step(weights, gradient, noise, statistics, POSTERIOR.potential(weights[0].clone()), burning_in=False)
    assert all(map(torch.equal, before, (weights, gradient, noise, *statistics.values())))


def test_a_new_rule_is_one_class() -> None:
    """Anything with the protocol's methods samples; here a rule that does not move."""

    class Still:
        def init(self, weights: Tensor) -> dict[str, Tensor]:
            return {"age": torch.zeros(len(weights), 1)}

        def step(
            self, weights: Tensor, mean_loss_gradient: Tensor, noise: Tensor, statistics: dict[str, Tensor],
            potential: Potential, *, burning_in: bool,
        ) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
            return weights, {"age": statistics["age"] + 1}

        def check(self, potential: Potential, *, burn_in: int) -> None: ...

        def remarks(self, statistics: dict[str, Tensor]) -> list[str]:
            return [f"age {statistics['age'].max().item():.0f}"]

    X = torch.randn(6, 3)
    with pytest.warns(SamplerWarning, match="age 4"):
        run = jostle.attribute(
            torch.nn.Linear(3, 2), (X, torch.zeros(6, dtype=torch.long)), (X, torch.ones(6, dtype=torch.long)),
            sampler=Still(), draws=5, thin=1, progress=False,
        )  # fmt: skip
    np.testing.assert_array_equal(run.influence().values, 0)


def classifier(**settings: object) -> jostle.Run:
    torch.manual_seed(0)
    X, y = torch.randn(12, 3), torch.arange(12) % 2
    defaults: dict[str, object] = {"chains": 3, "draws": 4, "thin": 5, "progress": False}
    return jostle.attribute(torch.nn.Linear(3, 2), (X, y), (X[:3], y[:3]), **(defaults | settings))  # type: ignore[arg-type]


def test_a_stabilizer_that_dominates_is_said() -> None:
    posterior = Posterior(n_beta=1, localization=1)
    with pytest.warns(SamplerWarning, match=re.escape("plain SGLD with a step of 1e-06")):
        classifier(posterior=posterior, sampler=jostle.RMSpropSGLD(step_size=1e-4, stabilizer=100.0))
    # With a small one there is nothing to say (warnings of Jostle's own are errors in these tests).
    classifier(posterior=posterior, sampler=jostle.RMSpropSGLD(step_size=1e-4, stabilizer=1e-6))


@pytest.mark.parametrize(("small", "said"), [(500, []), (501, ["50%"]), (1000, ["100%"])])
def test_a_remark_makes_nothing_wider_than_the_weights(small: int, said: list[str]) -> None:
    """The weights of which it says so are counted; on the way there is nothing of more than 4 bytes for each."""

    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            self.largest = max(self.largest, result.nbytes if isinstance(result, Tensor) else 0)
            return result

    rule = jostle.RMSpropSGLD(step_size=1e-4, stabilizer=1e-2)
    moments = torch.ones(1, 1000)
    moments[0, :small] = 1e-6
    statistics = rule.init(torch.zeros(1, 1000)) | {"second_moment": moments * (1 - rule.smoothing)}
    with Sizes() as sizes:
        remarks = rule.remarks(statistics)
    assert [re.findall(r"exceeds √V̂ for (\d+%)", remark)[0] for remark in remarks] == said
    assert sizes.largest <= 4 * 1000


class FailingRule(jostle.SGLD):
    """SGLD whose chain 1 leaves the finite numbers at the eighth step."""

    def init(self, weights: Tensor) -> dict[str, Tensor]:
        return {"step": torch.zeros(len(weights), 1, dtype=torch.int64)}

    def step(self, weights: Tensor, mean_loss_gradient: Tensor, noise: Tensor, statistics: dict[str, Tensor],
             potential: Potential, *, burning_in: bool) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
        moved, _ = super().step(weights, mean_loss_gradient, noise, {}, potential, burning_in=burning_in)
        count = statistics["step"] + 1
        if len(moved) == 3:
            moved[1] = torch.where(count[1] >= 8, torch.nan, moved[1])
        return moved, {"step": count}


@pytest.mark.parametrize("keep", ["traces", "covariance"])
def test_a_failed_chain_is_named_and_left_out(keep: str) -> None:
    with pytest.warns(ChainFailedWarning, match="chain 1 failed at step 10: weights left the finite numbers"):
        run = classifier(sampler=FailingRule(step_size=1e-5), keep=keep)
    assert run.failed_chains == [1]
    scores = run.influence()
    assert np.isfinite(scores.values).all()
    whole = classifier(sampler=jostle.SGLD(step_size=1e-5))
    losses, queries = (np.asarray(whole.traces.losses(name)[:])[[0, 2]].reshape(8, -1) for name in ("train", "query"))
    expected = -np.cov(losses.T, queries.T)[:12, 12:]
    np.testing.assert_allclose(scores.values, expected, rtol=1e-3, atol=1e-9)


def test_all_chains_failing_is_an_error() -> None:
    with pytest.raises(ChainsFailedError, match="all 3 chains failed, the first at step"):
        classifier(sampler=jostle.SGLD(step_size=1e30), posterior=Posterior(n_beta=1e20, localization=1e-31), draws=20)

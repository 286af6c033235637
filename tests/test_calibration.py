"""Calibration on models whose right answer is known, and unattended on those whose answer is not."""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

import jostle
from jostle import calibration, probing
from jostle.asking import requests
from jostle.calibration import calibrate, localization_for, longest_step, memory
from jostle.chains import progress
from jostle.data.datasets import Data
from jostle.diagnose.measures import memory_in_steps
from jostle.models.functional import FunctionalModel
from jostle.models.weights import MovingWeights
from jostle.posterior import Potential
from jostle.probing import Probe, largest_curvature, measured_rises, noise, standard_error
from reference import LinearGaussian
from test_commands import jostle_command

REGRESSION = jostle.losses.regression(noise_variance=0.25)


def linear(**settings: Any) -> LinearGaussian:
    return LinearGaussian.random(**{"samples": 60, "weights": 8, "n_beta": 30, "localization": 40, **settings})


def probe_of(model: nn.Module, data: Any, loss: Any, most: int = 256) -> Probe:
    return Probe(FunctionalModel(model, MovingWeights(model, "all")), loss, Data(data, "train"), 25, most)


class Bowl(nn.Module):
    """L(w) = ½·wᵀ diag(curvatures) w: a saddle where one of them is negative."""

    def __init__(self, curvatures: list[float], dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((len(curvatures),), 0.01, dtype=dtype))
        self.register_buffer("curvatures", torch.tensor(curvatures, dtype=dtype))


def height(model: Any, batch: Tensor) -> Tensor:
    return (0.5 * (model.curvatures * model.w.square()).sum()).expand(len(batch))


@pytest.mark.parametrize("off_minimum", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_largest_curvature_is_the_largest_eigenvalue(dtype: torch.dtype, off_minimum: float) -> None:
    problem = linear(off_minimum=off_minimum)
    data = tuple(part.to(dtype) for part in problem.data)
    probe = probe_of(problem.model().to(dtype), data, REGRESSION)
    found = largest_curvature(probe, probe.model.moving.center)
    eigenvalues = np.linalg.eigvalsh(problem.mean_hessian)
    assert found.largest == pytest.approx(eigenvalues[-1], rel=5e-3)
    assert abs(found.largest - eigenvalues[-1]) <= found.residual + 1e-3 * eigenvalues[-1]


@pytest.mark.parametrize(
    ("curvatures", "largest"), [([-50.0, 3.0, 1.0, 0.1], 3.0), ([1e6, 10.0, 1.0], 1e6), ([2e-5, 1e-5], 2e-5)]
)
def test_curvature_at_a_saddle_and_at_extreme_scales(curvatures: list[float], largest: float) -> None:
    probe = probe_of(Bowl(curvatures, torch.float32), torch.zeros(4, 1), height)
    found = largest_curvature(probe, probe.model.moving.center)
    assert found.largest == pytest.approx(largest, rel=0.01)


def test_the_chosen_localization_gives_the_chosen_rise() -> None:
    """Of a quadratic loss E[rise] = tr(H)/2γ, wherever w* is: mirror images cancel its gradient."""
    problem = linear(off_minimum=0.3)
    probe = probe_of(problem.model(), problem.data, REGRESSION)
    localization, rises = localization_for(probe, 0.2)
    assert rises.mean() == pytest.approx(0.2, rel=0.05)
    expected = np.trace(problem.mean_hessian) / (2 * localization)
    assert abs(expected - 0.2) < 4 * standard_error(rises) + 0.01
    many = measured_rises(probe, localization, seed=5, count=500)
    assert abs(many.mean() - expected) < 4 * standard_error(many)
    assert standard_error(many) < 0.05 * expected


def test_the_error_of_the_rise_is_as_large_as_it_says() -> None:
    """Over many seeds the rise is off by its standard error, root mean square; that of four pairs was twice too small."""
    problem = linear(samples=20)
    probe = probe_of(problem.model(), problem.data, REGRESSION)
    found = [localization_for(probe, 0.2, seed=seed) for seed in range(100)]
    truth = np.array([np.trace(problem.mean_hessian) / (2 * localization) for localization, _ in found])
    errors = np.array([standard_error(rises) for _, rises in found])
    z = (np.array([rises.mean() for _, rises in found]) - truth) / errors
    assert 0.8 < np.sqrt(np.mean(z**2)) < 1.25
    assert np.mean(np.abs(z) > 2) < 0.12
    assert np.median(errors) < 0.18 * 0.2


@pytest.mark.parametrize("order", [1, 2, 3.95, 8])
def test_the_chosen_rise_is_found_whatever_the_order_of_the_loss(order: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """L(w) = Σ|wᵢ|ᵏ: a guess that takes every loss for a quadratic one goes to and fro where k is nearly 4."""
    model, trials = nn.Linear(200, 1, bias=False).double(), []
    nn.init.zeros_(model.weight)
    probe = probe_of(model, torch.zeros(2, 1), lambda model, batch: model.weight.abs().pow(order).sum().expand(2))
    measure = probing.measured_rises
    monkeypatch.setattr(
        probing, "measured_rises", lambda *given, **named: trials.append(given) or measure(*given, **named)
    )
    localization, rises = localization_for(probe, 0.2)
    assert rises.mean() == pytest.approx(0.2, rel=0.05)
    # E|ξ|ᵏ = 2^(k/2)·Γ((k + 1)/2)/√π
    moment = 2 ** (order / 2) * math.gamma((order + 1) / 2) / math.sqrt(math.pi)
    assert 200 * moment * localization ** (-order / 2) == pytest.approx(0.2, abs=4 * standard_error(rises) + 0.01)
    assert len(trials) < 15


def test_a_part_of_the_data_stands_for_it() -> None:
    problem = linear(samples=100)
    some = probe_of(problem.model(), problem.data, REGRESSION, most=10)
    picked = np.linspace(0, 99, 10).astype(int)
    assert some.examples == 10
    expected = np.mean((problem.y - problem.X @ problem.center)[picked] ** 2 / 0.5)
    assert some.mean_loss(some.model.moving.center) == pytest.approx(expected, rel=1e-9)
    np.testing.assert_allclose(
        some.gradient(some.model.moving.center), problem.sample_gradients(problem.center)[picked].mean(0), rtol=1e-9
    )


RULES = {
    "sgld": jostle.SGLD(step_size=1.0),
    "leimkuhler-matthews": jostle.LeimkuhlerMatthews(step_size=1.0),
    "baoab": jostle.BAOAB(step_size=1.0),
    "ornstein-uhlenbeck": jostle.OrnsteinUhlenbeck(step_size=1.0),
    "rmsprop": jostle.RMSpropSGLD(step_size=1.0),
}


def step(sampler: Any, w: Tensor, statistics: Any, noise: Tensor, curvature: float, pull: float) -> tuple[Tensor, Any]:
    potential = Potential(1.0, pull, 0.0, torch.zeros(1, dtype=torch.float64))
    return sampler.step(w, curvature * w, noise, statistics, potential, burning_in=False)


@pytest.mark.parametrize("name", RULES)
def test_the_limit_of_stability_is_where_chains_begin_to_grow(name: str) -> None:
    """Without noise, a direction of curvature nβλ dies out just below the limit, and grows just above it."""
    curvature, pull = 70.0, 10.0
    preconditioner = 1 / RULES[name].stabilizer if name == "rmsprop" else 1.0
    _, limit = longest_step(RULES[name], curvature, pull, preconditioner)
    for share, grows in ((0.98, False), (1.02, True)):
        sampler = type(RULES[name])(step_size=share * limit)
        w = torch.full((1, 1), 1e-8, dtype=torch.float64)  # so small that RMSprop's preconditioner is 1/e
        statistics, first = sampler.init(w), w.clone()
        for _ in range(600):
            w, statistics = step(sampler, w, statistics, torch.zeros_like(w), curvature, pull)
        assert (abs(w) > abs(first)) == grows, (share, w)


@pytest.mark.parametrize("name", ["sgld", "ornstein-uhlenbeck"])
@pytest.mark.parametrize("ratio", [0.05, 0.7, 6.0])
def test_the_chosen_step_leaves_the_variance_a_tenth_too_wide_at_most(name: str, ratio: float) -> None:
    """Along the steepest direction: w ← m·w + s·ξ has the variance s²/(1 − m²), to be compared with 1/(nβλ + γ)."""
    pull, curvature = 20.0, 20.0 * ratio
    chosen, limit = longest_step(RULES[name], curvature, pull)
    assert chosen < limit
    sampler, one, zero = type(RULES[name])(step_size=chosen), torch.ones(1, 1).double(), torch.zeros(1, 1).double()
    m = step(sampler, one, {}, zero, curvature, pull)[0].item()
    s = step(sampler, zero, {}, one, curvature, pull)[0].item()
    too_wide = s**2 / (1 - m**2) * (curvature + pull)
    assert 1 < too_wide < 1.12
    # As long as that allows, where anything limits it.
    assert too_wide > 1.1 or chosen * pull == pytest.approx(4)


def test_memory_is_the_time_in_which_the_pull_forgets() -> None:
    # Without noise, a chain that begins at 1 follows its own autocorrelation.
    pull = 5.0
    for name in ("sgld", "leimkuhler-matthews", "ornstein-uhlenbeck", "baoab"):
        sampler = type(RULES[name])(step_size=5e-4 if name == "baoab" else 5e-3)
        w = torch.ones(1, 1, dtype=torch.float64)
        statistics, total, steps = sampler.init(w), 0.5, memory(sampler, pull)
        for _ in range(round(20 * steps)):
            w, statistics = step(sampler, w, statistics, torch.zeros_like(w), 0.0, pull)
            total += w.item()
        assert total == pytest.approx(steps, rel=0.015)


def test_diagnostics_know_how_long_a_rule_remembers() -> None:
    pull = 300.0
    friction = {"baoab": {"friction": 3.0}}
    for name in ("sgld", "leimkuhler-matthews", "ornstein-uhlenbeck", "baoab"):
        sampler = dataclasses.replace(RULES[name], step_size=1e-5, **friction.get(name, {}))
        config = {
            "posterior": {"localization": pull, "prior_precision": 0.0},
            "sampler": {"name": type(sampler).__name__, **dataclasses.asdict(sampler)},
        }
        assert memory_in_steps(config) == pytest.approx(memory(sampler, pull))


@pytest.mark.parametrize("name", ["leimkuhler-matthews", "baoab"])
def test_a_linear_model_is_sampled_as_theory_says(name: str) -> None:
    """The chosen settings give E[L̄] − L̄(w*) = ½tr(H(nβH + γ)⁻¹) at a minimum; nβλmax = κγ."""
    problem = linear()
    chosen = calibrate(problem.model(), problem.data, loss=REGRESSION, sampler=RULES[name], kappa=3.0, rise=0.2)
    n_beta, localization = chosen.posterior.n_beta, chosen.posterior.localization
    H = problem.mean_hessian
    assert n_beta * np.linalg.eigvalsh(H)[-1] == pytest.approx(3 * localization, rel=0.01)
    assert chosen.pilot is not None
    assert chosen.pilot["fault"] is None
    run = jostle.attribute(
        problem.model(),
        problem.data,
        problem.data,
        loss=REGRESSION,
        chains=8,
        draws=100,
        progress=False,
        **chosen.settings,
    )
    found, expected = run.diagnostics(), 0.5 * np.trace(H @ np.linalg.inv(n_beta * H + localization * np.eye(len(H))))
    error = found["local_learning_coefficient"]["standard_error"] / n_beta
    assert abs(found["rise"] - expected) < 4 * error
    assert error < 0.1 * expected
    assert found["verdict"]["level"] == "good"
    assert {choice.name for choice in chosen.choices} == {
        "localization",
        "curvature",
        "n_beta",
        "step_size",
        "burn_in",
        "thin",
        "pilot",
    }


def test_a_divergent_step_is_halved_until_it_is_stable() -> None:
    problem, said = linear(), []
    limit = longest_step(RULES["sgld"], 10 * np.linalg.eigvalsh(problem.mean_hessian)[-1], 40.0)[1]
    chosen = calibrate(
        problem.model(), problem.data, loss=REGRESSION, sampler=RULES["sgld"], localization=40.0, n_beta=10.0,
        step_size=3 * limit, say=said.append,
    )  # fmt: skip
    halvings = round(math.log2(3 * limit / chosen.settings["sampler"].step_size))
    assert chosen.settings["sampler"].step_size == pytest.approx(3 * limit / 2**halvings)
    assert limit / 8 < chosen.settings["sampler"].step_size < limit / 2  # as stable, and not much too hot
    assert sum("is rejected" in line for line in said) == halvings >= 2
    (reason,) = [choice.reason for choice in chosen.choices if choice.name == "step_size"]
    assert f"halved {halvings} times" in reason


def kinds(found: dict[str, Any]) -> set[str]:
    return {reason["kind"] for reason in found["verdict"]["reasons"]}


def small_classifier() -> dict[str, Any]:
    there: dict[str, Any] = {}
    exec(TASK, there)
    return there["build"]()


def test_a_step_that_small_batches_make_hot_is_halved_until_it_is_not() -> None:
    task, said = small_classifier(), []
    model, train, query, loss = (task[name] for name in ("model", "train", "query", "loss"))
    chosen = calibrate(
        model, train, loss=loss, localization=100.0, batch_size=13, say=said.append, progress=False, seed=1
    )  # fmt: skip
    rejected = [line for line in said if "is rejected" in line]
    assert len(rejected) >= 2
    assert all("times as hot as they should be" in line for line in rejected)
    longest = 2 ** len(rejected) * chosen.settings["sampler"].step_size
    steep, found = chosen.posterior.n_beta * max(chosen.curvature.largest, chosen.curvature_nearby), []
    assert longest == pytest.approx(longest_step(chosen.sampler, steep, 100.0)[0])
    for sampler in (chosen.sampler, jostle.BAOAB(step_size=longest)):
        settings = chosen.settings | {"sampler": sampler}
        run = jostle.attribute(
            model, train, query, loss=loss, chains=4, draws=50, seed=5, progress=False, **settings
        )  # fmt: skip
        found.append(run.diagnostics(support=False))
    assert "too hot" not in kinds(found[0])
    assert found[0]["temperature"]["value"] < 1.2
    assert "too hot" in kinds(found[1])  # as it would have been
    assert found[1]["temperature"]["value"] > 1.5


def test_a_model_that_does_not_fit_the_data_is_told_so() -> None:
    task = small_classifier()
    with pytest.raises(
        jostle.InputError, match=r"^loss on train: got RuntimeError: mat1 and mat2 .*, expected losses from"
    ):
        calibrate(torch.nn.Linear(99, 2), task["train"], loss=task["loss"], progress=False)


def test_batches_so_small_that_no_step_is_worth_it_are_refused() -> None:
    task = small_classifier()
    message = (
        r"^step_size: got a pilot that fails at 4e-06 still: .*as hot as they should be.*, expected chains that stay, without \d+ "
        r"times the steps between draws; raise --batch-size, or lower --kappa$"
    )
    with pytest.raises(jostle.InputError, match=message):
        calibrate(
            task["model"], task["train"], loss=task["loss"], localization=400.0, batch_size=2, step_size=4e-6,
            progress=False,
        )  # fmt: skip


@pytest.mark.parametrize("rule", [jostle.RMSpropSGLD(step_size=1.0), jostle.RMSpropSGLD.devinterp(step_size=1.0)])
def test_rmsprop_is_calibrated_by_the_gradients_that_it_meets(rule: jostle.RMSpropSGLD) -> None:
    """At a minimum E[mean of ḡ²] = tr(H²)/γd: G is as large as that says, and not as large as it can be."""
    problem = linear(weights=30)
    chosen = calibrate(problem.model(), problem.data, loss=REGRESSION, sampler=rule, rise=0.3, kappa=3.0)
    H, localization = problem.mean_hessian, chosen.posterior.localization
    size = math.sqrt(np.trace(H @ H) / localization / len(H))
    assert size > 3 * rule.stabilizer
    total = chosen.posterior.n_beta * np.linalg.eigvalsh(H)[-1] + localization
    assert chosen.sampler.step_size == pytest.approx(0.4 * (size + rule.stabilizer) / total, rel=0.3)
    assert chosen.thin == 20  # 2(1 + κ)/0.4, as for SGLD
    run = jostle.attribute(
        problem.model(), problem.data, problem.data, loss=REGRESSION, chains=4, draws=100, seed=5, progress=False,
        **chosen.settings,
    )  # fmt: skip
    found = run.diagnostics(support=False)
    assert found["effective_draws"] > 200
    assert kinds(found) <= {"scores disagree"}  # those of random inputs hardly differ


def test_what_was_measured_before_an_interruption_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice interrupted: while the rise is sought, and in the pilot."""
    problem, passes, interrupted_in = linear(), 0, ""
    settings: Any = {"loss": REGRESSION, "rise": 0.2, "batch_size": 60, "progress": False}
    measured = probing.Measured.__call__

    def interruptible(self: Any, name: str, measure: Any) -> Any:
        if interrupted_in and re.match(interrupted_in, name):
            raise KeyboardInterrupt
        return measured(self, name, measure)

    def counting(measure: Any) -> Any:
        def wrapped(*given: Any, **named: Any) -> Any:
            nonlocal passes
            passes += 1
            return measure(*given, **named)

        return wrapped

    monkeypatch.setattr(probing.Measured, "__call__", interruptible)
    for place, name in ((Probe, "mean_loss"), (Probe, "gradient"), (calibration, "_pilot")):
        monkeypatch.setattr(place, name, counting(getattr(place, name)))
    whole = calibrate(problem.model(), problem.data, **settings)
    in_all, keep = passes, tmp_path / "new" / "measured.json"

    def passes_until(name: str, model: torch.nn.Module) -> int:
        nonlocal interrupted_in
        interrupted_in = name
        with pytest.raises(KeyboardInterrupt):
            calibrate(model, problem.data, keep=keep, **settings)
        return passes

    passes = 0
    counts = [passes_until(name, problem.model()) for name in ("rises .* 8 pairs", "pilot")]
    interrupted_in = ""
    assert calibrate(problem.model(), problem.data, keep=keep, **settings).choices == whole.choices
    assert (
        1 < counts[0] < counts[1] < passes == in_all + 2
    )  # each begins with the mean loss at w*: is it the same model?
    # Another one is measured anew.
    other = problem.model()
    with torch.no_grad():
        next(other.parameters()).mul_(1.01)
    passes = 0
    assert passes_until("curvature", other) > 1


def test_what_is_being_done_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In a log, at most a line a minute: here, every line."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    problem = linear()
    found = calibrate(problem.model(), problem.data, loss=REGRESSION, rise=0.2)
    lines = capsys.readouterr().err.splitlines()
    rises = [
        re.match(r"jostle: seeking a rise of 0\.2: (\S+) at localization (\S+), pass \d+$", line) for line in lines
    ]
    reached = [float(match[1]) for match in rises if match]
    assert len(set(reached)) >= 2
    assert abs(reached[-1] - 0.2) < abs(reached[0] - 0.2)
    curvatures = [line for line in lines if "seeking the largest curvature: " in line]
    assert float(curvatures[-1].split(": ")[2].split(" ")[0]) == pytest.approx(found.curvature.largest, rel=0.05)
    assert sum("steps, about" in line for line in lines) > 5  # of the pilot
    calibrate(problem.model(), problem.data, loss=REGRESSION, rise=0.2, progress=False)
    assert capsys.readouterr().err == ""


def test_no_gradient_is_the_control() -> None:
    problem = linear()
    chosen = calibrate(problem.model(), problem.data, loss=REGRESSION, kappa=0)
    assert chosen.sampler == jostle.Gaussian()
    assert (chosen.posterior.n_beta, chosen.burn_in, chosen.thin) == (0, 1, 1)
    assert chosen.choices[0].reason.endswith(" examples)")  # its run rises as far


def test_bfloat16_weights_are_measured_in_float32() -> None:
    problem = linear()
    exact, narrow = problem.model().float(), problem.model().bfloat16()
    exact.load_state_dict({name: value.float() for name, value in narrow.state_dict().items()})
    data = tuple(part.float() for part in problem.data)
    settings = {"loss": REGRESSION, "pilot": False}
    chosen = [calibrate(model, data, **settings) for model in (exact, narrow)]
    assert chosen[0].posterior.localization == pytest.approx(chosen[1].posterior.localization, rel=1e-6)
    assert next(narrow.parameters()).dtype == torch.bfloat16


def test_the_model_is_left_as_it_was() -> None:
    problem = linear()
    model = problem.model().train()
    before = model.weight.detach().clone()
    calibrate(model, problem.data, loss=REGRESSION, kappa=1.0)
    assert torch.equal(model.weight, before)
    assert model.training
    assert model.weight.requires_grad


def test_noise_of_a_seed_is_always_the_same() -> None:
    problem = linear()
    model = FunctionalModel(problem.model(), MovingWeights(problem.model(), "all"))
    assert torch.equal(noise(model, 3, 1), noise(model, 3, 1))
    assert not torch.equal(noise(model, 3, 1), noise(model, 4, 1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rise": 0.0}, r"^rise: got 0\.0, expected a positive number$"),
        ({"rise": float("nan")}, r"^rise: got nan, expected a positive"),
        ({"rise": "much"}, r"^rise: got 'much', expected a positive"),
        ({"kappa": -1.0}, r"^kappa: got -1\.0, expected a finite number that is not negative$"),
        ({"localization": 0.0}, r"^localization: got 0\.0, expected a positive number$"),
        ({"batch_size": 0}, r"^batch_size: got 0, expected a positive whole number"),
        ({"weights": "attention"}, r"^weights: got 'attention', which matches no weight"),
        ({"n_beta": -1.0}, r"^n_beta: got -1\.0, expected a finite number that is not negative$"),
        (
            {"localization": 500.0, "rise": 0.2},
            r"^rise: got 0\.2 beside localization 500, .* only one of the two; leave localization out .*, or rise to keep loc",
        ),
        (
            {"n_beta": 30.0, "kappa": 10.0},
            r"^kappa: got 10 beside n_beta 30, which follows from it, expected only one of the two",
        ),
        ({"n_beta": 30.0, "kappa": 0}, r"^kappa: got 0 beside n_beta 30, which follows"),
        (
            {"sampler": jostle.Gaussian(), "kappa": 10.0},
            r"^kappa: got 10 for draws without a gradient, which have none",
        ),
        (
            {"sampler": jostle.Gaussian(), "n_beta": 30.0},
            r"^n_beta: got 30 for draws without a gradient, expected none",
        ),
    ],
)
def test_bad_input(settings: dict[str, Any], message: str) -> None:
    problem = linear()
    with pytest.raises(jostle.InputError, match=message):
        calibrate(problem.model(), problem.data, **{"loss": REGRESSION, **settings})


def test_a_rise_that_the_loss_cannot_reach() -> None:
    model = nn.Linear(3, 1)

    def bounded(model: nn.Module, batch: Any) -> Tensor:
        return torch.tanh(model(batch[0])[:, 0].square())

    with pytest.raises(jostle.InputError, match=r"^rise: got 5 nats, but perturbations .* a smaller one$"):
        calibrate(model, (torch.randn(20, 3), torch.zeros(20)), loss=bounded, rise=5.0)


def test_a_loss_that_is_not_finite() -> None:
    def broken(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0])[:, 0] * math.nan

    with pytest.raises(jostle.InputError, match=r"^loss at w\* on train: got nan, expected finite"):
        calibrate(nn.Linear(3, 1), (torch.randn(20, 3), torch.zeros(20)), loss=broken)


TASK = """
import torch, jostle
def build():
    torch.manual_seed(0)
    labels = torch.arange(60) % 3
    X = torch.randn(60, 6)
    X[torch.arange(60), labels] += 1.5
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(X), labels).backward()
        optimizer.step()
    return {"model": model, "train": (X, labels), "query": (X[:5], labels[:5]), "loss": jostle.losses.classification()}
"""


WHOLE = ["--batch-size", "200"]
"""Small ones take the pilot many steps."""


@pytest.fixture
def task(tmp_path: Path) -> list[str]:
    (tmp_path / "mine.py").write_text(TASK)
    return ["--task", f"{tmp_path / 'mine.py'}:build", "--chains", "2", "--draws", "20"]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of ``--auto``."""
    place = tmp_path_factory.mktemp("calibrated")
    (place / "mine.py").write_text(TASK)
    words = ["--task", f"{place / 'mine.py'}:build", "--chains", "2", "--draws", "20"]
    assert jostle_command("run", place / "run", *words, "--auto").exit_code == 0
    return place / "run"


def test_commands(task: list[str], tmp_path: Path) -> None:
    """``calibrate`` then ``run --config`` samples what ``run --auto`` samples; what is given is kept."""
    file = tmp_path / "chosen.yaml"
    result = jostle_command("calibrate", file, *task, "--rise", "0.2", "--kappa", "1", "--thin", "3")
    assert result.exit_code == 0, result.stderr
    said = " ".join(result.stdout.split())
    assert re.search(r"raise the mean loss of .* examples\) without a gradient; the run's own rise is lower", said)
    settings = yaml.safe_load(file.read_text())
    assert settings["thin"] == 3
    assert settings["calibration"]["rise"] == pytest.approx(0.2, rel=0.05)
    assert not file.with_suffix(".measured.json").exists()  # it was for an interruption
    assert jostle_command("run", tmp_path / "a", "--config", file).exit_code == 0
    auto = jostle_command("run", tmp_path / "b", *task, "--auto", "--rise", "0.2", "--kappa", "1", "--thin", "3")
    assert auto.exit_code == 0, auto.stderr
    assert "localization " in auto.stderr
    a, b = (jostle.load(tmp_path / name) for name in "ab")
    assert a.config == b.config
    assert a.failed_chains == b.failed_chains == []
    np.testing.assert_array_equal(a.traces.losses("train")[:], b.traces.losses("train")[:])
    again = jostle_command("run", tmp_path / "b", *task, "--auto", "--rise", "0.2", "--kappa", "1", "--thin", "3")
    assert again.exit_code == 0
    assert "localization " not in again.stderr  # what was chosen then stands


def test_a_run_that_was_interrupted_before_it_began(
    task: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What --auto measured stays in the directory, which is a run's for that; another place is refused at once."""

    def interrupt(*given: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    command, out = [*task, "--auto", "--rise", "0.2", "--kappa", "1"], tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(requests, "carry_out", interrupt)
        assert jostle_command("run", out, *command).exit_code == 75
    assert [path.name for path in out.iterdir()] == ["calibration.json"]
    with monkeypatch.context() as patched:
        patched.setattr(probing, "measured_rises", None)
        patched.setattr(probing, "largest_curvature", None)
        patched.setattr(calibration, "_pilot", None)
        finished = jostle_command("run", out, *command)
        assert finished.exit_code == 0, finished.stderr
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "notes.txt").write_text("something else")
        refused = jostle_command("run", tmp_path / "mine", *command)
    assert refused.exit_code == 2
    assert "holds something else" in refused.stderr
    assert jostle_command("check", out).exit_code == 0


@pytest.mark.parametrize("control", [["--kappa", "0", "--sampler", "sgld"], ["--sampler", "gaussian"]], ids=" ".join)
def test_the_control_without_a_gradient_given_again_is_the_same_run(
    control: list[str], task: list[str], tmp_path: Path
) -> None:
    command = ["run", tmp_path / "run", *task, "--auto", *control]
    assert jostle_command(*command).exit_code == 0
    before = (tmp_path / "run" / "manifest.json").read_bytes()
    assert jostle.load(tmp_path / "run").config["sampler"] == {"name": "Gaussian"}
    again = jostle_command(*command)
    assert again.exit_code == 0, again.stderr
    assert (tmp_path / "run" / "manifest.json").read_bytes() == before
    longer = jostle_command(*command, "--draws", "25")
    assert longer.exit_code == 0, longer.stderr
    assert jostle.load(tmp_path / "run").draws == 25


@pytest.mark.parametrize(
    ("began", "now", "changed"),
    [
        ([], ["--rise", "1"], "rise 0.3 there, 1.0 now"),
        ([], ["--kappa", "3"], "kappa 10.0 there, 3.0 now"),
        ([], ["--sampler", "sgld"], "sampler.name BAOAB there, SGLD now"),
        ([], ["--sampler", "gaussian"], "sampler.name BAOAB there, Gaussian now"),
        ([], ["--kappa", "0"], "sampler.name BAOAB there, Gaussian now"),
        ([], ["--friction", "2"], "sampler.friction 1.0 there, 2.0 now"),
        ([], ["--localization", "500"], "localization not asked for there, 500.0 now; rise 0.3 there, not asked for now"),
        (["--localization", "500", *WHOLE], WHOLE, "rise not asked for there, 0.3 now; localization 500.0 there, not asked for now"),
        ([], ["--seed", "5"], "seed 0 there, 5 now"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_run_that_was_calibrated_for_something_else_is_refused(
    began: list[str], now: list[str], changed: str, calibrated: Path, task: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    if began:
        assert jostle_command("run", out, *task, "--auto", *began).exit_code == 0
    else:
        shutil.copytree(calibrated, out)
    before = (out / "manifest.json").read_bytes()
    refused = jostle_command("run", out, *task, "--auto", *now)
    assert refused.exit_code == 2, refused.stderr
    assert f"jostle: out: got {out}, a run of other settings (" in refused.stderr
    assert changed in refused.stderr
    assert refused.stderr.rstrip().endswith("choose another directory, or delete this one")
    assert (out / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("words", [[], ["--rise", "0.3", "--kappa", "10", "--sampler", "baoab", "--friction", "1"]])
def test_the_same_in_other_words_is_the_same_run(words: list[str], calibrated: Path, task: list[str]) -> None:
    before = (calibrated / "manifest.json").read_bytes()
    again = jostle_command("run", calibrated, *task, "--auto", *words)
    assert again.exit_code == 0, again.stderr
    assert "is complete, with 2 × 20 draws" in again.stderr
    assert (calibrated / "manifest.json").read_bytes() == before


def test_a_step_that_the_pilot_halved_is_the_same_when_it_is_asked_for_again(task: list[str], tmp_path: Path) -> None:
    step = ["--localization", "100", "--n-beta", "300", "--step-size", "0.005", *WHOLE]
    command = ["run", tmp_path / "run", *task, "--auto", "--sampler", "sgld", *step]
    assert jostle_command(*command).exit_code == 0
    assert jostle.load(tmp_path / "run").config["sampler"]["step_size"] < 0.005
    again = jostle_command(*command)
    assert again.exit_code == 0, again.stderr
    assert "is complete" in again.stderr


def test_a_run_begun_without_a_calibration_is_no_calibrated_one(task: list[str], tmp_path: Path) -> None:
    assert jostle_command("run", tmp_path / "run", *task, "--thin", "2").exit_code == 0
    refused = jostle_command("run", tmp_path / "run", *task, "--thin", "2", "--auto")
    assert refused.exit_code == 2
    assert f"jostle: auto: got {tmp_path / 'run'}, a run begun without it" in refused.stderr


def test_bad_commands(task: list[str], tmp_path: Path) -> None:
    for arguments, message in (
        (["run", tmp_path / "x", *task, "--rise", "0.1"], "jostle: rise: got no --auto, expected --auto"),
        (["calibrate", tmp_path / "x.txt", *task], "expected the name of a file ending in .yaml"),
        (
            ["run", tmp_path / "x", *task, "--auto", "--sampler", "gaussian", "--kappa", "10"],
            "jostle: kappa: got 10 for draws without a gradient, which have none, expected it when they are read; leave "
            "it out here, and then: jostle top OUT --kappa 10",
        ),
        (["calibrate", tmp_path / "x.yaml", *task, "--n-beta", "0", "--kappa", "3"], "then: jostle top OUT --kappa 3"),
        (["calibrate", tmp_path / "x.yaml", *task, "--rise", "-1"], "jostle: rise: got -1.0, expected a positive"),
    ):
        result = jostle_command(*arguments)
        assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.py"]


def test_a_language_model_unattended(tmp_path: Path) -> None:
    """The demo's model from a cold start: no chain fails, and the loss rises about as far as it was asked to."""
    pytest.importorskip("transformers")
    from jostle.demo import language

    model, tokenizer = language.load()
    texts, _ = language.corpus(language.CORPUS_SEED)
    samples = [example.sample for example in language.read(texts[:10], tokenizer)]
    chosen = calibrate(
        model, samples, samples[:2], loss=jostle.losses.next_token(), weights="mlp", rise=0.2, kappa=0.3, batch_size=5,
    )  # fmt: skip
    assert chosen.pilot is not None
    assert chosen.rise == pytest.approx(0.2, rel=0.05)
    assert 0.05 < chosen.pilot["rise"] < 0.3  # the gradient holds it below the control's
    assert chosen.curvature.largest > 0

"""Steps between draws by cost: the best there are where that is known, and the same ones ever after."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import jostle
from jostle.chains import progress, thinning
from jostle.chains.chain import Dynamics
from jostle.errors import SamplerWarning
from reference import LinearGaussian
from test_commands import jostle_command
from test_sampler_commands import losses, task

__all__ = ["task"]

PROBLEM = LinearGaussian.random(samples=20, weights=3, n_beta=24, localization=20)
LARGEST = float(np.linalg.eigvalsh(PROBLEM.precision)[-1])


def autoregressive(rho: float, *, chains: int, steps: int, columns: int = 16, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    noise = generator.normal(size=(steps, chains, columns))
    values = np.empty_like(noise)
    values[0] = noise[0]
    for t in range(1, steps):
        values[t] = rho * values[t - 1] + np.sqrt(1 - rho**2) * noise[t]
    return values.transpose(1, 0, 2)


@pytest.mark.parametrize("rho", [0.5, 0.9, 0.97])
def test_autocorrelations_are_those_of_the_process(rho: float) -> None:
    series = autoregressive(rho, chains=8, steps=8000)
    curve = thinning.autocorrelations(series)
    lags = np.arange(int(3 / (1 - rho)))
    np.testing.assert_allclose(curve[lags].mean(1), rho**lags, atol=0.03)
    shifted = series + np.arange(8)[:, None, None]  # chains that disagree forget nothing
    assert thinning.autocorrelations(shifted)[200].min() > 0.7


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, 0.97])
@pytest.mark.parametrize("observation", [0.2, 1.0, 10.0, 300.0])
def test_the_choice_is_nearly_the_best(rho: float, observation: float) -> None:
    """Of an autoregressive process τₖ = (1 + ρᵏ)/(1 − ρᵏ): the best k is known, and so is what another one loses."""
    thins = np.arange(1, 1001)
    rate = (1 - rho**thins) / (1 + rho**thins) / (observation + thins)
    for seed in range(3):
        series = autoregressive(rho, chains=4, steps=3000, seed=seed)
        thin, time = thinning.best_thin([series], step_seconds=1.0, observation_seconds=observation)
        assert rate[thin - 1] > 0.9 * rate.max(), (thin, int(thins[rate.argmax()]))
        assert time == pytest.approx((1 + rho) / (1 - rho), rel=0.35)


def test_the_slower_of_losses_and_products_decides() -> None:
    quick, slow = (autoregressive(rho, chains=4, steps=1000) for rho in (0.1, 0.95))
    thins = [
        thinning.best_thin(groups, step_seconds=1.0, observation_seconds=100.0)[0]
        for groups in ([quick], [slow], [quick, slow], [slow, quick])
    ]
    assert thins[0] <= 5
    assert thins[1] >= 20
    assert thins[1] == thins[2] == thins[3]


def test_nothing_to_see() -> None:
    assert thinning.best_thin([np.empty((4, 100, 0))], step_seconds=1.0, observation_seconds=1.0) == (10, None)


def run(**changes: Any) -> jostle.Run:
    settings: dict[str, Any] = {
        "posterior": jostle.Posterior(n_beta=24, localization=20), "sampler": jostle.SGLD(step_size=1.0 / LARGEST),
        "chains": 4, "draws": 12, "burn_in": 20, "thin": "auto", "batch_size": 20, "progress": False,
    }  # fmt: skip
    return jostle.attribute(
        PROBLEM.model(), PROBLEM.data, PROBLEM.data, loss=jostle.losses.regression(), **(settings | changes)
    )


def slow_observation(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """An observation that takes as long as so many steps, by a clock that counts what is done."""
    clock = [0.0]
    observe, advance = Dynamics.observe, Dynamics.advance

    def counted(self: Dynamics, group: Any, observers: Any = None) -> dict[str, Tensor]:
        clock[0] += seconds if observers is None else 0.1
        return observe(self, group, observers)

    def stepped(self: Dynamics, group: Any, most: int = 1) -> None:
        clock[0] += 1.0
        advance(self, group)

    monkeypatch.setattr(Dynamics, "observe", counted)
    monkeypatch.setattr(Dynamics, "advance", stepped)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])


def test_a_run_with_costly_observations_is_thinned_until_draws_are_independent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thinning, "ENOUGH_TIMES", 8)
    slow_observation(monkeypatch, 1000.0)
    costly = run()
    found = costly.manifest["thinning"]
    assert found["step_seconds"] == 1.0
    assert found["observation_seconds"] == 1000.0
    assert costly.config["thin"] == found["thin"] > found["autocorrelation_time"]
    slow_observation(monkeypatch, 0.01)
    assert run(draws=120).config["thin"] < found["thin"] / 3


def test_a_pilot_that_would_outlast_the_run_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_observation(monkeypatch, 0.01)
    short = run(draws=8)
    assert short.config["thin"] == thinning.USUAL_THIN
    assert short.manifest["thinning"]["pilot_steps"] == 0
    assert str(thinning.Thinning(**short.manifest["thinning"])).endswith(
        "a pilot would take longer than half of the run"
    )


def test_the_pilot_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In a log, a line a minute: here, every line, up to the last step that it takes."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    found = run(progress=True).manifest["thinning"]
    said = [line.partition("between draws, step ")[2] for line in capsys.readouterr().err.splitlines()]
    steps = [tuple(int(number.replace(",", "")) for number in text.split(" of ")) for text in said if text]
    assert [step for step, _ in steps] == [*range(1, 20 + found["pilot_steps"] + 1)]  # the burn-in, and then the pilot
    assert steps[0][1] == 20 + thinning.FEWEST_STEPS
    assert steps[-1][0] == steps[-1][1]


def test_the_choice_is_kept_by_resuming_and_by_repeating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    observe, seen = Dynamics.observe, [0]

    def cut(self: Dynamics, group: Any, observers: Any = None) -> dict[str, Tensor]:
        seen[0] += observers is None
        if seen[0] == 9:
            raise RuntimeError("power cut")
        return observe(self, group, observers)

    monkeypatch.setattr(Dynamics, "observe", cut)
    with pytest.raises(RuntimeError, match="power cut"):
        run(out=out, checkpoint_seconds=0.0)
    # Whatever a pilot would find now, the choice stands.
    monkeypatch.setattr("jostle.runs.job.choose_thin", lambda *_, **__: pytest.fail("a second pilot"))
    resumed = run(out=out)
    thin = resumed.config["thin"]
    whole = run(thin=thin)
    np.testing.assert_array_equal(losses(out), np.asarray(whole.traces.losses("train")[:]))
    assert run(out=out, thin=thin).config == resumed.config
    with pytest.raises(jostle.InputError, match="thin"):
        run(out=out, thin=thin + 1)
    run(out=tmp_path / "other", thin=3)
    assert run(out=tmp_path / "other").config["thin"] == 3  # what a run began with is not chosen again


def test_independent_draws_are_not_thinned() -> None:
    settings = {"sampler": jostle.Gaussian(), "posterior": jostle.Posterior(n_beta=0, localization=20), "burn_in": 1}
    assert run(**settings).config["thin"] == 1
    with pytest.warns(SamplerWarning, match="every step of Gaussian is a new draw, and 4 of 5 are not looked"):
        run(**settings, thin=5)


def test_a_pilot_in_which_everything_diverges_leaves_it_to_the_run() -> None:
    class Exploding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.w).sum(1, keepdim=True) ** 4

    with pytest.raises(jostle.ChainsFailedError):
        jostle.attribute(
            Exploding(), PROBLEM.data, PROBLEM.data, loss=jostle.losses.regression(),
            posterior=jostle.Posterior(n_beta=1e6, localization=1.0), sampler=jostle.SGLD(step_size=1.0),
            chains=2, draws=10, burn_in=20, thin="auto", progress=False,
        )  # fmt: skip


def test_it_is_the_default_of_the_command_line(task: list[str], tmp_path: Path) -> None:
    settings = ["--chains", "2", "--draws", "12", "--batch-size", "3", "--n-beta", "10", "--localization", "100"]
    settings += ["--step-size", "0.005", "--burn-in", "2"]
    result = jostle_command("run", tmp_path / "run", *task, *settings)
    assert result.exit_code == 0, result.stderr
    thin = jostle.load(tmp_path / "run").config["thin"]
    assert f"thin {thin}: a step takes" in result.stderr
    again = jostle_command("run", tmp_path / "again", "--config", tmp_path / "run" / "config.yaml")
    assert again.exit_code == 0, again.stderr
    np.testing.assert_array_equal(losses(tmp_path / "run"), losses(tmp_path / "again"))
    assert jostle_command("run", tmp_path / "run", *task, *settings).exit_code == 0
    bad = jostle_command("run", tmp_path / "bad", *task, *settings, "--thin", "often")
    assert bad.exit_code == 2
    assert "thin: got 'often', expected a whole number or auto" in bad.stderr

"""Runs that stop when they have enough: at the right draw, the same one every time, and with what a longer run has."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import jostle
from jostle.chains.chain import Dynamics
from jostle.chains.stopping import next_round
from jostle.diagnose import THE_SAME, Sample, effective_draws, read_sample
from jostle.estimate import SLOW
from reference import LinearGaussian
from test_commands import jostle_command
from test_sampler_commands import task

__all__ = ["task"]

PROBLEM = LinearGaussian.random(samples=12, weights=3, n_beta=24, localization=20)
STEP = 1.0 / float(np.linalg.eigvalsh(PROBLEM.precision)[-1])
ROUNDS = [20, 25, 32, 40, 50, 63, 79, 99, 124, 155, 194, 200]


def run(**changes: Any) -> jostle.Run:
    settings: dict[str, Any] = {
        "posterior": jostle.Posterior(n_beta=0, localization=20), "sampler": jostle.Gaussian(),
        "chains": 4, "draws": 200, "burn_in": 1, "thin": 1, "progress": False,
    }  # fmt: skip
    return jostle.attribute(
        PROBLEM.model(), PROBLEM.data, PROBLEM.data, loss=jostle.losses.regression(), **(settings | changes)
    )


def losses(result: jostle.Run) -> np.ndarray:
    return np.asarray(result.traces.losses("train")[:])


def effective(values: np.ndarray) -> float:
    sample = Sample(
        mean_loss=values.mean(2), center_loss=0.0, chains=np.arange(len(values)), train=values, other=values,
        tokens=None,
    )  # fmt: skip
    found = effective_draws(sample, SLOW)[1]
    assert found is not None
    return found


@pytest.mark.parametrize("wanted", [100, 300])
def test_stops_at_the_first_round_with_so_many_effective_draws(wanted: int) -> None:
    whole, stopped = run(), run(until={"ess": wanted})
    values = losses(whole).astype(np.float64)
    first = next(draws for draws in ROUNDS if effective(values[:, :draws]) >= wanted)
    assert stopped.draws == first < 200
    np.testing.assert_array_equal(losses(stopped), losses(whole)[:, :first])
    np.testing.assert_array_equal(stopped.traces.to_xarray("train").step, np.arange(1, 1 + first))
    assert stopped.diagnostics()["effective_draws"] >= wanted
    assert stopped.diagnostics()["draws"] == first
    # Nearly all losses have reached it; what most of them are worth is more.
    assert wanted <= stopped.manifest["measured"]["ess"] <= stopped.diagnostics()["effective_draws"]
    assert stopped.stopped is not None
    assert stopped.stopped.endswith(" (ess is what 19 in 20 losses have, the verdict's effective draws 3 in 4)")
    assert SLOW == 19 / 20
    sample = read_sample(stopped.traces, stopped.healthy_chains)
    assert effective_draws(sample, 3 / 4)[1] == stopped.diagnostics()["effective_draws"]
    assert f"× {first} draws" in repr(stopped)


def test_the_error_it_was_asked_for_is_the_error_there_is() -> None:
    """Of independent draws the error of a correlation is about (1 − r²)/√N: the strongest are surest."""
    stopped = run(until={"error": 0.04})
    assert 20 < stopped.draws < 200
    scores = stopped.influence(normalize=True, standard_error=True)
    assert scores.standard_error is not None
    other = np.where(np.abs(scores.values) < THE_SAME, scores.values, 0)
    strongest = np.argsort(-np.abs(other), axis=0)[:10]
    reached = np.sqrt(np.mean(np.take_along_axis(scores.standard_error, strongest, 0) ** 2))
    assert reached == pytest.approx(stopped.manifest["measured"]["error"], rel=1e-5)
    assert reached <= 0.04
    fresh = [run(draws=stopped.draws, seed=seed).influence(normalize=True).values for seed in range(1, 9)]
    spread = np.sqrt(np.mean(np.take_along_axis(np.std(fresh, axis=0, ddof=1), strongest, 0) ** 2))
    assert spread == pytest.approx(0.04, rel=0.35)


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("at_draw", [30, 110])
def test_interrupted_it_stops_where_it_would_have(
    at_once: int, at_draw: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "posterior": jostle.Posterior(n_beta=24, localization=20), "sampler": jostle.BAOAB(step_size=STEP),
        "batch_size": 4, "thin": 3, "burn_in": 5, "chains": 2, "draws": 80, "until": {"ess": 60},
        "chains_at_once": min(2, at_once),
    }  # fmt: skip
    whole = run(**settings)
    assert 20 < whole.draws < 80
    observe, seen = Dynamics.observe, [0]

    def cut(self: Dynamics, group: Any, observers: Any = None) -> dict[str, Tensor]:
        seen[0] += len(group.chains)
        if at_draw <= seen[0] < at_draw + len(group.chains):
            raise RuntimeError("power cut")
        return observe(self, group, observers)

    monkeypatch.setattr(Dynamics, "observe", cut)
    at_draw = min(at_draw, 2 * whole.draws - 4)
    with pytest.raises(RuntimeError, match="power cut"):
        run(**settings, out=tmp_path / "run", checkpoint_seconds=0.0)
    resumed = run(**settings, out=tmp_path / "run")
    assert resumed.draws == whole.draws
    np.testing.assert_array_equal(losses(resumed), losses(whole))
    assert not (tmp_path / "run" / "state").exists()
    assert run(**settings, out=tmp_path / "run").draws == whole.draws


def test_draws_are_the_bound_and_all_criteria_must_hold() -> None:
    bounded = run(until={"ess": 1e6}, draws=30)
    assert bounded.draws == 30
    np.testing.assert_array_equal(losses(bounded), losses(run(draws=30)))
    assert bounded.stopped is not None
    assert "all of them" in bounded.stopped
    assert run(until={"ess": 60, "error": 1e-6}, draws=40).draws == 40


def test_rounds_depend_on_draws_and_minutes_alone() -> None:
    rounds, config = [], run(draws=2).config
    from jostle.config import Config

    def settings(**changes: Any) -> Config:
        posterior = jostle.Posterior(n_beta=0, localization=20)
        plain = {name: config[name] for name in ("loss", "potential_loss", "batch_size", "keep", "seed", "chains")}
        fixed = {"draws": 200, "burn_in": 1, "thin": 1, "observables": ()}
        return Config(posterior=posterior, sampler=jostle.Gaussian(), **(plain | fixed | changes))

    draws = 0
    while (more := next_round(settings(until={"ess": 1}), draws)) > draws:
        rounds.append(draws := more)
    assert rounds == ROUNDS
    assert next_round(settings(), 0) == 200
    timed = settings(minutes=1.0)
    assert next_round(timed, 0) == 20
    assert next_round(timed, 20, seconds=20.0) == 25
    assert next_round(timed, 50, seconds=55.0) == 54  # five seconds are left, and a draw takes 1.1
    assert next_round(timed, 50, seconds=70.0) == 50


def test_time_is_up() -> None:
    timed = run(minutes=1e-6)
    assert timed.draws == 20
    np.testing.assert_array_equal(losses(timed), losses(run(draws=20)))
    assert timed.stopped == "stopped after 20 draws of each chain: 1e-06 minutes"


def test_by_the_command_line_and_again_from_its_config(task: list[str], tmp_path: Path) -> None:
    words = ["--sampler", "gaussian", "--localization", "100", "--chains", "4", "--draws", "300"]
    result = jostle_command("run", tmp_path / "run", *task, *words, "--until", "ess=150", "--minutes", "10")
    assert result.exit_code == 0, result.stderr
    first = jostle.load(tmp_path / "run")
    assert f"jostle: stopped after {first.draws} draws of each chain: ess" in result.stderr
    assert first.config["until"] == {"ess": 150.0}
    again = jostle_command("run", tmp_path / "again", "--config", tmp_path / "run" / "config.yaml")
    assert again.exit_code == 0, again.stderr
    np.testing.assert_array_equal(losses(first), losses(jostle.load(tmp_path / "again")))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("ess", "until: got 'ess', expected ess=400, for one, or error=0.05, or none\n"),
        ("ess=400,error=0.05", "or none; for both, give --until twice: --until ess=400 --until error=0.05\n"),
        ("draws=3", "until: got 'draws', expected ess or error"),
        ("error=-1", "until error: got -1.0, expected a positive number"),
    ],
)
def test_what_is_no_criterion(word: str, message: str, task: list[str], tmp_path: Path) -> None:
    result = jostle_command("run", tmp_path / "run", *task, "--until", word)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "stops", [["--until", "ess=30"], ["--minutes", "1e-6"], ["--until", "ess=30", "--minutes", "9"]]
)
def test_advice_for_a_run_that_stopped_leads_on(stops: list[str], task: list[str], tmp_path: Path) -> None:
    words = ["--sampler", "gaussian", "--localization", "100", "--chains", "2", "--draws", "300"]
    result = jostle_command("run", tmp_path / "run", *task, *words, *stops)
    assert jostle.load(tmp_path / "run").draws == 20
    (told,) = re.findall(r"^to follow it: jostle (.*)$", result.stdout, re.MULTILINE)
    followed = jostle_command(*shlex.split(told))
    assert followed.exit_code == 0, followed.stderr
    second = jostle.load(tmp_path / "run-2")
    assert second.draws == second.config["draws"] == 67
    assert second.config["until"] is second.config["minutes"] is None
    assert "to follow it" not in followed.stdout


@pytest.mark.parametrize(
    ("asked", "more"), [(["--draws", 100], "--draws 100 --until none"), (["--draws", 400], "--draws 400 --until none"),
                        (["--chains", 8], "--chains 8")],
)  # fmt: skip
def test_a_run_that_stops_by_itself_is_not_extended(
    asked: list[Any], more: str, task: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = [*task, "--sampler", "gaussian", "--localization", "100", "--chains", "4", "--draws", "300"]
    assert jostle_command("run", out, *words, "--until", "ess=50").exit_code == 0
    said = (
        f"jostle: out: got {out}, a run that stops by itself (--until), expected another one: where its rounds end "
        f"depends on draws, so it is not extended; jostle run {out}-2 --config {out}/config.yaml {more}\n"
    )
    refused = jostle_command("extend", out, *asked)
    assert (refused.exit_code, refused.stderr) == (2, said)
    if asked != ["--draws", 100]:  # which is fewer than it may have, and so another run
        refused = jostle_command("run", out, *words, "--until", "ess=50", *asked)
        assert refused.exit_code == 2
        assert refused.stderr.endswith(said)
        assert "added are" not in refused.stderr


def test_minutes_that_are_none(task: list[str], tmp_path: Path) -> None:
    refused = jostle_command("run", tmp_path / "run", *task, "--minutes", "few")
    assert "jostle: minutes: got 'few', expected a number or none" in refused.stderr
    assert jostle_command("run", tmp_path / "run", *task, "--minutes", "-1").exit_code == 2


def test_without_traces_nobody_can_tell() -> None:
    with pytest.raises(jostle.InputError, match="keep='traces'"):
        run(until={"ess": 10}, keep="covariance")

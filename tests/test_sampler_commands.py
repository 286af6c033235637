"""Every sampler by its name on the command line, and again from the config.yaml of its run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import jostle
from jostle.asking import requests
from test_commands import jostle_command

TASK = """
import torch, jostle
def build():
    torch.manual_seed(0)
    X, y = torch.randn(8, 3), torch.randn(8, 1)
    return {"model": torch.nn.Linear(3, 1), "train": (X, y), "query": (X[:2], y[:2]),
            "loss": jostle.losses.regression()}
"""
SMALL = ["--chains", "2", "--draws", "6", "--batch-size", "3", "--n-beta", "10", "--localization", "100"]
SMALL += ["--step-size", "0.005", "--burn-in", "2", "--thin", "2"]


@pytest.fixture
def task(tmp_path: Path) -> list[str]:
    (tmp_path / "mine.py").write_text(TASK)
    return ["--task", f"{tmp_path / 'mine.py'}:build"]


def losses(out: Path) -> np.ndarray:
    return np.asarray(jostle.load(out).traces.losses("train")[:])


@pytest.mark.parametrize("name", [name for name in requests.SAMPLERS if name != "gaussian"])
def test_by_name_and_again_from_its_config(name: str, task: list[str], tmp_path: Path) -> None:
    options = ["--control-variates"] if name == "sgnht" else []
    first = jostle_command("run", tmp_path / "run", *task, *SMALL, "--sampler", name, *options)
    assert first.exit_code == 0, first.stderr
    again = jostle_command("run", tmp_path / "again", "--config", tmp_path / "run" / "config.yaml")
    assert again.exit_code == 0, again.stderr
    np.testing.assert_array_equal(losses(tmp_path / "run"), losses(tmp_path / "again"))
    assert losses(tmp_path / "run").std(1).min() > 0
    config = jostle.load(tmp_path / "again").config
    assert config == jostle.load(tmp_path / "run").config
    assert config["control_variates"] is bool(options)
    shorter = jostle_command(
        "run", tmp_path / "shorter", "--config", tmp_path / "run" / "config.yaml", "--step-size", "0.001"
    )
    assert shorter.exit_code == 0, shorter.stderr
    assert jostle.load(tmp_path / "shorter").config["sampler"]["step_size"] == 0.001


def test_the_control_of_a_run(task: list[str], tmp_path: Path) -> None:
    """``--sampler gaussian`` over the config of another run: the same localization, no gradient, no steps between."""
    assert jostle_command("run", tmp_path / "run", *task, *SMALL).exit_code == 0
    config = tmp_path / "run" / "config.yaml"
    result = jostle_command("run", tmp_path / "control", "--config", config, "--sampler", "gaussian")
    assert result.exit_code == 0, result.stderr
    control = jostle.load(tmp_path / "control")
    assert control.config["sampler"] == {"name": "Gaussian"}
    assert control.config["posterior"]["n_beta"] == 0
    assert control.config["posterior"]["localization"] == 100
    assert (control.config["burn_in"], control.config["thin"], control.config["draws"]) == (1, 1, 6)
    again = jostle_command("run", tmp_path / "again", "--config", tmp_path / "control" / "config.yaml")
    assert again.exit_code == 0, again.stderr
    np.testing.assert_array_equal(losses(tmp_path / "control"), losses(tmp_path / "again"))
    back = requests.resolve({"sampler": "sgld", "n_beta": 5.0}, config=tmp_path / "control" / "config.yaml")
    assert back["step_size"] == 1e-5  # the control has none to pass on


def test_the_control_of_a_preset(task: list[str], tmp_path: Path) -> None:
    settings = ["--preset", "vision", "--chains", "2", "--draws", "3", "--sampler", "gaussian"]
    result = jostle_command("run", tmp_path / "run", *task, *settings)
    assert result.exit_code == 0, result.stderr
    assert jostle.load(tmp_path / "run").config["posterior"] == {
        "n_beta": 0.0, "localization": 1000.0, "weights": "all", "prior_precision": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--step-size", "1e-5"], "step_size: got 1e-05, expected none: every step of gaussian draws anew"),
        (["--n-beta", "5"], "n_beta: got 5 with the Gaussian sampler, which uses no gradient"),
    ],
)
def test_the_control_has_no_steps_and_no_gradient(
    option: list[str], message: str, task: list[str], tmp_path: Path
) -> None:
    result = jostle_command("run", tmp_path / "run", *task, "--sampler", "gaussian", *option)
    assert result.exit_code == 2
    assert f"jostle: {message}" in result.stderr
    assert not (tmp_path / "run").exists()


def test_friction_of_rules_that_have_one(task: list[str], tmp_path: Path) -> None:
    result = jostle_command("run", tmp_path / "run", *task, *SMALL, "--sampler", "baoab", "--friction", "3")
    assert result.exit_code == 0, result.stderr
    assert jostle.load(tmp_path / "run").config["sampler"] == {"name": "BAOAB", "step_size": 0.005, "friction": 3.0}
    config = ["--config", tmp_path / "run" / "config.yaml"]
    assert jostle_command("run", tmp_path / "other", *config, "--friction", "2").exit_code == 0
    assert jostle.load(tmp_path / "other").config["sampler"]["friction"] == 2.0
    assert np.abs(losses(tmp_path / "run") - losses(tmp_path / "other"))[:, 1:].min() > 0
    refused = jostle_command("run", tmp_path / "refused", *task, *SMALL, "--friction", "3")
    assert refused.exit_code == 2
    assert "friction: got 3 for SGLD, which has none, expected --sampler baoab or sgnht" in refused.stderr


def test_antithetic_chains_by_name(task: list[str], tmp_path: Path) -> None:
    result = jostle_command("run", tmp_path / "run", *task, *SMALL, "--antithetic")
    assert result.exit_code == 0, result.stderr
    assert jostle.load(tmp_path / "run").influence(part="odd").shape == (8, 2)
    again = jostle_command("run", tmp_path / "again", "--config", tmp_path / "run" / "config.yaml")
    assert again.exit_code == 0, again.stderr
    np.testing.assert_array_equal(losses(tmp_path / "run"), losses(tmp_path / "again"))

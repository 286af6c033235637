"""Sweeps: every cell once, divergent ones marked, and the numbers in the cells those of their runs."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy.stats import spearmanr

import jostle
from jostle.cli.terminal import print_sweep
from jostle.evaluate import Bank, random_subsets
from test_calibration import TASK
from test_commands import jostle_command


@pytest.fixture
def task(tmp_path: Path) -> list[str]:
    (tmp_path / "mine.py").write_text(TASK)
    return ["--task", f"{tmp_path / 'mine.py'}:build", "--chains", "2", "--draws", "20", "--thin", "2"]


def test_a_sweep_is_resumed_widened_and_judged(task: list[str], tmp_path: Path) -> None:
    out, grid = tmp_path / "sweep", ["--localization", "100", "--step-size", "1e-2", "--burn-in", "0"]
    first = jostle_command("sweep", out, *task, *grid, "--n-beta", "0,30")
    assert first.exit_code == 0, first.stderr
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    written = {path: path.stat().st_mtime_ns for path in (out / "cells").rglob("*") if path.is_file()}
    assert len(list((out / "cells").iterdir())) == 2

    # Retrainings that follow the scores of one cell: its LDS is 1, and it comes first.
    runs = {
        n_beta: jostle.load(out / "cells" / f"n_beta={n_beta},localization=100,step_size=0.01,burn_in=0")
        for n_beta in (0, 30)
    }
    scores = runs[30].influence(normalize=True)
    bank = Bank.create(
        tmp_path / "bank", random_subsets(60, 10), queries=scores.shape[1],
        fingerprints={name: scores.provenance["fingerprints"][name] for name in ("train", "query")},
    )  # fmt: skip
    losses = bank.subsets.members @ scores.values
    for row, values in enumerate(losses):
        bank.store(row, 0, {"loss": values})
    truth = ["--bank", bank.directory]
    (tmp_path / "mine.py").write_text("raise RuntimeError('nothing has to be loaded')")
    judged = jostle_command("sweep", out, *task, *grid, "--n-beta", "0,30", *truth)
    assert judged.exit_code == 0, judged.stderr
    values = {cell["settings"]["n_beta"]: cell["value"] for cell in json.loads((out / "sweep.json").read_text())}
    assert values[30] == pytest.approx(1)
    predicted = bank.subsets.members @ runs[0].influence(normalize=True).values
    expected = np.mean([spearmanr(predicted[:, j], losses[:, j]).statistic for j in range(losses.shape[1])])
    assert values[0] == pytest.approx(expected, abs=1e-6)

    # Wider: a step that the pull alone makes unstable, and a curvature that does.
    (tmp_path / "mine.py").write_text(TASK)
    wider = jostle_command(
        "sweep",
        out,
        *task,
        "--localization",
        "100,500",
        "--step-size",
        "1e-2",
        "--burn-in",
        "0",
        "--n-beta",
        "0,30,1e25",
    )
    assert wider.exit_code == 0, wider.stderr
    cells = {
        (c["settings"]["n_beta"], c["settings"]["localization"]): c
        for c in json.loads((out / "sweep.json").read_text())
    }
    assert len(cells) == 6
    assert all(cells[n_beta, 500]["fault"].startswith("refused: step_size: got 0.01") for n_beta in (0, 30, 1e25))
    assert cells[1e25, 100]["fault"].startswith("diverged at step ")
    assert cells[1e25, 100]["failed_chains"] == 2
    for n_beta, run in runs.items():
        found = run.diagnostics()
        assert cells[n_beta, 100]["value"] == found["agreement"]["halves"]["spearman"]
        assert cells[n_beta, 100]["rise"] == found["rise"]
        assert cells[n_beta, 100]["fault"] is None
    assert all(path.stat().st_mtime_ns == then for path, then in written.items())

    other = jostle_command("sweep", out, *task, *grid, "--seed", "1")
    assert other.exit_code == 2
    assert "a sweep with seed 0, expected seed 1, as passed now" in other.stderr


def test_an_unreliable_cell_never_comes_first(task: list[str], tmp_path: Path) -> None:
    """Not even where a bank says that its scores are the best."""
    out = tmp_path / "sweep"
    grid = ["--localization", "100", "--n-beta", "1", "--burn-in", "20", "--thin", "5", "--step-size", "1e-2,1e-6"]
    assert jostle_command("sweep", out, *task, *grid).exit_code == 0
    timid = jostle.load(out / "cells" / "n_beta=1,localization=100,step_size=1e-06,burn_in=20")
    scores = timid.influence(normalize=True)
    bank = Bank.create(
        tmp_path / "bank", random_subsets(60, 10), queries=scores.shape[1],
        fingerprints={name: scores.provenance["fingerprints"][name] for name in ("train", "query")},
    )  # fmt: skip
    for row, values in enumerate(bank.subsets.members @ scores.values):
        bank.store(row, 0, {"loss": values})
    result = jostle_command("sweep", out, *task, *grid, "--bank", bank.directory)
    assert result.exit_code == 0, result.stderr
    cells = {cell["settings"]["step_size"]: cell for cell in json.loads((out / "sweep.json").read_text())}
    assert cells[1e-6]["value"] == pytest.approx(1)
    assert cells[1e-2]["value"] < 0.9
    assert (cells[1e-6]["verdict"], cells[1e-2]["verdict"]) == ("unreliable", "doubtful")
    order = [line.split()[2] for line in result.stdout.splitlines() if line.split()[:2] == ["1", "100"]]
    assert order == ["0.01", "1e-06"]


def test_side_by_side_the_numbers_are_the_same(task: list[str], tmp_path: Path) -> None:
    grid = ["--n-beta", "10", "--localization", "100", "--step-size", "1e-2", "--burn-in", "0,4"]
    for name, jobs in (("one", 1), ("two", 2)):
        result = jostle_command("sweep", tmp_path / name, *task, *grid, "--jobs", jobs)
        assert result.exit_code == 0, result.stderr
    one, two = (json.loads((tmp_path / name / "sweep.json").read_text()) for name in ("one", "two"))
    assert [cell["value"] for cell in one] == [cell["value"] for cell in two]
    pictures = sorted(path.name for path in (tmp_path / "one").glob("*.png"))
    assert pictures == ["sweep,step_size=0.01,burn_in=0.png", "sweep,step_size=0.01,burn_in=4.png"]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_number_is_cut_in_a_narrow_terminal(width: int) -> None:
    settings = {"n_beta": 12345.6, "localization": 500.333, "step_size": 1.23457e-06, "burn_in": 1200}
    cell: dict[str, Any] = {"settings": settings, "fault": None, "failed_chains": 0}
    refused = "refused: step_size: got 0.15 with a localization of 500.333, expected a step size below 0.008"
    cells = [
        cell | {"value": 0.123, "rise": -0.00467, "effective_draws": 1234.0, "verdict": "unreliable"},
        cell | dict.fromkeys(("value", "rise", "effective_draws", "verdict")) | {"fault": refused},
    ]
    file = io.StringIO()
    print_sweep(Console(file=file, width=width), cells, "agreement of halves")
    lines = file.getvalue().splitlines()
    assert "…" not in file.getvalue()
    (first,) = [line.split() for line in lines if "unreliable" in line]
    numbers = ["12345.6", "500.333", "1.23457e-06", "1200"]
    assert first == [*numbers, "0.123", "-0.00467", "1234", "unreliable"]
    row = next(number for number, line in enumerate(lines) if line.split()[:5] == [*numbers, "step_size:"])
    remark = " ".join(" ".join(lines[row:]).split()).removeprefix(" ".join(numbers)).strip()
    assert remark == "step_size: got 0.15 with a localization of 500.333"
    assert width < 80 or max(map(len, lines)) <= width


def test_bad_input(task: list[str], tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    out = tmp_path / "sweep"
    for arguments, message in (
        ([out, *task, "--n-beta", "1,few"], "n_beta: got '1,few', expected numbers separated by commas"),
        ([out, *task, "--burn-in", "1.5"], "burn_in: got '1.5', expected whole numbers"),
        ([out, *task, "--n-beta", "1,-1"], "n_beta: got -1.0, expected a finite number"),
        ([out, *task, "--bank", tmp_path / "full"], "bank: got no readable bank.json"),
        ([tmp_path / "full", *task], "which exists and holds something else"),
    ):
        result = jostle_command("sweep", *arguments)
        assert (result.exit_code, message in result.stderr) == (2, True), (message, result.stderr)
    assert not out.exists()

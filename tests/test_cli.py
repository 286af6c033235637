"""The command line as a user meets it: real processes, except where a failure has to be arranged."""

from __future__ import annotations

import importlib.util
import re
import signal
import struct
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import jostle
from jostle import cli
from jostle.demo import images, language
from jostle.errors import ChainFailedWarning, ChainsFailedError, InputError


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jostle", *map(str, arguments)], capture_output=True, text=True, timeout=300
    )


def entries(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_version():
    result = command("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"jostle {jostle.__version__}\n", "")


def test_help_names_the_commands_and_shows_examples():
    for result in (command("--help"), command("demo", "--help")):
        assert result.returncode == 0
        assert re.search(r"Examples\s+# .*\n jostle demo ", result.stdout)
    assert re.search(r"Commands.*\n│ demo  ", command("--help").stdout)


def test_console_script_is_installed():
    script = Path(sys.executable).with_name("jostle")
    assert subprocess.run([script, "--version"], capture_output=True, text=True).stdout.startswith("jostle ")


def test_help_does_not_wait_for_heavy_imports():
    code = "import sys, jostle.cli; print([m for m in ('torch', 'numpy', 'zarr', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_unknown_demo_is_bad_input():
    result = command("demo", "music")
    assert result.returncode == cli.ExitCode.BAD_INPUT
    assert "Traceback" not in result.stderr


def test_unknown_option_is_bad_input():
    result = command("demo", "--colour", "blue")
    assert result.returncode == cli.ExitCode.BAD_INPUT
    assert "Traceback" not in result.stderr


def test_directory_that_holds_something_else_is_refused_in_one_line(tmp_path):
    (tmp_path / "[bold]out[").mkdir()  # square brackets: nothing may take the message for markup
    foreign = tmp_path / "[bold]out[" / "run" / "thesis.tex"
    foreign.parent.mkdir()
    foreign.write_text("years of work")
    before = entries(tmp_path)
    result = CliRunner().invoke(cli.app, ["demo", "--out", str(foreign.parent.parent)])
    assert result.exit_code == cli.ExitCode.BAD_INPUT
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"jostle: out: got {foreign.parent}, which exists and holds something else")
    assert entries(tmp_path) == before


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            InputError("seed", got="[red]x[/red]", expected="a\nnumber"),
            2,
            "jostle: seed: got [red]x[/red], expected a number\n",
        ),
        (ChainsFailedError("all 4 chains failed"), 3, "jostle: all 4 chains failed\n"),
        (
            KeyboardInterrupt(),
            75,
            "jostle: interrupted; the same command goes on with what is there by now, or begins again\n",
        ),
    ],
)
def test_failure_with_a_name_is_one_line_and_an_exit_code(monkeypatch, error, code, line):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(language, "demonstrate", fail)
    result = CliRunner().invoke(cli.app, ["demo"])
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", line)


def test_failed_chain_is_a_warning_line_and_exit_code_3(monkeypatch):
    class Run:
        failed_chains = (1,)

    def demonstrate(*args, **kwargs):
        warnings.simplefilter("default")  # as at a shell; the test suite makes errors of them
        warnings.warn("chain 1 failed at step 7", ChainFailedWarning, stacklevel=1)
        return Run()

    monkeypatch.setattr(images, "demonstrate", demonstrate)
    result = CliRunner().invoke(cli.app, ["demo", "images"])
    assert (result.exit_code, result.stderr) == (3, "jostle: warning: chain 1 failed at step 7\n")


def test_missing_extra_is_named(monkeypatch, tmp_path):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sklearn" else find_spec(name))
    result = CliRunner().invoke(cli.app, ["demo", "images", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert result.stderr == (
        "jostle: demo: got no sklearn, expected the packages of the extra 'demo'; pip install 'jostle[demo]'\n"
    )
    assert not (tmp_path / "out").exists()


def test_queries_are_the_worst_misread_and_ordinary_ones_of_other_digits():
    rng = np.random.default_rng(0)
    labels = images.torch.tensor(rng.integers(10, size=200))
    logits = images.torch.tensor(rng.normal(size=(200, 10)), dtype=images.torch.float32)
    logits[images.torch.arange(200), labels] += 3
    logits[17] = 0.0
    logits[17, (int(labels[17]) + 1) % 10] = 99.0
    chosen = images.choose_queries(logits, labels)
    assert chosen[0] == 17
    assert len({int(labels[index]) for index in chosen}) == len(chosen) == 6
    assert all(logits[index].argmax() == labels[index] for index in chosen[images.HARD_QUERIES :])


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    out = tmp_path_factory.mktemp("demo") / "digits"
    return out, command("demo", "images", "--out", out)


def test_demo_prints_and_draws(demo):
    out, result = demo
    assert (result.returncode, result.stderr) == (0, "")
    assert "Positive: the two losses move together, so training on the image helps" in result.stdout
    assert str(out / "influence.png") in result.stdout
    header = (out / "influence.png").read_bytes()
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    assert 1000 < width < 3000
    assert 600 < height < 2000
    assert len(header) > 30_000  # more than a white page
    assert sorted(path.name for path in out.iterdir()) == ["influence.png", "run"]


def test_demo_finds_images_of_the_same_digit(demo):
    """Ten classes: one in ten by chance. Of the images it calls harmful, next to none."""
    out, result = demo
    count, same = map(int, re.search(r"Of the (\d+) most helpful images, (\d+) show", result.stdout).groups())
    assert count == 36
    assert same / count > 0.8

    train_set, test_set = images.load_digits(seed=0)
    tested = [int(index) for index in re.findall(r"^ #(\d+), a \d", result.stdout, re.MULTILINE)]
    scores = jostle.load(out / "run").influence(normalize=True)
    rankings = [scores.top(query, k=10) for query in range(len(tested))]
    labels = test_set.labels[tested].tolist()

    def share(side: str) -> float:
        return np.mean(
            [
                train_set.labels[entry.index] == label
                for ranking, label in zip(rankings, labels, strict=True)
                for entry in getattr(ranking, side)
            ]
        )

    assert share("helpful") > 0.8
    assert share("harmful") < 0.05


def test_demo_stays_near_the_trained_weights(demo):
    diagnostics = jostle.load(demo[0] / "run").diagnostics()
    assert diagnostics["failed_chains"] == []
    assert diagnostics["remarks"] == []
    assert 0 < diagnostics["mean_loss"] - diagnostics["mean_loss_at_center"] < 0.1
    assert diagnostics["effective_draws"] > 100


def test_demo_given_again_reads_the_run(demo):
    out, first = demo
    before = entries(out / "run")
    again = CliRunner().invoke(cli.app, ["demo", "images", "--out", str(out)])
    assert (again.exit_code, again.stdout) == (0, first.stdout)
    assert entries(out / "run") == before


def test_demo_interrupted_while_sampling_can_go_on(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "jostle", "demo", "images", "--out", tmp_path], stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and not (tmp_path / "run" / "manifest.json").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == cli.ExitCode.INTERRUPTED
    said = rf"jostle: stopped with (\d+) of {images.CHAINS} × {images.DRAWS} draws; the same command or call goes on\n"
    assert int(re.fullmatch(said, stderr).group(1)) < images.CHAINS * images.DRAWS
    assert len(list((tmp_path / "run" / "state").iterdir())) == images.CHAINS


def test_demo_with_another_seed_is_refused_where_one_lies(demo):
    out, _ = demo
    before = entries(out)
    result = CliRunner().invoke(cli.app, ["demo", "images", "--out", str(out), "--seed", "1"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert re.search(r"a run of .*there, .*now", result.stderr)
    assert entries(out) == before

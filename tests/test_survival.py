"""Runs survive: one writer, damage that is named, full and vanished disks, unreadable data, and more of what is there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import jostle
import jostle.chains.chain
from conftest import Says
from jostle.chains.checkpoints import Checkpoints
from jostle.errors import StorageError
from jostle.runs import layout, planning
from jostle.runs.integrity import examine
from test_commands import SMALL, jostle_command

X = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(9) % 2
SAMPLERS = {"SGLD": jostle.SGLD(step_size=1e-3), "SGNHT": jostle.SGNHT(step_size=1e-3)}


def sample(out: Path | None = None, *, sampler: str = "SGLD", **changes: Any) -> jostle.Run:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "train": (X, Y), "query": (X[:2], Y[:2]), "chains": 2, "draws": 6, "thin": 2, "burn_in": 1, "batch_size": 4,
        "posterior": jostle.Posterior(n_beta=20, localization=10), "sampler": SAMPLERS[sampler], "progress": False,
    }  # fmt: skip
    return jostle.attribute(nn.Linear(3, 2).double(), out=out, **(settings | changes))


def losses(run: jostle.Run, name: str = "train") -> np.ndarray:
    return run.traces.losses(name)[:]


def observed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], int]]:
    """Notes which chains are looked at, and at which step."""
    seen: list[tuple[list[int], int]] = []
    observe = jostle.chains.chain.Dynamics.observe

    def noting(self: Any, group: Any, *others: Any) -> Any:
        seen.append((list(group.chains), group.step))
        return observe(self, group, *others)

    monkeypatch.setattr(jostle.chains.chain.Dynamics, "observe", noting)
    return seen


# --- more of what is there ---


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("state", ["kept", "gone"])
@pytest.mark.parametrize("more", [{"draws": 11}, {"chains": 4}, {"draws": 11, "chains": 3}], ids=str)
def test_extended(
    more: dict[str, int], state: str, sampler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if state == "gone":
        monkeypatch.setattr(layout, "KEPT_STATE_BYTES", 0)
    settings = {"sampler": sampler, "chains_at_once": 1}
    sample(tmp_path / "run", **settings)
    assert (tmp_path / "run" / "state").exists() == (state == "kept")
    expected = sample(**settings, **more)
    seen = observed(monkeypatch)
    extended = sample(tmp_path / "run", **settings, **more)
    for name in ("train", "query"):
        np.testing.assert_array_equal(losses(extended, name), losses(expected, name))
    # 12 draws were there, and are not looked at again.
    assert len(seen) == extended.config["chains"] * extended.draws - 12
    assert extended.draws == more.get("draws", 6)
    np.testing.assert_array_equal(extended.traces.to_xarray("train").step, 1 + 2 * np.arange(extended.draws))
    assert examine(tmp_path / "run") == []
    with pytest.raises(jostle.InputError, match=r"a run of other settings \((chains|draws) "):
        sample(tmp_path / "run", **settings)  # fewer than there are


def test_extended_one_chain_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that began with its chains side by side."""
    expected = losses(sample(chains=3, draws=9, chains_at_once=3))
    assert sample(tmp_path / "run", chains=3, chains_at_once=3).manifest["execution"]["chains_at_once"] == 3
    seen = observed(monkeypatch)
    extended = losses(sample(tmp_path / "run", chains=3, draws=9, chains_at_once=1))
    assert [chains for chains, _ in seen] == [[chain] for chain in range(3) for _ in range(3)]
    np.testing.assert_allclose(extended, expected, rtol=1e-12)


def test_extended_after_interruptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An extension that is cut off at any of its draws is an unfinished run, and goes on like one."""
    expected = losses(sample(chains=3, draws=9, chains_at_once=1))
    sample(tmp_path / "whole", chains_at_once=1)
    observe = jostle.chains.chain.Dynamics.observe
    for fails_at in range(1, 16, 4):
        shutil.copytree(tmp_path / "whole", tmp_path / "run")
        count = 0

        def faulty(self: Any, group: Any, fails_at: int = fails_at) -> Any:
            nonlocal count
            count += 1
            if count == fails_at:
                raise RuntimeError("power cut")
            return observe(self, group)

        monkeypatch.setattr(jostle.chains.chain.Dynamics, "observe", faulty)
        settings: dict[str, Any] = {"chains": 3, "draws": 9, "chains_at_once": 1, "checkpoint_seconds": 0.0}
        with pytest.raises(RuntimeError, match="power cut"):
            sample(tmp_path / "run", **settings)
        assert [finding.kind for finding in examine(tmp_path / "run")] == ["unfinished"]
        with pytest.raises(jostle.InputError, match="not finished"):
            jostle.load(tmp_path / "run")
        np.testing.assert_array_equal(losses(sample(tmp_path / "run", **settings)), expected)
        shutil.rmtree(tmp_path / "run")


def test_seconds_before_an_interruption_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observe, count = jostle.chains.chain.Dynamics.observe, 0

    def slow(self: Any, group: Any, *others: Any) -> Any:
        nonlocal count
        count += 1
        time.sleep(0.2)
        if count == 6:
            raise RuntimeError("power cut")
        return observe(self, group, *others)

    settings: dict[str, Any] = {"chains_at_once": 1, "checkpoint_seconds": 0.0}
    started = time.perf_counter()
    with monkeypatch.context() as patch:
        patch.setattr(jostle.chains.chain.Dynamics, "observe", slow)
        with pytest.raises(RuntimeError, match="power cut"):
            sample(tmp_path, **settings)
    resumed = sample(tmp_path, **settings).manifest["seconds"]["sampling"]
    assert 1.0 < resumed < time.perf_counter() - started  # five observations are in checkpoints
    assert sample(tmp_path, **settings, chains=3).manifest["seconds"]["sampling"] > resumed


def test_checkpoints_count_what_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk is synced, as it is, before a checkpoint that is ahead of it."""
    synced: dict[str, tuple[int, int]] = {}
    sync, save, saved = os.fsync, Checkpoints.save, 0

    def state(path: str) -> tuple[int, int]:
        return os.stat(path).st_ino, os.stat(path).st_mtime_ns

    def noting(number: int) -> None:
        sync(number)
        path = os.path.realpath(f"/proc/self/fd/{number}")
        synced[path] = state(path)

    def saving(*arguments: Any) -> None:
        nonlocal saved
        chunks = [str(path) for path in tmp_path.glob("traces.zarr/*/losses/c/**/*") if path.is_file()]
        assert {path: synced.get(path) for path in chunks} == {path: state(path) for path in chunks}
        folders = {str(folder) for path in chunks for folder in Path(path).parents if "traces.zarr" in str(folder)}
        assert folders <= synced.keys()
        saved += bool(chunks)
        save(*arguments)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(Checkpoints, "save", saving)
    sample(tmp_path, checkpoint_seconds=0.0, chains_at_once=1)
    assert saved > 12


def test_what_is_extended_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptions of arrays, and losses at w*, of a new run, with more draws, more chains and more queries."""
    synced: dict[str, bytes] = {}

    def noting(number: int) -> None:
        path = Path(os.path.realpath(f"/proc/self/fd/{number}"))
        synced[str(path)] = path.read_bytes() if path.is_file() else b""

    monkeypatch.setattr(os, "fsync", noting)
    for changes in ({}, {"draws": 9}, {"draws": 9, "chains": 4}, {"draws": 9, "chains": 4, "query": (X[:5], Y[:5])}):
        sample(tmp_path, **changes)
        there = {str(path): path.read_bytes() for path in (tmp_path / "traces.zarr").rglob("*") if path.is_file()}
        assert len(there) > 15
        assert {path: synced.get(path) for path in there} == there
        synced = {path: content for path, content in synced.items() if path in there}


def test_sums_take_more_chains_but_not_more_draws(tmp_path: Path) -> None:
    sample(tmp_path, keep="covariance")
    extended = sample(tmp_path, keep="covariance", chains=4)
    np.testing.assert_allclose(extended.influence().values, sample(chains=4).influence().values, rtol=1e-9)
    with pytest.raises(jostle.InputError, match=r"draws 6 there, 8 now"):
        sample(tmp_path, keep="covariance", chains=4, draws=8)


def test_a_run_that_stops_by_itself_is_not_extended(tmp_path: Path) -> None:
    sample(tmp_path, draws=30, until={"ess": 10})
    assert not (tmp_path / "state").exists()
    with pytest.raises(jostle.InputError, match=r"draws 30 there, 60 now"):
        sample(tmp_path, draws=60, until={"ess": 10})
    with pytest.raises(jostle.InputError, match=r"chains 2 there, 4 now"):
        sample(tmp_path, draws=30, chains=4, until={"ess": 10})


# --- kills ---


def test_kills_at_random_moments() -> None:
    """Ten of the hundred of benchmarks/records/kills.json, with another seed."""
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kills", "--kills", "10", "--seed", "1"], cwd=root, capture_output=True,
        text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["kills"], result["identical"]) == (10, 10)
    assert sum(result["left by the kill"].values()) == 10


# --- one writer ---


def test_a_second_writer_is_told(tmp_path: Path, says: Says) -> None:
    inside, leave = threading.Event(), threading.Event()

    def slow(model: nn.Module) -> Tensor:
        if (tmp_path / "run" / "manifest.json").exists():
            inside.set()
            leave.wait(300)
        return next(model.parameters())[0]

    first = threading.Thread(target=lambda: sample(tmp_path / "run", observables={"slow": slow}))
    first.start()
    assert inside.wait(300)
    message = r"^out: got .*/run, which another process is writing to, expected one"
    with pytest.raises(jostle.InputError, match=message) as caught:
        sample(tmp_path / "run")
    says("a second writer", str(caught.value), 2)
    leave.set()
    first.join()
    assert jostle.load(tmp_path / "run").draws == 6


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    script = f"""
        import os, pathlib, jostle.runs.layout
        with jostle.runs.layout.writing(pathlib.Path({str(tmp_path)!r})):
            print("locked", flush=True)
            input()
            os.kill(os.getpid(), 9)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(jostle.InputError, match="another process is writing"), layout.writing(tmp_path):
        pass
    process.communicate("now\n")
    assert process.returncode == -9
    assert losses(sample(tmp_path)).shape == (2, 6, 9)  # only the lock's file is there, which is no obstacle


# --- damage ---


def flip(path: Path, at: int = -9) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


def first_chunk(out: Path, array: str = "train/losses") -> Path:
    return next(path for path in sorted((out / "traces.zarr" / array / "c").rglob("*")) if path.is_file())


DAMAGE: dict[str, tuple[Any, str, str]] = {
    "a byte of a chunk": (lambda out: flip(first_chunk(out)), r"damaged chunks train/losses/c/0/0/0,", r"a damaged chunk, train/losses/c/0/0/0, expected"),
    "a short chunk": (lambda out: os.truncate(first_chunk(out), 30), r"damaged chunks train/losses/c/0/0/0,", r"a damaged chunk, train/losses/c/0/0/0, expected"),
    "an empty chunk": (lambda out: os.truncate(first_chunk(out), 0), r"damaged chunks train/losses/c/0/0/0,", r"a damaged chunk, train/losses/c/0/0/0, expected"),
    "a chunk that is gone": (lambda out: first_chunk(out).unlink(), r"no train/losses/c/0/0/0,", r"no train/losses/c/0/0/0 in"),
    "an array that is gone": (lambda out: shutil.rmtree(out / "traces.zarr/train/losses"), r"no readable train/losses in", r"no readable train/losses in"),
    "no traces": (lambda out: shutil.rmtree(out / "traces.zarr"), r"nothing readable at .*traces.zarr", r"nothing readable at .*traces.zarr"),
    "losses at w*": (lambda out: flip(out / "center.safetensors"), r"center.safetensors, which is damaged \(loss on \w+ does not have its checksum", ""),
    "a checkpoint": (lambda out: flip(out / "state/chain-0001.safetensors"), r"chain-0001.safetensors, which is damaged \(weights does not have", ""),
    "half a checkpoint": (lambda out: os.truncate(out / "state/chain-0001.safetensors", 99), r"chain-0001.safetensors, which is damaged", ""),
    "a setting": (lambda out: (out / "config.yaml").write_text((out / "config.yaml").read_text().replace("seed: 0", "seed: 1")), r"config.yaml: got fingerprint \w+, expected \w+, as", ""),
    "no settings": (lambda out: (out / "config.yaml").unlink(), r"no readable config.yaml in", r"no readable config.yaml in"),
    "half a manifest": (lambda out: os.truncate(out / "manifest.json", 99), r"no readable manifest.json in", r"no readable manifest.json in"),
    "a manifest without": (lambda out: (out / "manifest.json").write_text('{"format": 1, "status": "complete"}'), r"a damaged manifest.json in", r"a damaged manifest.json in"),
    "another format": (lambda out: (out / "manifest.json").write_text('{"format": 99}'), r"format 99 in", r"format 99 in"),
    "examples": (lambda out: (out / "examples/query.jsonl").write_text("{"), r"a line that is not JSON", ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    examples = {"train": [{"text": str(i)} for i in range(9)], "query": [{"text": "a"}, {"text": "b"}]}
    sample(out, examples=examples, chains_at_once=1)
    return out


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, whole: Path, tmp_path: Path, says: Says) -> None:
    damage, found, read = DAMAGE[name]
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    assert jostle_command("check", out).stdout == f"{out}: whole\n"
    damage(out)
    result = jostle_command("check", out)
    assert result.exit_code == 4
    assert len(result.stdout.splitlines()) >= 1
    assert re.search(f"^damaged: .*{found}", result.stdout, re.M), result.stdout
    says("a run with damage: " + name, result.stdout.splitlines()[0], result.exit_code)
    if read:  # what a score is read from does not give one
        with pytest.raises(jostle.InputError, match=read):
            jostle.load(out).influence()


def test_a_damaged_checkpoint_is_not_gone_on_from(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    flip(tmp_path / "run/state/chain-0001.safetensors")
    more = {"draws": 9, "chains_at_once": 1}
    with pytest.raises(jostle.InputError, match=r"chain-0001.*delete it, and its chain begins again$"):
        sample(tmp_path / "run", **more)
    (tmp_path / "run/state/chain-0001.safetensors").unlink()
    np.testing.assert_array_equal(losses(sample(tmp_path / "run", **more)), losses(sample(**more)))


@pytest.mark.filterwarnings("ignore:chain")
def test_check_says_what_is_not_damage(tmp_path: Path) -> None:
    looked = 0

    def bursting(model: nn.Module) -> Tensor:
        nonlocal looked
        looked += 1
        return torch.tensor([torch.inf if looked == 9 else 1.0])

    sample(tmp_path, observables={"bursting": bursting}, chains_at_once=1)
    result = jostle_command("check", tmp_path)
    assert result.exit_code == 3
    assert re.fullmatch(r"failed chain: chain \d at step \d+: a loss left the finite numbers\n", result.stdout)
    assert jostle_command("check", tmp_path / "nowhere").exit_code == 2


# --- disks and data that fail ---

FULL_DISK = """
    import sys, pathlib, shutil, subprocess, jostle, test_survival as t
    import jostle.runs.planning
    jostle.runs.planning.Plan.check = lambda plan: None  # the disk fills up after the run has begun
    observe = jostle.chains.chain.Dynamics.observe
    def fill(self, group, *others):
        global count
        count += 1
        if count == 4:
            if kind == "full":
                with open(place / "ballast", "wb", buffering=0) as file:
                    try:
                        while True: file.write(bytes(4096))
                    except OSError: pass
            else:
                raise jostle.errors.StorageError("the server restarts")
        return observe(self, group, *others)
    jostle.chains.chain.Dynamics.observe = fill
    settings = dict(chains_at_once=1, checkpoint_seconds=0.0)
    for kind in ("full", "read-only"):
        place, count = pathlib.Path(sys.argv[1]) / kind, 0
        out = place / "run"
        try:
            t.sample(out, **settings)
        except jostle.errors.StorageError as error:
            if kind == "full":
                print(error)
        if kind == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
            try:
                t.sample(out, **settings)
            except jostle.InputError as error:
                print(error)
        if kind == "full":
            (place / "ballast").unlink()
        else:
            subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
        assert [str(finding.kind) for finding in t.examine(out)] == ["unfinished"], t.examine(out)
        before = count
        print(t.np.array_equal(t.losses(t.sample(out, **settings)), t.losses(t.sample(**settings))), before)
        assert not list(out.rglob("*.partial"))
"""


def test_disks_that_fail(tmp_path: Path, says: Says) -> None:
    """Real file systems of 1 MB, in a namespace of their own: one becomes full, the other read-only."""
    for kind in ("full", "read-only"):
        (tmp_path / kind).mkdir()
    mount = " && ".join(f"mount -t tmpfs -o size=1m tmpfs {tmp_path / kind}" for kind in ("full", "read-only"))
    mount += ' && exec "$@"'
    probe = ["unshare", "-rm", "sh", "-c", mount, "sh"]
    if not shutil.which("unshare") or subprocess.run([*probe, "true"], capture_output=True).returncode:
        pytest.skip("no mount of one's own is allowed here")
    done = subprocess.run(
        [*probe, sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path)],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    full, went_on, read_only, went_on_too = done.stdout.splitlines()
    assert "no space left in" in full
    assert "what was recorded is kept" in full
    says("a disk that becomes full", full, 74)
    assert "which cannot be written to" in read_only
    assert "what was recorded is kept" not in read_only
    says("a disk that becomes read-only", read_only, 2)
    assert (went_on, went_on_too) == ("True 4", "True 4")


@pytest.mark.parametrize("number", ["ENOSPC", "EIO", "EDQUOT", "EROFS"])
def test_a_disk_that_fails_in_the_writer_thread(
    number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    import errno

    from jostle.traces.store import Traces

    record, count = Traces.record, 0

    def faulty(self: Traces, *arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == 5:
            raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)))
        record(self, *arguments)

    monkeypatch.setattr(Traces, "record", faulty)
    with pytest.raises(StorageError, match=r"^out: got .* in .*; what was recorded is kept: .* goes on$") as caught:
        sample(tmp_path, checkpoint_seconds=0.0, chains_at_once=1)
    says(f"{number} amid a run", str(caught.value), 74)
    assert [finding.kind for finding in examine(tmp_path)] == ["unfinished"]
    np.testing.assert_array_equal(losses(sample(tmp_path, chains_at_once=1)), losses(sample(chains_at_once=1)))


@pytest.mark.parametrize("keep", ["traces", "covariance"])
def test_a_directory_that_vanishes(keep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    observe = jostle.chains.chain.Dynamics.observe

    def vanishing(self: Any, group: Any, *others: Any) -> Any:
        if group.step == 5:
            shutil.rmtree(tmp_path / "run")
        return observe(self, group, *others)

    monkeypatch.setattr(jostle.chains.chain.Dynamics, "observe", vanishing)
    with pytest.raises(StorageError, match=r"^out: got .*; no run is there: see that") as caught:
        sample(tmp_path / "run", keep=keep)
    says(f"a directory that vanishes (keep {keep})", str(caught.value), 74)
    assert not (tmp_path / "run").exists()  # nothing is made there that looks like a run


class Unreliable:
    """A data set on a network drive."""

    broken = False

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        if self.broken and index == 7:
            raise FileNotFoundError(2, "No such file or directory", "img/7.png")
        return X[index], Y[index]


def test_data_that_can_no_longer_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    monkeypatch.setattr("jostle.data.datasets.KEPT_IN_MEMORY", 0)
    data, observe, count = Unreliable(), jostle.chains.chain.Dynamics.observe, 0

    def breaking(self: Any, group: Any, *others: Any) -> Any:
        nonlocal count
        count += 1
        data.broken = count == 5
        return observe(self, group, *others)

    monkeypatch.setattr(jostle.chains.chain.Dynamics, "observe", breaking)
    settings: dict[str, Any] = {"train": data, "chains_at_once": 1, "checkpoint_seconds": 0.0}
    message = r"^train: got example 7, which cannot be read \(FileNotFoundError: .*7.png.*; mend it"
    with pytest.raises(jostle.InputError, match=message) as caught:
        sample(tmp_path, **settings)
    says("an example that can no longer be read", str(caught.value), 2)
    assert [finding.kind for finding in examine(tmp_path)] == ["unfinished"]
    data.broken = False
    resumed = sample(tmp_path, **settings)
    assert count <= 12 + 2  # it went on where it stood
    np.testing.assert_array_equal(losses(resumed), losses(sample(**settings)))
    data.broken = True
    with pytest.raises(jostle.InputError, match=message):
        sample(tmp_path / "other", **settings)
    assert not (tmp_path / "other").exists()


def test_clocks_that_jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock on the wall goes back a day at every look, amid a run that is interrupted and goes on."""
    now = time.time()
    expected = losses(sample())

    def backwards() -> float:
        nonlocal now
        now -= 86_400
        return now

    monkeypatch.setattr(time, "time", backwards)
    observe, count = jostle.chains.chain.Dynamics.observe, 0

    def faulty(self: Any, group: Any, *others: Any) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            raise RuntimeError("power cut")
        return observe(self, group, *others)

    monkeypatch.setattr(jostle.chains.chain.Dynamics, "observe", faulty)
    with pytest.raises(RuntimeError, match="power cut"):
        sample(tmp_path, checkpoint_seconds=1e-6)
    run = sample(tmp_path)
    np.testing.assert_array_equal(losses(run), expected)
    assert run.manifest["seconds"]["sampling"] > 0


# --- plans ---


@pytest.mark.parametrize("array", ["query/losses", "query/center_losses", "train/step"])
@pytest.mark.parametrize("more", [{"draws": 9}, {"query": (X[:5], Y[:5])}], ids=["draws", "queries"])
def test_nothing_is_added_to_what_is_damaged(array: str, more: dict[str, Any], tmp_path: Path, says: Says) -> None:
    sample(tmp_path)
    flip(first_chunk(tmp_path, array))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(jostle.InputError, match=rf"^out: got .*, which is damaged, expected .*; .*{array}") as caught:
        sample(tmp_path, **more)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    if array == "query/losses" and "draws" in more:
        says("more draws for a run with a damaged chunk", str(caught.value), 2)


TASK = """
import torch, jostle
def build():
    torch.manual_seed(0)
    X, y = torch.randn(8, 3), torch.randn(8, 1)
    return {'model': torch.nn.Linear(3, 1), 'train': (X, y), 'query': (X[:2], y[:2]), 'loss': jostle.losses.regression()}
"""


@pytest.fixture
def task(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(TASK)
    return f"{tmp_path / 'mine.py'}:build"


def test_the_plan_is_what_the_run_takes(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["run", tmp_path / "run", "--task", task, *SMALL]
    result = jostle_command(*command, "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert not (tmp_path / "run").exists()
    # 2 chains × 12 draws × (8 + 2) losses of 4 bytes; 2 chains of 4 weights; 8 × 2 scores.
    assert "4 of a model of 16 bytes" in result.stdout
    assert "960 bytes for traces, 32 bytes for the state" in result.stdout
    assert "64 bytes when asked for" in result.stdout
    assert "23 steps of" in result.stdout
    assert "for less time" not in result.stdout
    # A step and an observation of minutes each: of a long run, what takes longest is named.
    for thin, longest in (("9", "most of it are steps"), ("1", "most of it are observations")):
        with monkeypatch.context() as patch:
            patch.setattr(planning, "probe", lambda dynamics, at_once: (None, 240.0, 200.0))
            told = jostle_command(*command, "--thin", thin, "--burn-in", "0", "--dry-run").stdout
        assert longest in told
    assert jostle_command(*command).exit_code == 0
    arrays = jostle.load(tmp_path / "run").traces
    assert sum(arrays.losses(name)[:].nbytes for name in arrays.sets) == 960


def test_plans_that_cannot_fit_are_refused(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    def free(amount: int) -> Any:
        return lambda place: shutil._ntuple_diskusage(10**12, 0, amount)

    command = ["run", tmp_path / "run", "--task", task, *SMALL]
    monkeypatch.setattr(planning.shutil, "disk_usage", free(432))  # 400 beside the state: 5 draws of 80 bytes
    result = jostle_command(*command)
    assert result.exit_code == 2
    assert "out: got a run of 992 bytes (traces 960 bytes, state of the chains 32 bytes) where 432" in result.stderr
    assert result.stderr.strip().endswith("5 draws of each chain would fit")
    says("a run that does not fit on the disk", result.stderr.splitlines()[-1], 2)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(planning.shutil, "disk_usage", free(1000))
    monkeypatch.setattr(planning, "free_memory", lambda device: 50)  # a chain takes 16 + 2 × 16 bytes
    result = jostle_command(*command, "--dry-run")
    assert result.exit_code == 2
    assert "chains_at_once: got 2, which need 96 bytes of GPU memory, with 50 bytes free, expected at most 1" in (
        result.stderr
    )
    with pytest.raises(jostle.InputError, match=r"^device: got cuda:0 with 50 bytes free, for a model of 4e\+03 |4 KB"):
        planning.require_room(nn.Linear(999, 1), torch.device("cuda:0"))


def test_a_chain_alone_has_its_gradient_in_the_models_precision() -> None:
    class EnoughError(Exception):
        pass

    def tell(lines: list[str]) -> None:
        # Four weights in float32, their gradient in bfloat16, their noise in float32.
        assert "memory for chains   40 bytes" in lines
        raise EnoughError

    data = torch.randn(8, 3).bfloat16(), torch.randn(8, 1).bfloat16()
    with pytest.raises(EnoughError):
        jostle.attribute(
            nn.Linear(3, 1).bfloat16(), data, data, loss=jostle.losses.regression(), chains=2, chains_at_once=1,
            dry_run=tell,
        )  # fmt: skip


# --- the commands ---


def test_a_full_disk_has_an_exit_code_of_its_own(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jostle.traces.store import Traces

    def full(self: Traces, *arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    command = ["run", tmp_path / "run", "--task", task, *SMALL]
    with monkeypatch.context() as patch:
        patch.setattr(Traces, "record", full)
        result = jostle_command(*command)
    assert result.exit_code == 74
    assert result.stderr.splitlines()[-1].startswith("jostle: out: got no space left in ")
    assert jostle_command("resume", tmp_path / "run").exit_code == 0
    assert jostle_command("check", tmp_path / "run").exit_code == 0


def test_resume_and_extend(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["run", tmp_path / "run", "--task", task, *SMALL]
    observe, count = jostle.chains.chain.Dynamics.observe, 0

    def interrupted(self: Any, group: Any, *others: Any) -> Any:
        nonlocal count
        count += 1
        if count == 5:
            os.kill(os.getpid(), 2)
        return observe(self, group, *others)

    monkeypatch.setattr(jostle.chains.chain.Dynamics, "observe", interrupted)
    result = jostle_command(*command)
    assert result.exit_code == 75
    there = int(np.isfinite(losses(jostle.Run(tmp_path / "run"))).all(2).sum())
    assert 0 < there < 2 * 12
    assert f"jostle: stopped with {there} of 2 × 12 draws; the same command, or jostle resume" in result.stderr
    result = jostle_command("check", tmp_path / "run")
    assert result.exit_code == 75
    assert result.stdout.startswith(f"unfinished: {there} of 2 × 12 draws; jostle resume ")
    # Without --draws and --chains it is what it was asked for, and not the default.
    again = ["run", tmp_path / "run", "--task", task, "--burn-in", 1, "--batch-size", 3]
    result = jostle_command(*again)
    assert result.exit_code == 0, result.stderr
    assert f"has {there} of 2 × 12 draws, and goes on" in result.stderr
    assert jostle_command("check", tmp_path / "run").exit_code == 0
    before = losses(jostle.load(tmp_path / "run"))
    result = jostle_command(*again)
    assert result.exit_code == 0, result.stderr
    assert f"run is complete, with 2 × 12 draws; jostle extend {tmp_path / 'run'} --draws N adds" in result.stderr
    np.testing.assert_array_equal(losses(jostle.load(tmp_path / "run")), before)
    longer = [*command[2:], "--draws", 20, "--chains", 3]
    assert jostle_command("run", tmp_path / "longer", *longer).exit_code == 0
    result = jostle_command("extend", tmp_path / "run", "--draws", 20, "--chains", 3)
    assert result.exit_code == 0, result.stderr
    ours, theirs = jostle.load(tmp_path / "run"), jostle.load(tmp_path / "longer")
    np.testing.assert_array_equal(losses(ours), losses(theirs))
    assert ours.config == theirs.config
    result = jostle_command("extend", tmp_path / "run", "--draws", 5)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "draws: got 5 for" in result.stderr
    assert "expected more, in all" in result.stderr
    assert "neither --draws nor --chains nor --query" in jostle_command("extend", tmp_path / "run").stderr


@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize(("at_once", "looks", "thin"), [(1, 4, 2), (1, 8, 2), (2, 4, 2), (1, 5, 1)])
def test_draws_so_far_are_counted(
    at_once: int, looks: int, thin: int, extended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against how often chains were looked at, one after another or side by side; also right before a last draw."""
    if extended:
        sample(tmp_path, draws=3, thin=thin, chains_at_once=at_once)
    seen = observed(monkeypatch)
    observe = jostle.chains.chain.Dynamics.observe

    def interrupted(self: Any, group: Any, *others: Any) -> Any:
        if len(seen) == looks - 1:
            os.kill(os.getpid(), 2)
        return observe(self, group, *others)

    monkeypatch.setattr(jostle.chains.chain.Dynamics, "observe", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        sample(tmp_path, chains=3, thin=thin, chains_at_once=at_once)
    assert len(seen) == looks
    there = 6 * extended + sum(len(chains) for chains, _ in seen)
    assert str(caught.value) == f"stopped with {there} of 3 × 6 draws; the same command or call goes on"


def test_resume_says_what_is_missing_of_a_run_made_from_python(tmp_path: Path, says: Says) -> None:
    sample(tmp_path)
    result = jostle_command("resume", tmp_path)
    assert result.exit_code == 2
    assert "made from Python: its config.yaml names neither model nor data" in result.stderr
    assert "call jostle.attribute again with the same arguments and out=" in result.stderr
    says("jostle resume of a run made from Python", result.stderr.splitlines()[-1], 2)


def test_a_run_without_its_queries_is_another(tmp_path: Path) -> None:
    phi = {"first": lambda model: next(model.parameters()).reshape(-1)[:1]}
    sample(tmp_path, observables=phi)
    with pytest.raises(jostle.InputError, match=r"a run of other queries \(fingerprint \w+ there, none now\)"):
        sample(tmp_path, observables=phi, query=None)


def test_texts_may_hold_any_separator(tmp_path: Path) -> None:
    texts = [{"text": f"one\u2028two\u0085{number}"} for number in range(9)]
    run = sample(tmp_path, examples={"train": texts, "query": texts[:2]})
    assert run.examples("train") == texts
    assert examine(tmp_path) == []

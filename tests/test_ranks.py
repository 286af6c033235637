"""Many processes, one run: the same traces however many there are, and a clear end when one of them is gone."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import jostle
from jostle.errors import JostleError
from jostle.ranks import join
from jostle.runs.integrity import examine
from jostle.runs.layout import writing
from networks import network

PROCESSES = multiprocessing.get_context("forkserver")
# What ranks would otherwise import one by one, those of test_sharding.py among them.
PROCESSES.set_forkserver_preload([
    "jostle.runs.sampling", "jostle.models.sharding", "jostle.cli", "jostle.asking.requests", "pytest", "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
])  # fmt: skip

SETTINGS: dict[str, Any] = {"chains": 5, "draws": 12, "burn_in": 3, "thin": 2, "batch_size": 8}


def sample(out: Path, **changes: Any) -> jostle.Run:
    """A small run.

    ``slow`` makes each of its observations last, so that there is time to interrupt it; a chain whose second weight is
    above ``limit`` fails.
    """
    model, train, query = network()
    settings = SETTINGS | {"chains_at_once": 1, "sampler": jostle.SGLD(step_size=1e-3)} | changes
    slow, limit = settings.pop("slow", 0.0), settings.pop("limit", torch.inf)

    def first(model: torch.nn.Module) -> Tensor:
        time.sleep(slow)
        weights = next(model.parameters()).reshape(-1)[:2]
        return torch.where(weights[1] > limit, torch.nan, weights)

    if "wrapped" in settings:
        join()
        model = settings.pop("wrapped")(model)
    if settings.pop("other_data_on_rank_one", False) and os.environ.get("RANK") == "1":
        train = (train[0] + 1, train[1])
    if settings.pop("other_seed_on_rank_one", False) and os.environ.get("RANK") == "1":
        settings["seed"] = 1
    return jostle.attribute(
        model, train, query, loss=jostle.losses.regression(), observables={"first": first}, out=out, progress=False,
        posterior=jostle.Posterior(n_beta=50.0, localization=100.0), **settings,
    )  # fmt: skip


def sampled(out: Path, **changes: Any) -> str:
    return f"{sample(out, **changes).draws} draws"


Work = Callable[..., str]


def be_rank(rank: int, count: int, port: int, work: Work, out: Path, settings: dict[str, Any], silence: float) -> None:
    """One process of several, as torchrun would start it; what it has to say goes to a file."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    from jostle import ranks

    ranks.SILENCE_SECONDS = silence
    ranks.BEAT_SECONDS = 0.3
    try:
        said = work(out, **settings)
    except (JostleError, KeyboardInterrupt) as error:
        said = f"{type(error).__name__}: {error}"
    (out.parent / f"{out.name}-{rank}.txt").write_text(said)


def start(count: int, out: Path, *, work: Work = sampled, silence: float = 60.0, **settings: Any) -> list[BaseProcess]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for said in out.parent.glob(f"{out.name}-*.txt"):  # by ranks before these
        said.unlink()
    arguments = (count, port, work, out, settings, silence)
    processes = [PROCESSES.Process(target=be_rank, args=(rank, *arguments)) for rank in range(count)]
    for process in processes:
        process.start()
    return processes


def end(processes: list[BaseProcess], out: Path) -> list[str | None]:
    """Wait for all ranks, and return what each of them said last."""
    for process in processes:
        process.join(300)
        assert process.exitcode is not None, "a rank does not end"
    paths = [out.parent / f"{out.name}-{rank}.txt" for rank in range(len(processes))]
    return [path.read_text() if path.exists() else None for path in paths]


def await_checkpoints(out: Path, chains: int, *, since: float = 0.0) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if sum(path.stat().st_mtime > since for path in out.glob("state/*.safetensors")) >= chains:
                return
        time.sleep(0.02)


def traces(run: jostle.Run) -> dict[str, np.ndarray]:
    kept = {name: np.asarray(run.traces.losses(name)[:]) for name in run.traces.sets}
    return kept | {name: np.asarray(run.traces.observable(name)[:]) for name in run.traces.observables}


def assert_same(out: Path, reference: jostle.Run) -> None:
    got, expected = traces(jostle.load(out)), traces(reference)
    assert got.keys() == expected.keys() == {"train", "query", "first"}
    for name in expected:
        assert not np.isnan(got[name]).any()
        np.testing.assert_array_equal(got[name], expected[name])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> jostle.Run:
    return sample(tmp_path_factory.mktemp("alone") / "run")


@pytest.mark.parametrize("count", [2, 4])
def test_the_number_of_ranks_changes_nothing(count: int, alone: jostle.Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert end(start(count, out), out) == ["12 draws"] * count
    assert_same(out, alone)
    manifest = jostle.load(out).manifest
    for name in ("fingerprints", "execution", "failed_chains", "remarks", "draws", "scale"):
        assert manifest[name] == alone.manifest[name], name
    assert examine(out) == []


def test_side_by_side_on_each_rank_it_is_the_same_but_for_rounding(alone: jostle.Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert end(start(2, out, chains_at_once=None), out) == ["12 draws"] * 2
    run = jostle.load(out)
    assert run.manifest["execution"]["chains_at_once"] == 3  # of five chains, the larger half
    for name, expected in traces(alone).items():
        np.testing.assert_allclose(traces(run)[name], expected, rtol=1e-4, atol=1e-5)


def test_rank_zero_decides_when_there_is_enough(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"until": {"ess": 30}, "draws": 400, "thin": 6, "chains": 4}
    expected = sample(tmp_path / "alone", **settings)
    assert 20 < expected.draws < 400
    out = tmp_path / "run"
    assert end(start(2, out, **settings), out) == [f"{expected.draws} draws"] * 2
    assert_same(out, expected)
    assert jostle.load(out).manifest["measured"] == expected.manifest["measured"]
    out = tmp_path / "auto"  # what a pilot chooses is its own to choose, but the same on all ranks
    assert end(start(2, out, thin="auto", draws=6), out) == ["6 draws"] * 2
    assert not np.isnan(traces(jostle.load(out))["train"]).any()


def test_a_failed_chain_of_another_rank_is_named(alone: jostle.Run, tmp_path: Path) -> None:
    """All those fail that pass a limit, which is chosen so that one of the other rank's, with odd numbers, does."""
    second = traces(alone)["first"][:, :, 1]
    highest = second.max(1)
    order = np.argsort(-highest)
    last = int(np.argmax(order % 2 == 1))  # in this order: the first one of the other rank
    limit = float(highest[order[last : last + 2]].mean())
    failing = sorted(int(chain) for chain in order[: last + 1])
    assert len(failing) < 5
    out = tmp_path / "run"
    assert end(start(2, out, limit=limit), out) == ["12 draws"] * 2
    run = jostle.load(out)
    steps = {chain: 3 + 2 * int((second[chain] > limit).argmax()) for chain in failing}
    reason = "a loss left the finite numbers"
    expected = [{"chain": chain, "step": step, "reason": reason} for chain, step in steps.items()]
    assert sorted(run.manifest["failed_chains"], key=lambda failure: failure["chain"]) == expected
    others = [other for other in range(5) if other not in failing]
    np.testing.assert_array_equal(traces(run)["train"][others], traces(alone)["train"][others])


def test_a_rank_that_dies_is_named_by_the_others(alone: jostle.Run, tmp_path: Path) -> None:
    """Without torchrun, which would stop them: kill −9 of one rank, and then of the one that hosts the store."""
    out = tmp_path / "run"
    slow: dict[str, Any] = {"slow": 0.05, "checkpoint_seconds": 0.0}
    processes = start(4, out, silence=3.0, **slow)
    await_checkpoints(out, 4)
    os.kill(processes[2].pid or 0, signal.SIGKILL)
    said = end(processes, out)
    assert said[2] is None
    for rank in (0, 1, 3):
        message = (
            "RankLostError: rank 2 of 4 has given no sign of life for 3 s; what was recorded is kept, and the same"
        )
        assert (said[rank] or "").startswith(message)

    processes = start(2, out, silence=3.0, **slow)
    await_checkpoints(out, 1, since=time.time())
    os.kill(processes[0].pid or 0, signal.SIGKILL)
    assert (end(processes, out)[1] or "").startswith("RankLostError: rank 0 of 2 ")
    assert json.loads((out / "manifest.json").read_text())["status"] == "sampling"

    assert end(start(3, out), out) == ["12 draws"] * 3
    assert_same(out, alone)


def test_a_run_is_extended_by_any_number_of_ranks(alone: jostle.Run, tmp_path: Path) -> None:
    """More chains, then more draws; what is there is not observed again, and the state of the chains is of use."""
    out = tmp_path / "run"
    assert end(start(2, out, chains=3, draws=7), out) == ["7 draws"] * 2
    before = traces(jostle.load(out))
    assert end(start(3, out, chains=5, draws=7), out) == ["7 draws"] * 3
    assert end(start(2, out), out) == ["12 draws"] * 2
    assert before["train"].shape[:2] == (3, 7)
    assert_same(out, alone)
    assert examine(out) == []
    assert len(list(out.glob("state/*.safetensors"))) == 5


def test_a_run_that_another_process_writes_is_left_to_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with writing(out):
        said = end(start(2, out), out)
    assert (said[0] or "").startswith(f"InputError: out: got {out}, which another process is writing to")
    assert (said[1] or "").startswith("RankLostError: rank 0 of 2 failed: out: got")
    assert [path.name for path in out.iterdir()] == [".lock"]


def test_other_data_or_settings_on_one_rank_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    said = end(start(2, out, other_data_on_rank_one=True), out)
    assert re.match(r"InputError: train: got fingerprint \w+ on rank 1, expected \w+, as on rank 0", said[0] or "")
    # No run was laid out that could go on, and the same would fail again.
    assert re.fullmatch(r"RankLostError: rank 0 of 2 failed: train: .*, as on rank 0 \(\S+\)", said[1] or "")
    said = end(start(2, out, other_seed_on_rank_one=True), out)
    assert re.match(r"InputError: config: got fingerprint \w+ on rank 1, expected \w+, as on rank 0", said[0] or "")
    assert not out.exists()


@pytest.mark.parametrize(
    ("wrapped", "got"),
    [(torch.nn.parallel.DistributedDataParallel, "one in DistributedDataParallel"), (fully_shard, "sharded weights")],
)
def test_a_model_that_mixes_the_ranks_gradients_is_refused(wrapped: Any, got: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    for said in end(start(2, out, wrapped=wrapped), out):
        assert (said or "").startswith(f"InputError: model: got {got}")
    assert not out.exists()


TASK = """
import jostle, networks, time

def build():
    model, train, query = networks.network()
    def first(model):
        time.sleep(0.03)
        return next(model.parameters()).reshape(-1)[:2]
    return {"model": model, "train": train, "query": query, "loss": jostle.losses.regression(),
            "observables": {"first": first}, "chains_at_once": 1, "checkpoint_seconds": 0.0}
"""


def torchrun(count: int, task: Path, out: Path, *more: str, restarts: int = 0) -> subprocess.Popen[str]:
    """``jostle run`` of the task on several ranks."""
    options = {name.replace("_", "-"): value for name, value in SETTINGS.items()}
    options |= {"n-beta": 50, "localization": 100, "step-size": 1e-3, "weights": "all", "task": f"{task}:build"}
    flags = [f"--{name}={value}" for name, value in options.items()]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}"]
    command += [f"--max-restarts={restarts}", f"--master-port={port}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    return subprocess.Popen(
        [*command, "-m", "jostle", "run", str(out), *flags, *more],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
    )  # fmt: skip


@pytest.mark.parametrize("restarts", [0, 1])
def test_torchrun_and_a_rank_that_is_killed(restarts: int, alone: jostle.Run, tmp_path: Path) -> None:
    task, out = tmp_path / "task.py", tmp_path / "run"
    task.write_text(TASK)
    process = torchrun(2, task, out, restarts=restarts)
    await_checkpoints(out, 2)
    # The workers are the children of the launcher.
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = {worker: Path(f"/proc/{worker}/environ").read_bytes().split(b"\0") for worker in children}
    os.kill(next(int(worker) for worker, variables in ranks.items() if b"RANK=1" in variables), signal.SIGKILL)
    said, _ = process.communicate(timeout=300)
    if restarts:  # it goes on by itself
        assert process.returncode == 0, said
        assert_same(out, alone)
        return
    assert process.returncode != 0
    assert re.search(r"Root Cause.*rank +: 1 .*exitcode +: -9", said, re.DOTALL)
    _, last = re.findall("^jostle: .*", said, re.MULTILINE)
    assert re.fullmatch(
        r"jostle: rank 0: stopped with \d+ of 5 × 12 draws; the same command, or jostle resume .*", last
    )
    assert 0 < len(list(out.glob("state/*.safetensors"))) < 5
    sample(out)
    assert_same(out, alone)


def test_rank_zero_calibrates_for_all(tmp_path: Path) -> None:
    task, out = tmp_path / "task.py", tmp_path / "run"
    task.write_text(TASK)
    process = torchrun(2, task, out, "--auto")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert len(re.findall(r"^jostle: localization 100: given", said, re.MULTILINE)) == 1
    assert jostle.load(out).config["chains"] == 5
    assert examine(out) == []


def test_bad_input_is_said_once(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(TASK)
    process = torchrun(2, task, tmp_path / "run", "--sampler=sgldd")
    said, _ = process.communicate(timeout=300)
    assert len(re.findall(r"^jostle: rank \d: sampler: got 'sgldd'", said, re.MULTILINE)) == 1
    assert not (tmp_path / "run").exists()

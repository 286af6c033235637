"""Traces in an object store: a real server of S3's interface, on this machine, that may go away; and no secrets."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from moto.server import ThreadedMotoServer

import jostle
import jostle.chains.chain
from conftest import Says
from jostle.errors import StorageError
from jostle.runs.integrity import examine
from jostle.traces.store import Traces
from jostle.traces.stores import check_url, reaching
from test_commands import SMALL, jostle_command
from test_survival import TASK, X, Y, losses, sample

KEY, SECRET = "AKIAIOSFODNN7TESTING", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYTESTING"


class Server:
    """A server on a port of its own, with a bucket that outlives it."""

    def __init__(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        self.port = self._server.get_host_and_port()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/bucket", method="PUT"))

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()

    @property
    def files(self) -> Any:
        return fsspec.filesystem("s3", use_listings_cache=False)

    def objects(self, prefix: str) -> dict[str, bytes]:
        return {name: self.files.cat_file(name) for name in self.files.find(f"bucket/{prefix}")}

    def put(self, name: str, content: bytes) -> None:
        self.files.pipe_file(f"bucket/{name}", content)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    patch, server = pytest.MonkeyPatch(), Server()
    for name, value in {
        "AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1",
    }.items():  # fmt: skip
        patch.setenv(name, value)
    yield server
    server.stop()
    patch.undo()


def test_a_run_whose_traces_are_elsewhere(server: Server, tmp_path: Path, says: Says) -> None:
    one = {"chains_at_once": 1, "observation_batch_size": 1}
    run = sample(tmp_path / "run", **one, traces="s3://bucket/a/", keep_weights=True)
    assert run.manifest["traces"] == run.traces.place == "s3://bucket/a"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock", "center.safetensors", "config.yaml", "manifest.json", "state"]  # fmt: skip
    assert any(name.startswith("bucket/a/train/losses/c/") for name in server.objects("a"))
    np.testing.assert_array_equal(jostle.load(tmp_path / "run").influence().values, sample(**one).influence().values)
    assert jostle_command("check", tmp_path / "run").stdout == f"{tmp_path / 'run'}: whole\n"
    more: dict[str, Any] = {"draws": 9, "chains": 3, "query": (X[:5], Y[:5])}
    extended = sample(tmp_path / "run", **one, **more)  # follows the manifest
    for name in ("train", "query"):
        np.testing.assert_array_equal(losses(extended, name), losses(sample(**one, **more), name))
    assert examine(tmp_path / "run") == []
    with pytest.raises(
        jostle.InputError, match=r"^traces: got s3://bucket/b for .*, whose traces are in s3://bucket/a"
    ) as caught:
        sample(tmp_path / "run", **one, **more, traces="s3://bucket/b")
    says("other traces than the run's", str(caught.value), 2)
    with pytest.raises(jostle.InputError, match=r"^traces: got s3://bucket/a, which holds something already") as caught:
        sample(tmp_path / "other", traces="s3://bucket/a")
    says("traces where others are", str(caught.value), 2)
    assert not (tmp_path / "other").exists()
    with pytest.raises(
        StorageError, match=r"^traces: got FileNotFoundError \(The specified bucket does not exist\) from"
    ):
        sample(tmp_path / "other", traces="s3://nowhere/a")


KILLED = """
    import os, sys, pathlib, jostle, test_survival as t
    observe, count = jostle.chains.chain.Dynamics.observe, 0
    def killed(self, group, *others):
        global count
        count += 1
        if count == 8:
            os.kill(os.getpid(), 9)
        return observe(self, group, *others)
    jostle.chains.chain.Dynamics.observe = killed
    t.sample(pathlib.Path(sys.argv[1]), traces="s3://bucket/killed", chains_at_once=1, checkpoint_seconds=0.0)
"""


def test_a_place_with_something_else_is_not_free(server: Server, tmp_path: Path) -> None:
    server.put("mine/precious.bin", b"1")
    with pytest.raises(jostle.InputError, match=r"^traces: got s3://bucket/mine, which holds something already"):
        sample(tmp_path / "run", traces="s3://bucket/mine")
    assert server.objects("mine") == {"bucket/mine/precious.bin": b"1"}


def test_killed(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == -9, done.stderr
    assert [finding.kind for finding in examine(tmp_path)] == ["unfinished"]
    np.testing.assert_array_equal(losses(sample(tmp_path, chains_at_once=1)), losses(sample(chains_at_once=1)))
    assert examine(tmp_path) == []


def test_a_layout_that_was_cut_off(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*arguments: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Traces, "record_center", cut)
        with pytest.raises(StorageError):
            sample(tmp_path, traces="s3://bucket/cut")
    assert server.objects("cut")
    np.testing.assert_array_equal(losses(sample(tmp_path, traces="s3://bucket/cut")), losses(sample()))
    assert examine(tmp_path) == []


def test_damage_is_named(server: Server, tmp_path: Path, says: Says) -> None:
    sample(tmp_path, traces="s3://bucket/damaged")
    chunk = "damaged/train/losses/c/1/0/0"
    whole = server.objects("damaged")[f"bucket/{chunk}"]
    server.put(chunk, bytes([whole[0] ^ 1]) + whole[1:])
    result = jostle_command("check", tmp_path)
    assert result.exit_code == 4
    assert "damaged: traces: got damaged chunks train/losses/c/1/0/0," in result.stdout
    with pytest.raises(jostle.InputError, match=r"a damaged chunk, train/losses/c/1/0/0, expected"):
        jostle.load(tmp_path).influence()
    server.put(chunk, whole)
    server.put("damaged/zarr.json", b"{")
    result = jostle_command("check", tmp_path)
    assert (result.exit_code, "nothing readable at s3://bucket/damaged" in result.stdout) == (4, True)
    says("a run with damage: traces elsewhere", result.stdout.splitlines()[0], result.exit_code)


def test_a_server_that_goes_away(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    command = ["run", tmp_path / "run", "--task", f"{tmp_path / 'mine.py'}:build", *SMALL]
    there = [*command, "--traces", "s3://bucket/away"]
    plan = jostle_command(*there, "--dry-run").stdout
    assert "960 bytes for traces in s3://bucket/away, 32 bytes for the state" in plan
    observe, count = jostle.chains.chain.Dynamics.observe, 0

    def going_away(self: Any, group: Any, *others: Any) -> Any:
        nonlocal count
        count += 1
        if count == 5:
            server.stop()
        return observe(self, group, *others)

    monkeypatch.setattr(jostle.chains.chain.Dynamics, "observe", going_away)
    result = jostle_command(*there)
    said = result.stderr.splitlines()[-1].replace(str(server.port), "PORT")
    assert result.exit_code == 74
    assert re.match(
        r"jostle: traces: got \w+ \(Could not connect .*\) from s3://bucket/away; what was recorded is kept", said
    )
    says("a store that goes away amid a run", said, 74)
    for other in (
        ["check", tmp_path / "run"],
        ["resume", tmp_path / "run"],
        [*there[:1], tmp_path / "new", *there[2:]],
    ):
        result = jostle_command(*other)
        assert result.exit_code == 74
        assert result.stderr.splitlines()[-1].startswith("jostle: traces: got EndpointConnectionError (Could not conn")
    assert not (tmp_path / "new").exists()
    server.start()
    assert jostle_command("resume", tmp_path / "run").exit_code == 0
    assert jostle_command("check", tmp_path / "run").exit_code == 0
    assert jostle_command("top", tmp_path / "run", "--json").exit_code == 0
    assert jostle_command("run", tmp_path / "here", *command[2:]).exit_code == 0
    ours, theirs = jostle.load(tmp_path / "run"), jostle.load(tmp_path / "here")
    np.testing.assert_array_equal(losses(ours), losses(theirs))
    assert ours.config == theirs.config


# --- secrets ---


def test_no_secret_reaches_a_run_or_a_log(server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="jostle")
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "runs").mkdir()
    command = ["--task", f"{tmp_path / 'mine.py'}:build", *SMALL, "--traces"]
    said = []
    for number, url in enumerate(("s3://bucket/secret", f"s3://{KEY}:{SECRET}@bucket/secret", f"s3://bucket/x?key={SECRET}", f"::s3://{KEY}:{SECRET.replace('/', '')}@b/x")):  # fmt: skip
        result = jostle_command("run", tmp_path / "runs" / str(number), *command, url)
        said.append(result.stdout + result.stderr)
        assert result.exit_code == (2 if number else 0), result.stderr
    assert "credentials belong into the environment" in said[1]
    with pytest.raises(StorageError, match=r"no answer from http://host/x again") as caught, reaching("s3://bucket/x"):
        raise OSError(f"no answer from http://{KEY}:{SECRET.replace('/', '')}@host/x?X-Amz-Signature={SECRET} again")
    said += [str(caught.value), caplog.text]
    said += [path.read_bytes().decode(errors="replace") for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    said += [content.decode(errors="replace") for content in server.objects("secret").values()]
    assert len(said) > 12
    for text in said:
        assert not any(secret in text for secret in (KEY, SECRET, SECRET.replace("/", "")))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("bucket/prefix", r"got bucket/prefix, expected a URL such as s3://"),
        ("s3://", r"got s3://, expected a URL such as s3://"),
        ("s3://bucket", r"got s3://bucket, expected a URL such as s3://"),
        ("file:///tmp/traces", r"got a file URL, .*; a local run is all in its directory"),
        ("simplecache::s3://bucket/x", r"got simplecache::s3://bucket/x, expected a URL such as s3://"),
    ],
)
def test_places_that_are_none(url: str, message: str) -> None:
    with pytest.raises(jostle.InputError, match=r"^traces: " + message):
        check_url(url)


def test_stores_that_need_a_package(tmp_path: Path, says: Says) -> None:
    for url, reason in (("gs://bucket/x", "gcsfs"), ("nonsense://bucket/x", "Protocol not known")):
        with pytest.raises(jostle.InputError, match=reason) as caught:
            sample(tmp_path / "run", traces=url)
    says("a store of no known kind", str(caught.value), 2)
    assert not (tmp_path / "run").exists()
    with pytest.raises(jostle.InputError, match="keep='covariance', which keeps none"):
        sample(tmp_path / "run", keep="covariance", traces="s3://bucket/x")

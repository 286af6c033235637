"""Files that are replaced whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import jostle
from jostle.evaluate import Bank, random_subsets
from jostle.files import replace_file, replacing
from jostle.traces.tensor_files import write_tensors


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_others_may_read_what_they_may_read_of_new_files(mask: int, mode: int, tmp_path: Path) -> None:
    """Of safetensors as of others: it would keep its files to their owner."""
    before = os.umask(mask)
    try:
        replace_file(tmp_path / "plain.json", "{}")
        write_tensors(tmp_path / "state.safetensors", {"weights": torch.ones(2)}, {})
        jostle.Scores(values=np.eye(2), method="own").save(tmp_path / "scores.safetensors")
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == dict.fromkeys(
        ["plain.json", "state.safetensors", "scores.safetensors"], mode
    )


def test_what_fails_halfway_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "scores.safetensors"
    jostle.Scores(values=np.eye(2), method="old").save(path)

    def half() -> None:
        with replacing(path) as temporary:
            temporary.write_bytes(b"half")
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        half()
    with pytest.raises(TypeError):
        jostle.Scores(values=np.eye(3), method="odd", provenance={"what": object()}).save(path)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    assert jostle.Scores.load(path).method == "old"
    jostle.Scores(values=np.eye(3), method="new").save(path)
    assert jostle.Scores.load(path).shape == (3, 3)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_nobody_elses_file_is_written_over(tmp_path: Path) -> None:
    """Not a user's own beside it, nor what another process is writing."""
    (tmp_path / "scores.partial").write_text("mine")
    with replacing(tmp_path / "scores.json") as one, replacing(tmp_path / "scores.json") as other:
        one.write_text("one")
        other.write_text("the other")
    assert (tmp_path / "scores.json").read_text() == "one"  # which was done last
    assert (tmp_path / "scores.partial").read_text() == "mine"
    assert len([*tmp_path.iterdir()]) == 2


def test_what_is_replaced_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[str, bytes] = {}

    def noting(number: int) -> None:
        path = Path(os.path.realpath(f"/proc/self/fd/{number}"))
        synced[str(path)] = path.read_bytes() if path.is_file() else b""

    monkeypatch.setattr(os, "fsync", noting)
    scores = jostle.Scores(values=np.eye(2), method="own")
    bank = Bank.create(tmp_path / "bank", random_subsets(10, 2), queries=2, fingerprints={})
    bank.store(0, 0, {"loss": np.array([1.0, 2.0])})
    bank.fail(1, 0, "no memory")
    for name in ("scores.safetensors", "scores.npy", "scores.csv", "scores.parquet"):
        scores.export(tmp_path / name)
    there = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(there) == 8
    assert {path.read_bytes() for path in there} <= {*synced.values()}  # under other names, as of then
    assert {str(path.parent) for path in there} | {str(tmp_path)} <= synced.keys()

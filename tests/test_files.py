"""Files that are replaced whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import jostle
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
    assert jostle.Scores.load(path).method == "old"
    jostle.Scores(values=np.eye(3), method="new").save(path)
    assert jostle.Scores.load(path).shape == (3, 3)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]

"""Tensors in files, with checksums."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from jostle.errors import InputError
from jostle.files import replacing


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: dict[str, Any]) -> None:
    """Write a safetensors file, with checksums, so that a crash leaves the old one or the new one."""
    contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    sums = {name: _checksum(value) for name, value in contiguous.items()}
    metadata = {"jostle": json.dumps(about), "crc32c": json.dumps(sums)}
    with replacing(path) as temporary:
        safetensors.torch.save_file(contiguous, temporary, metadata=metadata)


def read_metadata(path: Path) -> dict[str, Any]:
    """Return what `write_tensors` was told about its tensors."""
    return _read_tensors(path, values=False)[1]


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_tensors` wrote; refuse what does not have its checksum."""
    return _read_tensors(path, values=True)


def _read_tensors(path: Path, *, values: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()} if values else {}  # noqa: SIM118
        about, sums = json.loads(metadata["jostle"]), json.loads(metadata["crc32c"])
        wrong = [name for name, value in tensors.items() if sums[name] != _checksum(value)]
        if wrong:
            raise ValueError(f"{wrong[0]} does not have its checksum")
        return tensors, about
    except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            "file",
            got=f"{path}, which is damaged ({str(error).partition(chr(10))[0]})",
            expected="it as Jostle wrote it",
            fix="delete it, and its chain begins again" if path.parent.name in ("state", "widening") else "",
        ) from error


def _checksum(tensor: Tensor) -> int:
    return google_crc32c.value(tensor.reshape(-1).view(torch.uint8).numpy())

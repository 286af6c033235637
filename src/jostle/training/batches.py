"""The batches of a training, kept with its record: neither its data set nor its collate function is needed then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from jaxtyping import Int
from torch import Tensor

from jostle.data.datasets import map_tensors
from jostle.errors import InputError
from jostle.files import replacing
from jostle.losses import Batch, RightPadded
from jostle.training.repeatable import Microbatch, Repeatable

Key = tuple[int, ...]
"""The examples of a batch, in their order."""

SMALL = ":small"
"""Ends the name of whole numbers that are kept in four bytes in place of eight."""


@dataclass(frozen=True)
class Batches:
    """The batches that a training saw, by their examples.

    Attributes:
        count: how many examples there are.
        known_as: the hash of the data set that they came from.
    """

    count: int
    known_as: str
    _by_examples: dict[Key, Batch]

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Sequence[int] | Int[np.ndarray, " sample"]) -> Batch:
        """Return the batch of these examples, which has to be one of the training's."""
        try:
            return self._by_examples[_key(indices)]
        except KeyError:
            raise InputError(
                "data", got=f"examples {[*indices][:6]}", expected="a batch that the training saw"
            ) from None

    def fingerprint(self) -> str:
        """Return the hash of the data set that they came from."""
        return self.known_as

    def tokens(self) -> list[list[int]]:
        """Return the tokens of each example, as its first batch has them; none where no batch had it."""
        found: list[list[int]] = [[] for _ in range(self.count)]
        for examples, batch in self._by_examples.items():
            mask = batch.get("attention_mask")
            for row, example in enumerate(examples):
                own = batch["input_ids"][row]
                found[example] = found[example] or (own if mask is None else own[mask[row] != 0]).tolist()
        return found


def _key(indices: Sequence[int] | Int[np.ndarray, " sample"]) -> Key:
    return tuple(int(index) for index in indices)


def are_tokens(training: Repeatable) -> bool:
    """Whether batches are of whole numbers alone, under names: as those of a language model, which take little room."""
    first = training.data.batch(training.steps[0][0].examples)
    return isinstance(first, dict) and "input_ids" in first and not any(
        value.is_floating_point() if isinstance(value, Tensor) else True for value in first.values()
    )  # fmt: skip


def save_batches(training: Repeatable, path: Path) -> None:
    """Write each batch of a training once."""
    tensors: dict[str, Tensor] = {}
    known: dict[Key, str | None] = {}
    for part in (part for step in training.steps for part in step):
        key = _key(part.examples)
        if key in known:
            if known[key] != part.digest:
                raise _drawn(part)
            continue
        batch = training.data.batch(part.examples)
        known[key] = part.digest
        if not (isinstance(batch, dict) and all(isinstance(value, Tensor) for value in batch.values())):
            raise InputError(
                "batches", got=f"a batch that is a {type(batch).__name__}", expected="a dict of tensors",
                fix="save(path, batches=False), and give the data to load_record",
            )  # fmt: skip
        number = len(known) - 1
        tensors[f"{number}/"] = torch.tensor([*key, int(isinstance(batch, RightPadded))])
        tensors |= dict(_small(f"{number}/{name}", value.cpu()) for name, value in batch.items())
    with replacing(path) as temporary:
        safetensors.torch.save_file(tensors, temporary)


def load_batches(path: Path, count: int, known_as: str, device: torch.device) -> Batches:
    """Read what `save_batches` wrote."""
    rows: dict[int, dict[str, Tensor]] = {}
    for name, value in safetensors.torch.load_file(path).items():
        number, _, field = name.partition("/")
        small = field.endswith(SMALL)
        rows.setdefault(int(number), {})[field.removesuffix(SMALL)] = value.long() if small else value
    found: dict[Key, Batch] = {}
    for row in (rows[number] for number in sorted(rows)):
        *key, padded = row.pop("").tolist()
        batch: Any = map_tensors(row, lambda value: value.to(device))
        found[tuple(key)] = RightPadded(batch) if padded else batch
    return Batches(count, known_as, found)


def _small(name: str, value: Tensor) -> tuple[str, Tensor]:
    """Whole numbers in four bytes, where they fit."""
    if value.dtype == torch.int64 and bool((value.abs() < 2**31).all()):
        return name + SMALL, value.int()
    return name, value.contiguous()


def _drawn(part: Microbatch) -> InputError:
    return InputError(
        "batches",
        got=f"different batches of the same examples {part.examples[:6].tolist()}",
        expected="batches without chance",
        fix="save(path, batches=False)",
    )

"""Data sets as users have them, read as batches by index."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from jostle.errors import InputError
from jostle.losses import IGNORED_LABEL, Batch

Collate = Callable[[list[Any]], Batch]

PADDING = {"labels": IGNORED_LABEL}
"""What each field of a token sequence is padded with, where that is not 0."""

FINGERPRINTED_SAMPLES = 16_384
"""A fingerprint reads at most this many samples, evenly spaced, besides the length."""

KEPT_IN_MEMORY = 2 << 30
"""Samples are read once and kept when they are estimated to take fewer bytes than this."""


class Data:
    """A data set that gives batches by index, on the model's device.

    Takes what people have: a tensor or array, a tuple or mapping of them (one row a sample), or anything with
    ``len`` and integer indexing (a `torch.utils.data.Dataset`, a Hugging Face data set, a list). Samples that
    fit in memory are read once, so a random augmentation is frozen: an observation has to be repeatable.
    """

    def __init__(
        self, source: Any, name: str, *, collate: Collate | None = None, device: torch.device | None = None
    ) -> None:
        self.name = name
        self._whole: Batch = None
        self._device = device
        self._collate = collate or collate_samples
        self._columns = None if collate else _as_columns(source)
        if self._columns is not None:
            self._length = _common_length(self._columns, name)
            self._columns = map_tensors(self._columns, lambda tensor: tensor.to(device))
        else:
            self._length = _length(source, name)
            self._samples = source
        if self._length == 0:
            raise InputError(name, got="an empty data set", expected="at least one example")
        if self._columns is None and _size_in_bytes(source[0]) * self._length <= KEPT_IN_MEMORY:
            self._samples = [source[index] for index in range(self._length)]

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Collate the samples at these indices."""
        if self._columns is not None:
            index = torch.as_tensor(np.asarray(indices), device=self._device)
            return map_tensors(self._columns, lambda tensor: tensor[index])
        try:
            batch = self._collate([self._samples[int(index)] for index in indices])
        except (TypeError, RuntimeError) as error:
            raise InputError(
                self.name,
                got=f"samples that do not collate into a batch ({str(error).splitlines()[0]})",
                expected="samples of tensors of equal shapes, or token sequences under 'input_ids'",
                fix="pass collate=your_function",
            ) from error
        return map_tensors(batch, lambda tensor: tensor.to(self._device))

    def whole(self) -> Batch:
        """Return every sample as one batch, made once."""
        if self._whole is None:
            self._whole = self.batch(range(self._length))
        return self._whole

    def fingerprint(self) -> str:
        """Return a hash of the contents, the same for the same samples however they are held."""
        digest = hashlib.sha256(f"{self._length}".encode())
        step = -(-self._length // FINGERPRINTED_SAMPLES)
        for index in range(0, self._length, step):
            if self._columns is not None:
                sample = map_tensors(self._columns, lambda tensor, index=index: tensor[index])
            else:
                sample = self._samples[index]
            _hash_into(digest, sample)
        return digest.hexdigest()[:16]


def collate_samples(samples: list[Any]) -> Batch:
    """Stack samples; token sequences of unequal lengths are padded on the right and their mask is added."""
    first = samples[0]
    if isinstance(first, Mapping) and "input_ids" in first:
        return _pad_sequences([{key: torch.as_tensor(value) for key, value in s.items()} for s in samples])
    return default_collate(samples)


def _pad_sequences(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    for sample in samples:
        sample.setdefault("attention_mask", torch.ones_like(sample["input_ids"]))
    batch = {}
    for key in samples[0]:
        rows = [sample[key] for sample in samples]
        if all(row.ndim == 1 and len(row) == len(s["input_ids"]) for row, s in zip(rows, samples, strict=True)):
            padded = rows[0].new_full((len(rows), longest), PADDING.get(key, 0))
            for row, values in zip(padded, rows, strict=True):
                row[: len(values)] = values
            batch[key] = padded
        else:
            batch[key] = torch.stack(rows)
    return batch


_AS_IT_IS = object()


def map_tensors(tree: Any, function: Callable[[Tensor], Any], otherwise: Any = _AS_IT_IS) -> Any:
    """Apply a function to every tensor of a batch; everything else stays as it is, or becomes ``otherwise``."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(value, function, otherwise) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        mapped = [map_tensors(value, function, otherwise) for value in tree]
        return type(tree)(*mapped) if hasattr(tree, "_fields") else type(tree)(mapped)
    return tree if otherwise is _AS_IT_IS else otherwise


def _as_columns(source: Any) -> Any:
    """The source as tensors whose rows are samples, or None where it is a sequence of samples."""
    if isinstance(source, TensorDataset):
        return source.tensors
    if isinstance(source, Tensor | np.ndarray):
        return torch.as_tensor(source)
    if isinstance(source, tuple) and source and all(isinstance(part, Tensor | np.ndarray) for part in source):
        return tuple(torch.as_tensor(part) for part in source)
    if isinstance(source, Mapping) and source:
        if all(isinstance(part, Tensor | np.ndarray) for part in source.values()):
            return {key: torch.as_tensor(part) for key, part in source.items()}
        raise InputError(
            "data set",
            got=f"a mapping with {sorted({type(part).__name__ for part in source.values()})} values",
            expected="a mapping of tensors, one row a sample",
            fix="convert the values to tensors, or pass a list of samples",
        )
    return None


def _common_length(columns: Any, name: str) -> int:
    lengths: list[int] = []
    map_tensors(columns, lambda tensor: lengths.append(len(tensor) if tensor.ndim else -1))
    if len(set(lengths)) != 1 or lengths[0] < 0:
        raise InputError(name, got=f"tensors of lengths {lengths}", expected="one row a sample in every tensor")
    return lengths[0]


def _length(source: Any, name: str) -> int:
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return len(source)
    raise InputError(
        name,
        got=f"a {type(source).__name__}",
        expected="tensors, or a data set with len() and integer indexing",
        fix="wrap an iterable in list(...)",
    )


def _size_in_bytes(sample: Any) -> int:
    sizes = [0]
    map_tensors(sample, lambda tensor: sizes.append(tensor.numel() * tensor.element_size()))
    return max(sum(sizes), 1024)


def _hash_into(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.view(torch.uint8) if value.dtype == torch.bfloat16 else value
        value = value.numpy()
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value):
            digest.update(str(key).encode())
            _hash_into(digest, value[key])
    elif isinstance(value, tuple | list):
        for part in value:
            _hash_into(digest, part)
    else:
        digest.update(repr(value).encode())


def fingerprint_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of named tensors: names, shapes, types and bytes."""
    digest = hashlib.sha256()
    _hash_into(digest, tensors)
    return digest.hexdigest()[:16]

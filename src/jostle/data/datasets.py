"""Data sets as users have them, read as batches by index."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from jostle.errors import InputError
from jostle.losses import IGNORED_LABEL, Batch, RightPadded

Collate = Callable[[list[Any]], Batch]

PADDING = {"labels": IGNORED_LABEL}
"""What each field of a token sequence is padded with, where that is not 0."""

MOST_FINGERPRINTED = 16_384
"""Of samples that are not kept in memory, a fingerprint reads at most this many, evenly spaced."""

KEPT_IN_MEMORY = 2 << 30
"""Samples are read once and kept when they are estimated to take fewer bytes than this."""


class Data:
    """A data set that gives batches by index, on the model's device.

    Takes what people have: a tensor or array, a tuple or mapping of them (one row a sample), or anything with
    ``len`` and integer indexing (a `torch.utils.data.Dataset`, a Hugging Face data set, a list). Samples that
    fit in memory are read once, so a random augmentation is frozen: an observation has to be repeatable. Token
    sequences that fit are padded once, and a batch is cut to its own longest sequence.

    Attributes:
        lengths: how many tokens each sequence has, where the data set is of token sequences and on the device.
    """

    def __init__(
        self, source: Any, name: str, *, collate: Collate | None = None, device: torch.device | None = None
    ) -> None:
        self.name = name
        self._device = device
        self._collate = collate or collate_samples
        self._whole: Batch = None
        self.lengths: np.ndarray | None = None
        columns = _as_columns(source)
        self._columns = None
        if columns is not None:
            self._length = _common_length(columns, name)
            if collate is None:
                self._columns = map_tensors(columns, lambda tensor: tensor.to(device))
            else:
                source = _Rows(columns, self._length)
        else:
            self._length = _length(source, name)
        if self._length == 0:
            raise InputError(name, got="an empty data set", expected="at least one example")
        self._kept = self._columns is not None
        if self._columns is None:
            self._samples = source
            if _size_in_bytes(_first_sample(source, name)) * self._length <= KEPT_IN_MEMORY:
                self._samples = [self._read(index) for index in range(self._length)]
                self._kept = True
                if collate is None:
                    self._lay_out_sequences()

    def _lay_out_sequences(self) -> None:
        """Pad token sequences once, for good, where they are plain and the padding is not most of it."""
        try:
            samples = _as_sequences(self._samples)
            if samples is None:
                return
            lengths = np.array([len(sample["input_ids"]) for sample in samples])
            if 8 * len(samples[0]) * len(lengths) * int(lengths.max()) > KEPT_IN_MEMORY:
                return
            columns = _pad_sequences(samples)
        except (TypeError, RuntimeError, ValueError, KeyError):
            return  # batches are collated one by one, and the one that fails is named
        if any(value.shape[:2] != columns["input_ids"].shape for value in columns.values()):
            return
        self.lengths = lengths
        self._columns = map_tensors(columns, lambda tensor: tensor.to(self._device))

    def __len__(self) -> int:
        return self._length

    def sample(self, index: int) -> Any:
        """Return one sample, as it was given."""
        if self._columns is None or self.lengths is not None:
            return self._samples[index]
        return map_tensors(self._columns, lambda tensor: tensor[index])

    @property
    def on_device(self) -> bool:
        """Whether `gather` works: every sample is a row of tensors on the device."""
        return self._columns is not None

    def longest(self, indices: Sequence[int] | np.ndarray) -> int | None:
        """Return how many tokens the longest of these sequences has; None where they are no sequences."""
        return None if self.lengths is None else int(self.lengths[np.asarray(indices)].max())

    def gather(self, rows: Tensor | slice, longest: int | None) -> Batch:
        """Return these rows as a batch, cut to so many tokens: work of the device alone, which a graph can record."""
        if longest is None:
            return map_tensors(self._columns, lambda tensor: tensor[rows])
        return map_tensors(self._columns, lambda tensor: tensor[:, :longest][rows])

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Collate the samples at these indices."""
        if self._columns is not None:
            longest = self.longest(indices)
            if isinstance(indices, range) and indices.step == 1:
                return self.gather(slice(indices.start, indices.stop), longest)  # a view, not a copy
            return self.gather(torch.as_tensor(np.asarray(indices), device=self._device), longest)
        samples = [self._read(int(index)) for index in indices]
        try:
            batch = self._collate(samples)
        except (TypeError, RuntimeError, ValueError) as error:
            raise InputError(
                self.name,
                got=f"samples that do not collate into a batch ({str(error).splitlines()[0]})",
                expected="samples of tensors of equal shapes, or token sequences under 'input_ids'",
                fix="pass collate=your_function",
            ) from error
        return map_tensors(batch, lambda tensor: tensor.to(self._device))

    def _read(self, index: int) -> Any:
        """One sample from where they are kept; an error of the user's own data set is named with its example."""
        try:
            return self._samples[index]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # files, networks and decoders fail in many ways
            reason = (str(error).splitlines() or [""])[0][:150]
            raise InputError(
                self.name,
                got=f"example {index}, which cannot be read ({type(error).__name__}: {reason})",
                expected="examples that can be read at any time",
                fix="mend it and do the same again: a run that had begun goes on from its last checkpoint",
            ) from error

    def part(self, chosen: range) -> Data:
        """Return consecutive samples as a data set of their own."""
        span = slice(chosen.start, chosen.stop)
        samples: Any = None if self._columns is not None and self.lengths is None else self._samples
        if samples is None:
            source = map_tensors(self._columns, lambda tensor: tensor[span])
        else:
            source = samples[span] if self._kept else Subset(samples, chosen)
        collate = None if self._collate is collate_samples else self._collate
        return Data(source, self.name, collate=collate, device=self._device)

    def whole(self) -> Batch:
        """Return every sample as one batch, made once."""
        if self._whole is None:
            self._whole = self.batch(range(self._length))
        return self._whole

    def spread(self, count: int) -> list[int]:
        """Return indices of some samples: evenly spaced, and the smallest and the largest where these are known."""
        chosen = set(np.linspace(0, self._length - 1, min(count, self._length)).astype(int).tolist())
        if self.lengths is not None:
            chosen |= {int(np.argmin(self.lengths)), int(np.argmax(self.lengths))}
        elif self._columns is None and self._kept:
            sizes = [_size_in_bytes(sample) for sample in self._samples]
            chosen |= {int(np.argmin(sizes)), int(np.argmax(sizes))}
        return sorted(chosen)

    def fingerprint(self) -> str:
        """Return a hash of the contents, as the model is given them."""
        digest = hashlib.sha256(f"{self._length}".encode())
        if self._columns is not None:
            _hash_into(digest, self._columns)
            return digest.hexdigest()[:16]
        step = 1 if self._kept else -(-self._length // MOST_FINGERPRINTED)
        indices = range(0, self._length, step)
        for start in range(0, len(indices), 256):
            _hash_into(digest, self.batch(list(indices[start : start + 256])))
        return digest.hexdigest()[:16]


class _Rows:
    """Columns seen as samples, for a collate function."""

    def __init__(self, columns: Any, length: int) -> None:
        self._columns, self._length = columns, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return map_tensors(self._columns, lambda tensor: tensor[index])


def collate_samples(samples: list[Any]) -> Batch:
    """Stack samples; token sequences of unequal lengths are padded on the right and their mask is added."""
    sequences = _as_sequences(samples)
    return default_collate(samples) if sequences is None else _pad_sequences(sequences)


def _as_sequences(samples: Sequence[Any]) -> list[dict[str, Tensor]] | None:
    """Samples as named vectors, or None where they are no token sequences."""
    first = samples[0]
    if isinstance(first, list) and first and isinstance(first[0], int):
        samples = [{"input_ids": tokens} for tokens in samples]
    if not (isinstance(samples[0], Mapping) and "input_ids" in samples[0]):
        return None
    return [{key: _one_row(value) for key, value in sample.items()} for sample in samples]


def _one_row(values: Any) -> Tensor:
    """A sequence as a vector; a tokenizer asked for tensors gives a batch of one."""
    tensor = torch.as_tensor(values)
    return tensor[0] if tensor.ndim == 2 and len(tensor) == 1 else tensor


def _pad_sequences(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    if any(len(sample["input_ids"]) == 0 for sample in samples):
        raise ValueError("a sequence without a token")
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
    # Padding of the user's own may stand anywhere; what was added here comes after every token.
    added = all(bool(sample["attention_mask"].all()) for sample in samples)
    return RightPadded(batch) if added else batch


def map_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply a function to every tensor of a batch, and leave everything else as it is."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        named = {key: map_tensors(value, function) for key, value in tree.items()}
        return RightPadded(named) if isinstance(tree, RightPadded) else named
    if isinstance(tree, tuple | list):
        mapped = [map_tensors(value, function) for value in tree]
        return type(tree)(*mapped) if hasattr(tree, "_fields") else type(tree)(mapped)
    return tree


def versions(tree: Any) -> dict[Tensor, int]:
    """Every tensor of a batch and its version, which each operation in place counts up."""
    found: dict[Tensor, int] = {}
    # Those made in inference mode have none.
    map_tensors(tree, lambda tensor: found.update({tensor: 0 if tensor.is_inference() else tensor._version}))
    return found


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
        fix="pass loader.dataset" if isinstance(source, DataLoader) else "make a list of its samples",
    )


def _first_sample(source: Any, name: str) -> Any:
    try:
        return source[0]
    except (KeyError, TypeError) as error:
        raise InputError(
            name,
            got=f"a {type(source).__name__} that cannot be indexed by number ({type(error).__name__})",
            expected="a data set whose samples are source[0], source[1], ...",
            fix="of a data frame, pass frame.to_dict('records')",
        ) from error


def _size_in_bytes(value: Any) -> int:
    """About how much memory a sample takes."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(_size_in_bytes(part) for part in value.values())
    if isinstance(value, tuple | list):
        numbers = len(value) > 0 and isinstance(value[0], int | float)
        return 32 * len(value) if numbers else sum(_size_in_bytes(part) for part in value)
    if hasattr(value, "tobytes"):  # an image
        return len(value.tobytes())
    return sys.getsizeof(value)


def _hash_into(digest: Any, value: Any) -> None:
    """Feed a batch to a hash; every part is led by its type and size, so that no two batches read the same."""
    if isinstance(value, Tensor | np.ndarray):
        tensor = torch.as_tensor(value).detach().cpu().contiguous()
        digest.update(f"tensor {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)};".encode())
        for key in sorted(value, key=str):
            _hash_into(digest, str(key))
            _hash_into(digest, value[key])
    elif isinstance(value, tuple | list):
        digest.update(f"sequence {len(value)};".encode())
        for part in value:
            _hash_into(digest, part)
    elif isinstance(value, str | bytes | int | float | bool | None):
        text = repr(value)
        digest.update(f"{type(value).__name__} {len(text)} {text};".encode())
    elif hasattr(value, "__dict__"):  # a batch of the user's own class
        digest.update(f"object {type(value).__qualname__};".encode())
        _hash_into(digest, vars(value))
    else:
        digest.update(f"opaque {type(value).__qualname__};".encode())


def fingerprint_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of named tensors: names, shapes, types and bytes."""
    digest = hashlib.sha256()
    _hash_into(digest, tensors)
    return digest.hexdigest()[:16]


def fingerprint_text(text: str) -> str:
    """Return a hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]

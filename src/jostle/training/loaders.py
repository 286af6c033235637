"""Loaders that say which examples are in the batch that they give."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Int
from torch.utils.data import DataLoader, TensorDataset, default_collate

from jostle.data.datasets import Collate
from jostle.errors import InputError
from jostle.losses import Batch


class Watched:
    """A loader that says which batch it gives, of which examples.

    Loaders read ahead, so the examples that their sampler drew last are not those of the batch that they give.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        given: Callable[[Int[np.ndarray, " sample"], Batch], None],
        began: Callable[[], None] = lambda: None,
    ) -> None:
        self._loader, self._given, self._began = loader, given, began
        self._base = innermost(loader)
        self._drawn: deque[Any] = deque()

    def __len__(self) -> int:
        return len(self._base)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """That of the loader: others ask whether it is one."""
        return type(self._base)

    def __iter__(self) -> Iterator[Batch]:
        base, sampler = self._base, self._base.batch_sampler
        self._drawn.clear()
        self._began()
        # PyTorch forbids to set it, for loaders that are read at the time.
        base.__dict__["batch_sampler"] = _Noted(sampler, self._drawn)
        try:
            for batch in self._loader:
                self._given(np.asarray(self._drawn.popleft()), batch)
                yield batch
        finally:
            base.__dict__["batch_sampler"] = sampler


class _Noted:
    """A batch sampler that says what it draws."""

    def __init__(self, sampler: Any, drawn: deque[Any]) -> None:
        self._sampler, self._drawn = sampler, drawn

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __iter__(self) -> Iterator[Any]:
        for indices in self._sampler:
            self._drawn.append(indices)
            yield indices


def innermost(loader: Any) -> DataLoader[Any]:
    """Return PyTorch's loader within others; refuse one that does not say which examples are in a batch."""
    while "base_dataloader" in getattr(loader, "__dict__", {}):
        loader = loader.base_dataloader
    if not isinstance(loader, DataLoader):
        raise InputError("loader", got=f"a {type(loader).__name__}", expected="a torch.utils.data.DataLoader")
    if loader.batch_sampler is None:
        streamed = not hasattr(loader.dataset, "__getitem__")
        raise InputError(
            "loader",
            got="a data set that is streamed" if streamed else "batch_size=None",
            expected="batches of examples that have numbers",
            fix="use a data set with len() and integer indexing, and a batch_size or batch_sampler",
        )
    if not getattr(loader, "in_order", True):
        raise InputError("loader", got="in_order=False", expected="batches in the order in which they were drawn")
    return loader


def source_of(loader: DataLoader[Any]) -> tuple[Any, Collate | None]:
    """Return the data set of a loader, and how it makes batches."""
    # What PyTorch collates of columns is their rows, which `Data` takes at once.
    plain = isinstance(loader.dataset, TensorDataset) and loader.collate_fn is default_collate
    return loader.dataset, None if plain else loader.collate_fn

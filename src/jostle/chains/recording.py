"""What becomes of the draws: traces on disk, or running sums of them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from jostle.chains.observing import Observer
from jostle.estimate import StreamingCovariance
from jostle.traces.store import Columns, Traces
from jostle.traces.tensor_files import read_tensors, write_tensors


class Recorder(Protocol):
    """What becomes of the draws."""

    @property
    def finished(self) -> list[int]:
        """The chains that need not be looked at again."""
        ...

    def record(self, chains: list[int], draw: int, values: dict[str, Float[Tensor, "chain column"]]) -> None:
        """Take in one draw of each of these chains."""
        ...

    def flush(self) -> None:
        """Make everything taken in safe from a crash, as far as this recorder writes by itself."""
        ...

    def unfinished(self, chain: int) -> dict[str, Tensor]:
        """Return what the chain's checkpoint has to hold for the recorder."""
        ...

    def restore(self, chain: int, state: dict[str, Tensor]) -> None:
        """Go on from `unfinished`."""
        ...

    def finish(self, chain: int) -> None:
        """The chain has all its draws."""
        ...

    def drop(self, chain: int) -> None:
        """The chain failed."""
        ...


class NoRecorder:
    """For a process that moves chains together with another, which records them."""

    @property
    def finished(self) -> list[int]:
        """None: a chain's own checkpoint says that it has reached its last draw."""
        return []

    def record(self, chains: list[int], draw: int, values: dict[str, Float[Tensor, "chain column"]]) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""

    def unfinished(self, chain: int) -> dict[str, Tensor]:
        """Return nothing."""
        return {}

    def restore(self, chain: int, state: dict[str, Tensor]) -> None:
        """Do nothing."""

    def finish(self, chain: int) -> None:
        """Do nothing."""

    def drop(self, chain: int) -> None:
        """Do nothing."""


class TraceRecorder(NoRecorder):
    """Writes draws to the trace store, many at a time and from another thread; until then they stay on the device.

    There is nothing to finish or to restore: draws are on disk, and estimates leave out the chains that failed.
    """

    def __init__(self, traces: Traces, *, first_column: int = 0, buffer_bytes: int = 64 << 20) -> None:
        self._traces, self._first_column = traces, first_column
        self._buffer_bytes, self._held = buffer_bytes, 0
        self._chains: list[int] = []
        self._first = 0
        self._pending: dict[str, list[Float[Tensor, "chain column"]]] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="jostle-traces")
        self._writing: Future[None] | None = None

    def record(self, chains: list[int], draw: int, values: dict[str, Float[Tensor, "chain column"]]) -> None:
        """Buffer one draw."""
        if chains != self._chains or self._held > self._buffer_bytes:
            self._write()
        if not self._pending:
            self._chains, self._first = list(chains), draw
        for name, value in values.items():
            self._pending.setdefault(name, []).append(value)
            self._held += value.numel() * value.element_size()

    def _write(self) -> None:
        """Hand what is buffered to the writer, once it is done with what it had."""
        self._wait()
        if self._pending:
            blocks = {name: torch.stack(draws, dim=1).cpu().numpy() for name, draws in self._pending.items()}
            self._writing = self._writer.submit(self._put, self._chains, self._first, blocks)
        self._pending = {}
        self._held = 0

    def _put(self, chains: list[int], first: int, blocks: dict[str, np.ndarray]) -> None:
        for name, block in blocks.items():
            self._traces.record(name, chains, first, block, self._first_column)

    def _wait(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()  # an error of the disk's is raised here

    def flush(self) -> None:
        """Write what is buffered, and see that it is on the disk before a checkpoint counts it."""
        self._write()
        self._wait()
        self._traces.sync()


class CovarianceRecorder:
    """Keeps running sums instead of traces; per-token losses are averaged over their sequence first."""

    def __init__(self, path: Path, observers: Mapping[str, Observer], draws: int) -> None:
        self._path, self._draws = path, draws
        self._columns = {name: observer.columns for name, observer in observers.items()}
        centers = [
            sequence_means(observers[name].center_losses, self._columns[name]).cpu() for name in ("train", "query")
        ]
        self._stream = StreamingCovariance(*centers)
        self._finished: list[int] = []
        self._temperatures: dict[int, list[Tensor]] = {}
        if path.exists():
            self._stream.sums, self._finished = load_sums(path)

    @property
    def finished(self) -> list[int]:
        """The chains that are in the sums."""
        return self._finished

    def record(self, chains: list[int], draw: int, values: dict[str, Float[Tensor, "chain column"]]) -> None:
        """Add one draw to each chain's sums."""
        for row, chain in enumerate(chains):
            if "temperature" in values:
                self._temperatures.setdefault(chain, []).append(values["temperature"][row].double().cpu())
            train, query = (sequence_means(values[name][row].cpu(), self._columns[name]) for name in ("train", "query"))
            self._stream.update(chain, train, query)

    def flush(self) -> None:
        """Do nothing: a chain's sums are in its checkpoint, the total is written when a chain ends."""

    def unfinished(self, chain: int) -> dict[str, Tensor]:
        """Return the chain's sums, and its temperatures."""
        temperatures = self._temperatures.get(chain)
        return self._stream.unfinished(chain) | ({"temperature": torch.cat(temperatures)} if temperatures else {})

    def restore(self, chain: int, state: dict[str, Tensor]) -> None:
        """Take the chain's sums back, and its temperatures."""
        sums = dict(state)
        if "temperature" in sums:
            self._temperatures[chain] = [sums.pop("temperature")]
        self._stream.restore(chain, sums)

    def finish(self, chain: int) -> None:
        """Add the chain to the total, and write that."""
        self._stream.finish(chain)
        if (temperatures := self._temperatures.pop(chain, None)) is not None:
            whole = torch.cat(temperatures)[None]
            known = self._stream.sums.get("temperature", whole[:0])
            self._stream.sums["temperature"] = torch.cat([known, whole])
        self._finished = [*self._finished, chain]
        recorded, expected = int(self._stream.sums["draws"]), self._draws * len(self._finished)
        if recorded != expected:
            raise RuntimeError(f"{recorded} draws in the sums of {len(self._finished)} chains, not {expected}")
        write_tensors(self._path, self._stream.sums, {"finished": self._finished})

    def drop(self, chain: int) -> None:
        """Forget the chain."""
        self._temperatures.pop(chain, None)
        self._stream.drop(chain)


def load_sums(path: Path) -> tuple[dict[str, Tensor], list[int]]:
    """Return the sums of a `CovarianceRecorder`, and which chains are in them."""
    tensors, about = read_tensors(path)
    return tensors, about["finished"]


def sequence_means(losses: Float[Tensor, " column"], columns: Columns) -> Float[Tensor, " sample"]:
    """Return one loss a sample; a sequence's is the mean of its tokens'."""
    if columns.offsets is None:
        return losses
    lengths = torch.from_numpy(np.diff(columns.offsets)).to(losses.device)
    return torch.segment_reduce(losses, "mean", lengths=lengths)

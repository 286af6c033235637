"""The trace store: every observed loss at every draw. Format, writer and reader together, since they change together.

``traces.zarr`` is a Zarr 3 group with one subgroup for each observed set (``train``, ``query``); elsewhere than in a
run's directory, it may have any other name:

===================  ====================================================================================
``losses``           (chain, draw, sample), or (chain, draw, token) where losses are per token
``center_losses``    (sample) or (token): the losses at w*
``offsets``          per token only: sample i owns tokens ``offsets[i]:offsets[i + 1]`` of the flat axis
``sample``           per token only, (token): which sample a token belongs to
``position``         per token only, (token): its place in that sample's sequence
===================  ====================================================================================

and a subgroup ``observables`` with one (chain, draw, component) array for each φ. Where they are kept, ``weights``
(chain, draw, weight) are the moving weights of every draw; and ``temperature`` (chain, draw, 1), where it was measured.
Dimensions are named, so ``xarray.open_zarr(path, group="train")`` opens it as it is. Chunks carry a checksum; a draw
that was not recorded is NaN.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import zarr
import zarr.codecs
import zarr.errors
from jaxtyping import Float, Int
from zarr.core.sync import sync

from jostle.errors import InputError
from jostle.files import to_disk
from jostle.traces.stores import Place, occupied, options, reaching, require_reachable

if TYPE_CHECKING:
    import xarray

FORMAT = 1
CHUNK_BYTES = 8 << 20
Part = Literal["odd", "even"]

HELD_BYTES = 128 << 20
"""Sequences' losses are held in memory where they take no more than this at all draws; reading them takes as much."""

STRANDS, STRAND_BYTES = 16, 512 << 20
"""Of a sequence, and what those of all sequences may take in memory."""

FEW_MOVES = 2_048
"""How many strands there may be in all, where draws are more: the time that finding how they move takes grows with the
third power of whichever are fewer."""


@dataclass(frozen=True)
class Columns:
    """What the last axis of a trace holds: one column a sample, or one a token with offsets that say whose."""

    samples: int
    offsets: Int[np.ndarray, " samples+1"] | None = None
    positions: Int[np.ndarray, " tokens"] | None = None

    @property
    def total(self) -> int:
        """The number of columns."""
        return self.samples if self.offsets is None else int(self.offsets[-1])

    @property
    def per_token(self) -> bool:
        """Whether a column is a token."""
        return self.offsets is not None

    def first(self, samples: int) -> Columns:
        """Return those of the first so many samples."""
        if self.offsets is None or self.positions is None:
            return Columns(samples)
        return Columns(samples, self.offsets[: samples + 1], self.positions[: self.offsets[samples]])

    def owner(self, column: int) -> int:
        """Return whose column it is."""
        return column if self.offsets is None else int(np.searchsorted(self.offsets, column, side="right")) - 1

    def positions_of(self, sample: int) -> list[int]:
        """Return where in its sequence each scored token of a sample stands."""
        return [] if self.positions is None else self.positions[self.of(sample)].tolist()

    def of(self, sample: int) -> slice:
        """Return the columns of one sample."""
        if self.offsets is None:
            return slice(sample, sample + 1)
        return slice(int(self.offsets[sample]), int(self.offsets[sample + 1]))


class Traces:
    """The traces of one run, in a directory or elsewhere.

    Attributes:
        place: where.
        sets: the observed sets.
        observables: the names of the other observables.
        keeps_weights: whether the weights of every draw are there.
        keeps_temperature: whether the temperature at every draw is.
    """

    def __init__(self, place: Place, *, writable: bool = False) -> None:
        self.place = place
        self._written: set[Path] = set()
        try:
            self._root = zarr.open_group(place, mode="r+" if writable else "r", zarr_format=3, **options(place))
            self.sets = tuple(name for name in ("train", "query") if name in self._root)
            self.keeps_weights = "weights" in self._root
            self.keeps_temperature = "temperature" in self._root
            self.observables: tuple[str, ...] = ()
            if "observables" in self._root:
                self.observables = tuple(sorted(cast(zarr.Group, self._root["observables"]).array_keys()))
        except Exception as error:  # damaged metadata fails in many ways
            require_reachable(place)
            raise InputError(
                "traces", got=f"nothing readable at {place}", expected="a traces.zarr made by Jostle"
            ) from error
        if self._root.attrs.get("format") != FORMAT:
            raise InputError(
                "traces",
                got=f"format {self._root.attrs.get('format')} at {place}",
                expected=f"format {FORMAT}",
                fix="read it with the version of Jostle that wrote it",
            )

    @classmethod
    def create(
        cls,
        place: Place,
        *,
        chains: int,
        steps: Sequence[int],
        dtype: np.dtype,
        sets: Mapping[str, Columns],
        observables: Mapping[str, int],
        weights: tuple[int, np.dtype] | None = None,
        temperature: bool = False,
        overwrite: bool = False,
    ) -> Traces:
        """Lay out an empty store: draw t of every chain will be observed at ``steps[t]``.

        ``weights`` says how many weights of every draw are kept, and in which precision; ``temperature``, whether its
        temperature is.
        """
        with reaching(place):
            about = {"format": FORMAT}
            try:
                root = zarr.create_group(place, zarr_format=3, attributes=about, overwrite=overwrite, **options(place))
            except zarr.errors.ContainsGroupError as error:
                raise occupied(place) from error
            for name, columns in sets.items():
                group = root.create_group(name)
                axis = "token" if columns.per_token else "sample"
                coordinates = {"chain": np.arange(chains), "step": np.asarray(steps)}
                _create(group, "chain", coordinates["chain"], ("chain",))
                _create(group, "step", coordinates["step"], ("draw",))
                extra = ["step"]
                if columns.offsets is not None:
                    assert columns.positions is not None
                    owner = np.repeat(np.arange(columns.samples), np.diff(columns.offsets))
                    _create(group, "offsets", columns.offsets, ("boundary",))
                    _create(group, "sample", owner, ("token",))
                    _create(group, "position", columns.positions, ("token",))
                    extra += ["sample", "position"]
                empty = np.full(columns.total, np.nan, dtype)
                _create(group, "center_losses", empty, (axis,))
                _create_trace(group, "losses", (chains, len(steps), columns.total), dtype, axis, extra)
            if observables:
                group = root.create_group("observables")
                for name, size in observables.items():
                    _create_trace(group, name, (chains, len(steps), size), dtype, name, [])
            if weights is not None:
                _create_trace(root, "weights", (chains, len(steps), weights[0]), weights[1], "weight", [])
            if temperature:
                _create_trace(root, "temperature", (chains, len(steps), 1), dtype, "temperature", [])
        return cls(place, writable=True)

    def columns(self, name: str) -> Columns:
        """Return what the columns of a set are."""
        group = cast(zarr.Group, self._root[name])
        if "offsets" not in group:
            return Columns(self.losses(name).shape[2])
        offsets, positions = self._read(f"{name}/offsets"), self._read(f"{name}/position")
        return Columns(len(offsets) - 1, offsets, positions)

    @property
    def arrays(self) -> list[str]:
        """Where the traces are, (chain, draw, column) each: losses of every set, every observable, and the rest."""
        traces = [f"{name}/losses" for name in self.sets] + [f"observables/{name}" for name in self.observables]
        return traces + ["weights"] * self.keeps_weights + ["temperature"] * self.keeps_temperature

    def losses(self, name: str) -> Trace:
        """Return the losses of a set, (chain, draw, column); read it by slicing."""
        return self.trace(f"{name}/losses")

    def sequence_losses(self, name: str, reduction: str = "mean") -> Trace | SequenceLosses:
        """Return the losses of a set with one number a sample, (chain, draw, sample), also where they are per token."""
        columns, losses = self.columns(name), self.losses(name)
        return SequenceLosses(losses, columns, reduction) if columns.per_token else losses

    def held_losses(self, name: str) -> Trace | Strands:
        """Return the losses of a set as they are held: those of samples, or of strands of tokens."""
        columns, losses = self.columns(name), self.losses(name)
        return Strands(losses, columns) if columns.per_token else losses

    def observable(self, name: str) -> Trace:
        """Return the values of another observable, (chain, draw, component)."""
        if name not in self.observables:
            raise InputError("observable", got=repr(name), expected=f"one of {list(self.observables)}")
        return self.trace(f"observables/{name}")

    def trace(self, path: str) -> Trace:
        """Return what is at one of `arrays`."""
        return Trace(self._array(path), self.place)

    def require_there(self) -> None:
        """Refuse to write where the store is gone: its directories would be made anew, without what was in them."""
        if not sync(self._root.store.exists("zarr.json")):
            raise FileNotFoundError(errno.ENOENT, "the directory is gone", str(self.place))

    def center_losses(self, name: str) -> Float[np.ndarray, " column"]:
        """Return the losses at w*."""
        return self._read(f"{name}/center_losses")

    def record_center(self, name: str, losses: Float[np.ndarray, " column"]) -> None:
        """Store the losses at w*."""
        with reaching(self.place):
            self._array(f"{name}/center_losses")[:] = losses
        self._sync_descriptions()

    def record(
        self,
        name: str,
        chains: Sequence[int],
        first_draw: int,
        values: Float[np.ndarray, "chain draw column"],
        first_column: int = 0,
    ) -> None:
        """Store consecutive draws of some chains; ``name`` is a set or, of the other `arrays`, the path."""
        draws = slice(first_draw, first_draw + values.shape[1])
        with reaching(self.place):
            self.require_there()
            array = self._array(f"{name}/losses" if name in self.sets else name)
            self._note_written(array, chains, draws, first_column)
            if list(chains) == list(range(chains[0], chains[-1] + 1)):
                array[chains[0] : chains[-1] + 1, draws, first_column:] = values
                return
            for chain, rows in zip(chains, values, strict=True):
                array[chain, draws, first_column:] = rows

    def _note_written(self, array: zarr.Array, chains: Sequence[int], draws: slice, first_column: int) -> None:
        """Remember which files a block of draws is in."""
        if isinstance(self.place, Path):
            rows = range(draws.start // array.chunks[1], (draws.stop - 1) // array.chunks[1] + 1)
            columns = range(first_column // array.chunks[2], -(-array.shape[2] // array.chunks[2]))
            place = self.place / array.path / "c"
            self._written |= {place / f"{c}/{r}/{k}" for c in chains for r in rows for k in columns}

    def sync(self) -> None:
        """See that what was recorded is on the disk, also after a power cut; a store elsewhere sees to it itself."""
        written, self._written = self._written, set()
        above = {folder for path in written for folder in path.parents if folder.is_relative_to(self.place)}
        for path in sorted(written | above):
            with contextlib.suppress(FileNotFoundError):  # a chunk without a number in it is not written
                to_disk(path)

    def _sync_descriptions(self) -> None:
        """See that everything but the draws is on the disk: what arrays there are, of which shape, and what of."""
        if isinstance(self.place, Path):
            draws = {str(self.place / path / "c") for path in self.arrays}
            for folder, within, files in os.walk(self.place):
                within[:] = [name for name in within if os.path.join(folder, name) not in draws]
                self._written |= {Path(folder, name) for name in files}
            self.sync()

    def extend(self, chains: int, steps: Sequence[int]) -> None:
        """Make room for so many chains in all, with draws at these steps in all; what is there stays."""
        with reaching(self.place):
            for path in self.arrays:
                array = self._array(path)
                if array.shape[:2] != (chains, len(steps)):
                    array.resize((chains, len(steps), array.shape[2]))
            for name in self.sets:
                self._replace(name, {"chain": np.arange(chains), "step": np.asarray(steps)})
        self._sync_descriptions()

    def widen(self, name: str, columns: Columns, center_losses: Float[np.ndarray, " column"]) -> None:
        """Make room for more samples of a set, after those that are there; what is there stays."""
        fields = {"center_losses": center_losses}
        if columns.offsets is not None:
            assert columns.positions is not None
            owner = np.repeat(np.arange(columns.samples), np.diff(columns.offsets))
            fields |= {"offsets": columns.offsets, "sample": owner, "position": columns.positions}
        with reaching(self.place):
            losses = self._array(f"{name}/losses")
            losses.resize((*losses.shape[:2], columns.total))
            self._replace(name, fields)
        self._sync_descriptions()

    def _replace(self, name: str, fields: Mapping[str, np.ndarray]) -> None:
        """Write what is known of a set's chains, draws and columns, which may be more of them than there were."""
        for field, values in fields.items():
            array = self._array(f"{name}/{field}")
            if array.shape != values.shape:
                array.resize(values.shape)
            array[:] = values

    def to_xarray(self, name: str) -> xarray.Dataset:
        """Return a set as (chain, draw, sample) or, per token, (chain, draw, sample, token) padded with NaN."""
        import xarray

        columns, losses = self.columns(name), np.asarray(self.losses(name)[:])
        coordinates = {"chain": np.arange(losses.shape[0]), "step": ("draw", self._read(f"{name}/step"))}
        if columns.offsets is None:
            return xarray.Dataset(
                {
                    "losses": (("chain", "draw", "sample"), losses),
                    "center_losses": ("sample", self.center_losses(name)),
                },
                coordinates,
            )
        assert columns.positions is not None
        owner = np.repeat(np.arange(columns.samples), np.diff(columns.offsets))
        width = int(columns.positions.max()) + 1
        padded = np.full((*losses.shape[:2], columns.samples, width), np.nan, losses.dtype)
        padded[:, :, owner, columns.positions] = losses
        center = np.full((columns.samples, width), np.nan, losses.dtype)
        center[owner, columns.positions] = self.center_losses(name)
        return xarray.Dataset(
            {
                "losses": (("chain", "draw", "sample", "token"), padded),
                "center_losses": (("sample", "token"), center),
            },
            coordinates,
        )

    def _array(self, path: str) -> zarr.Array:
        try:
            return cast(zarr.Array, self._root[path])
        except Exception as error:  # damaged metadata fails in many ways
            require_reachable(self.place)
            raise InputError("traces", got=f"no readable {path} in {self.place}", expected="a whole store") from error

    def _read(self, path: str) -> np.ndarray:
        return self.trace(path)[:]


class Trace:
    """An array of the store, read by slicing as NumPy's are; a chunk that is damaged is named."""

    def __init__(self, array: zarr.Array, place: Place) -> None:
        self._array, self._place = array, place
        self.shape, self.dtype, self.chunks = array.shape, array.dtype, array.chunks

    def __getitem__(self, index: Any) -> np.ndarray:
        try:
            return np.asarray(self._array[index])
        except IndexError:
            raise
        except Exception as error:  # checksums, decoders and disks fail in many ways
            damaged = self.damaged_chunks()
            if not damaged:
                raise
            raise InputError(
                "traces",
                got=f"a damaged chunk, {damaged[0]}" + (f", and {len(damaged) - 1} more" if len(damaged) > 1 else ""),
                expected="chunks with their checksums",
                fix="put it back from a copy, or sample again into another directory",
            ) from error

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)

    def missing_chunks(self, chains: Iterable[int]) -> list[str]:
        """Return the chunks of these chains that are not there; their draws would read as NaN."""
        with reaching(self._place):
            if self._array.nchunks_initialized == self._array.nchunks:
                return []
            store, chosen = self._array.store, set(chains)
            wanted = [chunk for chunk, region in self._regions() if region[0].start in chosen]
            return [chunk for chunk in wanted if not sync(store.exists(chunk))]

    def damaged_chunks(self) -> list[str]:
        """Return the chunks that cannot be read."""
        damaged = []
        for chunk, region in self._regions():
            try:
                self._array[region]
            except Exception:  # as above
                require_reachable(self._place)
                damaged.append(chunk)
        return damaged

    def _regions(self) -> Iterator[tuple[str, tuple[slice, ...]]]:
        """Every chunk's key in the store, and what it holds."""
        counts = [-(-size // chunk) for size, chunk in zip(self.shape, self.chunks, strict=True)]
        for place in np.ndindex(*counts):
            spans = zip(place, self.chunks, self.shape, strict=True)
            region = tuple(slice(at * size, min((at + 1) * size, end)) for at, size, end in spans)
            yield f"{self._array.path}/c/{'/'.join(map(str, place))}", region


class TokenSums:
    """Per-token losses added up in groups, seen as a trace: (chain, draw, group).

    A chunk of the store holds all tokens of a few draws, so that whoever asks for a few groups reads all of them: their
    numbers are read once and held, where they fit into ``held_bytes``.

    Args:
        tokens: the trace of the tokens.
        members: the tokens of all groups, one group after another.
        bounds: where in these each group begins, and the last one ends.
        divisors: what the sum of each group is divided by.
        held_bytes: what may be held in memory.
    """

    def __init__(
        self,
        tokens: Any,
        members: Int[np.ndarray, " token"],
        bounds: Int[np.ndarray, " bound"],
        divisors: Float[np.ndarray, " group"],
        held_bytes: int,
    ) -> None:
        self._tokens, self._members, self._bounds, self._divisors = tokens, members, bounds, divisors
        self._in_place = bool((np.diff(members) == 1).all())
        self.shape = (*tokens.shape[:2], len(divisors))
        self.dtype = tokens.dtype
        self._held_bytes = held_bytes
        self._holds = hasattr(tokens, "chunks") and math.prod(self.shape) * self.dtype.itemsize <= held_bytes
        self.read_per_column = 1 if self._holds else int(np.diff(bounds).max())
        """How many numbers are read for each one returned, at most."""

    def __getitem__(self, index: tuple[Any, Any, slice]) -> Float[np.ndarray, "chain draw group"]:
        return self._held[index] if self._holds else self._summed(*index)

    @functools.cached_property
    def _held(self) -> Float[np.ndarray, "chain draw group"]:
        held = np.empty(self.shape, self.dtype)
        draws = self._tokens.chunks[1]

        def read(place: tuple[int, int]) -> None:
            block = (slice(place[0], place[0] + 1), slice(place[1], place[1] + draws))
            held[block] = self._summed(*block, slice(None))

        chunks = itertools.product(range(self.shape[0]), range(0, self.shape[1], draws))
        chunk = draws * self._tokens.shape[2] * self.dtype.itemsize
        with ThreadPoolExecutor(
            max(1, min(os.cpu_count() or 1, self._held_bytes // (4 * chunk)))
        ) as pool:  # a few copies each
            for _ in pool.map(read, chunks):  # what goes wrong is raised here
                pass
        return held

    def _summed(self, chains: Any, draws: Any, groups: slice) -> Float[np.ndarray, "chain draw group"]:
        start, stop, _ = groups.indices(self.shape[2])
        bounds = self._bounds[start : stop + 1]
        members = self._members[int(bounds[0]) : int(bounds[-1])]
        first = int(members.min())
        tokens = np.asarray(self._tokens[chains, draws, first : int(members.max()) + 1])
        if not self._in_place:
            tokens = tokens[:, :, members - first]
        values = np.add.reduceat(tokens, bounds[:-1] - bounds[0], axis=2, dtype=np.float64)
        values /= self._divisors[start:stop]
        return values.astype(self.dtype)


class SequenceLosses(TokenSums):
    """Per-token losses seen as one number a sequence: (chain, draw, sample).

    ``mean`` averages a sequence's tokens and ``sum`` adds them up (the paper's ℓᵢ).
    """

    def __init__(self, tokens: Any, columns: Columns, reduction: str) -> None:
        assert columns.offsets is not None
        lengths = np.diff(columns.offsets)
        divisors = lengths if reduction == "mean" else np.ones(len(lengths))
        super().__init__(tokens, np.arange(columns.total), columns.offsets, divisors, HELD_BYTES)


class Strands(TokenSums):
    """Per-token losses as they are held where influence is read at a larger n_beta: (chain, draw, strand).

    It is the tokens' losses that are log-likelihoods of their own, so that the sum of gₜgₜᵀ over tokens, not that of
    gᵢgᵢᵀ over sequences, stands for the Hessian (`jostle.conditioning`). Tokens are many: a sequence's are dealt out in
    turn to up to `STRANDS` strands, and each strand's sum is held. Where a model's tokens surprise it independently,
    that is the same in the mean. Divided by the root of the sequence's length, since it counts by its mean loss.
    """

    def __init__(self, tokens: Any, columns: Columns) -> None:
        assert columns.offsets is not None
        lengths = np.diff(columns.offsets)
        owner = np.repeat(np.arange(len(lengths)), lengths)
        place = np.arange(columns.total) - columns.offsets[owner]
        draws = tokens.shape[0] * tokens.shape[1]
        room = STRAND_BYTES // (draws * len(lengths) * tokens.dtype.itemsize)
        if draws > max(len(lengths), FEW_MOVES):
            room = min(room, FEW_MOVES // len(lengths))
        strand = owner * columns.total + place % max(1, min(STRANDS, room))
        members = np.argsort(strand, kind="stable")
        begins = np.flatnonzero(np.diff(strand[members], prepend=-1))
        divisors = np.sqrt(lengths[owner[members[begins]]])
        super().__init__(tokens, members, np.append(begins, columns.total), divisors, STRAND_BYTES)


class PickedColumns:
    """Some columns of a trace, in any order, seen as a trace: (chain, draw, column)."""

    def __init__(self, trace: Any, picked: Int[np.ndarray, " column"]) -> None:
        self._trace, self._picked = trace, picked
        self.shape = (*trace.shape[:2], len(picked))
        self.dtype = trace.dtype
        # Whatever lies between two of them is read with them.
        between = (int(np.ptp(picked)) + 1) // len(picked) or 1
        self.read_per_column = between * getattr(trace, "read_per_column", 1)
        """How many numbers are read for each one returned, about."""
        self.whole = trace
        """What they were picked from."""

    def __getitem__(self, index: tuple[Any, Any, slice]) -> Float[np.ndarray, "chain draw column"]:
        chains, draws, columns = index
        picked = self._picked[columns]
        first, last = int(picked.min()), int(picked.max())
        return np.asarray(self._trace[chains, draws, first : last + 1])[:, :, picked - first]


class MirroredPairs:
    """Losses of antithetic chains as the odd or even part of what the noise does to them: (pair, draw, column).

    With ℓ⁺ and ℓ⁻ the losses of two chains whose noise has opposite signs, odd = (ℓ⁺ − ℓ⁻)/2 and even = (ℓ⁺ + ℓ⁻)/2.
    """

    def __init__(self, trace: Any, chains: Int[np.ndarray, " chain"], part: Part) -> None:
        self._part: Part = part
        self._trace, self._chains, self._sign = trace, chains, -1 if part == "odd" else 1
        self.shape = (len(chains) // 2, *trace.shape[1:])
        self.dtype = trace.dtype
        self.read_per_column = 2 * getattr(trace, "read_per_column", 1)
        """How many numbers are read for each one returned, at most."""

    @property
    def whole(self) -> MirroredPairs:
        """The same of all that columns were picked from."""
        return MirroredPairs(getattr(self._trace, "whole", self._trace), self._chains, self._part)

    def __getitem__(self, index: tuple[slice, slice, slice]) -> Float[np.ndarray, "pair draw column"]:
        pairs, draws, columns = index
        values = np.asarray(self._trace[:, draws, columns])[self._chains]
        return ((values[::2] + self._sign * values[1::2]) / 2)[pairs]


def _create(group: zarr.Group, name: str, values: np.ndarray, dimensions: tuple[str, ...]) -> None:
    group.create_array(name, data=np.asarray(values), dimension_names=dimensions, compressors=zarr.codecs.Crc32cCodec())


def _create_trace(
    group: zarr.Group,
    name: str,
    shape: tuple[int, int, int],
    dtype: np.dtype,
    axis: str,
    coordinates: list[str],
) -> None:
    columns = min(shape[2], CHUNK_BYTES // dtype.itemsize)
    draws = max(1, min(shape[1], CHUNK_BYTES // (columns * dtype.itemsize)))
    array = group.create_array(
        name,
        shape=shape,
        dtype=dtype,
        chunks=(1, draws, columns),
        fill_value=np.nan,
        # Losses are noise to a compressor; a checksum is what a chunk needs.
        compressors=zarr.codecs.Crc32cCodec(),
        dimension_names=("chain", "draw", axis),
    )
    if coordinates:
        array.attrs["coordinates"] = " ".join(coordinates)

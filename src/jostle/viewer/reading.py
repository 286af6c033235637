"""What a viewer reads of a run: everything recorded so far, kept in memory so that any question is one product.

A run that is still sampling is read as the largest rectangle of chains × draws that is there; when more is written, it
is read anew. Whatever is wrong with a directory becomes an `UnreadableError`, in words that a page can show.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int

from jostle.chains import read_metadata
from jostle.diagnose import Sample, diagnose, read_sample
from jostle.errors import EstimateWarning, InputError, JostleError
from jostle.estimate import FEWEST_DRAWS, Standardized, Trace, covariance, length_of_batch
from jostle.scores import Scores
from jostle.stores import Place
from jostle.traces import Columns, SequenceLosses, Traces

SETS = ("train", "query")

LAST_WRITTEN = 300.0
"""Seconds without a new draw after which a run that is not finished is said to rest."""


class UnreadableError(JostleError):
    """What cannot be shown, and why, in words for the page."""


class Opened(Protocol):
    """What is read of a `jostle.Run`."""

    directory: Path
    config: dict[str, Any]
    manifest: dict[str, Any]

    @property
    def draws(self) -> int:
        """How many draws each chain has in the end; a run may stop before its bound."""
        ...

    @property
    def antithetic(self) -> bool:
        """Whether chains are mirrored pairs."""
        ...

    @property
    def healthy_chains(self) -> np.ndarray:
        """The chains that estimates use."""
        ...

    @property
    def traces(self) -> Traces:
        """The recorded losses."""
        ...

    def examples(self, name: str) -> list[dict[str, Any]]:
        """What to show of a set."""
        ...

    def images(self, name: str) -> np.ndarray | None:
        """The images of a set."""
        ...

    def influence(self, *, normalize: bool) -> Scores:
        """Every training example's score on every query."""
        ...

    def diagnostics(self) -> dict[str, Any]:
        """Whether the scores can be trusted."""
        ...


class Source(Protocol):
    """Something that scores training examples for queries: a run, or a file of scores."""

    name: str

    def read(self) -> Reading | Table:
        """Return what is there now."""
        ...


class RunSource:
    """A run directory, read again whenever it has changed."""

    def __init__(self, path: Path, open_run: Callable[[Path], Opened]) -> None:
        self.path, self._open = path.resolve(), open_run
        self.name = name_of(path)
        self._lock = threading.Lock()
        self._reading: Reading | None = None
        self._seen: list[tuple[float, int]] = []

    def read(self) -> Reading:
        """Return the run as it stands.

        Raises:
            UnreadableError: it cannot be read.
        """
        with self._lock, in_words(f"{self.name} cannot be read"):
            stamp = self._stamp()
            if self._reading is None or stamp != self._reading.stamp:
                self._reading = Reading(self._open(self.path), stamp)
            return self._reading

    def _stamp(self) -> tuple[int, ...]:
        """What changes whenever the run does; refuses what leads out of the directory, and what would not end."""
        if not self.path.is_dir():
            raise UnreadableError(f"{self.name}: there is no such directory")
        if (self.path / ".begun").exists():
            raise UnreadableError(f"{self.name} is being laid out; it can be read when its first chains start")
        stamp = []
        for entry in ("manifest.json", "config.yaml", *(f"examples/{name}.{kind}" for name in SETS for kind in KINDS)):
            path = self.path / entry
            if not path.resolve().is_relative_to(self.path):
                raise UnreadableError(f"{self.name}: {entry} leads out of the run directory")
            if path.exists() and not path.is_file():
                raise UnreadableError(f"{self.name}: {entry} is not a file")
            stamp.append(path.stat().st_mtime_ns if path.is_file() else 0)
        stamp.append(int(1e9 * last_written(self.path)))
        return tuple(stamp)

    def progress(self, reading: Reading) -> dict[str, Any] | None:
        """How far a run has come that is not finished: steps, draws, and how long it may still take."""
        if reading.complete:
            return None
        config, now = reading.run.config, time.time()
        steps = _steps_done(self.path, reading)
        total = config["chains"] * (config["burn_in"] + (config["draws"] - 1) * config["thin"])
        written = last_written(self.path)
        if not self._seen or self._seen[-1][1] != steps:
            self._seen.append((written, steps))
        # What was seen to be done while looking on; before that, what was done since the sampling was prepared.
        first = self._seen[0] if len(self._seen) > 1 else ((self.path / "manifest.json").stat().st_mtime, 0)
        # A directory that was copied has lost its times, and tells nothing about them.
        rate = (steps - first[1]) / (written - first[0]) if written - first[0] > 0.5 else 0.0
        rests = now - written > LAST_WRITTEN
        left = (total - steps) / rate - (now - written) if rate > 0 and not rests else None
        return {
            "steps": steps,
            "total": total,
            "draws": reading.recorded.tolist(),
            "seconds_left": None if left is None else max(left, 0.0),
            "seconds_since_written": now - written,
            "rests": rests,
        }


KINDS = ("jsonl", "images.npy")


def name_of(path: Path) -> str:
    """A run's own name, with that of its directory where all are called "run"."""
    path = path.resolve()
    return f"{path.parent.name}/{path.name}" if path.name == "run" else path.name


def last_written(directory: Path) -> float:
    """When the newest draw was written."""
    newest = (directory / "manifest.json").stat().st_mtime
    for place in ("traces.zarr/train/losses", "state"):
        for path in (directory / place).rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # replaced while we look
                newest = max(newest, path.stat().st_mtime)
    return newest


def _steps_done(directory: Path, reading: Reading) -> int:
    """Over all chains: by their checkpoints, or by their draws where those are newer."""
    config = reading.run.config
    done = 0
    for chain, draws in enumerate(reading.recorded.tolist()):
        step = config["burn_in"] + (draws - 1) * config["thin"] if draws else 0
        path = directory / "state" / f"chain-{chain:04d}.safetensors"
        with contextlib.suppress(OSError, ValueError, KeyError):  # replaced while we look
            step = max(step, int(read_metadata(path)["step"])) if path.is_file() else step
        done += step
    return done


@contextlib.contextmanager
def in_words(what: str) -> Iterator[None]:
    """Turn whatever a damaged file makes of its reader into a `UnreadableError`."""
    try:
        yield
    except UnreadableError:
        raise
    except (InputError, JostleError) as error:
        raise UnreadableError(str(error)) from error
    except Exception as error:  # a damaged file fails in as many ways as there are readers
        first = (str(error).splitlines() or [""])[0][:200]
        raise UnreadableError(
            f"{what} ({type(error).__name__}: {first}); is it damaged, or of another version?"
        ) from error


class Recorded:
    """The first draws of a trace, in memory or not: (chain, draw, column)."""

    def __init__(self, trace: Any, draws: int) -> None:
        self._trace, self._draws = trace, draws
        self.shape = (trace.shape[0], draws, trace.shape[2])
        self.dtype = trace.dtype
        self.chunks = getattr(trace, "chunks", self.shape)

    def __getitem__(self, index: tuple[Any, ...]) -> np.ndarray:
        chains, draws, *rest = index
        return np.asarray(self._trace[(chains, slice(*draws.indices(self._draws)), *rest)])


class RecordedTraces(Traces):
    """The traces of a run that is still sampling, up to the draw that enough chains have reached."""

    def __init__(self, place: Place, draws: int) -> None:
        super().__init__(place)
        self._draws = draws

    def losses(self, name: str) -> Any:
        """Return the losses of a set so far."""
        return Recorded(super().losses(name), self._draws)

    def observable(self, name: str) -> Any:
        """Return an observable so far."""
        return Recorded(super().observable(name), self._draws)


class Reading:
    """One run at one moment."""

    def __init__(self, run: Opened, stamp: tuple[int, ...]) -> None:
        self.run, self.stamp = run, stamp
        self.complete = run.manifest["status"] == "complete"
        self._lock = threading.RLock()
        self._tables: dict[tuple[str, bool], Standardized] = {}
        self._kept: dict[str, Any] = {}
        self.has_traces = run.config["keep"] == "traces"
        chains, draws, healthy = int(run.config["chains"]), run.draws, run.healthy_chains
        if not self.has_traces:
            if not self.complete:
                raise UnreadableError("a run without traces (keep='covariance') can be read when it is finished")
            self.recorded, self.chains, self.draws = np.full(chains, draws), healthy, draws
            self._columns = {name: Columns(len(run.examples(name)) or size) for name, size in self._sizes().items()}
        else:
            traces = run.traces
            if "train" not in traces.sets:
                raise UnreadableError("there are no training losses in traces.zarr")
            self.recorded = np.full(chains, draws) if self.complete else _count_recorded(traces)
            self.chains, self.draws = (healthy, draws) if self.complete else _rectangle(self.recorded)
            self.traces = RecordedTraces(traces.place, self.draws)
            self._columns = {name: traces.columns(name) for name in traces.sets}
            if "query" not in self._columns:
                components = sum(traces.observable(name).shape[2] for name in traces.observables)
                self._columns["query"] = Columns(components)
        self.per_token = self._columns["train"].per_token and self._columns["query"].per_token
        self.images = {name: self._images(name) for name in SETS}

    def _sizes(self) -> dict[str, int]:
        train, query = self.matrix.shape
        return {"train": train, "query": query}

    @cached_property
    def matrix(self) -> Float[np.ndarray, "train query"]:
        """All posterior correlations, for runs that kept nothing else."""
        return self.run.influence(normalize=True).posterior_correlation

    def _images(self, name: str) -> np.ndarray | None:
        images = self.run.images(name)
        if images is None:
            return None
        if images.ndim != 4 or images.dtype != np.uint8 or len(images) != self.columns(name).samples:
            raise UnreadableError(f"examples/{name}.images.npy does not fit the traces")
        return images

    def columns(self, name: str) -> Columns:
        """What the columns of a set are."""
        return self._columns[name]

    @cached_property
    def examples(self) -> dict[str, list[dict[str, Any]]]:
        """What to show of every example: ``tokens``, ``positions`` of those with a loss, ``text`` and other fields."""
        with in_words("examples cannot be read"):
            return {name: self._examples(name) for name in SETS}

    def _examples(self, name: str) -> list[dict[str, Any]]:
        columns = self.columns(name)
        stored = self.run.examples(name)
        if stored and len(stored) != columns.samples:
            raise UnreadableError(
                f"examples/{name}.jsonl holds {len(stored)} examples, and the traces {columns.samples}"
            )
        if not stored:
            stored = self._unnamed(name)
        shown = []
        for index, example in enumerate(stored):
            if not isinstance(example, dict):
                raise UnreadableError(f"examples/{name}.jsonl, line {index + 1} is not an object")
            fields = {key: value for key, value in example.items() if key not in ("tokens", "scored", "text")}
            text = example.get("text")
            one = {"index": index, "text": None if text is None else str(text), "fields": fields}
            if columns.per_token:
                positions = columns.positions_of(index)
                tokens = example.get("tokens")
                length = max(positions, default=-1) + 1
                if not isinstance(tokens, list) or len(tokens) < length:
                    tokens = [f" {position}" for position in range(length)]
                one |= {"tokens": [str(token) for token in tokens], "positions": positions}
            shown.append(one)
        return shown

    def _unnamed(self, name: str) -> list[dict[str, Any]]:
        """Something to call examples by that were not described: observables have names."""
        if name == "query" and self.has_traces and "query" not in self.traces.sets:
            return [
                {"label": f"{observable}[{component}]"}
                for observable in self.traces.observables
                for component in range(self.traces.observable(observable).shape[2])
            ]
        return [{} for _ in range(self.columns(name).samples)]

    def sample_of(self, name: str, index: int) -> None:
        """Refuse an example that is not there."""
        if not 0 <= index < self.columns(name).samples:
            raise InputError(name, got=index, expected=f"an index from 0 to {self.columns(name).samples - 1}")

    def ready(self) -> bool:
        """Whether there is enough to correlate."""
        return len(self.chains) * self.draws >= 2

    def table(self, name: str, *, tokens: bool) -> Standardized:
        """The losses of a set, by token or by example, standardized and in memory."""
        if not self.ready():
            raise UnreadableError("too few draws are recorded yet; scores appear after the second")
        with self._lock, in_words("the traces cannot be read"):
            if (name, tokens) not in self._tables:
                columns = self.columns(name)
                # All at once: a chunk of the store holds all columns of a few draws.
                losses = self._losses(name)
                trace: Trace = losses if tokens or not columns.per_token else SequenceLosses(losses, columns, "mean")
                self._tables[name, tokens] = Standardized(trace, self.chains)
                if columns.per_token and (name, not tokens) not in self._tables:
                    other: Trace = SequenceLosses(losses, columns, "mean") if tokens else losses
                    self._tables[name, not tokens] = Standardized(other, self.chains)
            return self._tables[name, tokens]

    def _losses(self, name: str) -> Float[np.ndarray, "chain draw column"]:
        if name in self.traces.sets:
            return self.traces.losses(name)[:, :, :]
        parts = [self.traces.observable(one)[:, :, :] for one in self.traces.observables]
        return np.concatenate(parts, axis=2)

    def series(self, name: str, sample: int, span: tuple[int, int] | None) -> Float[np.ndarray, "chain draw"]:
        """The mean loss of an example, or the sum over its tokens from one position to another; centred."""
        self.sample_of(name, sample)
        columns = self.columns(name)
        if span is None or not columns.per_token:
            return self.table(name, tokens=False).centered([sample])[:, :, 0]
        start = columns.of(sample).start
        inside = [
            start + place
            for place, position in enumerate(columns.positions_of(sample))
            if span[0] <= position <= span[1]
        ]
        if not inside:
            raise InputError("span", got=f"{span[0]} to {span[1]}", expected="positions of tokens that have a loss")
        return self.table(name, tokens=True).centered(inside).sum(2)

    def correlations(
        self, name: str, sample: int, span: tuple[int, int] | None
    ) -> tuple[Float[np.ndarray, " example"], Float[np.ndarray, " token"] | None]:
        """How every example, and every token, of the other set moves with this one."""
        other = "query" if name == "train" else "train"
        if not self.has_traces:
            self.sample_of(name, sample)
            return (self.matrix[:, sample] if name == "query" else self.matrix[sample]), None
        series = self.series(name, sample, span)
        by_token = self.table(other, tokens=True).correlation(series) if self.columns(other).per_token else None
        return self.table(other, tokens=False).correlation(series), by_token

    def errors(
        self, name: str, sample: int, span: tuple[int, int] | None, columns: Sequence[int], *, tokens: bool
    ) -> tuple[Float[np.ndarray, " column"], int] | None:
        """The Monte Carlo errors of some of these correlations, and their degrees of freedom; None without traces."""
        other = "query" if name == "train" else "train"
        of = self.columns(other)
        if not self.has_traces or (tokens and not of.per_token):
            return None
        size = of.total if tokens else of.samples
        if any(not 0 <= column < size for column in columns):
            raise InputError("columns", got="one that is not there", expected=f"numbers from 0 to {size - 1}")
        series = self.series(name, sample, span)[:, :, None]
        block = self.table(other, tokens=tokens).centered(list(columns))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EstimateWarning)  # the degrees of freedom stand beside the number
            try:
                found = covariance(
                    block,
                    series,
                    normalize=True,
                    standard_error=True,
                    batch_length=self.batch_length,
                    device="cpu",
                    mirrored=self.mirrored,
                )
            except InputError:  # too few draws to leave a batch of them out
                return None
        assert found.standard_error is not None
        assert found.degrees_of_freedom is not None
        return found.standard_error[:, 0], found.degrees_of_freedom

    def remember(self, name: str, compute: Callable[[], Any]) -> Any:
        """Compute something once for this moment of the run, whoever asks first."""
        with self._lock:
            if name not in self._kept:
                self._kept[name] = compute()
            return self._kept[name]

    @property
    def mirrored(self) -> bool:
        """Whether chains are antithetic pairs; while sampling, one of a pair may be ahead of the other."""
        return self.run.antithetic and self.complete

    @cached_property
    def batch_length(self) -> int:
        """The same for every error of this run, whichever are asked for together."""
        blocks = []
        for name in SETS:
            count = self.columns(name).samples
            picked = np.unique(np.linspace(0, count - 1, 64).astype(int)).tolist()
            blocks.append(torch.from_numpy(self.table(name, tokens=False).centered(picked)))
        return length_of_batch(*blocks)

    @cached_property
    def sample(self) -> Sample | None:
        """What the diagnostics read; None where there is nothing to diagnose."""
        if not self.has_traces or not self.ready():
            return None
        with in_words("the traces cannot be read"):
            return read_sample(self.traces, self.chains, mirrored=self.mirrored)

    @cached_property
    def diagnostics(self) -> dict[str, Any] | None:
        """The verdict and what it rests on; of the draws so far where there are more to come."""
        if self.complete:
            with in_words("the diagnostics cannot be computed"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if not self.has_traces:
                    return self.run.diagnostics()
                config = self.run.config | {"draws": self.draws}
                return diagnose(config, self.run.manifest, self.sample if len(self.chains) else None)
        if self.sample is None or self.draws < FEWEST_DRAWS:
            return None
        so_far = {**self.run.config, "chains": len(self.chains), "draws": self.draws}
        with in_words("the diagnostics cannot be computed"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return diagnose(so_far, self.run.manifest, self.sample)


def _count_recorded(traces: Traces) -> Int[np.ndarray, " chain"]:
    """How many draws of each chain are there, from its first."""
    name = "query" if "query" in traces.sets else "train"
    losses = traces.losses(name)
    missing = np.any(~np.isfinite(np.asarray(losses[:, :, :])), axis=2)
    return np.where(np.any(missing, axis=1), np.argmax(missing, axis=1), missing.shape[1])


def _rectangle(recorded: Int[np.ndarray, " chain"]) -> tuple[Int[np.ndarray, " chain"], int]:
    """The chains and the draws of the most draws in all that can be taken from every one of these chains."""
    draws = max(recorded.tolist(), key=lambda count: count * int((recorded >= count).sum()), default=0)
    return np.flatnonzero(recorded >= max(draws, 1)), int(draws)


class Table:
    """Scores of another method, train × query, with the sign that positive helps."""

    def __init__(self, scores: Scores) -> None:
        self.method = scores.method
        self.normalized = scores.normalized
        self.matrix: Float[np.ndarray, "train query"] = -scores.values

    def correlations(self, name: str, sample: int) -> Float[np.ndarray, " example"]:
        """One query's scores, or one training example's."""
        size = self.matrix.shape[1 if name == "query" else 0]
        if not 0 <= sample < size:
            raise InputError(name, got=sample, expected=f"an index from 0 to {size - 1}")
        return self.matrix[:, sample] if name == "query" else self.matrix[sample]


class ScoresSource:
    """A file that `Scores.save` wrote."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self._path = path
        self._lock = threading.Lock()
        self._table: Table | None = None

    def read(self) -> Table:
        """Return its scores."""
        with self._lock, in_words(f"{self.name} cannot be read"):
            if self._table is None:
                self._table = Table(Scores.load(self._path))
            return self._table


def finite(value: Any) -> Any:
    """Plain data for JSON, which has no NaN: None in its place."""
    if isinstance(value, Mapping):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [finite(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

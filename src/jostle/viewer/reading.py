"""What a viewer reads of a run: everything recorded so far, kept in memory so that any question is one product.

Whatever is wrong with a directory becomes an `UnreadableError`, in words that a page can show.
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float, Int

from jostle.conditioning import CHOICES, Conditioned, Kappa, Moves, check_kappa, most_supported, supports
from jostle.diagnose import Sample, diagnose, read_sample
from jostle.errors import InputError, JostleError
from jostle.estimate import FEWEST_DRAWS, Standardized, Trace, covariance, length_of_batch
from jostle.scores import Scores
from jostle.traces.store import Columns, SequenceLosses, Strands, Traces
from jostle.traces.stores import Place

SETS = ("train", "query")


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
    """One run at one moment, as it was sampled or at a larger n_beta."""

    def __init__(self, run: Opened, kappa: Kappa = 0.0) -> None:
        check_kappa(kappa)
        self.run, self._asked = run, kappa
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

    @property
    def sizes(self) -> dict[str, int]:
        """How many examples each set has."""
        return {name: self.columns(name).samples for name in SETS}

    def sample_of(self, name: str, index: int) -> None:
        """Refuse an example that is not there."""
        if not 0 <= index < self.columns(name).samples:
            raise InputError(name, got=index, expected=f"an index from 0 to {self.columns(name).samples - 1}")

    def ready(self) -> bool:
        """Whether there is enough to correlate."""
        return len(self.chains) * self.draws >= 2

    @cached_property
    def kappa(self) -> float:
        """The κ at which everything is read (`jostle.conditioning`): as asked for, or what the draws support."""
        if not self._asked or not self.ready():
            return 0.0
        if not self.has_traces:
            if self._asked == "auto":
                return 0.0
            raise UnreadableError("a run without traces (keep='covariance') cannot be read at another κ")
        if self._asked != "auto":
            return float(self._asked)
        with in_words("the traces cannot be read"):
            try:
                train, query = (self._by_example(name) for name in SETS)
                together = 2 if self.mirrored else 1
                found = supports(train, query, self.chains, CHOICES, together=together, moves=self._moves)
                return most_supported(found)
            except InputError:  # nothing moved, or there are too many draws to hold
                return 0.0

    @cached_property
    def _moves(self) -> Moves:
        losses, columns = self._losses("train"), self.columns("train")
        return Moves(Strands(losses, columns) if columns.per_token else losses, self.chains)

    def _by_example(self, name: str) -> Trace:
        losses, columns = self._losses(name), self.columns(name)
        return SequenceLosses(losses, columns, "mean") if columns.per_token else losses

    def _standardized(self, trace: Trace) -> Standardized:
        if self.kappa:  # mapped, the draws are those of one chain
            return Standardized(Conditioned(trace, self._moves, self.kappa))
        return Standardized(trace, self.chains)

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
                self._tables[name, tokens] = self._standardized(trace)
                if columns.per_token and (name, not tokens) not in self._tables:
                    other: Trace = SequenceLosses(losses, columns, "mean") if tokens else losses
                    self._tables[name, not tokens] = self._standardized(other)
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
        """The Monte Carlo errors of some of these correlations, and of how many batches of draws they are.

        None without traces, and where the training losses are held, which mixes draws.
        """
        other = "query" if name == "train" else "train"
        of = self.columns(other)
        if not self.has_traces or self.kappa or (tokens and not of.per_token):
            return None
        size = of.total if tokens else of.samples
        if any(not 0 <= column < size for column in columns):
            raise InputError("columns", got="one that is not there", expected=f"numbers from 0 to {size - 1}")
        series = self.series(name, sample, span)[:, :, None]
        block = self.table(other, tokens=tokens).centered(list(columns))
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
        assert found.batches is not None
        return found.standard_error[:, 0], found.batches

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
            blocks.append(self.table(name, tokens=False).centered(picked))
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
        if not self.complete and (self.sample is None or self.draws < FEWEST_DRAWS):
            return None
        with in_words("the diagnostics cannot be computed"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.complete:
                return self.run.diagnostics()
            so_far = {**self.run.config, "chains": len(self.chains), "draws": self.draws}
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
        self.matrix: Float[np.ndarray, "train query"] = -scores.values
        self.sizes: dict[str, int] = dict(zip(SETS, self.matrix.shape, strict=True))

    def correlations(
        self, name: str, sample: int, span: tuple[int, int] | None
    ) -> tuple[Float[np.ndarray, " example"], None]:
        """One query's scores, or one training example's; of whole examples alone."""
        if not 0 <= sample < self.sizes[name]:
            raise InputError(name, got=sample, expected=f"an index from 0 to {self.sizes[name] - 1}")
        return (self.matrix[:, sample] if name == "query" else self.matrix[sample]), None

    def errors(self, *asked: Any, **options: Any) -> None:
        """None are known."""


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

"""Where a viewer reads from: run directories, which may still grow, and files of scores.

A run that is still sampling is read as the largest rectangle of chains × draws that is there; when more is written, it
is read anew.
"""

from __future__ import annotations

import contextlib
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jostle.conditioning import Kappa
from jostle.errors import InputError
from jostle.scores import Scores
from jostle.traces.tensor_files import read_metadata
from jostle.viewer.reading import Opened, Reading, Table, UnreadableError, in_words

PARTS = ("manifest.json", "config.yaml", "examples", "traces.zarr", "state")
"""Everything that is read of a run directory."""

WRITTEN = (".html", ".png", ".svg", ".pdf")
"""What pages and figures are called."""

LAST_WRITTEN = 300.0
"""Seconds without a new draw after which a run that is not finished is said to rest."""


class Stamp(NamedTuple):
    """When the newest file of each part was written, in nanoseconds: what changes whenever the run does."""

    manifest: int
    config: int
    examples: int
    traces: int
    state: int

    @property
    def written(self) -> float:
        """When the newest draw was written, in seconds."""
        return 1e-9 * max(self.manifest, self.traces, self.state)


class Source(Protocol):
    """Something that scores training examples for queries: a run, or a file of scores."""

    name: str

    def read(self) -> Reading | Table:
        """Return what is there now."""
        ...


class RunSource:
    """A run directory, read again whenever it has changed."""

    def __init__(self, path: Path, open_run: Callable[[Path], Opened], kappa: Kappa = 0.0) -> None:
        self.path, self._open = path.resolve(), open_run
        self._kappa: Kappa = kappa
        self.name = name_of(path)
        self._lock = threading.Lock()
        self._reading: Reading | None = None
        self._stamp = Stamp(0, 0, 0, 0, 0)
        self._seen: list[tuple[float, int]] = []

    def read(self) -> Reading:
        """Return the run as it stands.

        Raises:
            UnreadableError: it cannot be read.
        """
        with self._lock, in_words(f"{self.name} cannot be read"):
            if not self.path.is_dir():
                raise UnreadableError(f"{self.name}: there is no such directory")
            if (self.path / ".begun").exists():
                raise UnreadableError(f"{self.name} is being laid out; it can be read when its first chains start")
            if not self._finished():
                stamp = Stamp(*(self._newest(self.path / part) for part in PARTS))
                if self._reading is None or stamp != self._stamp:
                    self._reading, self._stamp = Reading(self._open(self.path), self._kappa), stamp
            assert self._reading is not None
            return self._reading

    def _finished(self) -> bool:
        """Whether what was read is all there will be: whatever adds to a finished run writes its manifest first."""
        if self._reading is None or not self._reading.complete:
            return False
        return self._newest(self.path / "manifest.json") == self._stamp.manifest

    def _newest(self, part: Path) -> int:
        """When the newest file was written; refuses what leads out of the directory, and what would never end."""
        newest = 0
        for path in (part, *part.rglob("*")):
            with contextlib.suppress(FileNotFoundError):  # replaced while we look
                status = path.lstat()
                named = path.relative_to(self.path)
                if stat.S_ISLNK(status.st_mode):
                    if not path.resolve().is_relative_to(self.path):
                        raise UnreadableError(f"{self.name}: {named} leads out of the run directory")
                    status = path.stat()
                if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                    raise UnreadableError(f"{self.name}: {named} is not a file")
                newest = max(newest, status.st_mtime_ns)
        return newest

    def progress(self, reading: Reading) -> dict[str, Any] | None:
        """How far a run has come that is not finished: steps, draws, and how long it may still take."""
        if reading.complete:
            return None
        config, now = reading.run.config, time.time()
        steps = _steps_done(self.path, reading)
        begun, written = 1e-9 * self._stamp.manifest, self._stamp.written
        total = config["chains"] * (config["burn_in"] + (config["draws"] - 1) * config["thin"])
        if not self._seen or self._seen[-1][1] != steps:
            self._seen.append((written, steps))
        # What was seen to be done while looking on; before that, what was done since the sampling was prepared.
        first = self._seen[0] if len(self._seen) > 1 else (begun, 0)
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


def open_sources(paths: Sequence[Path], open_run: Callable[[Path], Opened], kappa: Kappa = 0.0) -> list[Source]:
    """Run directories, and files of scores (.safetensors); which is which is all that is looked at here.

    Runs are read at ``kappa``, as `Run.influence` does.
    """
    sources: list[Source] = []
    for path in paths:
        if path.suffix == ".safetensors":
            if not path.is_file():
                raise InputError("run", got=f"{path}, which does not exist", expected="a file that Scores.save wrote")
            sources.append(ScoresSource(path))
        elif path.is_dir():
            sources.append(RunSource(path, open_run, kappa))
        else:
            raise InputError(
                "run",
                got=f"{path}, which is no directory",
                expected="a run directory, or a file of scores ending in .safetensors",
                fix=f"what is to be written goes behind -o: -o {path}" if path.suffix in WRITTEN else "",
            )
    if not any(isinstance(source, RunSource) for source in sources):
        raise InputError(
            "run",
            got="scores alone",
            expected="a run of the same examples beside them, which knows what these look like",
            fix=f"write RUN {paths[0]}" if paths else "",
        )
    names = [source.name for source in sources]
    for number, source in enumerate(sources):
        if names.count(source.name) > 1:
            source.name = f"{source.name} ({number})"
    return sources


def name_of(path: Path) -> str:
    """A run's own name, with that of its directory where all are called "run"."""
    path = path.resolve()
    return f"{path.parent.name}/{path.name}" if path.name == "run" else path.name


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

"""Runs chains: gradient, step, observe, record; checkpoints them, and stops those that fail."""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import google_crc32c
import numpy as np
import safetensors
import safetensors.torch
import torch
from jaxtyping import Float
from torch import Tensor

from jostle import randomness
from jostle.config import Config
from jostle.data import Data
from jostle.errors import InputError
from jostle.estimate import StreamingCovariance
from jostle.functional import FunctionalModel, Observable
from jostle.losses import Loss, at_least_float32
from jostle.observing import Observer
from jostle.ranks import Crew
from jostle.samplers import Statistics
from jostle.traces import Columns, Traces

log = logging.getLogger("jostle")

CHECKPOINT_SECONDS = 60.0
"""The least time between two checkpoints."""

LOOK_SECONDS, MOST_LOOKS = 0.2, 64
"""How long, and for how many draws, a GPU may run without being asked whether its chains are well."""

CHECKPOINT_SHARE = 0.02
"""The share of the run's time that checkpoints may take."""


@dataclass
class Group:
    """Chains that are at the same step, moved together."""

    chains: list[int]
    step: int
    weights: Float[Tensor, "chain weight"]
    statistics: Statistics

    def select(self, keep: list[int]) -> None:
        """Keep only these rows."""
        self.chains = [self.chains[row] for row in keep]
        self.weights = self.weights[keep]
        self.statistics = {name: value[keep] for name, value in self.statistics.items()}


@dataclass(frozen=True)
class Failure:
    """A chain that left the finite numbers."""

    chain: int
    step: int
    reason: str


class Walk(Protocol):
    """How chains get from draw to draw, and what is seen there."""

    config: Config
    model: FunctionalModel

    def start(self, chains: list[int]) -> Group:
        """Put chains at step 0."""
        ...

    def advance(self, group: Group) -> None:
        """Move a group by one step."""
        ...

    def observe(self, group: Group) -> dict[str, Float[Tensor, "chain column"]]:
        """Return what is recorded of a draw."""
        ...


class Dynamics:
    """How chains move and what is seen of them.

    Attributes:
        keeps_weights: whether the weights of every draw are recorded, too.
        center_gradient: the gradient at w* of the mean loss over all sampling data, which control variates need (see
            `full_gradient`).
    """

    def __init__(
        self,
        model: FunctionalModel,
        config: Config,
        *,
        sampling_data: Data,
        potential_loss: Loss,
        observers: Mapping[str, Observer],
        observables: Mapping[str, Observable],
    ) -> None:
        self.model, self.config = model, config
        self._sampling_data, self._potential_loss = sampling_data, potential_loss
        self._observers, self._observables = observers, observables
        self._center = model.moving.center
        self.center_gradient: Float[Tensor, " weight"] | None = None
        self.keeps_weights = False
        self._move: Callable[..., Statistics] = self._step
        self._pieces = 1
        config.sampler.check(config.posterior.potential(self._center), burn_in=config.burn_in)

    def compile_step(self, compiled: bool = True) -> None:
        """Make the step one pass over memory; without it, each of its operations is one."""
        self._move = torch.compile(self._step, dynamic=False) if compiled else self._step

    def start(self, chains: list[int]) -> Group:
        """Put chains at w*, at step 0."""
        moving = self.model.moving
        weights = torch.empty(len(chains), moving.total, dtype=moving.dtype, device=self.model.device)
        weights.copy_(moving.center)
        return Group(chains, 0, weights, self.config.sampler.init(weights))

    def gradient(self, group: Group) -> Float[Tensor, "chain weight"]:
        """Return the gradient of each chain's mean loss on the minibatch B of its next step.

        With control variates it is ∇L̄(w; B) − ∇L̄(w*; B) + ∇L̄(w*): the same on average, and without what of the
        minibatch's noise is there at w* already.

        Reference: Baker et al., *Control variates for stochastic gradient MCMC*, 2019.
        """
        config, n = self.config, len(self._sampling_data)
        if not config.posterior.n_beta:
            return torch.zeros_like(group.weights)
        batches = [
            randomness.minibatch(config.seed, chain, group.step, size=config.batch_size, of=n)
            for chain in self._sources(group.chains)
        ]
        gradient = self._mean_loss_gradient(group.weights, batches)
        if not config.control_variates or config.batch_size >= n:
            return gradient
        assert self.center_gradient is not None
        # A sum of its own before the next call, which may write its gradient over this one.
        controlled = gradient + self.center_gradient
        return controlled - self._mean_loss_gradient(self._center.repeat(len(group.chains), 1), batches)

    def _mean_loss_gradient(self, weights: Tensor, batches: list[np.ndarray]) -> Float[Tensor, "chain weight"]:
        """The gradient on each chain's minibatch; in pieces of it once memory has run out."""
        while True:
            try:
                if self._pieces == 1:
                    return self.model.mean_loss_gradient(self._potential_loss, weights, self._sampling_data, batches)
                total: Tensor | None = None
                for pieces in zip(*(np.array_split(batch, self._pieces) for batch in batches), strict=True):
                    part = self.model.mean_loss_gradient(self._potential_loss, weights, self._sampling_data, [*pieces])
                    part = len(pieces[0]) / len(batches[0]) * part.to(weights.dtype)
                    total = part if total is None else total.add_(part)
                assert total is not None
                return total
            except torch.OutOfMemoryError:
                if self._pieces >= len(batches[0]) or self.model.crew.count > 1:
                    raise
            # Only here: an error that is being handled holds on to the memory of what failed.
            self.model.free_memory()
            self._pieces = min(2 * self._pieces, len(batches[0]))
            log.warning("out of memory: minibatches are gone through in %d pieces from here on", self._pieces)

    def advance(self, group: Group) -> None:
        """Move a group by one step."""
        config, gradient = self.config, self.gradient(group)
        burning_in = group.step < config.burn_in
        before, after = group.statistics, {}
        sources = self._sources(group.chains)
        blocks = randomness.noise(config.seed, sources, group.step, self.model.moving, self.model.device)
        mirrored = [row for row, chain in enumerate(group.chains) if chain != sources[row]]
        if getattr(config.sampler, "whole_chain", False):
            noises = [noise for _, noise in blocks]
            whole = noises[0] if len(noises) == 1 else torch.cat(noises, dim=1)
            blocks = [(slice(0, self.model.moving.total), whole)]
        for part, noise in blocks:
            if mirrored:
                noise[mirrored] *= -1
            block = {name: value[:, part] if self._per_weight(value) else value for name, value in before.items()}
            after = self._move(group.weights[:, part], gradient[:, part], noise, block, self._center[part], burning_in)
        torch.autograd.graph.increment_version(group.weights)  # said aloud, since a compiled step may not
        # Statistics of single weights were moved in place, block by block; those of whole chains come from the last.
        group.statistics = {name: before[name] if self._per_weight(before[name]) else after[name] for name in before}
        group.step += 1

    def _sources(self, chains: list[int]) -> list[int]:
        """Whose random numbers each chain uses: its own or, in an antithetic pair, those of the first of the two."""
        return [chain - chain % 2 for chain in chains] if self.config.antithetic else chains

    def _per_weight(self, statistic: Tensor) -> bool:
        return statistic.ndim == 2 and statistic.shape[1] == self.model.moving.total

    def _step(
        self, weights: Tensor, gradient: Tensor, noise: Tensor, statistics: Statistics, center: Tensor, burning_in: bool
    ) -> Statistics:
        """Move a block of weights, and what is known of each of them, in place: one pass over memory if compiled."""
        potential = self.config.posterior.potential(center.to(weights.dtype))
        moved, after = self.config.sampler.step(
            weights, gradient.to(weights.dtype), noise, statistics, potential, burning_in=burning_in
        )
        weights.copy_(moved)
        for name, value in statistics.items():
            if value.shape == weights.shape:
                value.copy_(after[name])
        return after

    def observe(
        self, group: Group, observers: Mapping[str, Observer] | None = None
    ) -> dict[str, Float[Tensor, "chain column"]]:
        """Return the losses of every observed set, and every observable, at the group's weights.

        ``observers`` stand in for those of the run: a pilot looks at a few examples only.
        """
        observers = self._observers if observers is None else observers
        seen = {name: observer(self.model, group.weights) for name, observer in observers.items()}
        for name, observable in self._observables.items():
            seen[f"observables/{name}"] = at_least_float32(self.model.evaluate(observable, group.weights))
        if self.keeps_weights:
            # A copy, whole however the model is spread: the next step is made in place.
            seen["weights"] = torch.stack([self.model.gather(flat).cpu() for flat in group.weights])
        return seen


def full_gradient(model: FunctionalModel, loss: Loss, data: Data, batch_size: int) -> Float[Tensor, " weight"]:
    """Return the gradient at w* of the mean loss over all data, in batches, the same whenever it is asked for."""
    center, total = model.moving.center[None], torch.zeros_like(model.moving.center, dtype=torch.float64)
    for start in range(0, len(data), batch_size):
        chosen = np.arange(start, min(start + batch_size, len(data)))
        total += len(chosen) / len(data) * model.mean_loss_gradient(loss, center, data, [chosen])[0]
    return total.to(model.moving.dtype)


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
        """Write what is buffered, and see that it is written."""
        self._write()
        self._wait()


class CovarianceRecorder:
    """Keeps running sums instead of traces; per-token losses are averaged over their sequence first."""

    def __init__(self, path: Path, observers: Mapping[str, Observer], draws: int) -> None:
        self._path, self._draws = path, draws
        self._columns = {name: observer.columns for name, observer in observers.items()}
        centers = [
            _sequence_means(observers[name].center_losses, self._columns[name]).cpu() for name in ("train", "query")
        ]
        self._stream = StreamingCovariance(*centers)
        self._finished: list[int] = []
        if path.exists():
            self._stream.sums, self._finished = load_sums(path)

    @property
    def finished(self) -> list[int]:
        """The chains that are in the sums."""
        return self._finished

    def record(self, chains: list[int], draw: int, values: dict[str, Float[Tensor, "chain column"]]) -> None:
        """Add one draw to each chain's sums."""
        for row, chain in enumerate(chains):
            train, query = (
                _sequence_means(values[name][row].cpu(), self._columns[name]) for name in ("train", "query")
            )
            self._stream.update(chain, train, query)

    def flush(self) -> None:
        """Do nothing: a chain's sums are in its checkpoint, the total is written when a chain ends."""

    def unfinished(self, chain: int) -> dict[str, Tensor]:
        """Return the chain's sums."""
        return self._stream.unfinished(chain)

    def restore(self, chain: int, state: dict[str, Tensor]) -> None:
        """Take the chain's sums back."""
        self._stream.restore(chain, state)

    def finish(self, chain: int) -> None:
        """Add the chain to the total, and write that."""
        self._stream.finish(chain)
        self._finished = [*self._finished, chain]
        recorded, expected = int(self._stream.sums["draws"]), self._draws * len(self._finished)
        if recorded != expected:
            raise RuntimeError(f"{recorded} draws in the sums of {len(self._finished)} chains, not {expected}")
        write_tensors(self._path, self._stream.sums, {"finished": self._finished})

    def drop(self, chain: int) -> None:
        """Forget the chain."""
        self._stream.drop(chain)


def load_sums(path: Path) -> tuple[dict[str, Tensor], list[int]]:
    """Return the sums of a `CovarianceRecorder`, and which chains are in them."""
    tensors, about = read_tensors(path)
    return tensors, about["finished"]


def _sequence_means(losses: Float[Tensor, " column"], columns: Columns) -> Float[Tensor, " sample"]:
    if columns.offsets is None:
        return losses
    lengths = torch.from_numpy(np.diff(columns.offsets)).to(losses.device)
    return torch.segment_reduce(losses, "mean", lengths=lengths)


class Checkpoints:
    """The state of every chain, each in a file that is replaced whole or not at all."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _path(self, chain: int) -> Path:
        return self._directory / f"chain-{chain:04d}.safetensors"

    def save(self, group: Group, model: FunctionalModel, recorder: Recorder) -> None:
        """Store a group, between two steps; draws it has passed must be flushed already.

        What is stored is whole, however the model is spread, so that another number of processes can go on with it.
        """
        self._directory.mkdir(exist_ok=True)
        for row, chain in enumerate(group.chains):
            tensors = {"weights": model.gather(group.weights[row])}
            for name, value in group.statistics.items():
                per_weight = value.shape == group.weights.shape
                tensors[f"statistics/{name}"] = model.gather(value[row]) if per_weight else value[row]
            tensors |= {f"recorder/{name}": value for name, value in recorder.unfinished(chain).items()}
            if model.crew.leads:
                write_tensors(self._path(chain), tensors, {"step": group.step})

    def steps(self, chains: Iterable[int]) -> dict[int, int]:
        """Return the step at which each chain can go on."""
        return {
            chain: read_metadata(self._path(chain))["step"] if self._path(chain).exists() else 0 for chain in chains
        }

    def load(self, chains: list[int], step: int, dynamics: Walk, recorder: Recorder) -> Group:
        """Return chains as they were stored at this step."""
        group = dynamics.start(chains)
        if step == 0:
            return group
        stored = [read_tensors(self._path(chain))[0] for chain in chains]
        device = group.weights.device
        moving, group.step = dynamics.model.moving, step
        group.weights = torch.stack([moving.keep(tensors["weights"]) for tensors in stored]).to(device)
        for name, before in group.statistics.items():
            values = [tensors[f"statistics/{name}"] for tensors in stored]
            if before.shape == group.weights.shape:
                values = [moving.keep(value) for value in values]
            group.statistics[name] = torch.stack(values).to(device)
        for chain, tensors in zip(chains, stored, strict=True):
            prefix = "recorder/"
            recorder.restore(
                chain,
                {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)},
            )
        return group


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: dict[str, Any]) -> None:
    """Write a safetensors file, with checksums, so that a crash leaves the old one or the new one."""
    temporary = path.with_suffix(".partial")
    contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    sums = {name: _checksum(value) for name, value in contiguous.items()}
    metadata = {"jostle": json.dumps(about), "crc32c": json.dumps(sums)}
    safetensors.torch.save_file(contiguous, temporary, metadata=metadata)
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


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
            fix="delete it, and its chain begins again" if path.parent.name in ("state", "replay") else "",
        ) from error


def _checksum(tensor: Tensor) -> int:
    return google_crc32c.value(tensor.reshape(-1).view(torch.uint8).numpy())


@dataclass(frozen=True)
class Progress:
    """What a progress bar is told after every step."""

    steps_done: int
    mean_loss: float | None


def run_chains(
    dynamics: Walk,
    recorder: Recorder,
    checkpoints: Checkpoints,
    *,
    chains: list[int],
    at_once: int,
    draws: int | None = None,
    first_draw: int = 0,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    report: Callable[[Progress], None] = lambda progress: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> tuple[list[Failure], list[str]]:
    """Run chains to their last draw, or to so many draws, from wherever their checkpoints stand.

    Draws before ``first_draw`` are recorded already: a chain without a checkpoint walks past them without a look.

    Returns:
        The chains that failed, and the sampler's remarks.

    Raises:
        KeyboardInterrupt: when ``interrupted()``, after a checkpoint.
    """
    config = dynamics.config
    draws = config.draws if draws is None else draws
    failures: list[Failure] = []
    remarks: list[str] = []
    crew = dynamics.model.crew
    clock, health = _CheckpointClock(checkpoint_seconds), _Health(crew)
    remaining = [chain for chain in chains if chain not in recorder.finished]
    done = (len(chains) - len(remaining)) * config.steps[-1] + sum(checkpoints.steps(remaining).values())
    for group in _groups(dynamics, recorder, checkpoints, remaining, at_once):
        while group.chains:
            # Before the step's draw is observed: a chain that resumes here observes it, and nobody does so twice.
            stop = crew.any(interrupted())
            if stop or crew.any(clock.due()):
                started = time.monotonic()
                failures += health.examine(group, recorder)[0]
                recorder.flush()
                checkpoints.save(group, dynamics.model, recorder)
                clock.took(time.monotonic() - started)
            if stop:
                raise KeyboardInterrupt
            if not group.chains:  # the last of them has failed, as was noticed just now
                break
            mean_loss = None
            draw, between = divmod(group.step - config.burn_in, config.thin)
            if group.step >= config.burn_in and between == 0:
                if draw == draws:
                    break  # before it is observed: whoever asks for more draws goes on here
                if draw >= first_draw:
                    seen = dynamics.observe(group)
                    health.look(group, seen)
                    if crew.any(health.due()) or draw == draws - 1:
                        failed, kept = health.examine(group, recorder)
                        failures += failed
                        if not group.chains:
                            break
                        if failed:
                            seen = {name: value[kept] for name, value in seen.items()}
                        mean_loss = next(iter(seen.values())).mean().item()
                    recorder.record(group.chains, draw, seen)
                if draw == config.draws - 1:
                    report(Progress(done, mean_loss))
                    break
            dynamics.advance(group)
            done += len(group.chains)
            report(Progress(done, mean_loss))
        recorder.flush()
        for chain in group.chains:
            recorder.finish(chain)
        if group.chains:
            remarks += config.sampler.remarks(group.statistics)
            checkpoints.save(group, dynamics.model, recorder)
    return failures, remarks


def _groups(
    dynamics: Walk, recorder: Recorder, checkpoints: Checkpoints, chains: list[int], at_once: int
) -> Iterator[Group]:
    """Chains that stand at the same step, at most ``at_once`` together."""
    steps = checkpoints.steps(chains)
    ordered = sorted(chains, key=lambda chain: (-steps[chain], chain))
    for step, same in itertools.groupby(ordered, key=steps.__getitem__):
        waiting = list(same)
        for first in range(0, len(waiting), at_once):
            yield checkpoints.load(waiting[first : first + at_once], step, dynamics, recorder)


class _Health:
    """Notices chains that left the finite numbers; on a GPU only now and then, since asking it means waiting for it."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._looks: list[tuple[int, Tensor, Tensor]] = []
        self._last = time.monotonic()

    def look(self, group: Group, seen: dict[str, Tensor]) -> None:
        """Take note of what is finite at a draw, without asking yet."""
        # One pass that writes nothing: a sum is finite only if all its terms are.
        weights = torch.isfinite(group.weights.sum(1))
        values = [value.to(weights.device) for name, value in seen.items() if name != "weights"]
        losses = torch.stack([torch.isfinite(value.sum(1)) for value in values]).all(0)
        self._looks.append((group.step, weights, losses))

    def due(self) -> bool:
        """Whether it is time to ask."""
        on_gpu = self._looks[-1][1].is_cuda
        return not on_gpu or len(self._looks) >= MOST_LOOKS or time.monotonic() - self._last >= LOOK_SECONDS

    def examine(self, group: Group, recorder: Recorder) -> tuple[list[Failure], list[int]]:
        """Take failed chains out of the group; return them, and which of its rows are left."""
        rows = list(range(len(group.chains)))
        failed: dict[int, Failure] = {}
        for step, weights, losses in self._looks:
            finite = self._crew.all(torch.stack([weights, losses], 1))
            for row, (weights_finite, losses_finite) in enumerate(finite.tolist()):
                if row not in failed and not (weights_finite and losses_finite):
                    where = "a loss" if weights_finite else "weights"
                    failed[row] = Failure(group.chains[row], step, f"{where} left the finite numbers")
        self._looks, self._last = [], time.monotonic()
        kept = [row for row in rows if row not in failed]
        for failure in failed.values():
            recorder.drop(failure.chain)
        if failed:
            group.select(kept)
        return list(failed.values()), kept


class _CheckpointClock:
    """Says when a checkpoint is due: not too often, and never for more than a small share of the time."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._cost = seconds, 0.0
        self._last = time.monotonic()

    def due(self) -> bool:
        wait = max(self._seconds, self._cost / CHECKPOINT_SHARE if self._seconds else 0.0)
        return time.monotonic() - self._last >= wait

    def took(self, seconds: float) -> None:
        self._last, self._cost = time.monotonic(), seconds

"""Runs chains: gradient, step, observe, record; checkpoints them, and stops those that fail."""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors
import safetensors.torch
import torch
from jaxtyping import Float
from torch import Tensor

from jostle import randomness
from jostle.config import Config
from jostle.data import Data
from jostle.estimate import StreamingCovariance
from jostle.functional import FunctionalModel, Observable
from jostle.losses import Loss, at_least_float32
from jostle.observing import Observer
from jostle.samplers import Statistics
from jostle.traces import Columns, Traces

log = logging.getLogger("jostle")

CHECKPOINT_SECONDS = 60.0
"""The least time between two checkpoints."""

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


class Dynamics:
    """How chains move and what is seen of them.

    Attributes:
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
        self._move: Callable[..., Statistics] = self._step
        config.sampler.check(config.posterior.potential(self._center), burn_in=config.burn_in)

    def compile_step(self, compiled: bool = True) -> None:
        """Make the step one pass over memory; without it, each of its operations is one."""
        self._move = torch.compile(self._step, dynamic=False) if compiled else self._step

    def start(self, chains: list[int]) -> Group:
        """Put chains at w*, at step 0."""
        weights = self.model.moving.center.repeat(len(chains), 1)
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
            randomness.minibatch(config.seed, chain, group.step, size=config.batch_size, of=n) for chain in group.chains
        ]
        gradient = self.model.mean_loss_gradient(self._potential_loss, group.weights, self._sampling_data, batches)
        if not config.control_variates or config.batch_size >= n:
            return gradient
        assert self.center_gradient is not None
        # A sum of its own before the next call, which may write its gradient over this one.
        controlled = gradient + self.center_gradient
        centers = self._center.repeat(len(group.chains), 1)
        return controlled - self.model.mean_loss_gradient(self._potential_loss, centers, self._sampling_data, batches)

    def advance(self, group: Group) -> None:
        """Move a group by one step."""
        config, gradient = self.config, self.gradient(group)
        burning_in = group.step < config.burn_in
        before, after = group.statistics, {}
        blocks = randomness.noise(config.seed, group.chains, group.step, self.model.moving, self.model.device)
        if getattr(config.sampler, "whole_chain", False):
            noises = [noise for _, noise in blocks]
            whole = noises[0] if len(noises) == 1 else torch.cat(noises, dim=1)
            blocks = [(slice(0, self.model.moving.total), whole)]
        for part, noise in blocks:
            block = {name: value[:, part] if self._per_weight(value) else value for name, value in before.items()}
            after = self._move(group.weights[:, part], gradient[:, part], noise, block, self._center[part], burning_in)
        # Statistics of single weights were moved in place, block by block; those of whole chains come from the last.
        group.statistics = {name: before[name] if self._per_weight(before[name]) else after[name] for name in before}
        group.step += 1

    def _per_weight(self, statistic: Tensor) -> bool:
        return statistic.ndim == 2 and statistic.shape[1] == self.model.moving.total

    def _step(
        self, weights: Tensor, gradient: Tensor, noise: Tensor, statistics: Statistics, center: Tensor, burning_in: bool
    ) -> Statistics:
        """Move a block of weights, and what is known of each of them, in place: one pass over memory if compiled."""
        potential = self.config.posterior.potential(center)
        moved, after = self.config.sampler.step(
            weights, gradient.to(weights.dtype), noise, statistics, potential, burning_in=burning_in
        )
        weights.copy_(moved)
        for name, value in statistics.items():
            if value.shape == weights.shape:
                value.copy_(after[name])
        return after

    def observe(self, group: Group) -> dict[str, Float[Tensor, "chain column"]]:
        """Return the losses of every observed set, and every observable, at the group's weights."""
        seen = {name: observer(self.model, group.weights) for name, observer in self._observers.items()}
        for name, observable in self._observables.items():
            seen[f"observables/{name}"] = at_least_float32(self.model.evaluate(observable, group.weights))
        return seen


def full_gradient(model: FunctionalModel, loss: Loss, data: Data, batch_size: int) -> Float[Tensor, " weight"]:
    """Return the gradient at w* of the mean loss over all data, in batches, the same whenever it is asked for."""
    center, total = model.moving.center[None], torch.zeros_like(model.moving.center, dtype=torch.float64)
    for start in range(0, len(data), batch_size):
        chosen = np.arange(start, min(start + batch_size, len(data)))
        total += len(chosen) / len(data) * model.mean_loss_gradient(loss, center, data, [chosen])[0]
    return total.to(center.dtype)


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


class TraceRecorder:
    """Writes draws to the trace store, a chunk's worth at a time."""

    def __init__(self, traces: Traces, *, buffer_bytes: int = 64 << 20) -> None:
        self._traces, self._buffer_bytes, self._held = traces, buffer_bytes, 0
        self._chains: list[int] = []
        self._first = 0
        self._pending: dict[str, list[np.ndarray]] = {}

    @property
    def finished(self) -> list[int]:
        """None: a chain's own checkpoint says that it has reached its last draw."""
        return []

    def record(self, chains: list[int], draw: int, values: dict[str, Float[Tensor, "chain column"]]) -> None:
        """Buffer one draw."""
        if chains != self._chains or self._held > self._buffer_bytes:
            self.flush()
        if not self._pending:
            self._chains, self._first = list(chains), draw
        for name, value in values.items():
            array = value.cpu().numpy()
            self._pending.setdefault(name, []).append(array)
            self._held += array.nbytes

    def flush(self) -> None:
        """Write what is buffered."""
        for name, draws in self._pending.items():
            self._traces.record(name, self._chains, self._first, np.stack(draws, axis=1))
        self._pending.clear()
        self._held = 0

    def unfinished(self, chain: int) -> dict[str, Tensor]:
        """Return nothing: draws are on disk."""
        return {}

    def restore(self, chain: int, state: dict[str, Tensor]) -> None:
        """Do nothing: draws are on disk."""

    def finish(self, chain: int) -> None:
        """Do nothing: draws are on disk."""

    def drop(self, chain: int) -> None:
        """Do nothing: the run names the failed chain, and estimates leave it out."""


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

    def save(self, group: Group, recorder: Recorder) -> None:
        """Store a group, between two steps; draws it has passed must be flushed already."""
        self._directory.mkdir(exist_ok=True)
        for row, chain in enumerate(group.chains):
            tensors = {"weights": group.weights[row]}
            tensors |= {f"statistics/{name}": value[row] for name, value in group.statistics.items()}
            tensors |= {f"recorder/{name}": value for name, value in recorder.unfinished(chain).items()}
            write_tensors(self._path(chain), tensors, {"step": group.step})

    def steps(self, chains: Iterable[int]) -> dict[int, int]:
        """Return the step at which each chain can go on."""
        return {
            chain: read_metadata(self._path(chain))["step"] if self._path(chain).exists() else 0 for chain in chains
        }

    def load(self, chains: list[int], step: int, dynamics: Dynamics, recorder: Recorder) -> Group:
        """Return chains as they were stored at this step."""
        group = dynamics.start(chains)
        if step == 0:
            return group
        stored = [read_tensors(self._path(chain))[0] for chain in chains]
        device = group.weights.device
        group.step = step
        group.weights = torch.stack([tensors["weights"] for tensors in stored]).to(device)
        group.statistics = {
            name: torch.stack([tensors[f"statistics/{name}"] for tensors in stored]).to(device)
            for name in group.statistics
        }
        for chain, tensors in zip(chains, stored, strict=True):
            prefix = "recorder/"
            recorder.restore(
                chain,
                {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)},
            )
        return group


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: dict[str, Any]) -> None:
    """Write a safetensors file so that a crash leaves the old one or the new one."""
    temporary = path.with_suffix(".partial")
    contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    safetensors.torch.save_file(contiguous, temporary, metadata={"jostle": json.dumps(about)})
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_metadata(path: Path) -> dict[str, Any]:
    """Return what `write_tensors` was told about its tensors."""
    with safetensors.safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["jostle"])


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_tensors` wrote."""
    return safetensors.torch.load_file(path), read_metadata(path)


@dataclass(frozen=True)
class Progress:
    """What a progress bar is told after every step."""

    steps_done: int
    mean_loss: float | None


def run_chains(
    dynamics: Dynamics,
    recorder: Recorder,
    checkpoints: Checkpoints,
    *,
    chains: list[int],
    at_once: int,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    report: Callable[[Progress], None] = lambda progress: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> tuple[list[Failure], list[str]]:
    """Run chains to their last draw, from wherever their checkpoints stand.

    Returns:
        The chains that failed, and the sampler's remarks.

    Raises:
        KeyboardInterrupt: when ``interrupted()``, after a checkpoint.
    """
    config = dynamics.config
    failures: list[Failure] = []
    remarks: list[str] = []
    clock = _CheckpointClock(checkpoint_seconds)
    remaining = [chain for chain in chains if chain not in recorder.finished]
    done = (len(chains) - len(remaining)) * config.steps[-1]
    for group in _groups(dynamics, recorder, checkpoints, remaining, at_once):
        done += group.step * len(group.chains)
        while group.chains:
            # Before the step's draw is observed: a chain that resumes here observes it, and nobody does so twice.
            stop = interrupted()
            if stop or clock.due():
                started = time.monotonic()
                recorder.flush()
                checkpoints.save(group, recorder)
                clock.took(time.monotonic() - started)
            if stop:
                raise KeyboardInterrupt
            mean_loss = None
            draw, between = divmod(group.step - config.burn_in, config.thin)
            if group.step >= config.burn_in and between == 0:
                seen = dynamics.observe(group)
                healthy = _healthy(group, seen)
                if len(healthy) < len(group.chains):
                    failures += _fail(group, healthy, recorder)
                    group.select(healthy)
                    seen = {name: value[healthy] for name, value in seen.items()}
                if not group.chains:
                    break
                recorder.record(group.chains, draw, seen)
                mean_loss = seen["train"].mean().item()
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
            checkpoints.save(group, recorder)
    return failures, remarks


def _groups(
    dynamics: Dynamics, recorder: Recorder, checkpoints: Checkpoints, chains: list[int], at_once: int
) -> Iterator[Group]:
    """Chains that stand at the same step, at most ``at_once`` together."""
    steps = checkpoints.steps(chains)
    ordered = sorted(chains, key=lambda chain: (-steps[chain], chain))
    for step, same in itertools.groupby(ordered, key=steps.__getitem__):
        waiting = list(same)
        for first in range(0, len(waiting), at_once):
            yield checkpoints.load(waiting[first : first + at_once], step, dynamics, recorder)


def _healthy(group: Group, seen: dict[str, Tensor]) -> list[int]:
    finite = torch.isfinite(group.weights).all(1)
    for values in seen.values():
        finite &= torch.isfinite(values).all(1).to(finite.device)
    return finite.nonzero()[:, 0].tolist()


def _fail(group: Group, healthy: list[int], recorder: Recorder) -> list[Failure]:
    failures = []
    for row in sorted(set(range(len(group.chains))) - set(healthy)):
        where = "weights" if not torch.isfinite(group.weights[row]).all() else "a loss"
        failures.append(Failure(group.chains[row], group.step, f"{where} left the finite numbers"))
        recorder.drop(group.chains[row])
    return failures


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

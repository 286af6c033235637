"""Runs chains to their last draw: step, observe, record, checkpoint; stops those that fail."""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from jostle.chains.chain import Group, Walk
from jostle.chains.checkpoints import CheckpointClock, Checkpoints
from jostle.chains.progress import Progress
from jostle.chains.recording import Recorder
from jostle.ranks import Crew

LOOK_SECONDS, MOST_LOOKS = 0.2, 64
"""How long, and for how many draws, a GPU may run without being asked whether its chains are well."""


@dataclass(frozen=True)
class Failure:
    """A chain that left the finite numbers."""

    chain: int
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How many chains move side by side, how often they are checkpointed, and whether they are to stop."""

    at_once: int
    checkpoint_seconds: float
    interrupted: Callable[[], bool]


def run_chains(
    dynamics: Walk,
    recorder: Recorder,
    checkpoints: Checkpoints,
    pace: Pace,
    *,
    chains: list[int],
    draws: int | None = None,
    first_draw: int = 0,
    report: Callable[[Progress], None],
) -> tuple[list[Failure], list[str]]:
    """Run chains to their last draw, or to so many draws, from wherever their checkpoints stand.

    Draws before ``first_draw`` are recorded already: a chain without a checkpoint walks past them without a look.

    Returns:
        The chains that failed, and the sampler's remarks.

    Raises:
        KeyboardInterrupt: when ``pace.interrupted()``, after a checkpoint.
    """
    config = dynamics.config
    draws = config.draws if draws is None else draws
    failures: list[Failure] = []
    remarks: list[str] = []
    crew = dynamics.model.crew
    clock, health = CheckpointClock(pace.checkpoint_seconds), _Health(crew)
    remaining = [chain for chain in chains if chain not in recorder.finished]
    done = (len(chains) - len(remaining)) * config.steps[-1] + sum(checkpoints.steps(remaining).values())
    for group in _groups(dynamics, recorder, checkpoints, remaining, pace.at_once):
        while group.chains:
            # Before the step's draw is observed: a chain that resumes here observes it, and nobody does so twice.
            stop = crew.any(pace.interrupted())
            if stop or crew.any(clock.due()):
                started = time.monotonic()
                failures += health.examine(group, recorder)[0]
                recorder.flush()
                checkpoints.save(group, dynamics.model, recorder, bisect_left(config.steps, group.step))
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
            before = group.step
            dynamics.advance(group, config.thin - between)
            done += len(group.chains) * (group.step - before)
            report(Progress(done, mean_loss))
        recorder.flush()
        for chain in group.chains:
            recorder.finish(chain)
        if group.chains:
            remarks += config.sampler.remarks(group.statistics)
            checkpoints.save(group, dynamics.model, recorder, draws)
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
        values = [value.to(weights.device) for name, value in seen.items() if name not in ("weights", "temperature")]
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

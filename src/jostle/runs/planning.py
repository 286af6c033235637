"""What a run will take, before it takes it: weights, memory, disk and time; plans that cannot fit are refused."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from jostle.chains.execution import probe
from jostle.chains.progress import duration
from jostle.chains.randomness import BLOCK
from jostle.chains.stopping import next_round
from jostle.config import Config
from jostle.errors import InputError
from jostle.models.functional import free_memory
from jostle.runs.preparing import Prepared

THIN_WHERE_UNKNOWN = 10
"""For a time where a pilot will choose the steps between draws."""

LONG = 3600.0
"""Seconds from which on a plan says what would take less."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will take; bytes, unless it says otherwise."""

    moving_weights: int
    model_bytes: int
    chains: int
    chains_at_once: int
    """On each rank, or crew of them."""
    crews: int
    """Ranks, or groups of them that hold one model together."""
    shards: int
    draws: int
    at_least_draws: int
    thin: int | None
    """None where a pilot will choose it."""
    burn_in: int
    chain_bytes: int
    """Weights, statistics, gradient and noise of the chains that run at once, on the device."""
    state_bytes: int
    """Where all chains stand, on disk; with ``keep="covariance"``, their sums too."""
    trace_bytes: int
    """Of all draws, on disk."""
    kept_weight_bytes: int
    """The weights of all draws, on disk, where they are kept."""
    score_bytes: int
    """The matrix of train × query, when it is asked for."""
    written_bytes: int
    """Of these, what is on disk already."""
    disk_free: int
    elsewhere: str | None
    """Where traces are, and the weights of every draw, if not on this disk."""
    memory_free: int | None
    """On a GPU."""

    def check(self) -> None:
        """Refuse what cannot fit, and say what would."""
        room = self.disk_free + self.written_bytes - self.state_bytes
        a_draw = 0 if self.elsewhere else (self.trace_bytes + self.kept_weight_bytes) / self.draws
        if a_draw * self.at_least_draws > room:
            fits = int(max(0, room) / a_draw) if a_draw else 0
            raise InputError(
                "out",
                got=f"a run of {_size(self.trace_bytes + self.kept_weight_bytes + self.state_bytes)} (traces "
                f"{_size(self.trace_bytes)}{self._kept}, state of the chains {_size(self.state_bytes)}) where "
                f"{_size(self.disk_free)} are free",
                expected="room for it",
                fix=f"{fits} draws of each chain would fit" if fits else "choose another disk, or fewer weights",
            )
        if self.memory_free is not None and self.chain_bytes > self.memory_free:
            fits = int(self.memory_free / (self.chain_bytes / self.chains_at_once))
            raise InputError(
                "chains_at_once",
                got=f"{self.chains_at_once}, which need {_size(self.chain_bytes)} of GPU memory, with "
                f"{_size(self.memory_free)} free",
                expected=f"at most {fits}" if fits else "fewer moving weights, or a larger GPU",
            )

    @property
    def _kept(self) -> str:
        return f", {_size(self.kept_weight_bytes)} for the weights of every draw" if self.kept_weight_bytes else ""

    def lines(self, step_seconds: float, observation_seconds: float) -> list[str]:
        """Return the plan in words, given how long a step and an observation take."""
        thin = self.thin or THIN_WHERE_UNKNOWN
        steps = self.burn_in + (self.draws - 1) * thin
        rounds = -(-self.chains // (self.chains_at_once * self.crews))
        spread = f", on {self.shards} ranks" if self.shards > 1 else ""
        each = f" on each of {self.crews} {'crews' if spread else 'ranks'}" if self.crews > 1 else ""
        seconds = rounds * (steps * step_seconds + self.draws * observation_seconds)
        repeated = f", {rounds} times" if rounds > 1 else ""
        chosen = "" if self.thin else f" (a pilot will choose thin; here it is {thin})"
        most = "at most " if self.at_least_draws < self.draws else ""
        where = f" in {self.elsewhere}" if self.elsewhere else ""
        free = "" if self.memory_free is None else f", {_size(self.memory_free)} free"
        lines = [
            f"weights that move   {self.moving_weights:,} of a model of {_size(self.model_bytes)}{spread}",
            f"chains              {self.chains}, {self.chains_at_once} at once{each}, {most}{self.draws} draws of each",
            f"memory for chains   {_size(self.chain_bytes)}{free}",
            f"disk                {most}{_size(self.trace_bytes)} for traces{self._kept}{where}, "
            f"{_size(self.state_bytes)} for the state of the chains, {_size(self.disk_free)} free",
            f"scores              {_size(self.score_bytes)} when asked for",
            f"time                {most}about {duration(seconds)}: {steps:,} steps of {duration(step_seconds)} and "
            f"{self.draws:,} observations of {duration(observation_seconds)}{repeated}{chosen}",
        ]
        if seconds > LONG:
            if steps * step_seconds > self.draws * observation_seconds:
                less = "most of it are steps: --sampler gaussian takes none, a smaller --batch-size has shorter ones"
            else:
                less = "most of it are observations: fewer or shorter examples have shorter ones"
            lines.append(
                f"for less time       {less}; or fewer --draws; --minutes stops in time and keeps what there is"
            )
        return lines


def make_plan(
    config: Config,
    prepared: Prepared,
    directory: Path,
    *,
    pilot: bool,
    crews: int,
    keep_weights: bool = False,
    elsewhere: str | None = None,
) -> Plan:
    """Return what a run will take, without moving a chain."""
    at_once = prepared.at_once if prepared.together is not None else 1
    model, observers = prepared.alone.model, prepared.observers
    free = free_memory(model.device)  # before there is a chain, which would count twice
    group = prepared.alone.start([0])
    held = group.weights.nbytes + sum(value.nbytes for value in group.statistics.values())
    # One chain alone has its gradient in the model's own precision, and on a GPU its noise block by block.
    gradient = model.moving.center.nbytes if at_once == 1 else group.weights.nbytes
    noise = group.weights.nbytes
    if model.device.type == "cuda" and not getattr(config.sampler, "whole_chain", False):
        noise = min(noise, BLOCK * group.weights.element_size())
    item = next(iter(observers.values())).center_losses.element_size()
    samples = [observer.columns.samples for observer in observers.values()]
    scores = samples[0] * samples[1] if len(samples) > 1 else 0
    columns = sum(observer.columns.total for observer in observers.values())
    columns += sum(len(prepared.at_center[f"observable {name}"]) for name in config.observables)
    traces = config.keep == "traces"
    place = next(parent for parent in (directory, *directory.parents) if parent.exists())
    return Plan(
        moving_weights=model.moving.whole.total,
        model_bytes=size_of(model.model),
        chains=config.chains,
        chains_at_once=at_once,
        crews=crews,
        shards=model.crew.count,
        draws=config.draws,
        at_least_draws=next_round(config, 0),
        thin=None if pilot else config.thin,
        burn_in=config.burn_in,
        chain_bytes=at_once * (held + gradient + noise),
        state_bytes=config.chains * held * model.crew.count + (0 if traces else (config.chains + 1) * 8 * scores),
        trace_bytes=config.chains * config.draws * columns * item if traces else 0,
        kept_weight_bytes=config.chains * config.draws * group.weights.nbytes * model.crew.count if keep_weights else 0,
        score_bytes=item * scores,
        written_bytes=_written(directory),
        elsewhere=elsewhere,
        disk_free=shutil.disk_usage(place).free,
        memory_free=free,
    )


def describe_plan(plan: Plan, prepared: Prepared) -> list[str]:
    """Return the plan in words, after a few timed steps at w*."""
    dynamics = prepared.together or prepared.alone
    _, observation, step = probe(dynamics, plan.chains_at_once)
    return plan.lines(step, observation)


def size_of(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def require_room(model: nn.Module, device: torch.device) -> None:
    """Refuse a model that a GPU has no room for, before it is put there."""
    free = free_memory(device)
    if free is not None and size_of(model) > free:
        raise InputError(
            "device",
            got=f"{device} with {_size(free)} free, for a model of {_size(size_of(model))}",
            expected="room for it",
            fix="use a larger GPU, several of them with --shards, or --device cpu",
        )


def _written(directory: Path) -> int:
    """The bytes in a directory, whoever else may be writing there."""
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(place) / name).stat().st_size
    return total


def _size(count: float) -> str:
    """Bytes as people say them."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"

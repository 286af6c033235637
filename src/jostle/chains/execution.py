"""How a run is carried out on this machine: chosen by trying, once, and kept when the run is resumed.

None of it changes a number beyond rounding; but a resumed run should not differ by rounding either.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from jostle.chains.chain import Dynamics
from jostle.chains.signals import stopped_at_once
from jostle.chains.spreading import Spread
from jostle.config import Config
from jostle.models.in_place import InPlace

log = logging.getLogger("jostle")

Result = TypeVar("Result")

WORTH_COMPILING = 150.0
"""A run that would take more seconds than this on a GPU is compiled, which takes 14 to 36 and saves about a quarter."""

WORTH_TRYING = 60.0
"""A run on a CPU that would take fewer seconds than this is not tried in other ways than the plain one."""

SHORT = 10.0
"""A run on a GPU that would take fewer seconds than this runs side by side: no clock is to decide on its rounding."""

WORTHWHILE_GAIN = 1.1
"""How much quicker than the plain one another way has to be."""

COMPARED_ENTRIES = 1 << 24
"""Of a gradient, about how many entries two ways are compared by: that of a large model has no room twice."""

TRIAL_JITTER = 0.01
"""By how much of themselves weights differ where ways are compared, so that chains that see others' are noticed."""

LEAST_DRAWS = 60
"""Nor is a run on a CPU of fewer draws than this: trying takes three of them in each of four ways."""


@dataclass
class Execution:
    """What was chosen.

    Attributes:
        chains_at_once: how many chains run side by side.
        compiled: whether model and step are compiled.
        threads: over how many threads the chains of a group are spread.
        onednn: whether PyTorch may hand operations to oneDNN, whose calls cost more than small products on ARM.
        shares_passes: whether losses that a gradient's pass has found are not observed again.
        batch_sizes: examples in one forward pass of an observation, by set.
    """

    chains_at_once: int = 1
    compiled: bool = False
    threads: int = 1
    onednn: bool = True
    shares_passes: bool = False
    batch_sizes: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return it as a manifest has it."""
        return asdict(self)


def choose(
    config: Config,
    alone: Dynamics,
    together: Dynamics | None,
    spread: Spread | None,
    *,
    at_once: int,
    compile: bool | None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Execution:
    """Try the ways there are of running these chains.

    Args:
        config: the run's configuration.
        alone: chains one after another, in place.
        together: chains side by side, where they can run so.
        spread: the same over several threads.
        at_once: how many of them.
        compile: whether to compile; None leaves it to how long the run takes.
        interrupted: asked between two ways on a CPU; no more are tried then.
    """
    on_gpu = alone.model.device.type == "cuda"
    if not on_gpu and (together is not None or not compile):
        return _choose_on_cpu(config, together or alone, spread, at_once if together else 1, interrupted)
    alone.shares_passes = alone.is_worth_sharing(config.thin)
    if together is not None:
        one, several = _estimate(alone, config, 1), _estimate(together, config, at_once)
        log.info("about %.0f s one chain after another, %.0f s with %d side by side", one, several, at_once)
        if several < max(one, SHORT):
            return Execution(chains_at_once=at_once)
    if compile is None:
        seconds = _estimate(alone, config, 1) if on_gpu else 0.0
        compile = seconds > WORTH_COMPILING
        if on_gpu:
            log.info("about %.0f s of sampling: %s compiling", seconds, "worth" if compile else "not worth")
    return Execution(compiled=compile and _compile(alone), shares_passes=alone.shares_passes)


@functools.cache
def tell_of_contention() -> None:
    """Say once that threads, which wait for each other at every operation, lose more than they gain on busy cores."""
    if not hasattr(os, "getloadavg"):  # Windows has none
        return
    busy, cores, threads = os.getloadavg()[0], os.cpu_count() or 1, torch.get_num_threads()
    if threads > 1 and busy > cores:
        log.warning(
            "%d threads on a machine that is busy (load %.1f on %d cores): OMP_NUM_THREADS=1 may be many times as fast",
            threads, busy, cores,
        )  # fmt: skip


def _choose_on_cpu(
    config: Config, plain: Dynamics, spread: Spread | None, at_once: int, interrupted: Callable[[], bool]
) -> Execution:
    """Try other kernels and other threads, where the run is long enough for that."""
    best = Execution(chains_at_once=at_once)
    # Without oneDNN every way is tried, since it gains most where operations have no threads of their own.
    arm = platform.machine() in ("aarch64", "arm64") and torch.backends.mkldnn.is_available() and onednn_enabled()
    others: list[tuple[Execution, Dynamics]] = []
    for kernels in (True, False) if arm else (True,):
        if not kernels:
            others.append((Execution(chains_at_once=at_once, onednn=False), plain))
        if spread is not None:
            others.append((Execution(chains_at_once=at_once, threads=spread.threads, onednn=kernels), spread))
    groups = -(-config.chains // at_once)
    if not others or config.draws * groups < LEAST_DRAWS or plain.model.crew.count > 1 or interrupted():
        return best
    expected, first = _trial(plain, best, config)
    if first < WORTH_TRYING:
        return best
    # What will be captured sooner or later is compared as it will be.
    if plain.model.capture_now():
        expected, first = _trial(plain, best, config)
    if spread is not None:
        spread.model.capture_now()
    taken, tolerance = first, 10 * plain.model.tolerance
    for way, dynamics in others:
        if interrupted():
            break
        try:
            seen, seconds = _trial(dynamics, way, config)
        except Exception as error:  # a model may be impossible to copy, say
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
            log.info("chains do not run %s (%s)", _in_words(way), reason)
            continue
        if not all((seen[name] - value).norm() <= tolerance * value.norm() for name, value in expected.items()):
            log.info("chains do not run %s (they give other numbers)", _in_words(way))
        elif seconds < min(taken, first / WORTHWHILE_GAIN):
            best, taken = way, seconds
    log.info(
        "about %.0f s of sampling, %.0f s as it will run: %d chains at once %s", first, taken, at_once, _in_words(best)
    )
    return best


def _in_words(way: Execution) -> str:
    threads = f"spread over {way.threads} threads" if way.threads > 1 else "on the calling thread"
    return f"{threads}, {'with' if way.onednn else 'without'} oneDNN"


def _trial(dynamics: Dynamics, way: Execution, config: Config) -> tuple[dict[str, Tensor], float]:
    """What is seen of every set after a few steps, and about how many seconds the run would take."""
    group = dynamics.start(list(range(way.chains_at_once)))
    jitter = torch.randn(group.weights.shape, generator=torch.Generator().manual_seed(0), dtype=group.weights.dtype)
    group.weights *= 1 + TRIAL_JITTER * jitter.to(group.weights.device)
    step = observation = float("inf")
    seen: dict[str, Tensor] = {}
    with onednn(way.onednn):
        for _ in range(3):
            started = time.perf_counter()
            dynamics.advance(group)
            step = min(step, time.perf_counter() - started)
        for _ in range(3):
            started = time.perf_counter()
            seen = dynamics.observe(group)
            observation = min(observation, time.perf_counter() - started)
    groups = -(-config.chains // way.chains_at_once)
    return seen, groups * (config.draws * observation + config.steps[-1] * step)


def make_ready(execution: Execution, dynamics: Dynamics, in_place: InPlace) -> None:
    """Make chains run in the way that was chosen, until the model is given back."""
    if not execution.onednn:
        in_place.until_given_back(onednn(False))
    # A run may be resumed by arguments, or on processes, that do not allow what it was begun with.
    model, dynamics.shares_passes = dynamics.model, execution.shares_passes and dynamics.can_share_passes
    if not isinstance(model, InPlace):
        return
    if execution.compiled and not model.compiled:
        _compile(dynamics)
    if model.device.type == "cuda":
        model.replay()
        probe(dynamics, 1)


def probe(dynamics: Dynamics, chains: int) -> tuple[list[Tensor], float, float]:
    """What is seen, and which way it goes, at w*; and how long a step takes, and an observation beside it."""
    group = dynamics.start(list(range(chains)))
    values, seconds = [], []
    every = -(-group.weights.shape[1] // COMPARED_ENTRIES)
    for work in (
        lambda: list(dynamics.observe(group).values()),
        lambda: [dynamics.gradient(group)[:, ::every].float()],
    ):
        work()  # the first time, kernels are loaded or compiled
        seen, taken = timed(dynamics, work)
        values += seen
        seconds.append(taken)
    dynamics.advance(group)
    dynamics.model.let_go()
    observation, step = seconds
    return values, dynamics.beside_steps(observation, step), step


def timed(dynamics: Dynamics, work: Callable[[], Result]) -> tuple[Result, float]:
    """What some work gives, and how many seconds it takes, the device's part of it included."""

    def wait() -> None:
        if dynamics.model.device.type == "cuda":
            torch.cuda.synchronize()

    wait()
    started = time.perf_counter()
    result = work()
    wait()
    return result, dynamics.model.crew.slowest(time.perf_counter() - started)


def onednn_enabled() -> bool:
    """Return whether PyTorch may use oneDNN."""
    return bool(getattr(torch.backends.mkldnn, "enabled"))  # noqa: B009 - its type is not declared


@contextlib.contextmanager
def onednn(enabled: bool) -> Iterator[None]:
    """Have PyTorch use oneDNN, or not, for as long as this lasts."""
    mkldnn: Any = torch.backends.mkldnn
    before = mkldnn.enabled
    mkldnn.enabled = enabled and before
    try:
        yield
    finally:
        mkldnn.enabled = before


def _estimate(dynamics: Dynamics, config: Config, chains: int) -> float:
    """About how many seconds the run would take, with so many chains at once."""
    _, observation, step = probe(dynamics, chains)
    return -(-config.chains // chains) * (config.draws * observation + config.steps[-1] * step)


def _compile(dynamics: Dynamics) -> bool:
    """Compile model and step where that works and changes nothing but rounding; say so where it does not."""
    model = dynamics.model
    assert isinstance(model, InPlace)
    plain, *_ = probe(dynamics, 1)
    started = time.perf_counter()
    try:
        with stopped_at_once():
            model.compile("inductor")
            dynamics.compile_step()
            compiled, *_ = probe(dynamics, 1)
        same = all((a - b).norm() <= 10 * model.tolerance * a.norm() for a, b in zip(plain, compiled, strict=True))
        reason = None if same else "compiled, the model gives other numbers"
    except Exception as error:  # any model may hit any limit of the compiler; it runs without
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:150]}"
    if reason is None:
        log.info("compiled in %.0f s", time.perf_counter() - started)
        return True
    model.compile(None)
    dynamics.compile_step(False)
    log.warning("running without torch.compile (%s)", reason)
    return False

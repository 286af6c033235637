"""How a run is carried out on this machine: chosen by trying, once, and kept when the run is resumed.

None of it changes a number beyond rounding; but a resumed run should not differ by rounding either.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from jostle.chains import Dynamics
from jostle.config import Config
from jostle.in_place import InPlace

log = logging.getLogger("jostle")

WORTH_COMPILING = 240.0
"""A run that would take more seconds than this on a GPU is compiled: that saves a fifth of them, and takes about 50."""


@dataclass
class Execution:
    """What was chosen."""

    chains_at_once: int = 1
    compiled: bool = False
    batch_sizes: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return it as a manifest has it."""
        return asdict(self)


def choose(
    config: Config, alone: Dynamics, together: Dynamics | None, *, at_once: int, compile: bool | None
) -> Execution:
    """Try the ways there are of running these chains.

    Args:
        config: the run's configuration.
        alone: chains one after another, in place.
        together: chains side by side, where they can run so.
        at_once: how many of them.
        compile: whether to compile; None leaves it to how long the run takes.
    """
    on_gpu = alone.model.device.type == "cuda"
    if together is not None:
        if not on_gpu:
            return Execution(chains_at_once=at_once)
        one, several = _estimate(alone, config, 1), _estimate(together, config, at_once)
        log.info("about %.0f s one chain after another, %.0f s with %d side by side", one, several, at_once)
        if several < one:
            return Execution(chains_at_once=at_once)
    if compile is None:
        seconds = _estimate(alone, config, 1) if on_gpu else 0.0
        compile = seconds > WORTH_COMPILING
        if on_gpu:
            log.info("about %.0f s of sampling: %s compiling", seconds, "worth" if compile else "not worth")
    return Execution(compiled=compile and _compile(alone))


def prepare(execution: Execution, dynamics: Dynamics) -> None:
    """Make chains that run one after another run in the way that was chosen."""
    model = dynamics.model
    if not isinstance(model, InPlace):
        return
    if execution.compiled and not model.compiled:
        _compile(dynamics)
    if model.device.type == "cuda":
        model.replay()
        probe(dynamics, 1)


def probe(dynamics: Dynamics, chains: int) -> tuple[list[Tensor], float, float]:
    """What is seen, and which way it goes, at w*; and how long an observation and a step take."""
    group = dynamics.start(list(range(chains)))
    values, seconds = [], []
    for work in (lambda: list(dynamics.observe(group).values()), lambda: [dynamics.gradient(group).float()]):
        work()  # the first time, kernels are loaded or compiled
        _wait(dynamics)
        started = time.perf_counter()
        values += work()
        _wait(dynamics)
        seconds.append(dynamics.model.crew.slowest(time.perf_counter() - started))
    dynamics.advance(group)
    return values, seconds[0], seconds[1]


def _wait(dynamics: Dynamics) -> None:
    if dynamics.model.device.type == "cuda":
        torch.cuda.synchronize()


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

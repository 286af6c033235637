"""8 chains of models of 100k weights on a CPU, in each way there is of running them.

One after another is what a plain user gets from a loop over chains: PyTorch's own settings, one chain at a time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

import jostle
from benchmarks.small import configuration
from jostle.chains.chain import Dynamics
from jostle.chains.execution import choose, onednn
from jostle.chains.observing import Observer
from jostle.chains.spreading import OnEveryThread, Spread
from jostle.data.datasets import Data
from jostle.losses import Loss
from jostle.models.functional import FunctionalModel, SideBySide
from jostle.models.in_place import InPlace
from jostle.models.weights import MovingWeights

CHAINS, STEPS = 8, 10


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def parts_of_a_draw(way: Dynamics, at_once: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """The steps of every chain, of batch 32, and 500 examples observed at all of them."""
    groups = [way.start(list(range(first, first + at_once))) for first in range(0, CHAINS, at_once)]

    def steps() -> None:
        for group in groups:
            until = group.step + STEPS
            while group.step < until:
                way.advance(group, until - group.step)

    return steps, lambda: [way.observe(group) for group in groups]


def classifier() -> tuple[nn.Module, Loss, Data]:
    model = nn.Sequential(nn.Linear(64, 280), nn.GELU(), nn.Linear(280, 280), nn.GELU(), nn.Linear(280, 10))
    data = Data((torch.randn(500, 64), torch.arange(500) % 10), "train")
    return model, jostle.losses.classification(), data


def language_model() -> tuple[nn.Module, Loss, Data]:
    """Two blocks of width 64, 16 tokens at a time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=168, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    data = Data([{"input_ids": row} for row in torch.randint(64, (500, 16)).tolist()], "train")
    return LlamaForCausalLM(shape), jostle.losses.next_token(), data


def convnet() -> tuple[nn.Module, Loss, Data]:
    """Three convolutions, on images of 16 × 16."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    data = Data((torch.randn(500, 3, 16, 16), torch.arange(500) % 10), "train")
    return model, jostle.losses.classification(), data


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Loss, Data]], int]] = {
    "classifier": (classifier, 30),
    "language model": (language_model, 5),
    "convnet": (convnet, 3),
}
"""Each with how often it is timed."""


def bench() -> dict[str, Any]:
    """Seconds of a draw in each way, the least of many in turns, part by part; the processor's; and what is chosen."""
    table: dict[str, Any] = {}
    for name, (make, repeats) in MODELS.items():
        torch.manual_seed(0)
        model, loss, data = make()
        moving = MovingWeights(model.eval(), "all")
        print(f"  {name}, {moving.total:,} weights", flush=True)
        with InPlace(model, moving) as in_place:
            table[name] = {"weights": moving.total, **_bench(in_place, loss, data, repeats)}
    return table


def _bench(in_place: InPlace, loss: Loss, data: Data, repeats: int) -> dict[str, Any]:
    cores = torch.get_num_threads()
    model, moving = in_place.model, in_place.moving
    config = configuration(loss, chains=CHAINS, draws=2000, thin=STEPS)
    parts: dict[str, Any] = {
        "sampling_data": data, "potential_loss": loss, "observables": {},
        "observers": {"train": Observer(FunctionalModel(model, moving), loss, data, 256)},
    }  # fmt: skip
    alone = Dynamics(in_place, config, **parts)
    together = Dynamics(SideBySide(model, moving, captured=True), config, **parts)
    spread = Spread(OnEveryThread(model, moving, captured=True), config, threads=cores, **parts)
    for way in (together, spread):
        way.model.capture_now()
    ways: dict[str, tuple[Dynamics, int, int, bool]] = {
        "one after another": (alone, 1, cores, True),
        "one after another, one thread": (alone, 1, 1, True),
        "the same without oneDNN": (alone, 1, 1, False),
        "side by side": (together, CHAINS, cores, True),
        "side by side, without oneDNN": (together, CHAINS, cores, False),
        "spread": (spread, CHAINS, cores, True),
        "spread, without oneDNN": (spread, CHAINS, cores, False),
    }
    work = {name: parts_of_a_draw(way, at_once) for name, (way, at_once, *_) in ways.items()}
    clocks: tuple[Callable[[], float], ...] = (time.perf_counter, time.process_time)
    least = {name: np.full((2, 2), np.inf) for name in ways}  # of the steps and an observation, by each clock
    for _ in range(repeats):
        for name, (_, _, count, enabled) in ways.items():
            with threads(count), onednn(enabled):
                for row, part in enumerate(work[name]):
                    before = [clock() for clock in clocks]
                    part()
                    taken = [clock() - start for clock, start in zip(clocks, before, strict=True)]
                    least[name][row] = np.minimum(least[name][row], taken)
    draws = {name: times.sum(0) for name, times in least.items()}
    # The plain loop is given the better of two settings: several threads for each operation may hurt it.
    plain = min(draws[name][0] for name in list(ways)[:2])
    table: dict[str, Any] = {"load_average": os.getloadavg()[0]}  # of a busy machine, only the processor's count
    for name, (seconds, processor) in draws.items():
        table[name] = {"seconds": seconds, "processor_seconds": processor, "ratio": plain / seconds}
        print(f"  {name:32} {seconds:8.3f} s  {table[name]['ratio']:6.2f} ×  (processor {processor:.3f} s)", flush=True)
    table["chosen"] = choose(config, alone, together, spread, at_once=CHAINS, compile=None).to_dict()
    print(f"  chosen: {table['chosen']}", flush=True)
    return table

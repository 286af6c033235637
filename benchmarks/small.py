"""What a laptop can time in a minute, as ratios: two ways of doing the same thing, in turns, in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import jostle
from jostle.chains import Dynamics
from jostle.config import Config, describe
from jostle.data import Data
from jostle.estimate import Standardized, covariance
from jostle.functional import FunctionalModel, SideBySide
from jostle.in_place import InPlace
from jostle.observing import Observer
from jostle.weights import MovingWeights


def ratio(slow: Callable[[], Any], fast: Callable[[], Any], repeats: int = 7) -> dict[str, float]:
    """Median seconds of each, timed in turns so that whatever else the machine does falls on both; and their ratio."""
    times: tuple[list[float], list[float]] = ([], [])
    for function in (slow, fast):
        function()
    for _ in range(repeats):
        for function, taken in zip((slow, fast), times, strict=True):
            started = time.perf_counter()
            function()
            taken.append(time.perf_counter() - started)
    before, after = (statistics.median(taken) for taken in times)
    return {"seconds_before": before, "seconds": after, "ratio": before / after}


def dynamics(
    functional: FunctionalModel, loss: Any, data: Data, observers: dict[str, Observer], **more: Any
) -> Dynamics:
    settings: dict[str, Any] = {"chains": 8, "draws": 10, "burn_in": 0, "thin": 10, "batch_size": 32} | more
    config = Config(
        posterior=jostle.Posterior(n_beta=100, localization=1000), sampler=jostle.SGLD(step_size=1e-4),
        loss=describe(loss), potential_loss=describe(loss), observables=(), keep="traces", seed=0, **settings,
    )  # fmt: skip
    return Dynamics(functional, config, sampling_data=data, potential_loss=loss, observers=observers, observables={})


def chains_side_by_side() -> dict[str, float]:
    """A draw of 8 chains of a 100k-weight classifier, 10 steps apart: one after another, and side by side."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 280), nn.GELU(), nn.Linear(280, 280), nn.GELU(), nn.Linear(280, 10)).eval()
    moving = MovingWeights(model, "all")
    loss = jostle.losses.classification()
    data = Data((torch.randn(500, 64), torch.arange(500) % 10), "train")
    observers = {"train": Observer(FunctionalModel(model, moving), loss, data, 256)}
    alone, together = (dynamics(way(model, moving), loss, data, observers) for way in (InPlace, SideBySide))

    def draw(way: Dynamics, groups: list[list[int]]) -> None:
        for chains in groups:
            group = way.start(chains)
            for _ in range(10):
                way.advance(group)
            way.observe(group)

    return ratio(lambda: draw(alone, [[chain] for chain in range(8)]), lambda: draw(together, [list(range(8))]))


def late_layers() -> dict[str, float]:
    """Observing 32 sequences with an 8-layer model of which the last layer moves: in full, and from what is kept."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, num_hidden_layers=8, num_attention_heads=4, intermediate_size=512
    )
    model = LlamaForCausalLM(config).eval()
    moving = MovingWeights(model, "layers.7.attention")
    sequences = [{"input_ids": row} for row in torch.randint(512, (32, 64)).tolist()]
    data, loss = Data(sequences, "train"), jostle.losses.next_token()
    plain = FunctionalModel(model, moving)
    observer = Observer(plain, loss, data, 32)
    weights = moving.center[None]
    with InPlace(model, moving) as kept:
        return ratio(lambda: observer(plain, weights), lambda: observer(kept, weights))


def one_token_against_all() -> dict[str, float]:
    """One series against a 0.5 GB trace (400 draws of 312,500 tokens): estimated as a matrix, and from what is kept."""
    generator = np.random.default_rng(0)
    trace = generator.standard_normal((4, 100, 312_500), dtype=np.float32)
    series = trace[:, :, :1].copy()
    table = Standardized(trace)
    return ratio(lambda: covariance(trace, series, normalize=True), lambda: table.correlation(series), repeats=3)


RATIOS: dict[str, Callable[[], dict[str, float]]] = {
    "chains side by side": chains_side_by_side,
    "late layers alone move": late_layers,
    "one token against all": one_token_against_all,
}

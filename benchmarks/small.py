"""What a laptop can time in a minute, as ratios: two ways of doing the same thing, in turns, in one process.

Everything runs on one thread and is timed by what the processor spent on it: a machine that is busy with something else
makes both ways late, and neither expensive.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jostle
from jostle.chains.chain import Dynamics
from jostle.chains.observing import Observer
from jostle.config import Config, describe
from jostle.data.datasets import Data
from jostle.estimate import Standardized, covariance
from jostle.models.functional import FunctionalModel, SideBySide
from jostle.models.in_place import InPlace
from jostle.models.weights import MovingWeights


def ratio(slow: Callable[[], Any], fast: Callable[[], Any], repeats: int = 5) -> dict[str, float]:
    """Least processor seconds of each, in turns, after a first time that does not count; and their ratio."""
    torch.set_num_threads(1)
    times: tuple[list[float], list[float]] = ([], [])
    for function in (slow, fast):
        function()
    for _ in range(repeats):
        for function, taken in zip((slow, fast), times, strict=True):
            started = time.process_time()
            function()
            taken.append(time.process_time() - started)
    before, after = (min(taken) for taken in times)
    return {"seconds_before": before, "seconds": after, "ratio": before / after}


def configuration(loss: Any, **more: Any) -> Config:
    settings: dict[str, Any] = {"chains": 8, "draws": 10, "burn_in": 0, "thin": 10, "batch_size": 32} | more
    return Config(
        posterior=jostle.Posterior(n_beta=100, localization=1000), sampler=jostle.SGLD(step_size=1e-4),
        loss=describe(loss), potential_loss=describe(loss), observables=(), keep="traces", seed=0, **settings,
    )  # fmt: skip


def dynamics(
    functional: FunctionalModel, loss: Any, data: Data, observers: dict[str, Observer], **more: Any
) -> Dynamics:
    config = configuration(loss, **more)
    return Dynamics(functional, config, sampling_data=data, potential_loss=loss, observers=observers, observables={})


def algorithm_1(
    model: nn.Module, losses: Callable[[Any], Tensor], data: Data, moving: MovingWeights, config: Config
) -> list[Tensor]:
    """Algorithm 1 as one would write it down: eager, chain after chain, every parameter in turn."""
    parameters = [dict(model.named_parameters())[name] for name in moving.names]
    center = [parameter.detach().clone() for parameter in parameters]
    n_beta, localization = config.posterior.n_beta, config.posterior.localization
    step_size = vars(config.sampler)["step_size"]
    generator, everything = np.random.default_rng(config.seed), data.whole()
    trace = []
    for _ in range(config.chains):
        for step in range(config.steps[-1] + 1):
            if step in config.steps:
                with torch.no_grad():
                    trace.append(losses(everything))
            batch = data.batch(generator.choice(len(data), config.batch_size, replace=False))
            gradients = torch.autograd.grad(losses(batch).mean(), parameters)
            with torch.no_grad():
                for parameter, origin, gradient in zip(parameters, center, gradients, strict=True):
                    drift = n_beta * gradient + localization * (parameter - origin)
                    parameter += -step_size / 2 * drift + math.sqrt(step_size) * torch.randn_like(parameter)
        with torch.no_grad():
            for parameter, origin in zip(parameters, center, strict=True):
                parameter.copy_(origin)
    return trace


def walk(way: Dynamics) -> None:
    """The same with Jostle: all chains, side by side where they are so, observed as the configuration says."""
    chains = list(range(way.config.chains))
    for together in [chains] if isinstance(way.model, SideBySide) else [[chain] for chain in chains]:
        group = way.start(together)
        for step in range(way.config.steps[-1] + 1):
            if step in way.config.steps:
                way.observe(group)
            way.advance(group)


def classifier(inputs: int = 16, width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10)]
    return nn.Sequential(*layers).eval()


def small_classifier() -> dict[str, float]:
    """8 chains of a 6k-weight classifier: Algorithm 1, and side by side."""
    model, loss = classifier(), jostle.losses.classification()
    moving = MovingWeights(model, "all")
    data = Data((torch.randn(200, 16), torch.arange(200) % 10), "train")
    together = SideBySide(model, moving)
    way = dynamics(together, loss, data, {"train": Observer(together, loss, data, 256)}, draws=2, thin=5)
    return ratio(
        lambda: algorithm_1(model, lambda batch: loss(model, batch), data, moving, way.config), lambda: walk(way)
    )


def language_model(layers: int) -> tuple[Any, Data]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=512
    )
    sequences = [{"input_ids": row} for row in torch.randint(512, (16, 64)).tolist()]
    return LlamaForCausalLM(config).eval(), Data(sequences, "train")


def small_language_model() -> dict[str, float]:
    """A chain of a 2-layer language model: Algorithm 1, and in place."""
    model, data = language_model(2)
    moving, loss = MovingWeights(model, "attention+mlp"), jostle.losses.next_token()

    def losses(batch: Any) -> Tensor:
        logits, tokens = model(batch["input_ids"], use_cache=False).logits, batch["input_ids"]
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")

    with InPlace(model, moving) as place:
        observers = {"train": Observer(place, loss, data, 16)}
        way = dynamics(place, loss, data, observers, chains=1, draws=2, thin=2, batch_size=4)
        return ratio(lambda: algorithm_1(model, losses, data, moving, way.config), lambda: walk(way))


def late_layers() -> dict[str, float]:
    """Observing 16 sequences with an 8-layer model of which the last layer moves: in full, and from what is kept."""
    model, data = language_model(8)
    moving, loss = MovingWeights(model, "layers.7.attention"), jostle.losses.next_token()
    plain = FunctionalModel(model, moving)
    observer = Observer(plain, loss, data, 16)
    weights = moving.center[None]
    with InPlace(model, moving) as kept:
        return ratio(lambda: observer(plain, weights), lambda: observer(kept, weights))


def one_token_against_all() -> dict[str, float]:
    """One series against a trace of 400 draws of 30,000 tokens: estimated as a matrix, and from what is kept."""
    generator = np.random.default_rng(0)
    trace = generator.standard_normal((4, 100, 30_000), dtype=np.float32)
    series = trace[:, :, :1].copy()
    table = Standardized(trace)
    return ratio(lambda: covariance(trace, series, normalize=True), lambda: table.correlation(series))


RATIOS: dict[str, Callable[[], dict[str, float]]] = {
    "classifier, 8 chains": small_classifier,
    "language model, 1 chain": small_language_model,
    "late layers alone move": late_layers,
    "one token against all": one_token_against_all,
}

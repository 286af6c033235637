"""Training 64 small models on subsets, one by one and at once (`jostle.evaluate.Trainer`), on a CPU or a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.chains import classifier, convnet, language_model
from jostle.evaluate import Trainer

MODELS, COUNTS, BATCH, REPEATS = 64, (1, 4, 16, 64), 64, 3


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], int]] = {
    "perceptron": (perceptron, classifier, 5),
    "classifier": (lambda: classifier()[0], classifier, 5),
    "language model": (lambda: language_model()[0], language_model, 1),
    "convnet": (lambda: convnet()[0], convnet, 1),
}
"""What is trained, whose data, for how many epochs of half of 500 examples."""


def bench() -> dict[str, Any]:
    """Steps a second of all models together, the best of three in turns, and what a Trainer would choose."""
    table: dict[str, Any] = {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, (new_model, source, epochs) in KINDS.items():
        torch.manual_seed(0)
        _, loss, data = source()
        given = data.whole() if data.lengths is None else [data.sample(place) for place in range(len(data))]
        train = Trainer(
            lambda seed, new_model=new_model: new_model().to(device), given,
            lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), epochs=epochs, batch_size=BATCH, loss=loss,
        )  # fmt: skip
        random = np.random.default_rng(0)
        jobs = [(random.choice(500, 250, replace=False), seed) for seed in range(MODELS)]
        steps = MODELS * train.steps(250)[0]
        rates = dict.fromkeys(COUNTS, 0.0)
        for _ in range(REPEATS):
            for count in COUNTS:
                started = time.perf_counter()
                for first in range(0, MODELS, count):
                    train.together(jobs[first : first + count])
                if device == "cuda":
                    torch.cuda.synchronize()
                rates[count] = max(rates[count], steps / (time.perf_counter() - started))
        best = max(rates.values()) / rates[1]
        table[name] = {
            "weights": sum(parameter.numel() for parameter in new_model().parameters()),
            "steps_a_second": {str(count): rate for count, rate in rates.items()},
            "at_once_is_quicker_by": best, "chosen": train.most_at_once(jobs)[0],
        }  # fmt: skip
        words = ", ".join(f"{count} at once {rate:,.0f}" for count, rate in rates.items())
        print(f"  {name:15} steps a second: {words}  ({best:.1f} ×; chosen {table[name]['chosen']})", flush=True)
    return table

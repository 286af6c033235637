"""Functions that run as graphs: the same bits as of themselves, and themselves where that cannot be."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import jostle
from jostle.chains.spreading import OnEveryThread
from jostle.data.datasets import Data
from jostle.models import graphs
from jostle.models.functional import ObservedBatch, SideBySide
from jostle.models.graphs import Graphs
from jostle.models.weights import MovingWeights

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")

CHAINS = 3


def convnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def perceptron(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.Dropout(0.5), nn.Linear(20, outputs))


def task(name: str) -> tuple[nn.Module, Any, Data]:
    torch.manual_seed(0)
    if name == "classification":
        return perceptron(3), jostle.losses.classification(), Data((torch.randn(40, 6), torch.arange(40) % 3), "train")
    if name == "regression":
        return perceptron(2), jostle.losses.regression(), Data((torch.randn(40, 6), torch.randn(40, 2)), "train")
    if name == "convolutions":
        images = torch.randn(40, 1, 6, 6)
        return convnet(), jostle.losses.classification(), Data((images, torch.arange(40) % 3), "train")
    lengths = {"texts": [7] * 40, "texts of all lengths": [3 + k % 5 for k in range(40)]}[name]
    texts = [{"input_ids": torch.randint(30, (length,)).tolist()} for length in lengths]
    shape = LlamaConfig(
        vocab_size=30, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=8,
    )  # fmt: skip
    return LlamaForCausalLM(shape), jostle.losses.next_token(), Data(texts, "train")


@pytest.mark.parametrize(("name", "bfloat16"), [
    ("classification", False), ("classification", True), ("regression", False), ("convolutions", False),
    ("texts", False), ("texts of all lengths", False),
])  # fmt: skip
def test_the_same_bits(name: str, bfloat16: bool) -> None:
    """At other weights and batches than those that were captured, from one batch size to the next."""
    model, loss, data = task(name)
    moving = MovingWeights(model.eval(), "all")
    plain, other = SideBySide(model, moving, bfloat16=bfloat16), OnEveryThread(model, moving, bfloat16=bfloat16)
    generator = np.random.default_rng(0)
    with torch.no_grad(), plain.precision():
        loss(model, data.batch(range(5)))  # what it finds out about a model it cannot find out among chains
    for size in (5, 5, 40) if "texts" in name else (5, 5, 8, 5, 40):
        weights = moving.center * (1 + 0.1 * torch.randn(CHAINS, moving.total))
        indices = [generator.choice(40, size, replace=False) if size < 40 else np.arange(40) for _ in range(CHAINS)]
        gradients = [way.mean_loss_gradient(loss, weights, data, indices) for way in (plain, other)]
        assert torch.equal(*gradients)
        assert gradients[0].abs().max() > 0
        batch = [ObservedBatch(data.batch(indices[0]), None, 0)]
        assert torch.equal(*(way.losses(loss, weights, batch) for way in (plain, other)))
    captured = len(other._graphs._graphs)
    # Of each size, of gradients and of losses; the way back of a convolution PyTorch cannot capture.
    expected = {"convolutions": 3, "texts": 4, "texts of all lengths": 5}.get(name, 6)
    assert captured == expected


def test_what_numbers_decide_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    found = Graphs()

    def turned(values: Tensor) -> Tensor:
        return values if values.sum() > 0 else -values

    def doubled(values: Tensor) -> Tensor:
        return 2 * values

    with caplog.at_level(logging.INFO, "jostle"):
        for sign in (1.0, -1.0, 1.0):
            assert torch.equal(found.run("turned", turned, torch.full((3,), sign)), torch.ones(3))
            assert torch.equal(found.run("doubled", doubled, torch.full((3,), sign)), torch.full((3,), 2 * sign))
    assert len(found._graphs) == 1
    assert len([record for record in caplog.records if "chains run through Python in part" in record.message]) == 1


def test_what_is_no_tensor_is_part_of_what_is_captured() -> None:
    found = Graphs()
    for factor in (2.0, 3.0, 2.0):
        for name in ("a", "b"):
            product = found.run("times", lambda batch, by: batch.get("a", 0) * by, {name: torch.ones(2)}, factor)
            assert (torch.as_tensor(product) == (factor if name == "a" else 0)).all()


def test_capturing_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Graphs()
    for length in (*range(1, 9), *range(1, 9)):
        if length == 4:
            monkeypatch.setattr(graphs, "MOST_SECONDS", 0.0)
        values = torch.arange(float(length))
        assert torch.equal(found.run("square", torch.square, values), values**2)
    assert len(found._graphs) == 3


def test_threads_capture_one_after_another() -> None:
    found, together, calls = Graphs(), Barrier(4), []

    def squared(values: Tensor) -> Tensor:
        calls.append(len(values))
        return values.square().cumsum(0)

    def work(number: int) -> bool:
        together.wait()
        sizes = [number % 2 + 1, *range(1, 9)]
        return all(
            torch.equal(found.run("squared", squared, torch.full((size,), 2.0)), 4 * torch.arange(1.0, size + 1))
            for size in sizes
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert sorted(calls) == list(range(1, 9))  # once for each shape, whoever came first

"""Functions that run as graphs: the same bits as of themselves, and themselves where that cannot be."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import jostle
from jostle.data.datasets import Data
from jostle.models import graphs
from jostle.models.functional import ObservedBatch, SideBySide
from jostle.models.graphs import Graphs
from jostle.models.weights import MovingWeights

CHAINS = 3


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other work anything may take a while."""
    monkeypatch.setattr(graphs, "LONGEST_CALL", 600.0)
    monkeypatch.setattr(graphs, "MOST_SECONDS", 600.0)


def convnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def perceptron(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.Dropout(0.5), nn.Linear(20, outputs))


class Branches(nn.Module):
    """Products of one input with several weights, which an optimizer would like to make one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 5, bias=False) for _ in range(8))
        self.head = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.stack([part(inputs) for part in self.parts]).tanh().sum(0))


def task(name: str) -> tuple[nn.Module, Any, Data]:
    torch.manual_seed(0)
    if name == "classification":
        return perceptron(3), jostle.losses.classification(), Data((torch.randn(40, 6), torch.arange(40) % 3), "train")
    if name == "branches":
        return Branches(), jostle.losses.classification(), Data((torch.randn(40, 6), torch.arange(40) % 3), "train")
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


def captured(found: Graphs) -> int:
    return sum(known.graph is not None for known in found._known.values())


@pytest.mark.parametrize(("name", "weights", "bfloat16"), [
    ("classification", "all", False), ("classification", "all", True),
    ("classification", ["3.weight"], False), ("classification", ["3.weight"], True),
    ("branches", "all", False), ("branches", ["head.weight"], False), ("regression", "all", False),
    ("convolutions", "all", False), ("texts", "all", False), ("texts of all lengths", "all", False),
])  # fmt: skip
def test_the_same_bits(name: str, weights: Any, bfloat16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At other weights and batches than those that were captured, from one batch size to the next."""
    monkeypatch.setattr(graphs, "COMPARED_CALLS", 0)  # which would put right what is wrong
    model, loss, data = task(name)
    moving = MovingWeights(model.eval(), weights)
    plain, other = (SideBySide(model, moving, bfloat16=bfloat16, captured=captured) for captured in (False, True))
    assert not plain.capture_now()
    assert other.capture_now()
    generator = np.random.default_rng(0)
    with torch.no_grad(), plain.precision():
        loss(model, data.batch(range(5)))  # what it finds out about a model it cannot find out among chains
    sizes = (5, 40) if "texts" in name else (5, 8, 40)
    for size in 3 * sizes:
        at = moving.center * (1 + 0.1 * torch.randn(CHAINS, moving.total))
        indices = [generator.choice(40, size, replace=False) if size < 40 else np.arange(40) for _ in range(CHAINS)]
        gradients = [way.mean_loss_gradient(loss, at, data, indices) for way in (plain, other)]
        assert torch.equal(*gradients)
        assert gradients[0].abs().max() > 0
        batch = [ObservedBatch(data.batch(indices[0]), None, 0)]
        assert torch.equal(*(way.losses(loss, at, batch) for way in (plain, other)))
    # Of each size, gradients and losses; the way back of a convolution PyTorch cannot capture.
    assert other._graphs is not None
    assert captured(other._graphs) >= len(sizes) * (1 if name == "convolutions" else 2)
    assert len(other._graphs._as_they_are) == (2 if name == "convolutions" else 0)


def at_once() -> Graphs:
    made = Graphs()
    made.at_once = True
    return made


def test_captured_when_it_would_have_been_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of each shape, and of each structure, by themselves."""
    found, calls = Graphs(), []
    monkeypatch.setattr(Graphs, "last", 30.0)
    monkeypatch.setattr(graphs, "COMPARED_CALLS", 2)
    monkeypatch.setattr(time, "perf_counter", lambda: 12.0 * len(calls))

    def slow(batch: dict[str, Tensor]) -> Tensor:
        calls.append(tuple(batch))
        return 2 * next(iter(batch.values()))

    for _ in range(12):
        assert torch.equal(found.run("slow", slow, {"a": torch.ones(2)}), torch.full((2,), 2.0))
    assert len(calls) == 3 + 1 + 2  # as it is, to capture it, and to compare
    before = len(calls)
    for inputs in ({"b": torch.ones(2)}, {"a": torch.ones(3)}, {"a": torch.ones(2, dtype=torch.float64)}):
        found.run("slow", slow, inputs)
    assert len(calls) == before + 3
    assert captured(found) == 1
    assert Graphs.last == 12.0  # what this one took


def test_what_takes_long_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "LONGEST_CALL", 0.0)
    found = at_once()
    for _ in range(5):
        found.run("square", torch.square, torch.ones(2))
    assert captured(found) == 0


def test_what_numbers_decide_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    found = at_once()

    def turned(values: Tensor) -> Tensor:
        return values if values.sum() > 0 else -values

    def doubled(values: Tensor) -> Tensor:
        return 2 * values

    with caplog.at_level(logging.INFO, "jostle"):
        for sign in (1.0, -1.0, 1.0, -1.0):
            assert torch.equal(found.run("turned", turned, torch.full((3,), sign)), torch.ones(3))
            assert torch.equal(found.run("doubled", doubled, torch.full((3,), sign)), torch.full((3,), 2 * sign))
    assert captured(found) == 1
    assert len([record for record in caplog.records if "chains run through Python in part" in record.message]) == 1


def test_numbers_that_were_looked_at_in_secret_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    found = at_once()

    def longest_first(values: Tensor) -> Tensor:
        return values[sorted(range(len(values)), key=lambda place: -values.tolist()[place])]

    with caplog.at_level(logging.INFO, "jostle"):
        for _ in range(6):
            values = torch.randn(8)
            assert torch.equal(found.run("sorted", longest_first, values), values.sort(descending=True)[0])
    assert "it gives other numbers" in caplog.text


def test_what_is_no_number_compares_as_such() -> None:
    found = at_once()
    for _ in range(4):
        assert found.run("root", torch.sqrt, torch.tensor([-1.0, 4.0])).isnan().tolist() == [True, False]
    assert captured(found) == 1
    assert not found._as_they_are


def test_capturing_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    found = at_once()
    for length in (*range(1, 4), *range(1, 4), *range(4, 9), *range(1, 9)):
        if length == 4:
            monkeypatch.setattr(graphs, "MOST_SECONDS", 0.0)
        values = torch.arange(float(length))
        assert torch.equal(found.run("square", torch.square, values), values**2)
    assert captured(found) == 3


def test_threads_capture_one_after_another() -> None:
    """Whatever they have their graphs in: PyTorch stands between all modules and their calls meanwhile."""
    several, together = [at_once(), at_once()], Barrier(4)
    before = nn.Module.__call__

    def squared(values: Tensor) -> Tensor:
        return values.square().cumsum(0)

    def work(number: int) -> bool:
        together.wait()
        return all(
            torch.equal(
                several[number % 2].run("squared", squared, torch.full((size,), 2.0)), 4 * torch.arange(1.0, size + 1)
            )
            for size in 6 * (*range(1, 9),)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert [captured(found) for found in several] == [8, 8]
    assert nn.Module.__call__ is before


@pytest.mark.parametrize("weights", ["all", ["3.*"]])
def test_a_run_is_the_same_whatever_of_it_is_captured(
    weights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted and resumed, other calls are captured than would have been: the draws are the same to the last bit."""
    model, loss, _ = task("classification")
    inputs, labels = torch.randn(40, 6), torch.arange(40) % 3
    asked: dict[str, Any] = {
        "loss": loss, "posterior": jostle.Posterior(n_beta=30, localization=100, weights=weights), "chains": 3,
        "sampler": jostle.SGLD(step_size=1e-3), "thin": 2, "batch_size": 8, "progress": False,
    }  # fmt: skip
    made: list[Graphs] = []
    initialize = Graphs.__init__
    monkeypatch.setattr(Graphs, "__init__", lambda self: (initialize(self), made.append(self))[0])

    def losses(name: str, *draws: int) -> np.ndarray:
        for until in draws:
            run = jostle.attribute(
                model, (inputs, labels), (inputs[:4], labels[:4]), draws=until, out=tmp_path / name, **asked
            )
        return np.asarray(run.traces.losses("train")[:])

    monkeypatch.setattr(Graphs, "last", float("inf"))
    plain = losses("plain", 20)
    assert not any(map(captured, made))
    monkeypatch.setattr(Graphs, "last", 0.0)
    monkeypatch.setattr(graphs, "COMPARED_CALLS", 0)
    np.testing.assert_array_equal(losses("captured", 9, 20), plain)
    assert any(map(captured, made))


def test_what_remembers_is_never_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook, a loss and an observable of one's own see every call."""
    made: list[Graphs] = []
    initialize = Graphs.__init__
    monkeypatch.setattr(Graphs, "__init__", lambda self: (initialize(self), made.append(self))[0])
    (inputs, labels), plain = (torch.randn(40, 6), torch.arange(40) % 3), jostle.losses.classification()

    def graphs_of(model: nn.Module, **asked: Any) -> int:
        made.clear()
        asked = {"loss": plain} | asked
        jostle.attribute(
            model, (inputs, labels), (inputs[:4], labels[:4]), chains=2, draws=2, thin=1, progress=False, **asked
        )  # fmt: skip
        return len(made)

    hooked = perceptron(3)
    next(hooked.children()).register_forward_hook(lambda *_: None)
    assert graphs_of(perceptron(3)) > 0
    assert graphs_of(hooked) == 0
    assert graphs_of(perceptron(3), loss=lambda model, batch: plain(model, batch)) == 0
    assert graphs_of(perceptron(3), observables={"bias": lambda model: list(model.parameters())[-1]}) == 0

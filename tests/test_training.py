"""Many small models at once: each is what it would be by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import jostle
from jostle.errors import InputError, RetrainingFailedWarning
from jostle.evaluate import Trainer, random_subsets, retrain

MANY = 40
"""Training examples."""


def classes(count: int = MANY, shape: tuple[int, ...] = (5,)) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    labels = torch.randint(3, (count,), generator=random)
    return torch.randn(count, *shape, generator=random).double() + labels.view(-1, *[1] * len(shape)), labels


def perceptron(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def with_norms(seed: int) -> nn.Module:
    """Its batch norms are moved by training itself."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3, bias=False)
    ).double()


class Tied(nn.Module):
    """One weight twice, one that does not move, and a buffer that nothing changes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.fixed = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.two.weight = self.one.weight
        self.fixed.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.fixed(torch.tanh(self.two(torch.tanh(self.one(x))))) * self.scale


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.03, weight_decay=0.1)


def momentum(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)


def falling(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)


def jobs_of(count: int, size: int = 20, examples: int = MANY) -> list[tuple[np.ndarray, int]]:
    random = np.random.default_rng(1)
    return [(random.choice(examples, size, replace=False), seed) for seed in range(count)]


def apart(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((left.double() - right.double()).abs().max()) for left, right in pairs)


SEQUENCES = [{"input_ids": [1 + (i * j) % 7 for j in range(1, 4 + i % 3)]} for i in range(MANY)]


def language_model(seed: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


@pytest.mark.parametrize(
    ("new_model", "data", "optimizer", "more"),
    [
        (perceptron, classes(), adamw, {"batch_size": 8, "schedule": falling}),
        (perceptron, classes(), momentum, {}),
        (with_norms, classes(shape=(2, 5, 5)), momentum, {"batch_size": 6}),
        (lambda seed: Tied().double(), classes(), adamw, {"batch_size": 7}),
        (language_model, SEQUENCES, adamw, {"batch_size": 5, "loss": jostle.losses.next_token()}),
    ],
    ids=["minibatches and a schedule", "whole subsets", "batch norms", "tied weights", "sequences"],
)
def test_at_once_as_one_by_one(
    new_model: Callable[[int], nn.Module], data: Any, optimizer: Any, more: dict[str, Any]
) -> None:
    train = Trainer(new_model, data, optimizer, epochs=3, at_once=4, **more)
    jobs = jobs_of(4)
    assert train.most_at_once(jobs) == 4
    together, single = train.together(jobs), [train(*job) for job in jobs]
    for one, other in zip(together, single, strict=True):
        assert apart(one, other) < 1e-10
        assert not one.training
    assert min(apart(one, other) for one, other in zip(together[1:], together, strict=False)) > 1e-3
    # They have moved from where they began.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert apart(together[0], new_model(0)) > 1e-2


def test_a_training_is_the_loop_that_anyone_would_write() -> None:
    X, y = classes()
    train = Trainer(perceptron, (X, y), adamw, epochs=12, schedule=falling)
    indices = np.arange(3, 30)
    torch.manual_seed(5)
    model = perceptron(5)
    optimizer = adamw(model.parameters())
    for step in range(12):
        optimizer.param_groups[0]["lr"] = 0.03 * (1 - step / 12)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X[indices]), y[indices]).backward()
        optimizer.step()
    assert apart(train(indices, 5), model) < 1e-12


def test_each_epoch_sees_every_example_once_and_batches_are_full() -> None:
    seen: list[list[int]] = []

    def spy(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch[1].tolist())
        return model(batch[0]).square().sum(1)

    train = Trainer(
        lambda seed: nn.Linear(1, 1), (torch.ones(20, 1), torch.arange(20)), momentum, epochs=3, batch_size=4, loss=spy
    )
    indices = np.array([2, 3, 5, 7, 11, 13, 17, 19, 0, 1])
    train(indices, 0)
    assert [len(batch) for batch in seen] == [4] * 7  # 30 examples, of which the last two fill no batch
    in_order = [one for batch in seen for one in batch]
    assert sorted(in_order[:10]) == sorted(in_order[10:20]) == sorted(indices.tolist())
    assert in_order[:10] != in_order[10:20]


def test_subsets_of_unequal_sizes() -> None:
    train = Trainer(perceptron, classes(), adamw, epochs=2, batch_size=8)
    jobs = [(np.arange(size), seed) for seed, size in enumerate([16, 21, 16, 3, 23, 30])]
    for one, job in zip(train.together(jobs), jobs, strict=True):
        assert apart(one, train(*job)) < 1e-10


def test_what_cannot_be_stacked_is_trained_one_by_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("jostle"), "propagate", True)
    caplog.set_level(logging.INFO, "jostle")

    class BySize(torch.optim.SGD):
        """The length of a step hangs on all numbers of a tensor."""

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for value in group["params"]:
                    value.grad /= value.grad.norm()
            return super().step(closure)

    def drops(seed: int) -> nn.Module:
        return nn.Sequential(nn.Dropout(0.5), perceptron(seed))

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = perceptron(0)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x if x.sum() > 0 else -x)

    for new_model, optimizer, reason in (
        (perceptron, lambda ps: BySize(ps, lr=0.1), "the optimizer does not treat every number by itself"),
        (drops, momentum, "RuntimeError: vmap: called random operation"),
        (lambda seed: Looks(), momentum, "RuntimeError"),
    ):
        caplog.clear()
        assert Trainer(new_model, classes(), optimizer, epochs=2, batch_size=5).most_at_once(jobs_of(6)) == 1
        assert f"models are trained one by one: {reason}" in caplog.text, caplog.text
    # A training by itself has all its randomness from its seed, and leaves that of others alone.
    train = Trainer(drops, classes(), momentum, epochs=2, batch_size=5)
    before = torch.random.get_rng_state()
    first, again, other = train(np.arange(20), 1), train(np.arange(20), 1), train(np.arange(20), 2)
    assert apart(first, again) == 0 < apart(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_how_many_at_once_is_found_by_trying(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("jostle"), "propagate", True)
    caplog.set_level(logging.INFO, "jostle")
    train = Trainer(perceptron, classes(), adamw, epochs=5, batch_size=8)
    rates = {1: 100.0, 4: 300.0, 16: 900.0, 64: 910.0, 256: 5000.0}
    tried: list[int] = []

    def rate(jobs: Any) -> float:
        tried.append(len(jobs))
        return rates[len(jobs)]

    monkeypatch.setattr(train, "_steps_a_second", rate)
    assert train.most_at_once(jobs_of(300)) == 16  # 64 are hardly quicker, and 256 are not tried then
    assert tried == [1, 4, 16, 64]
    assert "16 at once: 900 steps a second; one by one 100" in caplog.text
    rates[9] = 500.0
    assert train.most_at_once(jobs_of(9)) == 9
    rates[4] = 105.0
    assert train.most_at_once(jobs_of(9)) == 1
    assert "one by one: 4 at once make no more steps a second" in caplog.text

    def out_of_memory(jobs: Any) -> float:
        if len(jobs) > 4:
            raise torch.OutOfMemoryError
        return 10.0 * len(jobs)

    monkeypatch.setattr(train, "_steps_a_second", out_of_memory)
    assert train.most_at_once(jobs_of(9)) == 4
    monkeypatch.undo()
    assert train._steps_a_second(jobs_of(2)) > 0
    assert train.most_at_once(jobs_of(1)) == 1
    one_by_one = Trainer(perceptron, classes(), adamw, epochs=5, at_once=1)
    assert one_by_one.most_at_once(jobs_of(9)) == 1


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_bank_is_the_same_at_once(tmp_path: Path, jobs: int) -> None:
    X, y = classes(MANY + 6)
    data, query = (X[:MANY], y[:MANY]), (X[MANY:], y[MANY:])
    train = Trainer(perceptron, data, adamw, epochs=3, batch_size=8, at_once=5)
    called: list[int] = []

    def one_by_one(indices: np.ndarray, seed: int) -> nn.Module:
        called.append(seed)
        return train(indices, seed)

    subsets = random_subsets(MANY, 7, share=0.4)
    plain = retrain(one_by_one, data, query, subsets=subsets, seeds=2, out=tmp_path / "plain")
    bank = retrain(train, data, query, subsets=random_subsets(MANY, 3, share=0.4), seeds=1, out=tmp_path / "bank")
    bank = retrain(train, data, query, subsets=subsets, seeds=2, out=tmp_path / "bank", jobs=jobs)
    assert len(called) == bank.summary()["finished"] == 14
    assert np.allclose(bank.values(), plain.values(), atol=1e-6)
    assert np.ptp(plain.values(), axis=(0, 1)).min() > 1e-3


def test_one_of_many_that_fails(tmp_path: Path) -> None:
    X, y = classes(MANY + 6)
    X[0] = float("inf")
    data, query = (X[:MANY], y[:MANY]), (X[MANY:], y[MANY:])
    subsets = random_subsets(MANY, 12)
    train = Trainer(perceptron, data, adamw, epochs=1, at_once=12)
    with pytest.warns(RetrainingFailedWarning):
        bank = retrain(train, data, query, subsets=subsets, out=tmp_path / "infinite")
    held = subsets.members[:, 0].sum()
    assert 0 < held < 12
    assert len(bank.failures) == held
    assert bank.summary()["finished"] == 12 - held

    def fails(seed: int) -> nn.Module:
        if seed == 1:
            raise RuntimeError("no such file")
        return perceptron(seed)

    finite = X[1:MANY], y[1:MANY]
    train, subsets = Trainer(fails, finite, adamw, epochs=1, at_once=24), random_subsets(MANY - 1, 4)
    with pytest.warns(RetrainingFailedWarning, match="no such file"):
        bank = retrain(train, finite, query, subsets=subsets, seeds=3, out=tmp_path / "raises")
    assert {(one["seed"], "no such file" in one["reason"]) for one in bank.failures} == {(1, True)}
    assert bank.summary()["finished"] == 8


def test_a_model_that_is_given_stays_as_it_is() -> None:
    pretrained = perceptron(0)
    before = {name: value.clone() for name, value in pretrained.state_dict().items()}
    train = Trainer(lambda seed: pretrained, classes(), adamw, epochs=2)
    one, other = train.together([(np.arange(10), 0), (np.arange(10, 20), 0)])
    assert apart(one, other) > 1e-3
    assert all(torch.equal(value, before[name]) for name, value in pretrained.state_dict().items())


def test_bad_input() -> None:
    for more, name in (({"epochs": 0}, "epochs"), ({"epochs": 1, "batch_size": 0}, "batch_size"),
                       ({"epochs": 1, "at_once": 0}, "at_once")):  # fmt: skip
        with pytest.raises(InputError, match=name):
            Trainer(perceptron, classes(), adamw, **more)
    not_a_model: Any = lambda seed: "model"  # noqa: E731
    with pytest.raises(InputError, match="new_model: got a str"):
        Trainer(not_a_model, classes(), adamw, epochs=1)(np.arange(3), 0)

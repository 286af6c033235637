"""Many small models at once: each is what it would be by itself."""

from __future__ import annotations

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
    assert train.most_at_once(jobs) == (4, "4 at once")
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


class OfItsSeed(nn.Module):
    """What it is hangs on its seed in one way or another."""

    def __init__(self, seed: int, how: str) -> None:
        super().__init__()
        self.how, self.inner, self.seen = how, perceptron(seed), 0
        self.fixed = torch.randn(5, generator=torch.Generator().manual_seed(seed)).double()
        self.register_buffer("mean", torch.zeros(5).double())
        if how == "layers" and seed:
            self.more = nn.Linear(5, 5)
        if how == "frozen" and seed:
            self.inner[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
            if self.how == "buffer":
                self.mean = 0.5 * self.mean + x.mean(0)
        elif self.how in ("buffer", "count"):  # what was kept is used later
            x = x * (self.seen + 1) - self.mean
        return self.inner(x * self.fixed if self.how == "attribute" else x)


class Pooled(nn.Module):
    def __init__(self, padding_idx: int | None = None, masked: bool = False) -> None:
        super().__init__()
        self.words, self.last, self.masked = nn.Embedding(9, 4, padding_idx=padding_idx), nn.Linear(4, 3), masked

    def forward(self, words: Tensor) -> Tensor:
        seen = self.words(words)
        return self.last((seen * (words > 0).unsqueeze(-1)).sum(1) if self.masked else seen.mean(1))


WORDS = [([1 + (i * j) % 8 for j in range(1, 3 + i % 5)], i % 3) for i in range(MANY)]


def padded(samples: list[Any]) -> tuple[Tensor, Tensor]:
    rows = nn.utils.rnn.pad_sequence([torch.tensor(words) for words, _ in samples], batch_first=True)
    return rows, torch.tensor([label for _, label in samples])


class BySize(torch.optim.SGD):
    """The length of a step hangs on all numbers of a tensor."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for value in group["params"]:
                value.grad /= value.grad.norm()
        return super().step(closure)


def clipped(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Only the gradients of many models are as long as that."""
    optimizer, values = momentum(given := list(parameters)), given
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(values, 50.0) and None)
    return optimizer


def by_dimensions(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for value in parameters:
        groups[value.ndim > 1].append(value)
    return torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": 0.01}, {"params": groups[False], "weight_decay": 0.0}], lr=1e-3
    )


def drops(seed: int) -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5), perceptron(seed))


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x if x.sum() > 0 else -x)


@pytest.mark.parametrize(
    ("new_model", "data", "optimizer", "reason", "more"),
    [
        (perceptron, classes(), lambda ps: BySize(ps, lr=0.1), "the optimizer does not treat every number", {}),
        (perceptron, classes(), clipped, "the optimizer does not treat every number of every model by itself", {}),
        (perceptron, classes(), by_dimensions, "other groups for parameters with one dimension more", {}),
        (drops, classes(), momentum, "RuntimeError: vmap: called random operation", {}),
        (lambda seed: Looks(), classes(), momentum, "RuntimeError", {}),
        *(
            (lambda seed, how=how: OfItsSeed(seed, how), classes(), momentum, reason, {})
            for how, reason in {
                "attribute": "other gradients", "buffer": "comes out differently", "count": "comes out differently",
                "layers": "models of unequal parameters", "frozen": "models of unequal parameters",
            }.items()
        ),
        (lambda seed: Pooled(padding_idx=0, masked=True), WORDS, momentum, "padding_idx", {"collate": padded}),
        (lambda seed: Pooled(), WORDS, momentum, "minds how long other examples are", {"collate": padded}),
    ],
    ids=["size", "clipping", "groups", "dropout", "looks", "attribute", "buffer", "count", "layers", "frozen", "padding",
         "mean"],
)  # fmt: skip
def test_what_cannot_be_stacked_is_trained_one_by_one(
    new_model: Any, data: Any, optimizer: Any, reason: str, more: dict[str, Any]
) -> None:
    train = Trainer(new_model, data, optimizer, epochs=2, batch_size=5, at_once=6, **more)
    count, how = train.most_at_once(jobs_of(6))
    assert count == 1
    assert how.startswith("one by one: ")
    assert reason in how


def test_what_can_be_stacked_though_it_looks_odd() -> None:
    class Masks(nn.Module):
        """Buffers without a norm, and one that two modules have."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.BatchNorm1d(5).double(), perceptron(0)
            self.register_buffer("kept", torch.rand(5) > 0.3)
            self.register_buffer("least", torch.tensor([-torch.inf, 0.0]))
            self.two.register_buffer("also_kept", self.kept)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x) * self.kept * self.get_buffer("two.also_kept"))

    class Scaled(nn.Module):
        """A single number is a parameter, too."""

        def __init__(self, seed: int) -> None:
            super().__init__()
            self.inner, self.scale = perceptron(seed), nn.Parameter(torch.tensor(2.0).double())

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.inner(x)

    for new_model, data, more in (
        (lambda seed: Masks(), classes(), {}),
        (lambda seed: Pooled(masked=True).double(), WORDS, {"collate": padded}),
        (perceptron, classes(), {"clip_norm": 0.1}),
        (Scaled, classes(), {"clip_norm": 0.1}),
    ):
        train = Trainer(new_model, data, adamw, epochs=3, batch_size=6, at_once=4, **more)
        assert train.most_at_once(jobs_of(4))[0] == 4
        for one, job in zip(train.together(jobs_of(4)), jobs_of(4), strict=True):
            assert apart(one, train(*job)) < 1e-10
    # In single precision a step is the same to rounding.
    short = Trainer(lambda seed: perceptron(seed).float(), [(x.float(), y) for x, y in zip(*classes(), strict=True)],
                    momentum, epochs=1, batch_size=6, at_once=4)  # fmt: skip
    assert short.most_at_once(jobs_of(4))[0] == 4
    for one, job in zip(short.together(jobs_of(4)), jobs_of(4), strict=True):
        assert apart(one, short(*job)) < 1e-5


def test_a_training_by_itself_has_all_its_randomness_from_its_seed() -> None:
    X, y = classes()
    train = Trainer(drops, (X, y), momentum, epochs=6, clip_norm=0.3)
    before = torch.random.get_rng_state()
    first, again, other = train(np.arange(20), 1), train(np.arange(20), 1), train(np.arange(20), 2)
    assert apart(first, again) == 0 < apart(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)
    # The same as in a loop, whose dropout goes on where the model's own numbers ended.
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = drops(1)
        optimizer = momentum(model.parameters())
        order = np.random.default_rng(1)
        for _ in range(6):
            chosen = order.permutation(20)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X[chosen]), y[chosen]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
    assert apart(first, model) < 1e-12


def test_how_many_at_once_is_found_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    train = Trainer(perceptron, classes(), adamw, epochs=5, batch_size=8)  # 12 steps
    rates = {1: 100.0, 4: 300.0, 16: 900.0, 64: 910.0, 256: 920.0}
    tried: list[int] = []

    def rate(jobs: Any) -> float:
        tried.append(len(jobs))
        return rates[len(jobs)]

    monkeypatch.setattr(train, "_steps_a_second", rate)
    jobs = jobs_of(300)
    assert train.most_at_once(jobs) == (16, "16 at once, 900 steps a second; one by one 100")  # others hardly quicker
    assert tried == [1, 4, 16, 64, 256]
    rates[256] = 5000.0  # one that is not quicker is no reason to stop
    assert train.most_at_once(jobs)[0] == 256
    # 600 jobs of 12 steps take 720 s at 10 steps a second: what is lost is at most a tenth of it.
    rates |= {1: 1.0, 4: 4.0, 16: 8.0, 64: 10.0, 256: 9.0}
    assert train.most_at_once(jobs, of=600)[0] == 16  # 24 s; 64 would take 77 s
    assert train.most_at_once(jobs, of=6000)[0] == 64
    rates |= {1: 1e6}
    tried.clear()
    assert train.most_at_once(jobs)[0] == 1  # all of them take no time
    assert tried == [1]

    # Twelve large models, 144 steps of 4 s: a try of four would take 112 s.
    rates |= {1: 0.25}
    tried.clear()
    assert train.most_at_once(jobs[:12]) == (1, "one by one: trying others would take longer than they could save")
    assert tried == [1]

    def out_of_memory(jobs: Any) -> float:
        if len(jobs) > 4:
            raise torch.OutOfMemoryError
        return 10.0 * len(jobs)

    monkeypatch.setattr(train, "_steps_a_second", out_of_memory)
    assert train.most_at_once(jobs_of(9))[0] == 4
    monkeypatch.undo()
    assert train._steps_a_second(jobs_of(2)) > 0
    assert train.most_at_once(jobs_of(1)) == (1, "one by one")
    assert Trainer(perceptron, classes(), adamw, epochs=5, at_once=1).most_at_once(jobs_of(9)) == (1, "one by one")


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
    assert train.most_at_once([(np.arange(9), 0), (np.arange(9), 1)]) == (1, "one by one: gradients are not finite")
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
    train, subsets = Trainer(fails, finite, adamw, epochs=1), random_subsets(MANY - 1, 4)
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


def test_a_bank_is_of_one_training_and_one_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    X, y = classes(MANY + 6)
    data, query, subsets = (X[:MANY], y[:MANY]), (X[MANY:], y[MANY:]), random_subsets(MANY, 4)

    def fill(out: str, given: Any = data, optimizer: Any = adamw, **more: Any) -> Any:
        return retrain(Trainer(perceptron, given, optimizer, epochs=2, **more), data, query, subsets=subsets,
                       out=tmp_path / out)  # fmt: skip

    fill("bank", at_once=2)
    assert "jostle: models are trained 2 at once" in capsys.readouterr().err
    fill("bank", given=(X[:MANY].clone(), y[:MANY].clone()))
    with pytest.raises(InputError, match="another training than the bank's: batch_size is 3, expected all"):
        fill("bank", batch_size=3)
    smooth = jostle.losses.classification(label_smoothing=0.1)
    with pytest.raises(
        InputError, match=r"training than the bank's: loss is Classification\(label_smoothing=0.1\), exp"
    ):
        fill("bank", loss=smooth)
    with pytest.raises(
        InputError, match=r"training than the bank's: optimizer is AdamW\(lr=0.5, .*, expected AdamW\(lr"
    ):
        fill("bank", optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.5))
    trainer = Trainer(perceptron, data, adamw, epochs=2)
    with pytest.raises(InputError, match="by is a function of your own, expected a Trainer"):
        retrain(lambda indices, seed: trainer(indices, seed), data, query, subsets=subsets, out=tmp_path / "bank")
    for other in ((X[:MANY].flip(0), y[:MANY].flip(0)), (X, y)):
        with pytest.raises(InputError, match="other examples than those of the Trainer"):
            fill("other", given=other)
    # A mistake that all trainings share is told at once, and leaves no failures behind.
    with pytest.raises(InputError, match="one loss a sample"):
        fill("mean", loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]))
    assert fill("mean").summary()["finished"] == 4


def test_bad_input() -> None:
    for more, name in (({"epochs": 0}, "epochs"), ({"epochs": 1, "batch_size": 0}, "batch_size"),
                       ({"epochs": 1, "at_once": 0}, "at_once")):  # fmt: skip
        with pytest.raises(InputError, match=name):
            Trainer(perceptron, classes(), adamw, **more)

    def not_a_model(seed: int) -> Any:
        return "model"

    others = nn.Linear(5, 3)
    for new_model, optimizer, more, message in (
        (not_a_model, adamw, {}, "new_model: got a str"),
        (perceptron(0), adamw, {}, "new_model: got a Sequential, expected a function of seed"),
        (perceptron, adamw(others.parameters()), {}, "optimizer: got a AdamW, expected a function of parameters"),
        (perceptron, lambda ps: adamw(others.parameters()), {}, "optimizer: got an optimizer of other parameters"),
        (perceptron, adamw, {"clip_norm": 0}, "clip_norm: got 0"),
        (perceptron, adamw, {"epochs": 2.5}, "epochs: got 2.5"),
        (perceptron, adamw, {"loss": nn.CrossEntropyLoss()}, "loss: got a CrossEntropyLoss"),
    ):
        given: Any = new_model
        with pytest.raises(InputError, match=message):
            Trainer(given, classes(), optimizer, **{"epochs": 1, **more})(np.arange(3), 0)
    train = Trainer(perceptron, classes(), adamw, epochs=1)
    for indices, message in ((np.arange(20) > 5, "flatnonzero"), ([], "0 of"), ([[1]], "shape"), ([0.5], "float")):
        with pytest.raises(InputError, match=message):
            train(np.asarray(indices), 0)

"""Drops: small sets left out of the same training, and how much of the predicted change of a loss comes true."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jostle
from jostle.attributors import gradient_similarity, subset_size
from jostle.errors import InputError
from jostle.evaluate import (
    Bank,
    Subsets,
    Trainer,
    compare,
    lds,
    predicted,
    random_drops,
    random_subsets,
    retrain,
    slope,
)
from jostle.evaluate.metrics import slopes_of
from jostle.evaluate.training import Job
from jostle.runs.replaying import Check
from jostle.scores import Scores

MANY, QUERIES, DROPS = 40, 12, 50


def classes(count: int = MANY) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    labels = torch.randint(3, (count,), generator=random)
    return torch.randn(count, 5, generator=random).double() + labels[:, None], labels


def perceptron(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def momentum(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.03, weight_decay=0.1)


def without(*indices: int) -> np.ndarray:
    weights = np.ones(MANY)
    weights[[*indices]] = 0
    return weights


def apart(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((left - right).detach().abs().max()) for left, right in pairs)


def by_hand(
    optimizer: Any, objective: Callable[[nn.Module, np.ndarray, np.ndarray], Tensor], weights: np.ndarray, seed: int
) -> nn.Module:
    """Three epochs in batches of 8, of which nothing is taken away."""
    torch.manual_seed(seed)
    model = perceptron(seed)
    steps = optimizer(model.parameters())
    order = np.random.default_rng(seed)
    for batch in np.concatenate([order.permutation(MANY) for _ in range(3)]).reshape(-1, 8):
        steps.zero_grad()
        objective(model, batch, weights[batch]).backward()
        steps.step()
    return model


@pytest.mark.parametrize("optimizer", [momentum, adamw])
def test_weights_multiply_losses_and_nothing_else(optimizer: Any) -> None:
    X, y = classes()
    train = Trainer(perceptron, (X, y), optimizer, epochs=3, batch_size=8)

    def objective(model: nn.Module, batch: np.ndarray, weights: np.ndarray) -> Tensor:
        return torch.from_numpy(weights) @ F.cross_entropy(model(X[batch]), y[batch], reduction="none") / len(batch)

    weights = without(1, 4, 17, 30)
    weights[5] = 2.5
    got = train.with_weights(weights, 7)
    assert apart(got, by_hand(optimizer, objective, weights, 7)) < 1e-12
    assert apart(got, train(np.arange(MANY), 7)) > 1e-3


class PerToken:
    """Each example has one to four tokens, which are predicted one by one."""

    lengths = torch.arange(MANY) % 4 + 1

    def token_mask(self, batch: Any) -> Tensor:
        return torch.arange(4) < batch[2][:, None]

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        X, y, _ = batch
        shifted = torch.stack([X * (1 + t) for t in range(4)], 1)
        return F.cross_entropy(model(shifted).transpose(1, 2), y[:, None].expand(-1, 4), reduction="none")


def test_where_tokens_count_alike_those_left_out_stay_in_the_denominator() -> None:
    X, y = classes()
    loss = PerToken()
    data, weights = (X, y, loss.lengths), without(2, 3, 21)

    def objective(model: nn.Module, batch: np.ndarray, weights: np.ndarray) -> Tensor:
        some = tuple(part[batch] for part in data)
        real = loss.token_mask(some)
        return (loss(model, some) * real * torch.from_numpy(weights)[:, None]).sum() / real.sum()

    given: dict[str, Any] = {"epochs": 3, "batch_size": 8, "loss": loss}
    tokens = Trainer(perceptron, data, adamw, count_alike="tokens", **given)
    got = tokens.with_weights(weights, 1)
    assert apart(got, by_hand(adamw, objective, weights, 1)) < 1e-12
    assert apart(got, Trainer(perceptron, data, adamw, **given).with_weights(weights, 1)) > 1e-3


@pytest.mark.parametrize("optimizer", [momentum, adamw])
def test_weights_of_one_are_the_training_itself_and_many_at_once_are_as_one_by_one(optimizer: Any) -> None:
    data = tuple(part.float() if part.is_floating_point() else part for part in classes())
    ordinary = Trainer(lambda seed: perceptron(seed).float(), data, optimizer, epochs=3, batch_size=8)
    assert apart(ordinary(np.arange(MANY), 4), ordinary.with_weights(without(), 4)) == 0
    everything = [Job(np.arange(MANY), seed) for seed in range(3)]
    pairs = zip(ordinary.together(everything), ordinary.together([job._replace(weights=without()) for job in everything]),
                strict=True)  # fmt: skip
    assert [apart(*pair) for pair in pairs] == [0, 0, 0]

    train = Trainer(perceptron, classes(), optimizer, epochs=3, batch_size=8, clip_norm=0.5, at_once=4)
    each = [without(*range(first, 12, 4)) for first in range(4)]
    jobs = [Job(np.arange(MANY), number % 2, weights) for number, weights in enumerate(each)]
    assert train.most_at_once(jobs) == (4, "4 at once")
    for number, one in enumerate(train.together([*jobs, *everything])[:4]):
        assert apart(one, train.with_weights(each[number], number % 2)) < 1e-10


def test_what_is_retrained_is_the_minimum_without_the_examples(tmp_path: Path) -> None:
    """Ridge regression by gradient descent: the mean of n losses keeps its n, and the closed form is in nats."""
    random, many = np.random.default_rng(0), 10 * MANY
    X = random.normal(size=(many + QUERIES, 3))
    y = X @ random.normal(size=3) + 0.5 * random.normal(size=len(X))
    tensors = torch.tensor(X), torch.tensor(y)
    train, query = (tuple(part[rows] for part in tensors) for rows in (slice(many), slice(many, None)))
    decay = 0.1

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0])[:, 0] - batch[1]).square() / 2

    trainer = Trainer(
        lambda seed: nn.Linear(3, 1, bias=False).double(), train,
        lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.5, weight_decay=decay), epochs=300, loss=loss,
    )  # fmt: skip
    drops = random_drops(many, DROPS, size=1)
    bank = retrain(trainer, train, query, subsets=drops, out=tmp_path / "bank", loss=loss, progress=False)

    def minimum(weights: np.ndarray) -> np.ndarray:
        weighted = weights[:, None] * X[:many] / many
        return np.linalg.solve(weighted.T @ X[:many] + decay * np.eye(3), weighted.T @ y[:many])

    expected = np.array([(X[many:] @ minimum(row) - y[many:]) ** 2 / 2 for row in drops.members.astype(float)])
    np.testing.assert_allclose(bank.values()[:, 0], expected, atol=2e-6, rtol=2e-6)

    solution = minimum(np.ones(many))
    gradients = X * (X @ solution - y)[:, None]
    curvature = X[:many].T @ X[:many] / many + decay * np.eye(3)
    nats = -gradients[:many] @ np.linalg.solve(curvature, gradients[many:].T) / many
    assert slope(bank, nats).value == pytest.approx(1.0, abs=0.02)
    assert slope(bank, nats / 3).value == pytest.approx(3.0, abs=0.06)
    assert lds(bank, nats).value > 0.99


def planted(
    directory: Path, *, slopes: float | np.ndarray = 1.0, noise: float = 0.0, seeds: int = 1
) -> tuple[Bank, Scores]:
    """A bank whose losses change by so much of what is predicted, and besides by a constant of the query."""
    random = np.random.default_rng(5)
    values = random.normal(size=(MANY, QUERIES))
    drops = random_drops(MANY, DROPS, size=4)
    bank = Bank.create(directory, drops, queries=QUERIES, fingerprints={"train": "a", "query": "b"})
    changes = slopes * ((drops.members - 1.0) @ values) + np.outer(~drops.members.all(1), random.normal(size=QUERIES))
    difficulty = random.random((seeds, QUERIES))
    for subset, seed in bank.todo(seeds):
        luck = noise * random.normal(size=QUERIES) if subset else 0.0
        bank.store(subset, seed, {"loss": difficulty[seed] + changes[subset] + luck})
    return bank, Scores(values=values, method="planted")


def test_a_planted_slope_is_found_and_the_lds_is_one(tmp_path: Path) -> None:
    bank, scores = planted(tmp_path / "bank", slopes=0.4, seeds=2)
    assert lds(bank, scores).value == pytest.approx(1.0, abs=1e-6)
    assert lds(bank, scores.values * -1).value == pytest.approx(-1.0, abs=1e-6)
    for pooled in (False, True):
        found = slope(bank, scores, pooled=pooled)
        assert found.value == pytest.approx(0.4, rel=1e-5)
        assert found.standard_error < 1e-5
        assert len(found.each) == QUERIES
    assert slope(bank, scores.values * -0.1).value == pytest.approx(-4.0, rel=1e-5)
    # A query of which nothing is predicted, and so never the median.
    blind = scores.values.copy()
    blind[:, 3] = 7.0
    assert slope(bank, blind).each[3] == 0
    assert slope(bank, blind).value == pytest.approx(0.4, rel=1e-5)


def test_the_median_of_queries_and_the_pooled_slope_are_those_by_hand(tmp_path: Path) -> None:
    bank, scores = planted(tmp_path / "bank", slopes=np.linspace(0.2, 3, QUERIES) ** 2, noise=0.5)
    predicted = -((~bank.subsets.members[1:]) @ scores.values)
    real = bank.values()[1:, 0] - bank.values()[0, 0]
    each = [np.polyfit(predicted[:, j], real[:, j], 1)[0] for j in range(QUERIES)]
    found = slope(bank, scores)
    np.testing.assert_allclose(found.each, each, rtol=1e-5)
    assert found.value == pytest.approx(np.median(each), rel=1e-5)
    weights = predicted.var(0)
    assert slope(bank, scores, pooled=True).value == pytest.approx(np.average(each, weights=weights), rel=1e-5)
    assert abs(np.median(each) - np.average(each, weights=weights)) > 0.1


@pytest.mark.parametrize("pooled", [False, True])
def test_errors_of_slopes_are_those_of_repeated_experiments(pooled: bool) -> None:
    """Queries, each with a slope of its own, and drops are drawn anew; so is noise, a part of it common to queries."""
    random = np.random.default_rng(11)
    truth, apart, covered, repeats = 0.8, 0.15, np.zeros(2), 150
    values, errors = np.zeros((repeats, 3)), np.zeros((repeats, 3))
    for repeat in range(repeats):
        predicted = random.normal(size=(DROPS, QUERIES))
        noise = random.normal(size=(DROPS, QUERIES)) + random.normal(size=(DROPS, 1))
        changes = (truth + 0.3 * random.normal(size=QUERIES)) * predicted + 0.5 * noise
        # The other's are too large, and have a little noise of their own.
        other = (1 + apart) * predicted + 0.05 * random.normal(size=(DROPS, QUERIES))
        one, two = slopes_of([predicted, other], changes[:, None], pooled=pooled, bootstrap=100, seed=0)
        found = one, two, one - two
        values[repeat], errors[repeat] = [m.value for m in found], [m.standard_error for m in found]
        expected = truth, truth * (1 - (1 + apart) / ((1 + apart) ** 2 + 0.05**2))
        for place, (measured, right) in enumerate(zip((found[0], found[2]), expected, strict=True)):
            low, high = measured.interval
            covered[place] += low < right < high
    np.testing.assert_allclose(values[:, 2], values[:, 0] - values[:, 1], atol=1e-12)
    ratio = errors.mean(0) / values.std(0)
    assert (ratio > 0.9).all(), ratio
    assert (ratio < 1.9).all(), ratio
    assert (covered / repeats > 0.9).all(), covered / repeats
    assert errors[:, 2].mean() < 0.4 * errors[:, 0].mean()


def test_a_bank_of_drops_goes_on_where_it_stood(tmp_path: Path) -> None:
    X, y = classes(MANY + QUERIES)
    data, query = (X[:MANY], y[:MANY]), (X[MANY:], y[MANY:])
    trainer = Trainer(perceptron, data, momentum, epochs=3, batch_size=8)
    trained: list[tuple[int, ...]] = []

    class Counting:
        def __call__(self, indices: np.ndarray, seed: int) -> nn.Module:
            raise AssertionError("drops keep their batches")

        def with_weights(self, weights: np.ndarray, seed: int) -> nn.Module:
            trained.append((seed, *np.flatnonzero(weights == 0).tolist()))
            if len(trained) == 3:
                raise KeyboardInterrupt
            return trainer.with_weights(weights, seed)

    def fill(count: int, train: Any, **more: Any) -> Bank:
        drops = random_drops(MANY, count, size=2)
        return retrain(train, data, query, subsets=drops, out=tmp_path / "bank", progress=False, **more)

    with pytest.raises(KeyboardInterrupt):
        fill(4, Counting())
    assert trained[0] == (0,)
    bank = fill(4, Counting())
    before = bank.values()
    assert len(trained) == 6  # two, one that was interrupted, and the three that were missing
    bank = fill(9, Counting(), seeds=2)
    np.testing.assert_array_equal(bank.values()[:5, 0], before[:, 0])
    assert len(trained) == 6 + 5 + 10
    assert len(set(trained)) == 20

    at_once = retrain(
        Trainer(perceptron, data, momentum, epochs=3, batch_size=8, at_once=4), data, query,
        subsets=random_drops(MANY, 9, size=2), out=tmp_path / "at once", seeds=2, progress=False,
    )  # fmt: skip
    np.testing.assert_allclose(at_once.values(), bank.values(), rtol=1e-6)
    assert Bank(tmp_path / "bank").subsets.kind == "drops"


def test_rows_that_are_missing_are_left_out(tmp_path: Path) -> None:
    bank, scores = planted(tmp_path / "bank", noise=2.0, seeds=2)
    files = {(int(path.stem[:5]), int(path.stem[6:])): path for path in (tmp_path / "bank" / "retrainings").iterdir()}
    whole = slope(bank, scores).value
    for subset in (7, 8, 9):
        files[subset, 0].unlink()
        files[subset, 1].unlink()
    kept = np.delete(np.arange(1, DROPS + 1), [6, 7, 8])
    predicted, real = -((~bank.subsets.members[kept]) @ scores.values), bank.values()
    changes = (real[kept] - real[0]).mean(1)
    each = [np.polyfit(predicted[:, j], changes[:, j], 1)[0] for j in range(QUERIES)]
    assert slope(bank, scores).value == pytest.approx(np.median(each), rel=1e-5)
    assert abs(slope(bank, scores).value - whole) > 1e-4
    # Without the training of a seed on everything, the drops of that seed say nothing.
    files[0, 1].unlink()
    first = real[kept, 0] - real[0, 0]
    each = [np.polyfit(predicted[:, j], first[:, j], 1)[0] for j in range(QUERIES)]
    assert slope(bank, scores).value == pytest.approx(np.median(each), rel=1e-5)
    assert np.isfinite(lds(bank, scores).value)
    files[0, 0].unlink()
    for measure in (lds, slope):
        with pytest.raises(InputError, match="no finished training with nothing left out"):
            measure(bank, scores)
    with pytest.raises(InputError, match="no finished training with nothing left out"):
        compare(bank, {"planted": scores})


def test_the_report_has_slopes(tmp_path: Path) -> None:
    bank, scores = planted(tmp_path / "bank", slopes=0.4, noise=0.3)
    report = compare(bank, {"in nats": scores.values * 0.4, "as it is": scores}, against="as it is")
    text = str(report)
    assert "pooled slope" in text
    assert "LDS per subset" not in text
    assert "1 for scores in nats" in text
    nats, other, *controls = report.rows
    assert nats.slopes is not None
    assert other.slopes is not None
    assert [one.value for one in nats.slopes] == pytest.approx([2.5 * one.value for one in other.slopes], rel=1e-6)
    assert nats.slopes[0].value == pytest.approx(1.0, abs=0.1)
    assert str(nats.slopes[1]) in text
    assert nats.more is not None
    assert abs(nats.more.value) < 1e-12
    assert controls
    assert all(row.slopes is None for row in controls)
    plain = report.to_dict()["methods"]
    assert plain[1]["slopes"]["slope"]["value"] == slope(bank, scores).value
    assert plain[1]["slopes"]["pooled slope"]["value"] == slope(bank, scores, pooled=True).value
    assert plain[2]["slopes"] is None
    report.draw(tmp_path / "drops.svg")
    # All drops are of one size, so that it says nothing.
    assert abs(next(row for row in controls if row.method == "subset size").per_query.value) < 0.15
    assert abs(lds(bank, subset_size(MANY, QUERIES, seed=3)).value) < 0.15


def test_drops_depend_on_seed_and_number_alone() -> None:
    few, more = random_drops(50, 3, size=5, seed=2), random_drops(50, 9, size=5, seed=2)
    assert few.members[0].all()
    assert (~more.members).sum(1).tolist() == [0] + 9 * [5]
    np.testing.assert_array_equal(few.members, more.members[:4])
    assert len({row.tobytes() for row in more.members}) == 10
    assert not np.array_equal(random_drops(50, 3, size=5, seed=3).members, few.members)


def test_bad_input(tmp_path: Path) -> None:
    data = classes()
    train = Trainer(perceptron, data, adamw, epochs=1)
    halves = Bank.create(tmp_path / "halves", random_subsets(MANY, 5), queries=2, fingerprints={})
    with pytest.raises(InputError, match="random_drops"):
        slope(halves, np.ones((MANY, 2)))
    for size, count in ((0, 3), (MANY, 3), (2, 0)):
        with pytest.raises(InputError, match="size" if count else "count"):
            random_drops(MANY, count, size=size)
    drops = random_drops(MANY, 2, size=3)
    given: dict[str, Any] = {"query": data, "out": tmp_path / "bank", "progress": False}
    with pytest.raises(InputError, match="with_weights"):
        retrain(lambda indices, seed: perceptron(seed), data, subsets=drops, **given)
    with pytest.raises(InputError, match="row of all examples"):
        retrain(train, data, subsets=Subsets(drops.members[1:], "drops", drops.labels[1:]), **given)
    with pytest.raises(InputError, match="change losses by little"):
        retrain(train, data, subsets=drops, dtype="float16", **given)
    assert not (tmp_path / "bank").exists()
    with pytest.raises(InputError, match="one for each of the 40 examples"):
        train.with_weights(np.ones(7), 0)
    with pytest.raises(InputError, match="not finite"):
        train.with_weights(np.full(MANY, np.nan), 0)
    with pytest.raises(InputError, match="'sequences' or 'tokens'"):
        Trainer(perceptron, data, adamw, epochs=1, count_alike="words")  # type: ignore[arg-type]


def test_no_resampling_leaves_the_numbers(tmp_path: Path) -> None:
    bank, scores = planted(tmp_path / "bank", noise=1.0)
    for measure in (lds, slope):
        assert measure(bank, scores, bootstrap=0).value == measure(bank, scores, bootstrap=20).value


def test_a_replay_in_place_of_trainings(tmp_path: Path) -> None:
    """What it measures of another method is what trainings do, and every table says that nothing was trained."""
    torch.manual_seed(0)
    X, labels = torch.randn(120, 6), torch.randint(0, 3, (120,))
    train, query = (X[:100], labels[:100]), (X[100:], labels[100:])
    trainer = Trainer(
        lambda seed: seeded(seed), train, lambda parameters: torch.optim.SGD(parameters, lr=0.1), epochs=4,
        batch_size=10,
    )  # fmt: skip
    drops = random_drops(100, 60, size=4, seed=3)
    replay = jostle.replay(trainer.repeatable(0), query, share=0.04)
    bank = predicted(replay, drops, out=tmp_path / "predicted")
    real = retrain(trainer, train, query, subsets=drops, out=tmp_path / "real")
    scores = {"gradients": gradient_similarity(trainer(np.arange(100), 0), train, query)}
    tables = [compare(one, scores, controls=False) for one in (bank, real)]
    found, truth = (table.rows[0].per_query.value for table in tables)
    assert abs(found - truth) < 0.03
    assert truth > 0.3
    assert "nothing was trained" in str(tables[0])
    assert "LDS per query, of predicted drops" in str(tables[0])
    assert "predicted drops" not in str(tables[1])
    again = predicted(replay, drops, out=tmp_path / "predicted")
    np.testing.assert_array_equal(again.values(), bank.values())
    with pytest.raises(InputError, match="another training than the bank's"):
        retrain(trainer, train, query, subsets=drops, out=tmp_path / "predicted")
    assert replay.check is not None
    poor = Check(replay.check.real[::-1], replay.check.predicted, 4)
    refused = {
        "one without a check": (jostle.replay(trainer.repeatable(0), query, check=0), drops),
        "drops of 9 examples, expected at most the 4": (replay, random_drops(100, 5, size=9)),
        "random subsets of 100": (replay, random_subsets(100, 5)),
        "may be": (dataclasses.replace(replay, check=poor), drops),
    }
    for message, (one, subsets) in refused.items():
        with pytest.raises(InputError, match=message):
            predicted(one, subsets, out=tmp_path / "none")


def seeded(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

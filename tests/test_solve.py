"""What `jostle.solve` says an example did, against minimizers that are found and trainings that are done without it."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, vmap

import jostle
from jostle import Training, losses
from jostle.curvature import descent, gauss_newton, response
from jostle.data.datasets import Data
from jostle.errors import EstimateWarning, InputError
from jostle.runs import solving
from jostle.training import ParameterGroup
from test_curvature import language_model, sequences

CLASSES, TRAIN, QUERIES = 4, 300, 20
PARTS = 4
"""Of the pixels: each has weights of its own, for groups of parameters."""

Rows = tuple[Tensor, Tensor]
Losses = Callable[[nn.Module, Rows], Tensor]


@functools.cache
def digits(loss: str) -> tuple[Rows, Rows]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(n_class=CLASSES, return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))[: TRAIN + QUERIES]
    X, y = torch.tensor(pixels[order] / 16), torch.tensor(labels[order])
    if loss == "regression":
        y = F.one_hot(y, CLASSES).double()
    return (X[:TRAIN], y[:TRAIN]), (X[TRAIN:], y[TRAIN:])


LOSSES: dict[str, Losses] = {"regression": losses.regression(), "classification": losses.classification()}


class Linear(nn.Module):
    """A linear map, of which every part of the inputs has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        width = 64 // PARTS
        self.parts = nn.ParameterList(
            0.1 * torch.randn(CLASSES, width, generator=random, dtype=torch.float64) for _ in range(PARTS)
        )
        self.bias = nn.Parameter(torch.zeros(CLASSES, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat([*self.parts], dim=1).T + self.bias


def named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, value.detach()) for name, value in model.named_parameters()]


def flat_of(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def at(model: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    parts = flat.split([value.numel() for value in model.parameters()])
    return {name: part.view(value.shape) for (name, value), part in zip(named(model), parts, strict=True)}


def losses_at(loss: Losses, model: nn.Module, flat: Tensor, rows: Rows) -> Tensor:
    # The losses are our own, which take a model; here it is one whose weights are given.
    return loss(lambda x: functional_call(model, at(model, flat), x), rows)  # type: ignore[arg-type]


def gradients(loss: Losses, model: nn.Module, rows: Rows) -> Tensor:
    """(example, weight)."""
    found = jacrev(lambda flat: losses_at(loss, model, flat, rows))(flat_of(model))
    assert isinstance(found, Tensor)
    return found


class Minimizers:
    """Of the mean loss + ½(w − start)ᵀD(w − start), with examples of other weights than 1."""

    def __init__(self, loss: Losses, model: nn.Module, rows: Rows, metric: Tensor) -> None:
        self.start = flat_of(model)

        def objective(flat: Tensor, weights: Tensor) -> Tensor:
            moved = flat - self.start
            return losses_at(loss, model, flat, rows) @ weights / len(weights) + (metric * moved * moved).sum() / 2

        self._gradients, curvature = vmap(grad(objective)), hessian(objective)
        self.flat, even = self.start, torch.ones(len(rows[0]), dtype=torch.float64)
        for _ in range(6):
            self._factor = torch.linalg.cholesky(curvature(self.flat, even))
            self.flat = self._stepped(self.flat[None], even[None])[0]

    def _stepped(self, flats: Tensor, weights: Tensor) -> Tensor:
        return flats - torch.cholesky_solve(self._gradients(flats, weights).T, self._factor).T

    def of(self, weights: Tensor) -> Tensor:
        """Newton's steps with the curvature of the first minimizer, near which all others are."""
        flats = self.flat.expand(len(weights), -1)
        for _ in range(12):
            flats = self._stepped(flats, weights)
        assert self._gradients(flats, weights).norm() < 1e-9
        return flats


def lowered(drops: np.ndarray, by: float, count: int = TRAIN) -> Tensor:
    """A weight for each example, with nothing left out in the last row: (drop + 1, example)."""
    weights = torch.ones(len(drops) + 1, count, dtype=torch.float64)
    for row, drop in zip(weights, drops, strict=False):
        row[list(drop)] -= by
    return weights


def drops_of(size: int, count: int = 30, among: int = TRAIN) -> np.ndarray:
    random = np.random.default_rng(0)
    return np.array([random.permutation(among)[:size] for _ in range(count)])


def predicted(solution: jostle.Solution, drops: np.ndarray) -> np.ndarray:
    return np.stack([solution.effect_of_removing(drop)[0].astype(np.float64) for drop in drops])


def changes(loss: Losses, model: nn.Module, flats: Tensor, query: Rows) -> np.ndarray:
    """Of the queries' losses, from the last row to the others."""
    found = vmap(lambda flat: losses_at(loss, model, flat, query))(flats).detach().numpy()
    return found[:-1] - found[-1]


def slopes(real: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Least squares with an intercept of real changes on predicted ones, (case, query), of each query."""
    real, predicted = real - real.mean(0), predicted - predicted.mean(0)
    return (real * predicted).sum(0) / (predicted**2).sum(0)


def off(found: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """How far a matrix (case, query) is from another, of each query, relative."""
    return np.linalg.norm(found - truth, axis=0) / np.linalg.norm(truth, axis=0)


# --- minimizers ---


def in_groups(loss: Losses, rows: Rows) -> tuple[Training, Tensor]:
    """SGD with rates and decays of each part's own, and D by hand: three decades."""
    rates, decays = [2.0, 0.2, 0.02, 0.002], [0.02, 0.5, 0.0, 3.0]
    names = [f"parts.{number}" for number in range(PARTS)]
    groups = [
        ParameterGroup(parameters=[name], total_rate=rate, weight_decay=decay)
        for name, rate, decay in zip(names, rates, decays, strict=True)
    ]
    training = Training(optimizer="sgd", total_rate=0.5, momentum=0.5, groups=groups)
    metric = {name: decay + 0.5 / rate for name, rate, decay in zip(names, rates, decays, strict=True)} | {"bias": 1.0}
    return training, torch.cat([torch.full_like(value, metric[name]).flatten() for name, value in named(Linear())])


def by_weight(loss: Losses, rows: Rows) -> tuple[Training, Tensor]:
    """AdamW with second moments that are near those of gradients, and of each weight's own, and D by hand."""
    moments = gradients(loss, Linear(), rows).square().mean(0) / 8
    random = torch.Generator().manual_seed(2)
    moments *= 10 ** (2 * torch.rand(moments.shape, generator=random, dtype=torch.float64) - 1)
    training = Training(
        optimizer="adamw", total_rate=0.02, weight_decay=20.0, eps=1e-3, batch_size=8,
        second_moments=at(Linear(), moments),
    )  # fmt: skip
    # Weights of pixels that are always 0 never move.
    return training, torch.where(moments > 0, (moments.sqrt() + 1e-3) * (20.0 + 1 / 0.02), 1e12)


@pytest.mark.parametrize("described", [in_groups, by_weight])
@pytest.mark.parametrize("name", LOSSES)
def test_minimizers_are_found_again(name: str, described: Callable[..., tuple[Training, Tensor]]) -> None:
    loss, (rows, query), model = LOSSES[name], digits(name), Linear()
    training, metric = described(loss, rows)
    assert metric[metric < 1e11].max() / metric.min() > 300
    minimizers = Minimizers(loss, model, rows, metric)
    put(model, minimizers.flat)
    solution = jostle.solve(model, rows, query, training=training, loss=loss, filter="minimum")
    assert solution.solved.all()
    drops = drops_of(3)
    expected = predicted(solution, drops)

    def real(by: float) -> np.ndarray:
        return changes(loss, model, minimizers.of(lowered(drops, by)), query) / by

    # What is left is of second order: of a hundredth of a weight, a hundredth of it.
    assert abs(np.median(slopes(real(1.0), expected)) - 1) < 0.02
    assert np.abs(slopes(real(0.01), expected) - 1).max() < 1e-3
    assert off(expected, real(0.01)).max() < 1e-3


# --- trainings ---


Objective = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The loss of a batch, by weights, weights of examples, and the batch's indices."""


@dataclasses.dataclass
class Trained:
    """Trainings side by side, of which the last has left nothing out."""

    flats: Tensor
    moments: Tensor | None
    clip_factor: float


def train(
    objective: Objective,
    model: nn.Module,
    start: Tensor,
    weights: Tensor,
    batches: Tensor,
    make: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer],
    max_norm: float | None = None,
) -> Trained:
    """Train by an optimizer of PyTorch's: what it does to a number, it does to that alone, but for clipping."""
    together = {
        name: nn.Parameter(value.expand(len(weights), *value.shape).clone()) for name, value in at(model, start).items()
    }
    optimizer, slopes_at, factors = make(together), vmap(grad(objective), in_dims=(0, 0, None)), []
    for batch in batches:
        flats = torch.cat([value.detach().flatten(1) for value in together.values()], dim=1)
        slope = slopes_at(flats, weights, batch)
        factor = torch.ones(len(weights)).double()
        if max_norm is not None:
            factor = (max_norm / slope.norm(dim=1)).clamp(max=1)
        factors.append(float(factor[-1]))
        parts = (factor[:, None] * slope).split([value[0].numel() for value in together.values()], dim=1)
        for value, part in zip(together.values(), parts, strict=True):
            value.grad = part.view(value.shape)
        optimizer.step()
    flats = torch.cat([value.detach().flatten(1) for value in together.values()], dim=1)
    states, moments = [optimizer.state[value] for value in together.values()], None
    if "exp_avg_sq" in states[0]:
        beta = optimizer.defaults["betas"][1]
        moments = torch.cat([state["exp_avg_sq"][-1].flatten() for state in states]) / (1 - beta ** len(batches))
    return Trained(flats, moments, float(np.mean(factors)))


def batches_of(steps: int, size: int, count: int = TRAIN) -> Tensor:
    random = torch.Generator().manual_seed(3)
    epochs = -(-steps * size // count)
    return torch.cat([torch.randperm(count, generator=random) for _ in range(epochs)])[: steps * size].view(steps, size)


def objective_of(loss: Losses, model: nn.Module, rows: Rows) -> Objective:
    def objective(flat: Tensor, weights: Tensor, batch: Tensor) -> Tensor:
        return losses_at(loss, model, flat, (rows[0][batch], rows[1][batch])) @ weights[batch] / len(batch)

    return objective


def at_rest(loss: Losses, rows: Rows, metric: Tensor | float) -> Tensor:
    """Where a training that decays weights so would stand still."""
    model = Linear()
    nn.utils.vector_to_parameters(torch.zeros_like(flat_of(model)), model.parameters())
    return Minimizers(loss, model, rows, torch.as_tensor(metric)).flat


def put(model: nn.Module, flat: Tensor) -> nn.Module:
    nn.utils.vector_to_parameters(flat, model.parameters())
    return model


LOSS = LOSSES["regression"]
"""Quadratic, so that its curvature is the same wherever a training passes."""

Make = Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]


def real_effects(
    start: Tensor, drops: np.ndarray, batches: Tensor, make: Make, max_norm: float | None = None
) -> tuple[nn.Module, np.ndarray, Trained]:
    """Trainings in which the dropped examples weigh 1 % less, each with the same batches; effects for a whole weight."""
    (rows, query), model = digits("regression"), Linear()
    found = train(objective_of(LOSS, model, rows), model, start, lowered(drops, 0.01), batches, make, max_norm)
    return put(model, found.flats[-1]), changes(LOSS, model, found.flats, query) / 0.01, found


def by_sgd() -> tuple[nn.Module, np.ndarray, Training, np.ndarray]:
    drops, steps = drops_of(3, 12), 300
    model, real, _ = real_effects(
        at_rest(LOSS, digits("regression")[0], 0.1), drops, batches_of(steps, TRAIN),
        lambda named: torch.optim.SGD(named.values(), lr=3e-3, momentum=0.9, weight_decay=0.1),
    )  # fmt: skip
    return model, real, Training(optimizer="sgd", total_rate=3e-3 * steps, momentum=0.9, weight_decay=0.1), drops


def by_adamw(eps: float, rate: float, decay: float) -> tuple[nn.Module, np.ndarray, Training, np.ndarray]:
    drops, steps, size = drops_of(3, 12), 600, 30
    model, real, found = real_effects(
        at_rest(LOSS, digits("regression")[0], decay * eps + 1e-6), drops, batches_of(steps, size),
        lambda named: torch.optim.AdamW(named.values(), lr=rate, eps=eps, weight_decay=decay),
    )  # fmt: skip
    training = Training(
        optimizer="adamw", total_rate=rate * steps, weight_decay=decay, eps=eps, batch_size=size,
        second_moments=at(model, some(found.moments)),
    )  # fmt: skip
    return model, real, training, drops


def some(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


@pytest.mark.parametrize(
    ("trained", "exact"),
    [
        (by_sgd, 0.015),
        # The metric differs from weight to weight. Batches, whose noise the second moments are of, move the weights.
        (lambda: by_adamw(1e-2, 1e-4, 0.0), 0.07),
        # Decay pulls against a mean gradient, which the second moments would follow if ε were not much larger.
        (lambda: by_adamw(1.0, 5e-3, 0.3), 0.07),
    ],
    ids=["sgd", "adamw, its metric", "adamw, its decay"],
)
def test_trainings_end_where_the_filter_says(
    trained: Callable[[], tuple[nn.Module, np.ndarray, Training, np.ndarray]],
    exact: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # They begin at rest. Elsewhere an example's gradients along the way are not those at the end, which are all that
    # is asked of a checkpoint: experiments/solve_regression.py has what that does.
    model, real, training, drops = trained()
    rows, query = digits("regression")

    def answered(filter: Any) -> np.ndarray:
        return predicted(jostle.solve(model, rows, query, training=training, loss=LOSS, filter=filter), drops)

    dense = answered("descent")
    assert abs(np.median(slopes(real, dense)) - 1) < 0.02
    assert off(dense, real).max() < exact
    # Where it would stand still is somewhere else.
    assert np.median(slopes(real, answered("minimum"))) > 1.1
    monkeypatch.setattr(response, "DENSE", {"cpu": 0})
    solved = answered("descent")
    assert abs(np.median(slopes(real, solved)) - 1) < 0.05
    assert np.median(off(solved, real)) < 0.05
    assert off(solved, real).max() < 0.1


# --- what a training is said to have been ---

Case = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Real effects, those predicted by how it was, and by how it was not."""


def told(
    model: nn.Module, drops: np.ndarray, right: Training, wrong: Training, among: int = TRAIN
) -> tuple[np.ndarray, np.ndarray]:
    rows, query = digits("regression")
    rows = rows[0][:among], rows[1][:among]

    def answered(training: Training) -> np.ndarray:
        return predicted(jostle.solve(model, rows, query, training=training, loss=LOSS), drops)

    return answered(right), answered(wrong)


def clipped() -> Case:
    drops, rate, steps = drops_of(3, 12), 5e-4, 200
    model, real, found = real_effects(
        at_rest(LOSS, digits("regression")[0], 0.1), drops, batches_of(steps, 10),
        lambda named: torch.optim.SGD(named.values(), lr=rate, momentum=0.9), max_norm=0.1,
    )  # fmt: skip
    training = Training(optimizer="sgd", total_rate=rate * steps, momentum=0.9, clip_factor=found.clip_factor)
    return real, *told(model, drops, training, dataclasses.replace(training, clip_factor=1.0))


def decayed(kind: str) -> Case:
    drops, steps, size = drops_of(3, 12), 300, 30
    rate, eps, decay = (1e-3, 1e-2, 0.3) if kind == "adam" else (1e-3, 0.1, 2.0)
    make = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    model, real, found = real_effects(
        at_rest(LOSS, digits("regression")[0], decay * (1.0 if kind == "adam" else eps)), drops,
        batches_of(steps, size), lambda named: make(named.values(), lr=rate, eps=eps, weight_decay=decay),
    )  # fmt: skip
    training = Training(
        optimizer=kind, total_rate=rate * steps, weight_decay=decay, eps=eps, batch_size=size,
        second_moments=at(model, some(found.moments)),
    )  # fmt: skip
    # What has decay in it is refused beside what has none: so they are estimated for the other.
    other = dataclasses.replace(training, optimizer="adamw" if kind == "adam" else "adam", second_moments=None)
    return real, *told(model, drops, training, other)


def grouped() -> Case:
    drops, steps, rates = drops_of(3, 12), 200, [1e-5, 3e-4, 1e-5, 3e-3]
    names = [f"parts.{number}" for number in range(PARTS)]

    def make(named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": [named[name]], "lr": rate} for name, rate in zip(names, rates, strict=True)]
        return torch.optim.SGD([*groups, {"params": [named["bias"]]}], lr=3e-5, momentum=0.9)

    model, real, _ = real_effects(at_rest(LOSS, digits("regression")[0], 0.1), drops, batches_of(steps, 100), make)
    groups = [
        ParameterGroup(parameters=[name], total_rate=rate * steps) for name, rate in zip(names, rates, strict=True)
    ]
    training = Training(optimizer="sgd", total_rate=3e-5 * steps, momentum=0.9, groups=groups)
    return real, *told(model, drops, training, dataclasses.replace(training, groups=[]))


def seen_often() -> Case:
    """Of every epoch's 450 examples, each of the last 75 is there three times."""
    often = np.r_[np.ones(225), np.full(75, 3.0)]
    drops, rate = drops_of(3, 12, among=75) + 225, 1e-3
    epoch, random = torch.arange(TRAIN).repeat_interleave(torch.tensor(often, dtype=torch.long)), torch.Generator()
    batches = torch.cat([epoch[torch.randperm(450, generator=random)] for _ in range(20)]).view(-1, 30)
    model, real, _ = real_effects(
        at_rest(LOSS, digits("regression")[0], 0.1), drops, batches,
        lambda named: torch.optim.SGD(named.values(), lr=rate, momentum=0.9),
    )  # fmt: skip
    training = Training(optimizer="sgd", total_rate=rate * len(batches), momentum=0.9, times_seen=often / often.mean())
    return real, *told(model, drops, training, dataclasses.replace(training, times_seen=None))


def a_part_alone() -> Case:
    drops, rate, steps = drops_of(3, 12, among=150), 1e-3, 300
    model, real, _ = real_effects(
        at_rest(LOSS, digits("regression")[0], 0.1), drops, batches_of(steps, 30),
        lambda named: torch.optim.SGD(named.values(), lr=rate, momentum=0.9),
    )  # fmt: skip
    training = Training(optimizer="sgd", total_rate=rate * steps, momentum=0.9, total=TRAIN)
    return real, *told(model, drops, training, dataclasses.replace(training, total=None), among=150)


@pytest.mark.parametrize(
    "case",
    [
        clipped,
        functools.partial(decayed, "adam"),
        functools.partial(decayed, "adamw"),
        grouped,
        seen_often,
        a_part_alone,
    ],
    ids=["clipped", "coupled decay", "decoupled decay", "groups", "seen often", "a part alone"],
)
def test_how_it_was_trained_decides(case: Callable[[], Case]) -> None:
    real, right, wrong = case()
    found, without = np.median(slopes(real, right)), np.median(slopes(real, wrong))
    assert abs(found - 1) < 0.15
    assert abs(np.log(without)) > np.log(1.3)


class Pairs(nn.Module):
    """The next token's logits are a row for the token before it: a logistic regression of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 8, dtype=torch.float64)
        nn.init.zeros_(self.rows.weight)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.rows(input_ids)


def texts(count: int, seed: int) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 30, (count,), generator=random).tolist()
    # Tokens that follow each other more or less often, and longer sequences differently from shorter ones.
    return [
        {"input_ids": (torch.randint(5, (length,), generator=random).cumsum(0) + length // 10) % 8}
        for length in lengths
    ]


@pytest.mark.parametrize("alike", ["tokens", "sequences"])
def test_tokens_or_sequences_count_alike(alike: Any) -> None:
    rows, query, model, steps, rate = texts(60, 0), texts(20, 1), Pairs(), 300, 0.05
    drops, loss = drops_of(3, 20, among=60), losses.next_token()

    def pairs_of(some: list[dict[str, Tensor]]) -> Tensor:
        """How often each token comes after each: (sequence, 64)."""
        places = [8 * one["input_ids"][:-1] + one["input_ids"][1:] for one in some]
        return torch.stack([torch.bincount(place, minlength=64) for place in places]).double()

    def mean_losses(flat: Tensor, pairs: Tensor) -> Tensor:
        return -(pairs @ flat.view(8, 8).log_softmax(1).flatten()) / pairs.sum(1)

    pairs, counts = pairs_of(rows), pairs_of(rows).sum(1)
    shares = counts / counts.sum() if alike == "tokens" else torch.full((60,), 1 / 60).double()

    def objective(flat: Tensor, weights: Tensor, batch: Tensor) -> Tensor:
        return mean_losses(flat, pairs) @ (weights * shares)

    def trained(start: Tensor, weights: Tensor, steps: int) -> Tensor:
        def make(named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
            return torch.optim.SGD(named.values(), lr=rate, momentum=0.9, weight_decay=0.05)

        return train(objective, model, start, weights, torch.zeros(steps, 1), make).flats

    rested = trained(torch.zeros(64).double(), torch.ones(1, 60).double(), 600)[0]
    flats = trained(rested, lowered(drops, 0.01, 60), steps)
    put(model, flats[-1])
    after = torch.stack([mean_losses(flat, pairs_of(query)) for flat in flats])
    real = (after[:-1] - after[-1]).numpy() / 0.01
    training = Training(optimizer="sgd", total_rate=rate * steps, momentum=0.9, weight_decay=0.05, count_alike=alike)
    right = jostle.solve(model, rows, query, training=training, loss=loss, tokens=True)
    other = dataclasses.replace(training, count_alike="sequences" if alike == "tokens" else "tokens")
    wrong = jostle.solve(model, rows, query, training=other, loss=loss)
    assert abs(np.median(slopes(real, predicted(right, drops))) - 1) < 0.02
    assert off(predicted(right, drops), real).max() < 0.02
    assert np.median(off(predicted(wrong, drops), real)) > 0.3
    require_sums(right, rows, right.effects)


def require_sums(solution: jostle.Solution, rows: list[dict[str, Tensor]], effects: np.ndarray) -> None:
    assert solution.tokens is not None
    assert [one.shape for one in solution.tokens] == [(len(row["input_ids"]), effects.shape[1]) for row in rows]
    sums = np.stack([one.sum(0) for one in solution.tokens])
    np.testing.assert_allclose(sums, effects, rtol=1e-5, atol=1e-6 * np.abs(effects).max())
    for one, row in zip(solution.tokens, rows, strict=True):
        scored = row.get("labels", row["input_ids"]) != -100
        scored[0] = False  # nothing is before it
        assert not one[~scored.numpy()].any()
        assert one[scored.numpy()].any(1).all()


@pytest.mark.parametrize("alike", ["tokens", "sequences"])
def test_tokens_sum_to_sequences(alike: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = language_model("tied llama"), sequences()
    training = Training(optimizer="adamw", total_rate=3e-3, eps=1e-3, batch_size=2, count_alike=alike)
    monkeypatch.setattr(response, "DENSE", {"cpu": 0})
    solution = jostle.solve(model, rows, rows[:3], training=training, loss=losses.next_token(), tokens=True)
    require_sums(solution, rows, solution.effects)
    with pytest.raises(InputError, match="a loss of tokens"):
        jostle.solve(
            Linear(), *digits("classification"), training=Training(optimizer="sgd", total_rate=1.0), tokens=True
        )


def test_a_token_or_a_span_may_be_asked_about() -> None:
    """By its label alone; what tokens are asked about makes up, as a mean, what their text is."""
    model, rows = language_model("tied llama"), sequences()
    asked = {"input_ids": rows[0]["input_ids"], "labels": rows[0]["input_ids"].clone()}
    places = range(1, len(asked["labels"]))

    def alone(*kept: int) -> dict[str, Tensor]:
        labels = torch.full_like(asked["labels"], -100)
        labels[list(kept)] = asked["labels"][list(kept)]
        return {**asked, "labels": labels}

    queries = [asked, alone(2, 3), *map(alone, places)]
    training = Training(optimizer="sgd", total_rate=0.5, count_alike="tokens")
    found = jostle.solve(model, rows, queries, training=training, loss=losses.next_token()).effects
    np.testing.assert_allclose(found[:, 2:].mean(1), found[:, 0], atol=1e-6 * np.abs(found).max())
    np.testing.assert_allclose(found[:, [3, 4]].mean(1), found[:, 1], atol=1e-6 * np.abs(found).max())
    assert np.abs(found[:, 3] - found[:, 4]).max() > 0.1 * np.abs(found).max()


# --- the solver ---


def filtered(
    model: nn.Module, loss: Losses, rows: Rows, query: Rows, reach: Tensor, hold: Tensor, filter: str
) -> np.ndarray:
    """Effects by an eigendecomposition of the loss's own Hessian (of a linear model, the Gauss–Newton matrix)."""
    flat = flat_of(model)
    curvature = hessian(lambda flat: losses_at(loss, model, flat, rows).mean())(flat)
    root = reach.sqrt()
    values, vectors = torch.linalg.eigh(root[:, None] * (curvature + torch.diag(hold)) * root)
    values = values.clamp(min=1e-12)
    kept = -torch.expm1(-values) / values if filter == "descent" else 1 / (1 + values)
    asked = (gradients(loss, model, query) * root) @ vectors * kept @ vectors.T * root
    return (gradients(loss, model, rows) @ asked.T / TRAIN).numpy()


@pytest.mark.parametrize("filter", ["descent", "minimum"])
@pytest.mark.parametrize("rate", [0.1, 10.0])
@pytest.mark.parametrize("name", LOSSES)
def test_descents_are_the_dense_form(name: str, rate: float, filter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each step sees all examples; after short trainings and, with momentum, long ones."""
    model, loss, (rows, query) = Linear(), LOSSES[name], digits(name)
    training, _ = by_weight(loss, rows)
    training = dataclasses.replace(training, total_rate=rate, weight_decay=0.2 / rate)
    moments = torch.cat([value.flatten() for value in moments_of(training).values()])
    assert (moments == 0).any()  # pixels that are always 0
    reach = torch.where(moments > 0, rate / (moments.sqrt() + 1e-3), 0.0)
    hold = 0.2 / rate * (moments.sqrt() + 1e-3)
    if name == "regression":  # an answer that the model gives itself: a gradient of 0
        query = query[0].clone(), query[1].clone()
        query[0][4], query[1][4] = 0.0, 0.0

    def answered() -> jostle.Solution:
        return jostle.solve(model, rows, query, training=training, loss=loss, filter=filter)

    dense = answered()
    assert (dense.provenance["runs"], dense.errors.max()) == (0, 0)
    truth = filtered(model, loss, rows, query, reach, hold, filter)
    np.testing.assert_allclose(dense.effects, truth, atol=1e-5 * np.abs(truth).max())
    monkeypatch.setattr(response, "DENSE", {"cpu": 0})
    asked = truth.std(0) > 0
    assert (~asked).sum() == (name == "regression")
    solved = answered()
    assert (solved.provenance["runs"], solved.errors.max()) == (1, 0)
    assert not solved.effects[:, ~asked].any()
    assert off(solved.effects[:, asked], truth[:, asked]).max() < 0.03


class Private(nn.Module):
    """A linear map of inputs of which one part is each example's own, as a rare word's embedding is a text's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, SHARED + ALONE, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


SHARED, ALONE = 6, 60


def private() -> tuple[Rows, Rows]:
    """Examples with features of their own, and queries that share the first few's."""
    random = torch.Generator().manual_seed(0)
    own = torch.eye(ALONE, dtype=torch.float64)
    rows = torch.cat([0.3 * torch.randn(ALONE, SHARED, generator=random, dtype=torch.float64), own], dim=1)
    query = torch.cat([0.3 * torch.randn(8, SHARED, generator=random, dtype=torch.float64), own[:8]], dim=1)
    targets = torch.randn(ALONE + 8, 1, generator=random, dtype=torch.float64)
    return (rows, targets[:ALONE]), (query, targets[ALONE:])


def test_descents_of_some_examples_a_step_are_right_but_for_the_error_that_they_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of what an example has alone, too, which a run comes by a few times only."""
    model, (rows, query) = Private(), private()
    # An example's own direction has a curvature of 2 in the metric of training, of which a run sees a tenth at a time.
    given: dict[str, Any] = {
        "training": Training(optimizer="sgd", total_rate=float(ALONE), times_seen=np.linspace(0.2, 1.8, ALONE)),
        "loss": LOSSES["regression"],
    }
    exact = jostle.solve(model, rows, query, **given)
    monkeypatch.setattr(response, "DENSE", {"cpu": 0})
    monkeypatch.setattr(descent, "STEP_TOKENS", {"cpu": 4})
    stated, seeds = {}, 10
    for runs in (2, 8):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EstimateWarning)
            found = [
                jostle.solve(model, rows, query, runs=runs, within=1e-9, seed=seed, **given)
                for seed in range(seeds if runs == 2 else 2)
            ]
        assert {one.provenance["runs"] for one in found} == {runs}
        stated[runs] = np.sqrt(np.mean([np.square(one.errors) for one in found], axis=0))
        if runs == 8:
            break
        away = np.stack([one.effects - exact.effects for one in found])
        assert 0.6 < np.median(np.sqrt(np.square(away).mean((0, 1))) / stated[2]) < 1.6
        # Of many examples left out together; errors of one query go together.
        some = range(0, ALONE, 3)
        errors = np.sqrt(np.mean([np.square(one.effect_of_removing(some)[1]) for one in found], axis=0))
        assert 0.5 < np.median(np.sqrt(np.square(away[:, some].sum(1)).mean(0)) / errors) < 2
        # What runs have in common is no error of theirs: none is expected, of each query's own example neither.
        own = np.stack([one.effects[range(8), range(8)] for one in found]) / exact.effects[range(8), range(8)]
        error = own.std(0, ddof=1) / seeds**0.5
        assert (np.abs(own.mean(0) - 1) < 4 * error).all()
        assert np.abs(own.mean() - 1) < 3 * np.sqrt(np.square(error).sum()) / 8 < 0.1
    assert 1.4 < np.median(stated[2] / stated[8]) < 2.8


def test_all_examples_are_seen_where_that_is_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (rows, query) = Linear(), digits("classification")
    training = Training(optimizer="sgd", total_rate=5.0, weight_decay=1e-3)
    exact = jostle.solve(model, rows, query, training=training)
    monkeypatch.setattr(response, "DENSE", {"cpu": 0})
    monkeypatch.setattr(descent, "STEP_TOKENS", {"cpu": 60})  # a fifth of them
    found = jostle.solve(model, rows, query, training=training, within=1e-3)
    assert found.provenance["runs"] == 3
    assert not found.errors.any()
    assert off(found.effects, exact.effects).max() < 0.02


def test_steps_that_are_too_long_are_made_shorter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, (rows, query) = Linear(), digits("classification")
    training = Training(optimizer="sgd", total_rate=1e3)
    exact = jostle.solve(model, rows, query, training=training)
    monkeypatch.setattr(response, "DENSE", {"cpu": 0})
    monkeypatch.setattr(descent, "PACES", (descent.Pace(0.9, 1, 100.0),))
    with caplog.at_level("INFO", "jostle"):
        found = jostle.solve(model, rows, query, training=training)
    assert "not stable at step 16 of" in caplog.text
    assert off(found.effects, exact.effects).max() < 0.1


@pytest.mark.parametrize("alike", ["tokens", "sequences"])
def test_some_rows_are_expected_to_be_all(alike: Any) -> None:
    """Of examples that count for more or less, too."""
    model, rows = language_model("tied llama"), sequences()
    data = Data(rows, "train", device=torch.device("cpu"))
    counts = np.array([len(row["input_ids"]) if alike == "tokens" else 1 for row in rows], np.float64)
    with gauss_newton.GaussNewton(
        model, "all", losses.next_token(), data, shares=counts / counts.sum()
    ) as curvature:  # fmt: skip
        vector = torch.randn(1, curvature.moving.total, generator=torch.Generator().manual_seed(0)).double()
        each = torch.cat([curvature(vector, rows=np.array([index])) for index in range(len(rows))])
        np.testing.assert_allclose(each.mean(0), curvature(vector)[0], atol=1e-9 * each.abs().max().item())


def test_gradients_of_0_and_weights_that_never_moved_in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among the queries that are solved together, and beside others alone."""
    model, (rows, query) = Linear().float(), digits("regression")
    rows = rows[0].float(), rows[1].float()
    query = query[0][:4].float(), query[1][:4].float()
    query[0][1:3], query[1][1:3] = 0.0, 0.0
    training = Training(optimizer="adamw", total_rate=0.1, eps=1e-3, batch_size=8)
    found = []
    for dense in (2048, 0):
        monkeypatch.setattr(response, "DENSE", {"cpu": dense})
        solution = jostle.solve(model, rows, query, training=training, loss=LOSS, filter="minimum")
        assert solution.solved.all()
        assert not solution.effects[:, 1:3].any()
        alone = jostle.solve(model, rows, (query[0][1:2], query[1][1:2]), training=training, loss=LOSS)
        assert not alone.effects.any()
        found.append(solution.effects[:, [0, 3]])
    assert off(found[1], found[0]).max() < 0.05


def moments_of(training: Training) -> dict[str, Tensor]:
    assert training.second_moments is not None
    return dict(training.second_moments)


# --- what changes nothing, and what is refused ---


def test_blocks_order_and_seeds_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (rows, query) = Linear(), digits("classification")
    training = Training(optimizer="sgd", total_rate=3.0, weight_decay=0.01)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    order = np.random.default_rng(1).permutation(QUERIES)

    def answered(**settings: Any) -> np.ndarray:
        solution = jostle.solve(model, rows, query, training=training, **settings)
        assert solution.solved.all()
        return solution.effects

    # Of seeds, random steps keep what they are known to; the order of queries changes none of them.
    for dense, together, tolerance in ((2048, 512, 1e-6), (0, 512, 0.05), (0, 150, 0.5)):
        monkeypatch.setattr(response, "DENSE", {"cpu": dense})
        monkeypatch.setattr(descent, "STEP_TOKENS", {"cpu": together})
        plain = answered()
        turned = jostle.solve(model, rows, (query[0][order], query[1][order]), training=training).effects
        assert off(turned, plain[:, order]).max() < 1e-6
        assert off(answered(seed=1), plain).max() < tolerance
        with monkeypatch.context() as small:
            small.setattr(gauss_newton, "PASS_TOKENS", {"cpu": 110})
            small.setattr(gauss_newton, "BLOCK", {"cpu": 50})
            small.setattr(solving, "free_memory", lambda device: 6 * 2 * solving.VECTORS * 8 * len(flat_of(model)))
            assert off(answered(), plain).max() < tolerance  # queries six at a time
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.grad is None and value.requires_grad for value in model.parameters())


def test_what_is_not_solved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response, "DENSE", {"cpu": 0})
    monkeypatch.setattr(descent, "STEP_TOKENS", {"cpu": 30})
    model, (rows, query) = Linear(), digits("classification")
    training = Training(optimizer="sgd", total_rate=100.0)
    with pytest.warns(
        EstimateWarning, match=r"20 of 20 queries are not solved: 0 \(error .*% of the spread\), 1 .*raise runs"
    ):
        solution = jostle.solve(model, rows, query, training=training, runs=2, within=1e-3)
    assert not solution.solved.any()
    assert (solution.errors > 1e-3 * solution.spreads).all()
    assert "20 queries not solved" in repr(solution)


def test_effects_of_removing() -> None:
    model, (rows, query) = Linear(), digits("classification")
    solution = jostle.solve(model, rows, query, training=Training(optimizer="sgd", total_rate=3.0))
    rise, error = solution.effect_of_removing([3, 7, 3])
    assert not error.any()  # by the matrix itself
    np.testing.assert_allclose(rise, solution.effects[[3, 7]].sum(0))
    assert rise.shape == error.shape == (QUERIES,)
    np.testing.assert_allclose(solution.effect_of_removing([3, 7], 5)[0], rise[5:6])
    # Lists take what helps for negative.
    np.testing.assert_array_equal(solution.scores.values, -solution.effects)
    for bad, message in (([TRAIN], "indices from 0 to 299"), ([-1], "indices from 0 to 299")):
        with pytest.raises(InputError, match=message):
            solution.effect_of_removing(bad)
    with pytest.raises(InputError, match="an index from 0 to 19"):
        solution.effect_of_removing([0], QUERIES)


@pytest.mark.parametrize("dense", [2048, 0])
def test_examples_without_a_finite_gradient_are_named(dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Curvature knows no targets."""
    monkeypatch.setattr(response, "DENSE", {"cpu": dense})
    monkeypatch.setattr(solving, "PROBES", 1)
    model, (rows, query) = Linear(), digits("regression")
    rows[1][11] = torch.nan
    training = Training(optimizer="sgd", total_rate=3.0)
    with pytest.raises(InputError, match="train: got example 11, whose gradient is not finite"):
        jostle.solve(model, rows, query, training=training, loss=LOSSES["regression"])


def weighs_weights(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none") + (model.bias - 1).square().sum()


def test_what_is_refused() -> None:
    model, (rows, query) = Linear(), digits("classification")
    sgd = Training(optimizer="sgd", total_rate=1.0)

    def refused(message: str, training: Training = sgd, **settings: Any) -> None:
        with pytest.raises(InputError, match=message):
            jostle.solve(model, rows, query, training=training, **settings)

    others = [ParameterGroup(parameters=["parts.4"], total_rate=1.0)]
    refused("a parameter 'parts.4', which the model has not", Training(optimizer="sgd", groups=others))
    refused("reads weights past the model's outputs", loss=weighs_weights)
    few = [ParameterGroup(parameters=["parts.0"], total_rate=1.0)]
    refused("parameters that training never moved", Training(optimizer="sgd", groups=few), weights="all")
    right, _ = by_weight(LOSSES["classification"], rows)
    random = torch.Generator().manual_seed(0)
    wrong = {
        name: value.flatten()[torch.randperm(value.numel(), generator=random)].view(value.shape)
        for name, value in moments_of(right).items()
    }
    refused("second_moments: got roots", dataclasses.replace(right, second_moments=wrong))


def test_what_would_be_wrong_without_a_word_is_refused() -> None:
    model, (rows, query) = Linear(), digits("classification")
    training = Training(optimizer="sgd", total_rate=1.0)
    for argument, value in (("filter", "Descent"), ("runs", 1), ("within", 0.0), ("seed", -1)):
        with pytest.raises(InputError, match=f"{argument}: got"):
            jostle.solve(model, rows, query, training=training, **{argument: value})
    images = rows[0].clone()
    images[7, 3] = torch.nan
    with pytest.raises(InputError, match="train: got example 7, whose gradient is not finite"):
        jostle.solve(model, (images, rows[1]), query, training=training, loss=losses.classification())
    asked = query[0].clone()
    asked[2] = torch.inf
    with pytest.raises(InputError, match="query: got example 2, whose gradient is not finite"):
        jostle.solve(model, rows, (asked, query[1]), training=training)
    texts = [*sequences(), {"input_ids": torch.tensor([3, 4]), "labels": torch.tensor([-100, -100])}]
    with pytest.raises(InputError, match=f"train: got example {len(texts) - 1}, of which no token is scored"):
        jostle.solve(language_model("tied llama"), texts, sequences(), training=training, loss=losses.next_token())


def test_a_single_example_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (rows, query) = Linear(), digits("classification")
    training = Training(optimizer="sgd", total_rate=1.0, total=TRAIN, count_alike="sequences")
    one = rows[0][:1], rows[1][:1]
    exact = jostle.solve(model, one, query, training=training)
    monkeypatch.setattr(response, "DENSE", {"cpu": 0})
    found = jostle.solve(model, one, query, training=training)
    assert exact.solved.all()
    assert found.solved.all()
    np.testing.assert_allclose(found.effects, exact.effects, rtol=0.05, atol=0.02 * np.abs(exact.effects).max())


def test_frozen_weights_did_not_move() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].requires_grad_(False)
    training = Training.from_optimizer(optimizer, model, total_rate=2.0)
    assert [name for group in training.groups for name in group.parameters] == ["2.weight", "2.bias"]


def test_rounded_products_are_believed_where_they_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, which here is slow and the same."""
    model, rows = language_model("tied llama"), sequences()
    model = model.float()
    given: Any = {"loss": losses.next_token()}
    training = Training(optimizer="sgd", total_rate=1.0, count_alike="sequences")
    exact = jostle.solve(model, rows, rows, training=training, **given)
    monkeypatch.setattr(response, "DENSE", {"cpu": 0})
    apart = []
    for believed in (0.0, 0.05):
        with monkeypatch.context() as large:
            large.setattr(solving._Work, "_may_be_rounded", lambda self: True)
            large.setattr(solving, "ROUNDED", believed)
            found = jostle.solve(model, rows, rows, training=training, **given)
        apart.append(np.sqrt(np.square(found.effects - exact.effects).mean(0)) / exact.spreads)
    assert np.max(apart) < 0.02
    assert np.abs(apart[1] - apart[0]).max() > 1e-5  # they were rounded


class Bags(nn.Module):
    """What a bag of words is given, by a number of each word's own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(SHARED + ALONE, 2, dtype=torch.float64)
        with torch.no_grad():
            self.words.weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.words(x)).sum(1)


def test_rows_that_few_examples_have_take_steps_that_are_not_too_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each text has common words and one of its own, which a run comes by a dozen times, at many times the pace."""
    random = torch.Generator().manual_seed(0)
    words = torch.randint(SHARED, (ALONE + 8, 5), generator=random)
    own = SHARED + torch.cat([torch.arange(ALONE), torch.arange(8)])
    bags = torch.cat([words, own[:, None]], dim=1)
    targets = torch.randn(ALONE + 8, 2, generator=random, dtype=torch.float64)
    model, sets = Bags(), ((bags[:ALONE], targets[:ALONE]), (bags[ALONE:], targets[ALONE:]))
    given: dict[str, Any] = {"training": Training(optimizer="sgd", total_rate=300.0), "loss": LOSSES["regression"]}
    exact = jostle.solve(model, *sets, **given)
    monkeypatch.setattr(response, "DENSE", {"cpu": 0})
    monkeypatch.setattr(descent, "STEP_TOKENS", {"cpu": 4})
    away, stable = {}, {}
    for alone in (1.0, 1e9):
        monkeypatch.setattr(descent, "ALONE", alone)
        caplog.clear()
        with caplog.at_level("INFO", "jostle"), warnings.catch_warnings():
            warnings.simplefilter("ignore", EstimateWarning)
            found = jostle.solve(model, *sets, runs=2, within=0.02, **given)
        stable[alone] = "not stable" not in caplog.text
        away[alone] = float(np.median(off(found.effects, exact.effects)))
    assert stable == {1.0: True, 1e9: False}
    assert away[1.0] < 0.4 * away[1e9]


class Headed(nn.Module):
    """A weight whose name is that of a group of weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(64, 8), nn.Parameter(torch.randn(CLASSES, 8))

    def forward(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.body(rows)) @ self.head.T


def test_weights_are_meant_by_their_names_and_not_by_patterns() -> None:
    model, (rows, query) = Headed().double(), digits("classification")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = Training.from_optimizer(optimizer, model, total_rate=5.0)
    found, whole = (jostle.solve(model, rows, query, training=training, weights=which) for which in (None, "*"))
    np.testing.assert_array_equal(found.effects, whole.effects)


class Padded(nn.Module):
    """An embedding that is the head, too."""

    def __init__(self, padding: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(9, 6, padding_idx=padding)
        with torch.no_grad():
            self.words.weight.normal_()
        self.mix = nn.Linear(6, 6)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.mix(self.words(input=rows).mean(1))) @ self.words.weight.T


@pytest.mark.parametrize("dense", [True, False])
def test_a_head_that_shares_the_row_of_padding_moves_it(dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No text has a word 0: then it is the same whether that is called padding."""
    if not dense:
        monkeypatch.setitem(response.DENSE, "cpu", 0)
    random = torch.Generator().manual_seed(0)
    rows, labels = (torch.randint(1, 9, size, generator=random) for size in ((40, 4), (40,)))
    training = Training(optimizer="sgd", total_rate=20.0)
    given = (rows, labels), (rows[:5], labels[:5])
    found, plain = (jostle.solve(Padded(padding), *given, training=training).effects for padding in (0, None))
    np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-6 * np.abs(plain).max())


def heavy_tailed(model: nn.Module, batch: Any) -> Tensor:
    """Curves downwards where a residual is above 1."""
    return torch.log1p((model(batch[0])[:, 0] - batch[1]).square())


@pytest.mark.parametrize("dense", [True, False])
def test_a_loss_that_curves_downwards_at_few_examples_is_refused(dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not dense:
        monkeypatch.setitem(response.DENSE, "cpu", 0)
    rows = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.zeros(60)
    targets[::6] = 30.0
    model = nn.Linear(5, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    data = rows[:, :5], targets
    with pytest.raises(InputError, match="curves downwards"):
        jostle.solve(model, data, data, training=Training(optimizer="sgd", total_rate=20.0), loss=heavy_tailed)


def test_optimizers_that_climb_and_no_rates_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(InputError, match="maximize=True"):
        Training.from_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, maximize=True), model, total_rate=1.0)
    with pytest.raises(InputError, match=r"rates: got (none|\\[\\])"):
        Training.from_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, rates=[])


def test_without_any_curvature_nothing_is_damped(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is fitted so well that neither gradients nor curvature are left."""
    monkeypatch.setitem(response.DENSE, "cpu", 0)
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(200 * torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        model.bias.zero_()
    rows = torch.tensor([[1.0, 0.3], [-1.0, 0.2], [1.5, -1.0]])
    data = rows, torch.tensor([0, 1, 0])
    found = jostle.solve(model, data, data, training=Training(optimizer="sgd", total_rate=1.0))
    np.testing.assert_array_equal(found.effects, 0)


def tokens_without_a_mask(model: nn.Module, batch: Any) -> Tensor:
    return torch.nn.functional.cross_entropy(model(batch["input_ids"]).mT, batch["input_ids"], reduction="none")


def test_a_loss_of_tokens_that_does_not_know_its_padding_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))
    texts = [[1, 2, 3], [2, 4, 5, 6, 1], [3, 3]]
    training = Training(optimizer="sgd", total_rate=1.0)
    with pytest.raises(InputError, match="which are padding"):
        jostle.solve(model, texts, texts, training=training, loss=tokens_without_a_mask)

"""The baselines, against a loop over examples and against exact influence."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import logging
import math
import sys
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import jostle
from architectures import tiny
from jostle.attributors import (
    FirstOrder,
    bm25,
    ekfac,
    ekfac_self_influence,
    exact_influence,
    first_order,
    gradient_self_influence,
    gradient_similarity,
    layers_alike,
    trak,
)
from jostle.curvature import per_example
from jostle.curvature.per_example import Gradients, PerExample, products
from jostle.data.datasets import Data
from jostle.models.in_place import InPlace
from jostle.models.weights import MovingWeights


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def examples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 5, generator=generator), torch.randint(3, (count,), generator=generator)


def gradients_by_hand(model: nn.Module, losses: list[Tensor], parameters: list[Tensor]) -> np.ndarray:
    rows = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    return np.stack([torch.cat([part.reshape(-1) for part in row]).numpy() for row in rows])


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("buffer_bytes", [1 << 30, 20 * 57 * 4])
def test_gradient_similarity(cosine: bool, buffer_bytes: int) -> None:
    model = classifier()
    train, query = examples(23, 1), examples(9, 2)
    found = gradient_similarity(model, train, query, cosine=cosine, buffer_bytes=buffer_bytes)
    left, right = (
        gradients_by_hand(
            model, list(nn.functional.cross_entropy(model(x), y, reduction="none")), list(model.parameters())
        )
        for x, y in (train, query)
    )
    expected = left @ right.T
    if cosine:
        expected /= np.linalg.norm(left, axis=1)[:, None] * np.linalg.norm(right, axis=1)
    np.testing.assert_allclose(found.values, -expected, rtol=1e-4, atol=1e-6)
    # Whichever side is held in memory, and passed through as often as that takes.
    turned = gradient_similarity(model, query, train, cosine=cosine, buffer_bytes=buffer_bytes)
    np.testing.assert_allclose(turned.values, found.values.T, rtol=1e-5, atol=1e-6)
    # An example helps itself.
    same = gradient_similarity(model, train, train, cosine=cosine).values
    assert (np.diag(same) < 0).all()


def influence_by_hand(
    left: np.ndarray, right: np.ndarray, held: np.ndarray, kappa: float, *, normalize: bool
) -> np.ndarray:
    """−G(I + HᵀH/λ)⁻¹gⱼ in the space of weights, where Jostle solves in that of what is held."""
    precision = np.eye(left.shape[1])
    if kappa:
        precision += kappa / np.linalg.eigvalsh(held.T @ held)[-1] * held.T @ held
    covariance = np.linalg.inv(precision)
    expected = left @ covariance @ right.T
    if normalize:
        spreads = [np.sqrt(np.einsum("iw,wv,iv->i", side, covariance, side)) for side in (left, right)]
        expected /= np.outer(*spreads)
    return -expected


def losses_by_hand(model: nn.Module, inputs: Tensor, labels: Tensor) -> np.ndarray:
    losses = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
    return gradients_by_hand(model, list(losses), list(model.parameters())).astype(float)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kappa", [0.0, 3.0, 1000.0])
def test_first_order_is_an_influence_function(normalize: bool, kappa: float) -> None:
    """Of the losses themselves; and with two labels for each example, of the losses of these."""
    model, (train, query) = classifier(), (examples(23, 1), examples(9, 2))
    left, right = (losses_by_hand(model, *side) for side in (train, query))
    found = FirstOrder(model, train, query, labels=0).influence(kappa=kappa, normalize=normalize).values
    expected = influence_by_hand(left, right, left, kappa, normalize=normalize)
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-5 * np.abs(expected).max())
    # What fits the buffer by halves is the same, and labels are the same for the same seed.
    scores = [
        FirstOrder(model, train, query, labels=2, seed=seed, buffer_bytes=size).influence(kappa=kappa).values
        for seed, size in ((0, 1 << 20), (0, 3_000), (1, 1 << 20))
    ]
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-3, atol=1e-5 * np.abs(scores[0]).max())
    assert (np.abs(scores[0] - scores[2]).max() > 1e-3 * np.abs(scores[0]).max()) == (kappa > 0)


@pytest.mark.parametrize("kappa", [0.0, 3.0, 1e4])
def test_first_order_of_rounded_gradients(kappa: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of bfloat16 on every side, so that any κ can be read; what is rounded is no more than that."""
    model, (train, query) = classifier(), (examples(23, 1), examples(9, 2))
    exact = [losses_by_hand(model, *side) for side in (train, query)]
    left, right = (torch.tensor(side).bfloat16().double().numpy() for side in exact)
    assert not np.array_equal(left, exact[0])
    monkeypatch.setattr(per_example, "SLICE", 7)
    for size in (1 << 20, 3_000):
        found = FirstOrder(model, train, query, labels=0, rounded=True, buffer_bytes=size).influence(kappa=kappa).values
        expected = influence_by_hand(left, right, left, kappa, normalize=False)
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kappa", [0.0, 30.0])
def test_first_order_in_the_metric_of_adam(kappa: float) -> None:
    """Gradients by gᵀMg with M = diag(1/√v); a weight that no training example moves does not move."""
    model, (train, query) = classifier(), (examples(23, 1), examples(9, 2))
    train[0][:, 0] = 0
    train[0][0, 0] = 1e-12  # no more than rounding
    left, right = (losses_by_hand(model, *side) for side in (train, query))
    squares = np.square(left).mean(0)
    moved = squares > 1e-16
    assert (right[:, ~moved] != 0).any()
    assert (squares[~moved] > 0).any()
    scale = np.divide(1, np.sqrt(np.sqrt(squares)), out=np.zeros_like(squares), where=moved)
    limit = FirstOrder(model, train, query, labels=0, metric="adam")
    expected = influence_by_hand(left * scale, right * scale, left * scale, kappa, normalize=False)
    found = limit.influence(kappa=kappa)
    np.testing.assert_allclose(found.values, expected, rtol=2e-3, atol=1e-5 * np.abs(expected).max())
    assert found.provenance["metric"] == "adam"


UNIT = 1e-9  # of weights by which losses hardly move


@pytest.mark.parametrize("kappa", [0.0, 30.0])
def test_first_order_in_a_metric_in_which_layers_count_alike(kappa: float) -> None:
    """By gᵀMg with M one over the mean of v over each tensor; so a layer may be written in any unit.

    One that no training example moves does not move.
    """
    model, (train, query) = classifier(), (examples(23, 1), examples(9, 2))
    left, right = (losses_by_hand(model, *side) for side in (train, query))
    sizes = [value.numel() for value in model.parameters()]
    means = [np.square(part).mean() for part in np.split(left, np.cumsum(sizes)[:-1], axis=1)]
    scale = np.repeat(1 / np.sqrt(means), sizes)
    assert scale.max() > 2 * scale.min()
    expected = influence_by_hand(left * scale, right * scale, left * scale, kappa, normalize=False)
    limit = FirstOrder(model, train, query, labels=0, metric="layers")
    found = limit.influence(kappa=kappa)
    np.testing.assert_allclose(found.values, expected, rtol=2e-3, atol=1e-5 * np.abs(expected).max())
    assert found.provenance["metric"] == "layers"

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.unused = classifier(), nn.Parameter(torch.ones(3))
            with torch.no_grad():
                self.model[0].weight.div_(UNIT)

        def forward(self, inputs: Tensor) -> Tensor:
            first = nn.functional.linear(inputs, self.model[0].weight * UNIT, self.model[0].bias)
            return self.model[2](self.model[1](first)) + 0 * self.unused.sum()

    scaled = FirstOrder(Scaled(), train, query, labels=0, metric="layers").influence(kappa=kappa)
    np.testing.assert_allclose(scaled.values, found.values, rtol=2e-3, atol=1e-5 * np.abs(expected).max())
    # All weights alike, the layer in other units would have all the say.
    cosines = [
        FirstOrder(network, train, query, labels=0).influence(kappa=kappa, normalize=True).values
        for network in (Scaled(), classifier())
    ]
    assert np.abs(cosines[0] - cosines[1]).max() > 0.02


def test_how_gradients_are_taken_is_decided_in_full_precision() -> None:
    """Where TF32 is allowed, its rounding is no reason to take them one by one; and it is allowed again after."""
    seen, matmul = [], torch.backends.cuda.matmul
    plain = jostle.losses.classification()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(matmul.fp32_precision)
        return plain(model, batch)

    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        gradient_similarity(classifier(), examples(40, 1), examples(9, 2), loss=loss)
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before
    assert set(seen) == {"ieee", "tf32"}
    assert seen[-1] == "tf32"


def test_labels_of_the_model_make_the_fisher_matrix() -> None:
    """Σ p(y|x) g(y)g(y)ᵀ over all labels, which many that are drawn come to; the labels there are, do not.

    Of a model that is sure, few are enough: a class by chance would hardly ever be another than its own.
    """
    model, (train, query) = classifier(), (examples(5, 1), examples(9, 2))
    with torch.no_grad():
        cast(nn.Linear, model[2]).weight.mul_(8)
    left, right = (losses_by_hand(model, *side) for side in (train, query))
    chances = model(train[0]).softmax(1).detach()
    labels = range(chances.shape[1])
    held = np.concatenate(
        [
            losses_by_hand(model, train[0], torch.full_like(train[1], label)) * chances[:, label, None].sqrt().numpy()
            for label in labels
        ]
    )
    away = {}
    for count in (0, 4, 600):
        limit = FirstOrder(model, train, query, labels=count)
        for normalize in (False, True):
            expected = influence_by_hand(left, right, held, 30.0, normalize=normalize)
            found = limit.influence(kappa=30.0, normalize=normalize).values
            away[count, normalize] = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    for normalize in (False, True):
        assert away[600, normalize] < 0.08
        assert away[600, normalize] < away[4, normalize] / 4  # the root of 150 is 12
        assert away[600, normalize] < away[0, normalize] / 4


def test_labels_for_a_share_of_the_examples() -> None:
    """They make the same Fisher matrix and tell the same κ, up to what is left out; whose labels, the seed says."""
    model, (train, query) = classifier(), (examples(1_600, 1), examples(20, 2))
    given: Any = {"model": model, "train": train, "query": query}
    whole = FirstOrder(**given, labels=1)
    expected, told = whole.influence(kappa=10.0).values, whole.kappa_of_training(2.0)
    away = {}
    for share, seed in itertools.product((0.02, 0.25), range(4)):
        part = FirstOrder(**given, labels=share, seed=seed)
        found = part.influence(kappa=10.0)
        assert found.provenance["labels"] == share
        away[share, seed] = np.linalg.norm(found.values - expected) / np.linalg.norm(expected)
        assert part.kappa_of_training(2.0) == pytest.approx(told, rel=0.25 if share == 0.25 else 0.7)
    assert max(away[0.25, seed] for seed in range(4)) < 0.25
    assert len(set(away.values())) == len(away)
    assert np.mean([away[0.02, seed] / away[0.25, seed] for seed in range(4)]) > 2  # the root of 12.5 is 3.5
    # Where all labels are alike (of a single output), it is the examples that differ.
    loss, single = jostle.losses.regression(), nn.Linear(train[0].shape[1], 1)
    sides = [(X, torch.zeros(len(X), 1)) for X, _ in (train, query)]
    found = [
        FirstOrder(single, *sides, loss=loss, labels=0.02, seed=seed).influence(kappa=10.0).values
        for seed in (3, 3, -1)
    ]
    np.testing.assert_array_equal(found[0], found[1])
    assert np.abs(found[2] - found[0]).max() > 1e-3 * np.abs(found[0]).max()


def test_labels_for_a_share_of_the_sequences_count_their_own_tokens() -> None:
    """Of long sequences and short ones, each is held by the tokens that it has."""
    train = [[8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]] * 60 + [[5, 6, 7]] * 60
    whole, part = (
        FirstOrder(
            tiny("gpt2"), train, train[-1:], loss=jostle.losses.next_token(), weights="attention", labels=labels
        ).kappa_of_training(1.0)
        for labels in (1, 0.5)
    )
    assert part == pytest.approx(whole, rel=0.6)  # counted by the tokens of others, it would be several times that


def test_labels_of_a_regression_are_its_gauss_newton_matrix() -> None:
    """To the last digit, with a label for each example: of a scalar output there is but one direction."""
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), torch.randn(30, 4)
    train, query = (inputs[:20], torch.randn(20, 1)), (inputs[20:], torch.randn(10, 1))
    sides = []
    for x, y in (train, query):
        sides.append(gradients_by_hand(model, list((model(x) - y).square()[:, 0] / 0.5), list(model.parameters())))
    held = 2 * gradients_by_hand(model, list(model(train[0])[:, 0]), list(model.parameters()))
    limit = FirstOrder(model, train, query, loss=jostle.losses.regression(noise_variance=0.25), labels=1)
    expected = influence_by_hand(*sides, held, 100.0, normalize=False)
    found = limit.influence(kappa=100.0).values
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-4 * np.abs(expected).max())


def test_units_in_which_layers_are_alike_are_the_metric_in_which_they_count_alike() -> None:
    """The model stays what it is; its gradients have one mean square in all layers, and cosines of them, and draws
    around it, are those of the metric."""
    model, (train, query) = classifier(), (examples(23, 1), examples(9, 2))
    alike = layers_alike(model, train)
    torch.testing.assert_close(alike(train[0]), model(train[0]))
    sizes = [value.numel() for value in model.parameters()]
    squares = [
        [np.square(part).mean() for part in np.split(losses_by_hand(network, *train), np.cumsum(sizes)[:-1], axis=1)]
        for network in (model, alike)
    ]
    assert max(squares[0]) > 4 * min(squares[0])
    np.testing.assert_allclose(squares[1], np.average(squares[0], weights=sizes), rtol=0.02)  # factors of three digits
    limit = FirstOrder(model, train, query, labels=0, metric="layers").influence(kappa=0, normalize=True)
    cosines = gradient_similarity(alike, train, query, cosine=True).values
    np.testing.assert_allclose(cosines, limit.values, atol=5e-3)
    plain = gradient_similarity(model, train, query, cosine=True).values
    assert np.abs(cosines - plain).max() > 0.05
    near = jostle.Posterior(n_beta=0.0, localization=1e6)
    run = jostle.attribute(
        alike, train, query, posterior=near, sampler=jostle.Gaussian(), chains=2, draws=2_000, progress=False
    )
    np.testing.assert_allclose(run.influence(normalize=True).values, cosines, atol=5 / np.sqrt(4_000))


def test_a_module_under_two_names_keeps_its_weights() -> None:
    """And a weight of two modules is moved in both."""
    torch.manual_seed(0)
    layer, train = nn.Linear(5, 5), examples(23, 1)
    model = nn.Sequential(layer, layer, nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3))
    model[3].weight = layer.weight
    parameters = dict(model.named_parameters())
    by_hand = losses_by_hand(model, *train)
    found = gradient_similarity(model, train, train).values
    np.testing.assert_allclose(found, -by_hand @ by_hand.T, rtol=1e-3, atol=1e-5 * np.abs(found).max())
    near = jostle.Posterior(n_beta=0.0, localization=1e6)
    jostle.attribute(model, train, train, posterior=near, sampler=jostle.Gaussian(), chains=3, draws=2, progress=False)
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is value for name, value in parameters.items())


def test_units_of_some_layers_and_of_those_that_nothing_moves() -> None:
    model, train = classifier(), examples(23, 1)
    alike = layers_alike(model, train, weights=["2.*"])
    assert [name for name, value in alike.named_parameters() if value.requires_grad] == [
        "2.parametrizations.weight.original", "2.parametrizations.bias.original",
    ]  # fmt: skip
    assert all(value.requires_grad for value in model.parameters())
    with torch.no_grad():
        model[2].weight.zero_()  # so that the first layer moves nothing
    still = layers_alike(model, train)
    torch.testing.assert_close(still[0].parametrizations.weight.original, model[0].weight)
    model[2].weight = nn.Parameter(torch.full((3, 6), torch.inf))
    with pytest.raises(jostle.InputError, match="finite"):
        layers_alike(model, train)
    layer = nn.Linear(5, 5)
    twice = nn.Sequential(layer, layer, nn.Linear(5, 3))  # one module under two names
    torch.testing.assert_close(layers_alike(twice, train)(train[0]), twice(train[0]))
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)))
    before = normed(train[0])
    torch.testing.assert_close(layers_alike(normed, train)(train[0]), before)
    torch.testing.assert_close(normed(train[0]), before, rtol=0, atol=0)
    some = layers_alike(twice, train, weights=["0.weight"])
    torch.testing.assert_close(layers_alike(some, train, weights=["2.*"])(train[0]), twice(train[0]))
    tied = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3))
    tied[1].weight = tied[0].weight
    with pytest.raises(jostle.InputError, match=r"weights: got 0.weight, which several modules share.*leave it out"):
        layers_alike(tied, train)
    assert layers_alike(tied, train, weights=["2.*"])(train[0]).shape == (23, 3)


@pytest.mark.parametrize("metric", ["isotropic", "adam"])
@pytest.mark.parametrize(("steps", "weight_decay"), [(1, 0.0), (12, 0.0), (150, 0.0), (1000, 0.03), (math.inf, 0.03)])
def test_kappa_of_training(metric: Literal["isotropic", "adam"], steps: float, weight_decay: float) -> None:
    """What examples of more or less importance do to losses by descent from w*, differentiated through all its steps.

    In Adam's metric gradients are divided by the size that those of 16 examples have, which is a quarter of one's.
    """
    torch.manual_seed(0)
    inputs = torch.randn(45, 6) * torch.tensor([3.0, 2.0, 1.0, 0.5, 0.2, 0.1])
    targets = inputs.sum(1, keepdim=True) + torch.randn(45, 1)
    train, query = (inputs[:30], targets[:30]), (inputs[30:], targets[30:])
    (X, y), (X_query, y_query) = ((x.double(), y.double()) for x, y in (train, query))

    def optimum(importance: Tensor, divided: Tensor) -> Tensor:
        """Where X'(Xw − y)/n is divided, and decay holds it."""
        curvature = X.T @ (importance[:, None] * X) / 30 / divided[:, None] + weight_decay * torch.eye(6)
        return torch.linalg.solve(curvature, X.T @ (importance[:, None] * y) / 30 / divided[:, None])

    ones = torch.ones(30, dtype=torch.double)
    divided, start = torch.ones(6, dtype=torch.double), optimum(ones, torch.ones(6))
    for _ in range(50 if metric == "adam" else 0):  # until one belongs to the other
        divided = (X * (X @ start - y)).square().mean(0).sqrt() / 4
        start = optimum(ones, divided)
    model, rate = nn.Linear(6, 1, bias=False), float(0.05 * divided.min())
    with torch.no_grad():
        model.weight.copy_(start.T)

    def losses_after_training(importance: Tensor) -> Tensor:
        weights = start
        if steps == math.inf:
            weights = optimum(importance, divided)
        for _ in range(int(steps) if steps < math.inf else 0):
            gradient = X.T @ (importance[:, None] * (X @ weights - y)) / 30
            weights = (1 - rate * weight_decay) * weights - rate * gradient / divided[:, None]
        return (X_query @ weights - y_query).square()[:, 0] / 2

    exact = torch.autograd.functional.jacobian(losses_after_training, ones).T.numpy()
    limit = FirstOrder(model, train, query, loss=jostle.losses.regression(noise_variance=1.0), metric=metric)
    kappa = limit.kappa_of_training(rate * steps, weight_decay=weight_decay, batch_size=16)

    def agreement(kappa: float) -> float:
        found = limit.influence(kappa=kappa).values
        return float((found * exact).sum() / np.linalg.norm(found) / np.linalg.norm(exact))

    if steps == math.inf:  # here it is exact, and nothing near it is
        assert agreement(kappa) > 0.999999
        assert max(agreement(kappa / 2), agreement(kappa * 2)) < 0.99999
        return
    assert agreement(kappa) > 0.99
    if kappa > 1:  # all smaller ones are alike
        assert agreement(kappa) > max(agreement(kappa / 20), agreement(kappa * 20)) + 0.01


@pytest.mark.parametrize("rounded", [False, True])
def test_kappa_of_training_where_layers_count_alike(rounded: bool) -> None:
    """The rate at which SGD moves the losses that have most curvature in the metric."""
    torch.manual_seed(0)
    model, X = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), torch.randn(40, 4)
    with torch.no_grad():
        model[2].weight.mul_(4)  # so that the first layer moves the losses most
    train, query = (X[:30], torch.randn(30, 1)), (X[30:], torch.randn(10, 1))
    losses = list((model(train[0]) - train[1]).square()[:, 0] / 0.5)
    sizes = [value.numel() for value in model.parameters()]
    held, given = (
        gradients_by_hand(model, of, list(model.parameters())) for of in (list(2 * model(train[0])[:, 0]), losses)
    )
    means = [np.square(part).mean() for part in np.split(given, np.cumsum(sizes)[:-1], axis=1)]
    pattern = np.linalg.svd(held * np.repeat(1 / np.sqrt(means), sizes))[0][:, 0]
    options: Any = {"loss": jostle.losses.regression(noise_variance=0.25), "labels": 1, "rounded": rounded}
    found = FirstOrder(model, train, query, metric="layers", **options).kappa_of_training(5.0, weight_decay=0.3)
    tolerance = 0.02 if rounded else 1e-4
    assert found == pytest.approx(pattern @ held @ held.T @ pattern / 30 / (0.3 + 1 / 5), rel=tolerance)
    most = np.linalg.norm(held, 2) ** 2 / 30 / (0.3 + 1 / 5)
    assert FirstOrder(model, train, query, **options).kappa_of_training(5.0, weight_decay=0.3) == pytest.approx(
        most, rel=tolerance
    )
    assert found < 0.95 * most


@pytest.mark.parametrize("unit", [1.0, 0.1, 1e-3])
@pytest.mark.parametrize("steps", [1, 30, 1000])
def test_kappa_of_training_where_layers_count_alike_is_that_of_descent(unit: float, steps: int) -> None:
    """Of a linear model in two layers: no κ that is far larger or smaller predicts its training better. With one of them
    in other units, in which SGD hardly moves it, κ is about what it would be without that layer."""
    torch.manual_seed(0)
    X = torch.randn(60, 8) * torch.tensor([3.0, 2.0, 1.0, 0.5, 2.0, 1.0, 0.5, 0.2])

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Linear(4, 1, bias=False) for _ in range(2))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.first(inputs[:, :4]) + unit * self.second(inputs[:, 4:])

    model = Parts()
    with torch.no_grad():
        y = model(X) + torch.randn(60, 1)
    train, query = (X[:40], y[:40]), (X[40:], y[40:])
    design = torch.cat([X[:, :4], unit * X[:, 4:]], 1).double()
    start = torch.cat([model.first.weight, model.second.weight], 1).detach().double()[0]
    hessian, residual = design[:40].T @ design[:40] / 40, design[:40] @ start - y[:40, 0]
    rate = 0.5 / torch.linalg.eigvalsh(hessian)[-1]
    follows = torch.zeros(8, 8, dtype=torch.double)
    for _ in range(steps):
        follows = follows + rate * (torch.eye(8) - hessian @ follows)
    asked = design[40:] * (design[40:] @ start - y[40:, 0])[:, None]
    exact = -(design[:40] * residual[:, None]) @ follows @ asked.T
    loss = jostle.losses.regression(noise_variance=1.0)
    limit = FirstOrder(model, train, query, loss=loss, metric="layers", labels=1)
    kappa = limit.kappa_of_training(float(rate) * steps)

    def agreement(kappa: float) -> float:
        found = limit.influence(kappa=kappa).values
        return float((found * exact.numpy()).sum() / np.linalg.norm(found) / np.linalg.norm(exact))

    if unit == 1:
        assert agreement(kappa) > 0.92
        assert agreement(kappa) > max(agreement(kappa / 30), agreement(kappa * 30)) - 0.01
    plain = FirstOrder(model, train, query, loss=loss, labels=1).kappa_of_training(float(rate) * steps)
    assert plain / 4 < kappa < 1.01 * plain


def test_layers_that_nothing_moves_change_nothing() -> None:
    """A key's bias in attention: its gradients are rounding. Gradients of held labels that are all 0 are told of."""

    class Attention(nn.Module):
        def __init__(self, bias: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.query, self.value, self.key = nn.Linear(5, 6), nn.Linear(5, 3), nn.Linear(5, 6, bias=False)
            if bias:
                self.bias = nn.Parameter(torch.randn(6))

        def forward(self, inputs: Tensor) -> Tensor:
            X = torch.stack([inputs, inputs.flip(1), inputs**2], 1)
            keys = self.key(X) + (self.bias if hasattr(self, "bias") else 0)
            return (self.query(X) @ keys.mT).softmax(-1).matmul(self.value(X)).mean(1)

    train, query = examples(23, 1), examples(9, 2)
    found = [FirstOrder(Attention(bias), train, query, labels=1, metric="layers") for bias in (False, True)]
    told = [limit.kappa_of_training(3.0) for limit in found]
    assert told[1] == pytest.approx(told[0], rel=1e-3)
    scores = [limit.influence(kappa=told[0]).values for limit in found]
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-3 * np.abs(scores[0]).max())
    alike = layers_alike(Attention(True), train)
    torch.testing.assert_close(alike.parametrizations.bias.original, Attention(True).bias)
    model = classifier()
    with torch.no_grad():
        model[2].weight.zero_()
    dead = FirstOrder(model, train, query, weights=["0.*"], metric="layers")
    assert not dead.influence(kappa=0).values.any()
    with pytest.raises(jostle.InputError, match="gradients that are all 0"):
        dead.kappa_of_training(1.0)


@pytest.mark.parametrize("examples", [256, 60])
def test_kappa_of_training_counts_the_curvature_where_it_begins(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the Fisher matrices of a logistic regression, at w* and where nothing is known yet."""
    monkeypatch.setattr(first_order, "EXAMPLES", examples)
    torch.manual_seed(1)
    X, y = torch.randn(120, 4) * torch.tensor([2.0, 1.0, 0.5, 0.2]), torch.randint(0, 3, (120,))
    model, start = (nn.Linear(4, 3, bias=False) for _ in range(2))
    with torch.no_grad():
        start.weight.mul_(0.1)

    def fishers(network: nn.Module) -> np.ndarray:
        """Of each example that is counted, as a row."""
        chosen = X[np.linspace(0, 119, min(120, examples)).round()]
        shares = network(chosen).softmax(1).detach()
        spread = torch.diag_embed(shares) - shares[:, :, None] * shares[:, None]
        outer = chosen[:, :, None] * chosen[:, None]
        return torch.einsum("nab,nij->naibj", spread, outer).flatten(1).double().numpy()

    with torch.no_grad():
        model.weight.mul_(6)  # sure of itself: less curvature, and in other directions
    ours, begin = fishers(model), fishers(start)
    different = 1 - np.eye(len(ours))
    expected = (begin @ ours.T * different).sum() / (ours @ ours.T * different).sum()
    given: Any = {"train": (X, y), "query": (X[:3], y[:3]), "labels": 16}
    at_optimum = FirstOrder(model, **given)
    kappa = FirstOrder(model, **given, start=start).kappa_of_training(2.0, weight_decay=0.1)
    assert kappa / at_optimum.kappa_of_training(2.0, weight_decay=0.1) == pytest.approx(expected, rel=0.1)
    assert expected > 1.5
    same = FirstOrder(model, **given, start=copy.deepcopy(model))
    assert same.kappa_of_training(2.0) == pytest.approx(at_optimum.kappa_of_training(2.0), rel=1e-5)
    # What fits the buffer by parts alone is the same.
    parts = FirstOrder(model, **given, start=start, buffer_bytes=12_000)
    assert parts.kappa_of_training(2.0, weight_decay=0.1) == pytest.approx(kappa, rel=1e-4)
    with pytest.raises(jostle.InputError, match="start: got a model with other weights"):
        FirstOrder(model, **given, start=nn.Linear(4, 3))
    with pytest.raises(jostle.InputError, match="start: got a model on meta, expected one on cpu"):
        FirstOrder(model, **given, start=nn.Linear(4, 3, bias=False, device="meta"))
    with pytest.raises(jostle.InputError, match="start: got OrderedDict, expected a model"):
        FirstOrder(model, **given, start=cast("Any", start.state_dict()))
    with pytest.raises(jostle.InputError, match="batch_size: got none, expected the examples in a step"):
        FirstOrder(model, **given, metric="adam").kappa_of_training(1.0)
    with pytest.raises(jostle.InputError, match="start: got labels=0"):
        FirstOrder(model, **{**given, "labels": 0}, start=start)


def test_a_start_of_a_regression_with_a_single_output() -> None:
    """Of which one label says it all, however many are asked for. A linear one has the same curvature everywhere."""
    torch.manual_seed(1)
    X, y = torch.randn(30, 4), torch.randn(30, 1)
    models = nn.Linear(4, 1), nn.Linear(4, 1)
    given: Any = {"train": (X, y), "query": (X[:3], y[:3]), "loss": jostle.losses.regression()}
    told = [FirstOrder(models[0], **given, start=start).kappa_of_training(2.0) for start in (None, models[1])]
    assert told[1] == pytest.approx(told[0], rel=1e-4)


def test_products_of_gradients_with_themselves_by_parts() -> None:
    """Each pair once, whether it is one object or two, and where the other has more."""
    model, loss = classifier(), jostle.losses.classification()
    sets = [Data(examples(count, seed), "train") for count, seed in ((11, 1), (7, 2))]
    moving = MovingWeights(model, "all")
    with InPlace(model, moving) as in_place:
        each = PerExample(in_place, loss)
        each.at_once = 2
        several, more = Gradients([(each, sets[0])]), Gradients([(each, sets[0]), (each, sets[1])])
        rows = torch.cat([part for _, part in more(range(18))]).double()
        for room in (3, 4, 40):
            size = (2 + room) * moving.total * 4
            for left, right in ((several, several), (several, Gradients(several.parts)), (several, more), (more, more)):
                expected = rows[: len(left)] @ rows[: len(right)].T
                np.testing.assert_allclose(products(left, right, size), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(more.squares, rows.square().sum(1))


def test_draws_near_the_checkpoint_tend_to_the_first_order() -> None:
    """Both as they are and read at κ = 10, to their Monte Carlo error; farther away there is more than that."""
    model = classifier()
    train, query = examples(5, 1), examples(4, 2)
    limit, distances = FirstOrder(model, train, query, labels=0), {}
    for localization in (1e6, 5.0):
        run = jostle.attribute(
            model, train, query, sampler=jostle.Gaussian(), progress=False, chains=8, draws=500,
            posterior=jostle.Posterior(n_beta=0, localization=localization),
        )  # fmt: skip
        for kappa in (0.0, 10.0):
            scores = run.influence(normalize=True, kappa=kappa, standard_error=True)
            expected = limit.influence(normalize=True, kappa=kappa)
            assert scores.standard_error is not None
            away = (scores.values - expected.values) / scores.standard_error
            distances[localization, kappa] = float(np.sqrt((away**2).mean()))
    assert max(distances[1e6, kappa] for kappa in (0.0, 10.0)) < 1.6
    assert min(distances[5.0, kappa] for kappa in (0.0, 10.0)) > 3


def gaussian_run(localization: float, train: Any, query: Any, n_beta: float = 0.0, draws: int = 500) -> jostle.Run:
    return jostle.attribute(
        classifier(), train, query, sampler=jostle.SGLD(step_size=1e-3) if n_beta else jostle.Gaussian(),
        posterior=jostle.Posterior(n_beta=n_beta, localization=localization), chains=4, draws=draws, progress=False,
    )  # fmt: skip


def tokens_by_hand(model: nn.Module, sequences: list[list[int]], parameters: list[Tensor]) -> list[np.ndarray]:
    """Of each sequence, the gradients of its tokens' losses."""
    found = []
    for tokens in sequences:
        ids = torch.tensor([tokens])
        logits: Any = model(ids).logits
        losses = nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
        found.append(gradients_by_hand(model, list(losses), parameters).astype(float))
    return found


SEQUENCES = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16], [7, 5]], [[5, 6, 8], [12, 13, 9, 11]]


def test_labels_of_tokens_make_the_fisher_matrix_of_tokens() -> None:
    """Each token's counts by one over its sequence's length; sequences are of unequal lengths, so some are padded."""
    model, (train, query) = tiny("gpt2"), SEQUENCES
    parameters = [value for name, value in model.named_parameters() if ".attn." in name]
    left, right = (np.stack([one.mean(0) for one in tokens_by_hand(model, rows, parameters)]) for rows in SEQUENCES)
    held = []
    for tokens in train:
        output: Any = model(torch.tensor([tokens]))
        chances = output.logits[0, :-1].log_softmax(1)
        each = gradients_by_hand(model, list(-chances.flatten()), parameters).astype(float)
        held.append(each * chances.flatten().exp().sqrt().detach().numpy()[:, None] / np.sqrt(len(tokens) - 1))
    held = np.concatenate(held)
    # The Fisher matrix has as many rows as weights: what is left of each side is found in the space of what is held.
    products = held @ held.T
    slack = np.linalg.eigvalsh(products)[-1] / 30
    expected = left @ held.T @ np.linalg.solve(products + slack * np.eye(len(held)), held @ right.T) - left @ right.T
    away = {}
    for count in (0, 2, 200):
        limit = FirstOrder(
            model, train, query, loss=jostle.losses.next_token(), weights="attention", labels=count
        ).influence(kappa=30.0)
        away[count] = np.linalg.norm(limit.values - expected) / np.linalg.norm(expected)
    assert away[200] < 0.15
    assert away[200] < min(away[0], away[2]) / 4


def test_a_gradient_that_fits_the_buffer_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    several = PerExample._gradients
    monkeypatch.setattr(
        PerExample, "_gradients", lambda self, data, chosen: taken.append(len(chosen)) or several(self, data, chosen)
    )
    given: dict[str, Any] = {"loss": jostle.losses.next_token(), "weights": "attention"}
    FirstOrder(tiny("gpt2"), [[5, 6, 7], [8, 9, 10, 11]], [[5, 7, 9]], labels=3, **given)
    assert sum(taken) == (1 + 3) * 2 + 1


def test_draws_of_a_language_model_hold_every_token() -> None:
    """Read at κ = 10, to their Monte Carlo error, with every token held by itself; not with whole sequences."""
    model, (train, query) = tiny("gpt2").double(), SEQUENCES
    run = jostle.attribute(
        model, train, query, sampler=jostle.Gaussian(), progress=False, chains=4, draws=400,
        loss=jostle.losses.next_token(), posterior=jostle.Posterior(n_beta=0, localization=1e8, weights="attention"),
    )  # fmt: skip
    scores = run.influence(normalize=True, kappa=10.0, standard_error=True)
    assert scores.standard_error is not None
    parameters = [value for name, value in model.named_parameters() if ".attn." in name]
    tokens, asked = (tokens_by_hand(model, rows, parameters) for rows in SEQUENCES)
    left, right = (np.stack([one.mean(0) for one in rows]) for rows in (tokens, asked))
    by_token = np.concatenate([one / np.sqrt(len(one)) for one in tokens])
    by_sequence = np.stack([one.sum(0) / np.sqrt(len(one)) for one in tokens])
    distances = []
    for held in (by_token, by_sequence):
        slack = np.linalg.eigvalsh(held @ held.T)[-1] / 10

        def through(side: np.ndarray, held: np.ndarray = held, slack: float = slack) -> np.ndarray:
            return side - side @ held.T @ np.linalg.solve(held @ held.T + slack * np.eye(len(held)), held)

        limit = through(left) @ right.T
        limit /= np.outer(*(np.sqrt((through(side) * side).sum(1)) for side in (left, right)))
        distances.append(float(np.sqrt((((scores.values + limit) / scores.standard_error) ** 2).mean())))
    assert distances[0] < 1.6
    assert distances[1] > 3


def test_losses_move_as_far_as_in_a_run() -> None:
    """Near w* that is what gradients say; farther away it is the run's own, under correlations of gradients."""
    train, query = examples(23, 1), examples(9, 2)
    limit = FirstOrder(classifier(), train, query)
    near = gaussian_run(1e6, train, query)
    for normalize, scale in ((True, 1.0), (False, 1e6)):
        expected = limit.influence(normalize=normalize).values
        found = scale * limit.influence(normalize=normalize, spread=near).values
        assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)
    far = gaussian_run(5.0, train, query)
    cosines, spreads = limit.influence(kappa=0, normalize=True).values, []
    for name in ("train", "query"):
        spreads.append(np.asarray(far.traces.losses(name)[:], dtype=float).std((0, 1)))
    found = limit.influence(kappa=0, spread=far).values
    np.testing.assert_allclose(found, cosines * np.outer(*spreads), rtol=1e-4)
    np.testing.assert_allclose(limit.influence(kappa=0, normalize=True, spread=far).values, cosines, rtol=1e-4)
    wider = found / limit.influence(kappa=0).values
    np.testing.assert_allclose(
        limit.influence(kappa=3, spread=far).values, limit.influence(kappa=3).values * wider, rtol=1e-4
    )


def test_first_order_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    train, query = examples(5, 1), examples(4, 2)
    limit = FirstOrder(classifier(), train, query)
    with pytest.raises(jostle.InputError, match="n_beta 30, in which training losses are held already"):
        limit.influence(spread=gaussian_run(100.0, train, query, n_beta=30.0, draws=2))
    with pytest.raises(jostle.InputError, match=r"spread: got query of fingerprint .*: the same data"):
        limit.influence(spread=gaussian_run(100.0, train, train, draws=2))
    for kappa, message in (
        ("auto", "there is no noise to choose it by"),
        (-1, "got -1, expected 0 or a positive number"),
    ):
        with pytest.raises(jostle.InputError, match=message):
            limit.influence(kappa=kappa)
    for given, message in (
        ({"total_rate": 0.0}, "total_rate: got 0.0, expected a positive number"),
        ({"total_rate": [0.1]}, r"total_rate: got \[0.1\], expected a positive number"),
        ({"total_rate": 1.0, "weight_decay": -0.1}, "weight_decay: got -0.1, expected 0 or a positive number"),
        ({"total_rate": math.inf}, "expected something that holds the weights"),
    ):
        with pytest.raises(jostle.InputError, match=message):
            limit.kappa_of_training(**given)
    with pytest.raises(jostle.InputError, match=r"labels: got 0, .*; give a κ"):
        FirstOrder(classifier(), train, query, labels=0).kappa_of_training(1.0)
    with pytest.raises(jostle.InputError, match=r"kappa: got 1e\+12, .*still have digits"):
        limit.influence(kappa=1e12)
    model = classifier()
    nn.init.zeros_(model[2].weight)  # so that the first layer moves nothing
    still = FirstOrder(model, examples(5, 1), examples(4, 2), weights="0.*")
    assert not still.influence(kappa=0).values.any()
    with pytest.raises(jostle.InputError, match=r"gradients that are all 0, expected .*, or more labels"):
        still.influence()
    with pytest.raises(jostle.InputError, match="labels: got -1, expected a whole number"):
        FirstOrder(model, train, query, labels=-1)
    with pytest.raises(
        jostle.InputError, match=r"loss on train: got RuntimeError: mat1 and mat2 .*, expected losses from"
    ):
        FirstOrder(nn.Linear(99, 3), train, query)
    with pytest.raises(jostle.InputError, match="'isotropic' or 'layers' or 'adam'"):
        FirstOrder(model, train, query, metric=cast(Any, "sgd"))
    # Of 5 examples and 4 queries, with h held: 8·(3h² + 5h + 8h + 80) + 4·(h + 4)·(h + 9) bytes.
    train, query = examples(5, 1), examples(4, 2)
    for room, said in ((9_423, "labels=2, or score fewer"), (5_143, "labels=1, or score fewer"), (1, "; score fewer")):
        monkeypatch.setattr(first_order, "_memory", lambda device, room=room: room)
        with pytest.raises(jostle.InputError, match=rf"labels: got 3 for each of 5 examples, with 4 queries.*{said}"):
            FirstOrder(model, train, query, labels=3)
    monkeypatch.setattr(first_order, "_memory", lambda device: 9_424)
    FirstOrder(model, train, query, labels=3)


def test_gradient_similarity_of_sequences() -> None:
    """Ragged sequences, attention alone: one sequence at a time, without padding, by hand."""
    model = tiny("gpt2")
    sequences = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16]]
    found = gradient_similarity(
        model, sequences, sequences[:2], loss=jostle.losses.next_token(), weights="attention"
    ).values
    parameters = [value for name, value in model.named_parameters() if ".attn." in name]
    losses = []
    for tokens in sequences:
        ids = torch.tensor([tokens])
        logits: Any = model(ids).logits
        losses.append(nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))
    rows = gradients_by_hand(model, losses, parameters)
    np.testing.assert_allclose(found, -rows @ rows[:2].T, rtol=1e-3, atol=1e-6)


def test_gradients_of_sequences_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another they take many times as long on a GPU; only the ends, the shortest and the longest are."""
    taken = []
    one_by_one = PerExample._one_by_one
    monkeypatch.setattr(
        PerExample,
        "_one_by_one",
        lambda self, data, chosen: taken.append(len(chosen)) or one_by_one(self, data, chosen),
    )
    model = tiny("llama")
    generator = np.random.default_rng(0)
    ragged = [{"input_ids": generator.integers(1, 20, length).tolist()} for length in (5, 9, 7, 4, 6)]
    jostle.attributors.gradient_similarity(model, ragged, ragged[:2], loss=jostle.losses.next_token())
    assert sorted(taken) == [2, 4]


@pytest.mark.parametrize("lengths", [(2, 7, 4, 5), (7, 2, 4, 5), (4, 4, 2, 7), (4, 4, 4, 4)])
def test_padding_that_a_model_looks_at_is_noticed(lengths: tuple[int, ...]) -> None:
    """Examples taken together are padded; of a model that averages over padding, that changes their gradients."""

    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, rows: Tensor) -> Tensor:
            return self.linear(rows).tanh().mean(1)

    torch.manual_seed(0)
    model = Averaging()
    samples = [(torch.randn(length, 3), torch.tensor(length % 2)) for length in lengths]
    asked = [(torch.randn(length, 3), torch.tensor(length % 2)) for length in (3, 3, 6)]

    def collate(some: list[Any]) -> Any:
        rows = nn.utils.rnn.pad_sequence([row for row, _ in some], batch_first=True)
        return rows, torch.stack([label for _, label in some])

    found = gradient_similarity(model, samples, asked, collate=collate).values
    parameters = [*model.parameters()]
    losses = [nn.functional.cross_entropy(model(row[None]), label[None]) for row, label in samples + asked]
    rows = gradients_by_hand(model, losses, parameters)
    np.testing.assert_allclose(found, -rows[: len(samples)] @ rows[len(samples) :].T, rtol=1e-4, atol=1e-6)


def test_the_model_is_left_as_it_was() -> None:
    model = classifier().train()
    before = copy.deepcopy(model.state_dict())
    gradient_similarity(model, examples(4, 1), examples(3, 2))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


kronfluence = pytest.mark.skipif(importlib.util.find_spec("kronfluence") is None, reason="kronfluence is not installed")


@kronfluence
def test_ekfac_has_the_sign_and_scale_of_exact_influence() -> None:
    """A linear softmax model, where the Fisher information is the Hessian: close to −gᵀ(H + λI)⁻¹g."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3, bias=False))
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(400, 5, generator=generator)
    y = torch.distributions.Categorical(logits=model(X).detach()).sample()
    query = examples(12, 5)
    damping = 0.02
    # n_beta·H + γI with n_beta = 1, γ = λ is the damped Hessian of the mean loss.
    exact = exact_influence(model, (X[:60], y[:60]), query, posterior=jostle.Posterior(n_beta=1, localization=damping),
                            sampling_data=(X, y)).values  # fmt: skip
    found = ekfac(model, (X[:60], y[:60]), query, fit_data=(X, y), damping=damping).values
    assert np.corrcoef(found.ravel(), exact.ravel())[0, 1] > 0.97
    slope = (found * exact).sum() / (exact**2).sum()
    assert 0.8 < slope < 1.25


@kronfluence
def test_ekfac_of_a_regression_has_the_noise_that_its_loss_assumes() -> None:
    """Not that of the data, which is four times as wide here and would make scores a sixteenth as large."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(400, 5, generator=generator)
    y = X.sum(1, keepdim=True) + 2.0 * torch.randn(400, 1, generator=generator)
    model = nn.Sequential(nn.Linear(5, 1, bias=False))
    nn.init.ones_(cast(nn.Linear, model[0]).weight)
    data, damping, loss = ((X[:60], y[:60]), (X[60:70], y[60:70])), 0.02, jostle.losses.regression(noise_variance=0.25)
    posterior = jostle.Posterior(n_beta=1, localization=damping)
    exact = exact_influence(model, *data, loss=loss, posterior=posterior, sampling_data=(X, y)).values
    found = ekfac(model, *data, loss=loss, fit_data=(X, y), damping=damping).values
    assert np.corrcoef(found.ravel(), exact.ravel())[0, 1] > 0.97
    assert 0.8 < (found * exact).sum() / (exact**2).sum() < 1.25


@kronfluence
def test_ekfac_of_a_language_model() -> None:
    model = tiny("gpt-neox")
    generator = np.random.default_rng(0)
    sequences = [{"input_ids": generator.integers(1, 90, size=length).tolist()} for length in (6, 9, 12, 7, 8)]
    found = ekfac(
        model, sequences, sequences[:2], loss=jostle.losses.next_token(), weights="attention+mlp", damping=1e-3
    )
    assert found.values.shape == (5, 2)
    # A sequence helps itself more than others do.
    assert found.values[:, 0].argmin() == 0
    assert found.values[:, 1].argmin() == 1
    # Damped beyond every eigenvalue it is the dot product of gradients: of a head that is a layer of its own, too.
    damped = ekfac(model, sequences, sequences[:2], loss=jostle.losses.next_token(), damping=1e6)
    left_out = damped.provenance["left_out"]
    taken = [name for name, _ in model.named_parameters() if name not in left_out]
    (head,) = [name for name in taken if "layers" not in name]
    assert model.get_parameter(head) is cast(Any, model).get_output_embeddings().weight
    dots = gradient_similarity(model, sequences, sequences[:2], loss=jostle.losses.next_token(), weights=taken)
    np.testing.assert_allclose(1e6 * damped.values, dots.values, rtol=1e-3, atol=1e-5)


@kronfluence
@pytest.mark.parametrize("empirical", [True, False])
def test_ekfac_knows_what_is_padding(empirical: bool) -> None:
    """Of texts of very different lengths, in batches and one by one; labels that are drawn differ a little."""
    generator = np.random.default_rng(0)
    texts = [{"input_ids": generator.integers(1, 90, size=length).tolist()} for length in (3, 4, 30, 5, 3, 4, 28, 3)]
    one, some = (
        ekfac(
            tiny("gpt-neox"), texts, texts[:3], loss=jostle.losses.next_token(), weights="mlp", damping=1e-3,
            batch_size=size, factor_arguments={"use_empirical_fisher": empirical},
        ).values
        for size in (1, 8)
    )  # fmt: skip
    assert np.linalg.norm(some - one) < (1e-4 if empirical else 0.1) * np.linalg.norm(one)


@kronfluence
def test_ekfac_needs_a_layer_to_factor() -> None:
    with pytest.raises(jostle.InputError, match="without a linear or convolutional layer"):
        ekfac(tiny("llama"), [[1, 2]], [[1, 2]], loss=jostle.losses.next_token(), weights="norm")


def test_ekfac_without_kronfluence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kronfluence", None)
    for name in [name for name in sys.modules if name.startswith("kronfluence.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(jostle.InputError, match=r"pip install 'jostle\[ekfac\]'"):
        ekfac(classifier(), examples(3, 0), examples(2, 1))


def projection_by_hand(weights: int, dimension: int, seed: int) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (weights, dimension), generator=generator, dtype=torch.int8)
    return (2.0 * signs.numpy() - 1) / np.sqrt(dimension)


def trak_by_hand(models: list[nn.Module], train: Any, query: Any, dimension: int, seed: int) -> np.ndarray:
    """Park et al.'s estimator with loops: margins, a kernel of projected gradients, and 1 − p."""
    products, shares = [], []
    for model in models:
        parameters = list(model.parameters())
        P = projection_by_hand(sum(p.numel() for p in parameters), dimension, seed)
        features, missing = {}, {}
        for name, (X, y) in (("train", train), ("query", query)):
            rows, left = [], []
            for x, label in zip(X, y, strict=True):
                p = model(x[None]).softmax(1)[0, label]
                margin = torch.log(p / (1 - p))
                gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(margin, parameters)])
                rows.append(P.T @ gradient.double().numpy())
                left.append(1 - p.item())
            features[name], missing[name] = np.array(rows), np.array(left)
        kernel = np.linalg.inv(features["train"].T @ features["train"])
        tau = features["train"] @ kernel @ features["query"].T  # of the margin: positive helps
        products.append(-tau * missing["query"])  # of the loss: ∇ℓ = −(1 − p)∇f
        shares.append(missing["train"])
    return np.mean(products, axis=0) * np.mean(shares, axis=0)[:, None]


@pytest.mark.parametrize("checkpoints", [1, 3])
def test_trak_against_a_loop(checkpoints: int) -> None:
    models = [classifier() for _ in range(checkpoints)]
    for seed, model in enumerate(models):
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    train, query = examples(40, 1), examples(7, 2)
    found = trak(models if checkpoints > 1 else models[0], train, query, dimension=8, seed=3)
    expected = trak_by_hand(models, train, query, 8, 3)
    np.testing.assert_allclose(found.values, expected, rtol=2e-3, atol=2e-4 * np.abs(expected).max())
    # The same however many gradients are held at once, and however the projection is cut.
    few = trak(models, train, query, dimension=8, seed=3, buffer_bytes=1)
    np.testing.assert_allclose(few.values, found.values, rtol=1e-3, atol=1e-5 * np.abs(expected).max())
    own = trak(models[0], train, train, dimension=8).values
    assert (np.diag(own) < 0).all()


def test_trak_in_blocks_of_the_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    train, query = examples(30, 1), examples(5, 2)
    whole = trak(classifier(), train, query, dimension=4).values
    monkeypatch.setattr(sys.modules["jostle.attributors.trak"], "BLOCK_BYTES", 7 * 4 * 4)
    np.testing.assert_allclose(trak(classifier(), train, query, dimension=4).values, whole, rtol=1e-3)


def test_trak_of_sequences() -> None:
    """Margins averaged over tokens, sequences of unequal lengths one at a time, by hand."""
    model = tiny("gpt2")
    generator = np.random.default_rng(0)
    sequences = [generator.integers(1, 90, size=length).tolist() for length in (6, 9, 5, 7, 8, 4, 6, 9)]
    found = trak(model, sequences, sequences[:3], loss=jostle.losses.next_token(), weights="attention", dimension=3)
    parameters = [value for name, value in model.named_parameters() if ".attn." in name]
    P = projection_by_hand(sum(p.numel() for p in parameters), 3, 0)
    margins, losses, missing = [], [], []
    for tokens in sequences:
        ids = torch.tensor([tokens])
        logits: Any = model(ids).logits
        p = logits[0, :-1].softmax(1).gather(1, ids[0, 1:, None])[:, 0]
        margins.append(torch.log(p / (1 - p)).mean())
        losses.append(-torch.log(p).mean())
        missing.append((1 - p).mean().item())
    features = gradients_by_hand(model, margins, parameters) @ P
    targets = gradients_by_hand(model, losses[:3], parameters) @ P
    expected = features @ np.linalg.inv(features.T @ features) @ targets.T * np.array(missing)[:, None]
    np.testing.assert_allclose(found.values, expected, rtol=5e-3, atol=1e-3 * np.abs(expected).max())


def test_trak_refuses_what_it_cannot_invert_and_losses_without_a_margin() -> None:
    with pytest.raises(jostle.InputError, match="lower dimension, or pass ridge"):
        trak(classifier(), examples(5, 1), examples(2, 2), dimension=16)
    assert np.isfinite(trak(classifier(), examples(5, 1), examples(2, 2), dimension=16, ridge=0.1).values).all()
    with pytest.raises(jostle.InputError, match="of which TRAK knows the margin"):
        trak(classifier(), examples(5, 1), examples(2, 2), loss=jostle.losses.regression())
    inputs, labels = examples(5, 1)
    weights = nn.functional.one_hot(labels, 3) * 0.9 + 0.1 / 3
    with pytest.raises(jostle.InputError, match="train: got labels that are weights of classes"):
        trak(classifier(), (inputs, weights), examples(2, 2))


def test_trak_of_fewer_weights_than_examples() -> None:
    found = trak(nn.Linear(5, 3), examples(400, 1), examples(2, 2))
    assert found.provenance["dimension"] == 8  # of 18 weights
    assert np.isfinite(found.values).all()


def test_bm25_against_a_loop() -> None:
    generator = np.random.default_rng(0)
    train = [generator.integers(0, 12, size=size).tolist() for size in (3, 9, 14, 5)]
    query = [generator.integers(0, 14, size=size).tolist() for size in (4, 6)]
    found = bm25(train, query).values
    mean_length = np.mean([len(text) for text in train])
    for i, text in enumerate(train):
        for j, words in enumerate(query):
            total = 0.0
            for word in set(words):
                holding = sum(word in other for other in train)
                idf = np.log(1 + (len(train) - holding + 0.5) / (holding + 0.5))
                frequency = text.count(word)
                total += idf * frequency * 2.5 / (frequency + 1.5 * (0.25 + 0.75 * len(text) / mean_length))
            assert found[i, j] == pytest.approx(-total)


@kronfluence
def test_ekfac_reuses_its_factors_for_another_damping(tmp_path: Path) -> None:
    """As one factorization serves every damping, choosing one is cheap; the same factors give the same scores."""
    model, train, query = classifier(), examples(60, 1), examples(4, 2)
    once = ekfac(model, train, query, damping=1e-2, directory=tmp_path / "a")
    other = ekfac(model, train, query, damping=10.0, directory=tmp_path / "a")
    again = ekfac(model, train, query, damping=1e-2, directory=tmp_path / "a", seed=5)
    assert again.provenance["seed"] == 0
    np.testing.assert_array_equal(again.values, once.values)  # another seed of labels would show, were it fitted again
    # With a damping beyond every eigenvalue it is the dot product of gradients.
    dots = gradient_similarity(model, train, query).values
    assert np.corrcoef(other.values.ravel(), dots.ravel())[0, 1] > 0.999
    assert np.corrcoef(once.values.ravel(), dots.ravel())[0, 1] < 0.999


class Twice(nn.Module):
    """Calls one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(torch.tanh(self.first(inputs)))))


@kronfluence
@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(5, 3), Twice], ids=["a model that is a layer", "a layer used twice"]
)
def test_ekfac_of_unusual_models(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Damped beyond every eigenvalue, it is the dot product of gradients, divided by the damping."""
    torch.manual_seed(0)
    model, train, query = make(), examples(12, 1), examples(4, 2)
    found = ekfac(model, train, query, damping=1e6)
    np.testing.assert_allclose(
        1e6 * found.values, gradient_similarity(model, train, query).values, rtol=1e-3, atol=1e-5
    )
    assert found.provenance["left_out"] == []
    assert not caplog.text


class Shared(nn.Module):
    """Two layers with one weight, one that is called for parts of examples, and one by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.parts, self.last = (nn.Linear(*size) for size in ((5, 5), (5, 5), (1, 1), (5, 3)))
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs))))
        return self.last(self.parts(hidden.view(-1, 1)).view(-1, 5))


@kronfluence
def test_ekfac_leaves_out_layers_that_are_not_one_for_each_example() -> None:
    torch.manual_seed(0)
    model, train, query = Shared(), examples(12, 1), examples(4, 2)
    found = ekfac(model, train, query, damping=1e6)
    last = ["last.weight", "last.bias"]
    assert found.provenance["left_out"] == [name for name, _ in model.named_parameters() if name not in last]
    alone = gradient_similarity(model, train, query, weights=last)
    np.testing.assert_allclose(1e6 * found.values, alone.values, rtol=1e-3, atol=1e-5)
    # kronfluence takes biases along, whether they move or not.
    with pytest.raises(jostle.InputError, match="expected one that EK-FAC can factor, with its bias"):
        ekfac(model, train, query, weights=["*.weight"])


class Own(nn.Linear):
    """A linear layer of the user's own."""


class Uncalled(nn.Module):
    """Multiplies with the weight of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, self.inner.weight, self.inner.bias)


@kronfluence
def test_ekfac_leaves_out_what_kronfluence_cannot_handle(caplog: pytest.LogCaptureFixture) -> None:
    """A subclass, a layer that is not called, groups, uneven padding or circular, a norm: they are named."""
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(6, 6, 1, groups=2), nn.Conv2d(6, 6, 2, padding="same"),
                    nn.Conv2d(6, 6, 1, padding_mode="circular")]  # fmt: skip
    model = nn.Sequential(nn.Linear(5, 6), Own(6, 6), Uncalled(), nn.Unflatten(1, (6, 1, 1)), *convolutions,
                          nn.Flatten(), nn.LayerNorm(6), nn.Linear(6, 3))  # fmt: skip
    train, query = examples(9, 1), examples(4, 2)
    state, level = torch.get_rng_state(), logging.root.level
    found = ekfac(model, train, query, damping=1e6)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's random numbers are left alone
    assert logging.root.level == level < logging.ERROR  # and what the caller logs
    names = [name for name, _ in model.named_parameters()]
    assert found.provenance["left_out"] == [name for name in names if name[0] in "124568"]
    sizes = {name: one.numel() for name, one in model.named_parameters()}
    share = 100 * sum(sizes[name] for name in found.provenance["left_out"]) / sum(sizes.values())
    assert f"EK-FAC takes {share:.0f} % of the weights that move for fixed" in caplog.text
    assert "5.weight, 1.weight, 2.inner.weight and 9 more" in caplog.text
    others = gradient_similarity(model, train, query, weights=["0.*", "9.*"])
    np.testing.assert_allclose(1e6 * found.values, others.values, rtol=1e-3, atol=1e-5)
    with pytest.raises(jostle.InputError, match="without a linear or convolutional layer that the model calls"):
        ekfac(model, train, query, weights=["1.*", "2.*"])


def test_gradient_self_influence_is_the_diagonal() -> None:
    model, train = classifier(), examples(25, 1)
    dots = gradient_similarity(model, train, train).values
    np.testing.assert_allclose(gradient_self_influence(model, train), np.diag(dots), rtol=1e-4)
    language, sequences = tiny("gpt2"), [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16]]
    attention: dict[str, Any] = {"loss": jostle.losses.next_token(), "weights": "attention"}
    dots = gradient_similarity(language, sequences, sequences, **attention).values
    np.testing.assert_allclose(gradient_self_influence(language, sequences, **attention), np.diag(dots), rtol=1e-4)


def test_gradients_of_a_model_in_half_precision() -> None:
    """They are the model's own, but their products are not rounded to three digits."""
    model, train = classifier().bfloat16(), (examples(6, 1)[0].bfloat16(), examples(6, 1)[1])
    losses = list(jostle.losses.classification()(model, train))
    rows = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    by_hand = np.stack([torch.cat([part.reshape(-1) for part in row]).double().numpy() for row in rows])
    # One example at a time the model itself rounds in other places than in a batch.
    np.testing.assert_allclose(gradient_self_influence(model, train), -(by_hand**2).sum(1), rtol=2e-2)
    found = gradient_similarity(model, train, train).values
    np.testing.assert_allclose(np.diag(found), gradient_self_influence(model, train), rtol=1e-5)
    assert not torch.equal(torch.tensor(found), torch.tensor(found).bfloat16().float())
    assert np.isfinite(trak(model, train, train, dimension=2).values).all()


@kronfluence
def test_ekfac_self_influence_is_the_diagonal(tmp_path: Path) -> None:
    model, train = nn.Sequential(nn.Linear(5, 3)), examples(25, 1)
    pairs = ekfac(model, train, train, damping=1e-2, directory=tmp_path).values
    alone = ekfac_self_influence(model, train, damping=1e-2, directory=tmp_path)
    np.testing.assert_allclose(alone, np.diag(pairs), rtol=1e-3)
    # The factors of something else are refused.
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.add_(1)
    for words, given, data in (("weights is", other, train), ("fit_data is", model, examples(25, 3))):
        with pytest.raises(jostle.InputError, match=f"EK-FAC factors whose {words} \\w+, expected \\w+"):
            ekfac_self_influence(given, data, directory=tmp_path)

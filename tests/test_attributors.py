"""The baselines, against a loop over examples and against exact influence."""

from __future__ import annotations

import copy
import importlib.util
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import jostle
from architectures import tiny
from jostle.attributors import ekfac, exact_influence, gradient_similarity


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
    # An example helps itself.
    same = gradient_similarity(model, train, train, cosine=cosine).values
    assert (np.diag(same) < 0).all()


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


@kronfluence
def test_ekfac_needs_a_layer_to_factor() -> None:
    with pytest.raises(jostle.InputError, match="without a linear or convolutional layer"):
        ekfac(tiny("llama"), [[1, 2]], [[1, 2]], loss=jostle.losses.next_token(), weights="norm")


def test_ekfac_without_kronfluence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kronfluence", None)
    for name in [name for name in sys.modules if name.startswith("kronfluence.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(jostle.InputError, match="pip install kronfluence"):
        ekfac(classifier(), examples(3, 0), examples(2, 1))

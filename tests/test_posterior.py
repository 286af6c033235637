"""Which weights move, and which are never touched."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import jostle
from jostle.data.datasets import Data
from jostle.models.functional import FunctionalModel
from jostle.models.weights import MovingWeights


class Tied(nn.Module):
    """A tiny language model whose unembedding is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.attention = nn.Linear(4, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        # A causal mean, so that padding on the right is never seen by a real token.
        states = self.attention(self.embed(input_ids)).cumsum(1)
        return self.head(torch.tanh(states / torch.arange(1, states.shape[1] + 1)[None, :, None]))


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        ("all", ["embed.weight", "attention.weight", "attention.bias"]),
        ("attention.*", ["attention.weight", "attention.bias"]),
        ("*.bias", ["attention.bias"]),
        (re.compile("^att.*t$"), ["attention.weight"]),
        ("re:embed|bias", ["embed.weight", "attention.bias"]),
        (["embed*", re.compile("bias")], ["embed.weight", "attention.bias"]),
        (lambda name, parameter: parameter.ndim == 1, ["attention.bias"]),
        ("head.weight", ["embed.weight"]),  # a tied weight answers to both its names, and moves once
    ],
)
def test_selection(selection: object, names: list[str]) -> None:
    moving = MovingWeights(Tied(), selection)  # type: ignore[arg-type]
    assert list(moving.names) == names
    assert moving.total == sum(dict(Tied().named_parameters())[name].numel() for name in names)


def test_frozen_weights_move_only_when_named() -> None:
    model = Tied()
    model.embed.weight.requires_grad_(False)
    assert list(MovingWeights(model, "all").names) == ["attention.weight", "attention.bias"]
    assert "embed.weight" in MovingWeights(model, "*").names


def test_tied_weights_move_together() -> None:
    """The substituted weight reaches both its places: the gradient is that of the sum of both uses."""
    model = Tied().double()
    moving = MovingWeights(model, "all")
    tokens = {"input_ids": torch.tensor([[1, 5, 3, 7]])}
    flat = moving.center + 0.1
    value = FunctionalModel(model, moving).evaluate(jostle.losses.next_token(), flat[None], tokens)[0]
    moved = Tied().double()
    with torch.no_grad():
        for name, part in moving.unflatten(flat).items():
            dict(moved.named_parameters())[name].copy_(part)
    losses = jostle.losses.next_token()(moved, tokens)
    torch.testing.assert_close(value, losses)
    gradient = FunctionalModel(model, moving).mean_loss_gradient(
        jostle.losses.next_token(), flat[None], Data([{"input_ids": tokens["input_ids"][0]}], "train"), [np.array([0])]
    )
    losses[:, 1:].mean().backward()
    parts = [parameter.grad.flatten() for parameter in moved.parameters()]
    torch.testing.assert_close(gradient[0], torch.cat(parts))


def test_weights_that_do_not_move_are_neither_copied_nor_perturbed() -> None:
    model = nn.Sequential(nn.Linear(3, 1000), nn.ReLU(), nn.Linear(1000, 2))
    seen: list[int] = []

    def observable(inner: nn.Module) -> Tensor:
        seen.append(inner[0].weight.data_ptr())  # type: ignore[index,union-attr]
        return inner[2].bias  # type: ignore[index,union-attr,return-value]

    X, y = torch.randn(6, 3), torch.arange(6) % 2
    run = jostle.attribute(
        model, (X, y), (X, y), posterior=jostle.Posterior(n_beta=10, localization=100, weights="2.bias"),
        observables={"bias": observable}, sampler=jostle.SGLD(step_size=1e-3), draws=5, progress=False,
    )  # fmt: skip
    assert set(seen) == {model[0].weight.data_ptr()}
    assert run.manifest["moving_weights"] == 2
    assert run.traces.observable("bias")[:].std() > 0


def test_chain_state_is_float32_for_a_half_precision_model() -> None:
    """While w* itself, which never moves, is exact as the model has it."""
    model = nn.Linear(2, 2).bfloat16()
    moving = MovingWeights(model, "all")
    assert (moving.dtype, moving.center.dtype) == (torch.float32, torch.bfloat16)
    assert moving.unflatten(moving.center + torch.zeros(6))["weight"].dtype == torch.bfloat16
    mixed = MovingWeights(nn.Sequential(model, nn.Linear(2, 2)), "all")
    assert mixed.center.dtype == torch.float32
    assert MovingWeights(nn.Linear(2, 2).double(), "all").dtype == torch.float64
    X, y = torch.randn(8, 2).bfloat16(), torch.arange(8) % 2
    run = jostle.attribute(
        model, (X, y), (X, y), posterior=jostle.Posterior(n_beta=5, localization=1e4), draws=20, thin=1,
        sampler=jostle.OrnsteinUhlenbeck(step_size=1e-3), observables={"weight": lambda m: m.weight.flatten().float()},
        progress=False,
    )  # fmt: skip
    # Draws are around w* itself, which has 8 bits; a centre that were rounded once more would be seen.
    seen = np.asarray(run.traces.observable("weight")[:]).mean((0, 1))
    np.testing.assert_allclose(seen, model.weight.detach().float().flatten().numpy(), atol=0.01)

"""Token losses of Hugging Face models: the same however they are batched, padded, ordered or chunked."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import jostle
from architectures import CONFIGURATIONS, VOCABULARY, tiny, transformers
from jostle import losses
from jostle.data.datasets import Data, collate_samples
from jostle.losses import _KNOWN_HEADS
from jostle.models.functional import FunctionalModel, SideBySide
from jostle.models.in_place import InPlace
from jostle.models.weights import MovingWeights

LENGTHS = [9, 4, 14, 2, 7]


def sequences() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, VOCABULARY, (length,), generator=generator)} for length in LENGTHS]


@pytest.fixture(params=CONFIGURATIONS, scope="module")
def model(request: pytest.FixtureRequest) -> nn.Module:
    # Larger weights than at initialization, so that attention, caps and scales all make a difference.
    network = tiny(request.param)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(3)
    return network


def reference(model: nn.Module, tokens: Tensor) -> Tensor:
    """−log p of each token after the first, from the model's own logits of the sequence alone."""
    logits = model(input_ids=tokens[None]).logits[0].double()
    return -torch.log_softmax(logits[:-1], -1)[torch.arange(len(tokens) - 1), tokens[1:]]


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left.float(), right.float(), rtol=2e-5, atol=2e-5)


@torch.no_grad()
def test_padding_order_and_chunks_change_nothing(model: nn.Module) -> None:
    samples = sequences()
    expected = [reference(model, sample["input_ids"]) for sample in samples]
    for chunk_bytes in (1, 4 * VOCABULARY * 5, 1 << 30):
        loss: Any = jostle.losses.next_token(chunk_bytes=chunk_bytes)
        for order in ([0, 1, 2, 3, 4], [4, 2, 0, 1, 3], [3], [1, 3]):
            batch = collate_samples([samples[index] for index in order])
            losses, mask = loss(model, batch), loss.token_mask(batch)
            for row, index in enumerate(order):
                close(losses[row][mask[row]], expected[index])
    assert _KNOWN_HEADS[model]  # no architecture here fell back to whole logits


@torch.no_grad()
def test_padding_on_the_left(model: nn.Module) -> None:
    if "position_ids" not in inspect.signature(model.forward).parameters:
        pytest.skip("this architecture takes no positions")
    samples = sequences()
    longest = max(LENGTHS)
    padded = [torch.nn.functional.pad(s["input_ids"], (longest - len(s["input_ids"]), 0)) for s in samples]
    attention = torch.stack([torch.arange(longest) >= longest - length for length in LENGTHS]).long()
    loss: Any = jostle.losses.next_token()
    batch = {"input_ids": torch.stack(padded), "attention_mask": attention}
    losses, mask = loss(model, batch), loss.token_mask(batch)
    for row, sample in enumerate(samples):
        close(losses[row][mask[row]], reference(model, sample["input_ids"]))


def test_gradients_through_chunks(model: nn.Module) -> None:
    batch = collate_samples(sequences())
    gradients = []
    for chunk_bytes in (4 * VOCABULARY * 5, 1 << 30):
        model.zero_grad()
        jostle.losses.next_token(chunk_bytes=chunk_bytes)(model, batch).mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[1].norm()


def test_gradients_through_chunks_away_from_the_checkpoint() -> None:
    """More positions than a chunk holds, where two examples alone, by which chains are tried, are fewer."""
    model, source = tiny("llama"), [{"input_ids": [3, 4, 5, 6, 7, 8 + k]} for k in range(12)]
    moving, data, indices = MovingWeights(model, "all"), Data(source, "train"), [np.arange(6), np.arange(6) + 6]
    weights = moving.center * (1 + 0.1 * torch.randn(2, moving.total))
    chunks, whole = (jostle.losses.next_token(chunk_bytes=size) for size in (4 * VOCABULARY * 11, 1 << 30))
    expected = FunctionalModel(model, moving).mean_loss_gradient(whole, weights, data, indices)
    for way in (FunctionalModel, SideBySide):
        found = way(model, moving).mean_loss_gradient(chunks, weights, data, indices)
        assert (found - expected).norm() <= 1e-5 * expected.norm()
    with InPlace(model, moving) as in_place:
        found = in_place.mean_loss_gradient(chunks, weights, data, indices)
        assert (found - expected).norm() <= 1e-5 * expected.norm()
    jostle.attribute(model, source, source[:1], loss=chunks, chains=2, draws=2, thin=1, batch_size=6, progress=False)


@torch.no_grad()
def test_moved_weights_reach_the_head(model: nn.Module) -> None:
    """Embedding, head and body all move, wherever the loss takes them from."""
    moving = MovingWeights(model, "*")
    flat = moving.center * 1.1
    batch = collate_samples(sequences())
    value = FunctionalModel(model, moving).evaluate(jostle.losses.next_token(), flat[None], batch)[0]
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    try:
        for parameter in model.parameters():
            parameter.mul_(1.1)
        close(value, jostle.losses.next_token()(model, batch))
    finally:
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])


def test_an_unknown_head_falls_back_to_whole_logits(caplog: pytest.LogCaptureFixture) -> None:
    class Inverted(transformers.LlamaForCausalLM):
        def forward(self, *arguments: Any, **options: Any) -> Any:
            output = super().forward(*arguments, **options)
            output.logits = -output.logits
            return output

    model = Inverted(tiny("llama").config).eval()
    batch = collate_samples(sequences())
    with caplog.at_level(logging.WARNING), torch.no_grad():
        loss: Any = jostle.losses.next_token()
        losses, mask = loss(model, batch), loss.token_mask(batch)
        loss(model, batch)
    close(losses[0][mask[0]], reference(model, sequences()[0]["input_ids"]))
    assert [record.message for record in caplog.records] == [
        "Inverted does something of its own to its logits: the loss keeps them whole, in float32"
    ]


def test_a_whole_run_on_attention_alone() -> None:
    model, samples = tiny("gpt-neox"), sequences()
    run = jostle.attribute(
        model, samples, samples[:2], loss=jostle.losses.next_token(),
        posterior=jostle.Posterior(n_beta=30, localization=300, weights="attention"),
        sampler=jostle.SGLD(step_size=1e-4), chains=2, draws=10, thin=2, batch_size=3, progress=False,
    )  # fmt: skip
    assert all("attention" in name for name in run.manifest["moving_parameters"])
    scores = run.influence(normalize=True)
    np.testing.assert_allclose(np.diag(scores.values), -1, rtol=1e-5)
    assert run.token_influence(train=2, query=0).values.shape == (13, 8)


@pytest.mark.parametrize("name", ["llama", "gpt-neox", "gemma2", "granite"])
def test_rounding_to_half_precision_is_not_taken_for_a_difference(name: str) -> None:
    """Under autocast too, the head is known and padding on the right needs no mask: the fast road is taken."""
    model = tiny(name, "eager" if name == "gemma2" else "sdpa")
    batch = losses.RightPadded(
        input_ids=torch.randint(1, 90, (2, 12)), attention_mask=torch.tensor([[1] * 12, [1] * 8 + [0] * 4])
    )
    with torch.no_grad():
        plain = jostle.losses.next_token()(tiny(name, "eager"), batch)
        with torch.autocast("cpu", torch.bfloat16):
            half = jostle.losses.next_token()(model, batch)
    assert losses._KNOWN_HEADS[model]
    assert losses._LOOKS_ONLY_BACK[model]
    real = batch["attention_mask"].bool()
    assert ((half - plain)[real].norm() / plain[real].norm()).item() < 0.02


def test_labels_that_are_not_the_tokens_are_what_is_scored() -> None:
    """As in Hugging Face's own loss, whose labels stand where the tokens stand."""
    model: Any = tiny("gpt2")
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    labels = torch.tensor([[-100, -100, 12, 8, 3]])
    batch, loss = {"input_ids": tokens, "labels": labels}, jostle.losses.next_token()
    with torch.no_grad():
        found = loss(model, batch)[0][labels[0] != -100]
        assert float(found.mean()) == pytest.approx(float(model(input_ids=tokens, labels=labels).loss), rel=1e-5)
        plain = loss(model, {"input_ids": tokens})[0]
        anything = torch.tensor([[-100, -100, 12, 8, -1]])  # where nothing is scored
        padded = {"input_ids": tokens, "labels": anything, "attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}
        assert float(loss(model, padded)[0, 2]) == pytest.approx(float(found[0]), rel=1e-5)
    assert not np.isclose(float(plain[2]), float(found[0]))
    assert float(plain[3]) == pytest.approx(float(found[1]))


class Logits(torch.nn.Module):
    """A model of which nothing is known but its logits."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask).logits


@pytest.mark.parametrize("name", ["gpt2", "plain"])
def test_labels_are_drawn_with_the_chances_that_a_model_gives_them(name: str) -> None:
    """By the same road as its losses, which is −log of that chance: known heads and unknown, few positions at a time."""
    model: Any = tiny("gpt2")
    loss: Any = jostle.losses.next_token(chunk_bytes=1 if name == "gpt2" else 1 << 20)
    network = model if name == "gpt2" else Logits(model)
    tokens, count = torch.tensor([[5, 6, 7, 8], [9, 3, 2, 0]]), 4_000
    batch = {"input_ids": tokens, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])}
    with torch.no_grad():
        labels = loss.draw_labels(network, batch, count, torch.Generator().manual_seed(0))
        chances = model(**batch).logits[:, :-1].softmax(-1)
    assert labels.shape == (2, count, 4)
    assert (labels[:, :, 0] == -100).all()
    for row, place in ((0, 1), (0, 3), (1, 2)):
        seen = torch.bincount(labels[row, :, place], minlength=chances.shape[2]) / count
        expected = chances[row, place - 1]
        error = (expected * (1 - expected) / count).sqrt()
        away = (seen - expected) / error
        assert float(away.abs().max()) < 5
        assert 0.7 < float(away.square().mean()) < 1.3
    other = loss.relabelled(batch, labels[:, 0])
    assert torch.equal(loss.token_mask(other), loss.token_mask(batch))

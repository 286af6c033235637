"""Products with the Gauss–Newton matrix against explicit Jacobians."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

import jostle
from jostle.curvature import compiled, gauss_newton, jacobians
from jostle.curvature.gauss_newton import GaussNewton
from jostle.curvature.rows import embeddings_of, largest_in_rows
from jostle.data.datasets import Data
from jostle.losses import LanguageHead, plain_operations
from jostle.models.functional import FunctionalModel
from jostle.models.in_place import InPlace
from jostle.models.weights import MovingWeights

VOCABULARY = 13
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 10,
    "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
LLAMA = ("LlamaConfig", SIZES | {"num_key_value_heads": 1, "tie_word_embeddings": True})
LANGUAGE: dict[str, tuple[str, dict[str, Any]]] = {
    "tied llama": LLAMA,
    "llama with padding": (LLAMA[0], LLAMA[1] | {"pad_token_id": 0, "tie_word_embeddings": False}),
    "gpt-neox": ("GPTNeoXConfig", SIZES),
    "gemma2": ("Gemma2Config", SIZES | {
        "num_key_value_heads": 1, "head_dim": 4, "final_logit_softcapping": 1.5, "attn_logit_softcapping": 1.0,
    }),
    "granite": ("GraniteConfig", SIZES | {"num_key_value_heads": 1, "logits_scaling": 0.5}),
    "phi": ("PhiConfig", SIZES),  # its head has a bias
    "gpt2": ("GPT2Config", {
        "vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16, "resid_pdrop": 0.5,
        "embd_pdrop": 0.5, "attn_pdrop": 0.5, "bos_token_id": 1, "eos_token_id": 2,
    }),
}  # fmt: skip


def language_model(name: str, attention: str | None = None) -> nn.Module:
    """With weights large enough that its logits differ, and curve."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    configuration, settings = LANGUAGE[name]
    torch.manual_seed(0)
    config = getattr(transformers, configuration)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention or ("eager" if name == "gemma2" else "sdpa")
    )
    for parameter in model.double().parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def sequences() -> list[dict[str, Tensor]]:
    """Of different lengths, some of whose tokens are not scored; with the token 0 among them."""
    random = torch.Generator().manual_seed(1)
    found = []
    for length in (7, 3, 9, 5):
        tokens = torch.randint(VOCABULARY, (length,), generator=random)
        tokens[length // 2] = 0
        labels = tokens.clone()
        labels[: length // 3] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def images() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(2)
    return torch.randn(6, 1, 5, 5, generator=random, dtype=torch.float64), torch.arange(6) % 3


def rows(outputs: int = 2) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    return torch.randn(7, 3, generator=random, dtype=torch.float64), torch.randn(7, outputs, generator=random).double()


def convolutions() -> nn.Module:
    """With batch statistics that are not those of a new layer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.GELU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(27, 3)
    ).double()
    model(2 * images()[0] + 1)
    return model


def tanh_network(outputs: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


# --- the truth: a Jacobian and a Hessian by torch.func, of one example at a time ---


def weights_of(model: nn.Module, chosen: Callable[[str], bool]) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name: value.detach() for name, value in named if value.requires_grad and chosen(name)}


def jacobian(
    model: nn.Module, outputs: Callable[[nn.Module], Tensor], chosen: Callable[[str], bool] = lambda name: True
) -> Tensor:
    """(output, weight)."""

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self) -> Tensor:
            return outputs(self.model).flatten()

    called = Called()
    weights = {f"model.{name}": value for name, value in weights_of(model, chosen).items()}
    with sdpa_kernel(SDPBackend.MATH):
        found: Any = jacrev(lambda weights: functional_call(called, weights, ()))(weights)
    return torch.cat([one.flatten(1) for one in found.values()], dim=1)


def curvature_of_language(
    model: nn.Module, shares: np.ndarray | None = None, chosen: Callable[[str], bool] = lambda name: True
) -> Tensor:
    """Σᵢ ωᵢ Σₜ Jᵀ(diag p − ppᵀ)J/Tᵢ, of logits as the model itself gives them, without padding."""
    samples, total = sequences(), torch.zeros(())
    shares = np.full(len(samples), 1 / len(samples)) if shares is None else shares
    model.eval()
    for sample, share in zip(samples, shares, strict=True):
        tokens = sample["input_ids"][None]
        J = jacobian(model, lambda model, tokens=tokens: model(tokens, use_cache=False).logits[0], chosen)
        J = J.unflatten(0, (tokens.shape[1], VOCABULARY))[:-1]
        p = model(tokens).logits[0, :-1].softmax(1).detach()
        scored = (sample["labels"] != -100)[1:].double()
        Lambda = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        total = total + share * torch.einsum("tvw,tvu,tux,t->wx", J, Lambda, J, scored / scored.sum())
    return total


def curvature_of_outputs(model: nn.Module, inputs: Tensor, loss_of: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Mean of JᵀΛJ, Λ the Hessian of a loss of an example's outputs."""
    model.eval()
    total = torch.zeros(())
    for number in range(len(inputs)):
        J = jacobian(model, lambda model, number=number: model(inputs[number : number + 1]))
        z = model(inputs[number : number + 1]).detach().flatten()
        Lambda: Any = hessian(lambda z, number=number: loss_of(z, number))(z)
        total = total + J.T @ Lambda @ J / len(inputs)
    return total


def close(found: Tensor, truth: Tensor, tolerance: float = 1e-9) -> bool:
    assert truth.norm() > 1e-3
    return bool((found - truth).norm() < tolerance * truth.norm())


SINGLE = 1e-5
"""Norms and softmaxes of many models are computed in float32, whatever the rest is in."""


def products(model: nn.Module, loss: Any, data: Any, weights: Any = "all") -> tuple[Tensor, Tensor]:
    """Some vectors, and H·v of them."""
    with GaussNewton(model, weights, loss, Data(data, "train")) as found:
        random = torch.Generator().manual_seed(0)
        vectors = torch.randn(3, found.moving.total, generator=random, dtype=torch.float64)
        return vectors, found(vectors)


def curvature(model: nn.Module, loss: Any, data: Any, weights: Any = "all", **settings: Any) -> Tensor:
    with GaussNewton(model, weights, loss, Data(data, "train"), **settings) as found:
        return found.dense()


def ways_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Those that were given up."""
    return [record.message for record in caplog.records if "curvature of" in record.message]


# --- language models ---


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, "eager") for name in LANGUAGE] + [(name, "sdpa") for name in LANGUAGE if name != "gemma2"],
)
def test_language_models(name: str, attention: str) -> None:
    model, loss = language_model(name, attention), jostle.losses.next_token()
    vectors, found = products(model, loss, sequences())
    truth = vectors @ curvature_of_language(model)
    assert close(found, truth, SINGLE)
    if name == "gpt2":  # and not what it would be with every token scored
        _, other = products(model, loss, [{"input_ids": one["input_ids"]} for one in sequences()])
        assert not close(other, truth, 0.05)


@pytest.mark.parametrize("name", LANGUAGE)
def test_layer_by_layer(name: str) -> None:
    """As the model as a whole, with one function for all layers that are alike."""
    model, data = language_model(name), Data(sequences(), "train")
    vectors = torch.randn(3, MovingWeights(model, "all").total, dtype=torch.float64)
    with GaussNewton(model, "all", jostle.losses.next_token(), data) as found:
        view = found.view
        assert isinstance(view, gauss_newton._LanguageModel)
        assert view._layers is not None
        assert view._layers._like == ([0, 1] if name == "gemma2" else [0, 0])  # of gemma's, one looks back less far
        by_layers = found(vectors)
        view._layers = None
        assert close(by_layers, found(vectors), 1e-9)


def test_what_layers_have_of_their_own_stays() -> None:
    """Hooks that replace a layer's `forward`, as those that move it between devices do."""
    model = language_model("tied llama")
    layer = model.model.layers[1]
    plain = layer.forward
    own = layer.forward = lambda *args, **named: plain(*args, **named)
    with GaussNewton(model, "all", jostle.losses.next_token(), Data(sequences(), "train")) as found:
        vector = torch.randn(1, found.moving.total, dtype=torch.float64)
        view: Any = found.view
        assert view._layers._like == [0, 1]
        assert close(found(vector), vector @ curvature_of_language(model), SINGLE)
    assert layer.forward is own
    assert "forward" not in vars(model.model.layers[0])


def test_vectors_are_fewer_where_a_single_example_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model = language_model("tied llama")
    most: list[int] = []

    with GaussNewton(model, "all", jostle.losses.next_token(), Data(sequences(), "train")) as found:
        vectors = torch.randn(7, found.moving.total, dtype=torch.float64)
        plain, products = found(vectors), found.view.products

        def short_of_memory(some: Tensor, batch: Any, shares: Tensor) -> Tensor:
            if len(some) * batch["input_ids"].numel() > 30:
                raise torch.OutOfMemoryError
            most.append(len(some) * batch["input_ids"].numel())
            return products(some, batch, shares)

        monkeypatch.setattr(found.view, "products", short_of_memory)
        assert close(found(vectors), plain, 1e-9)
    assert max(most) > 15


def test_small_vectors_in_half_precision() -> None:
    model = language_model("tied llama")
    with GaussNewton(
        model, "all", jostle.losses.next_token(), Data(sequences(), "train"), dtype=torch.float16
    ) as found:
        vector = torch.randn(1, found.moving.total)
        assert close(1e8 * found(1e-8 * vector), found(vector), 1e-3)


def test_layers_that_are_no_chain(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = language_model("tied llama")
    model.model.layers[1].mlp.down_proj.weight = model.model.layers[0].mlp.down_proj.weight
    with caplog.at_level("INFO", "jostle"):
        vectors, found = products(model, jostle.losses.next_token(), sequences())
    assert "the model is not taken layer by layer (layers share weights)" in caplog.text
    assert close(found, vectors @ curvature_of_language(model), SINGLE)


def test_adapters() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = language_model("tied llama")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, settings).double()
    for loss in (jostle.losses.next_token(), UnknownHead()):
        vectors, found = products(model, loss, sequences())
        assert vectors.shape[1] == 2 * 2 * (2 * 8 * 2) - 2 * 8
        assert close(found, vectors @ curvature_of_language(model), SINGLE)


class UnknownHead:
    """Next tokens, where nothing is known of the model: with its mask, in the model's own way to be called."""

    def __init__(self) -> None:
        self.inner = jostle.losses.next_token()
        self.token_mask = self.inner.token_mask  # type: ignore[attr-defined]

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self.inner(model, batch)


@pytest.mark.parametrize("name", ["tied llama", "gemma2", "gpt2"])
def test_logits_as_a_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the head is not known, the matrix and the tangents are the same, padding on the left included."""
    model = language_model(name)
    left = [{"input_ids": F.pad(s["input_ids"], (2, 0)), "labels": F.pad(s["labels"], (2, 0), value=-100),
             "attention_mask": F.pad(torch.ones_like(s["input_ids"]), (2, 0))} for s in sequences()]  # fmt: skip
    vectors = torch.randn(3, MovingWeights(model, "all").total, dtype=torch.float64)

    def both(data: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        with GaussNewton(model, "all", jostle.losses.next_token(), Data(data, "train")) as found:
            tangents, mask = found.tangents(vectors, range(4))
            assert mask is not None
            return found(vectors), tangents * mask

    # Masks of Hugging Face are no numbers any more in float32, in which a softmax is taken of float64: all but one's.
    cases = [(data, both(data)) for data in (sequences(), left)[: 2 if name == "gpt2" else 1]]
    monkeypatch.setattr(LanguageHead, "of", lambda *arguments: None)
    for data, known in cases:
        for found, expected in zip(both(data), known, strict=True):
            assert close(found, expected, SINGLE)
    if name == "gpt2":
        assert close(cases[1][1][0], cases[0][1][0], SINGLE)


def test_parts_of_the_weights() -> None:
    """A selection is the block of the matrix; where the head does not move, nothing is lost of what it passes on."""
    model = language_model("llama with padding")
    whole, moving = curvature_of_language(model), MovingWeights(model, "all")
    for selection, parts in (("attention", ["attn"]), ("head", ["lm_head"]), ("embedding+mlp", ["embed", "mlp"])):
        kept = [name for name in moving.names if any(part in name for part in parts)]
        places = torch.cat([torch.arange(moving.total)[moving.slices[name]] for name in kept])
        assert 0 < len(places) < moving.total
        vectors, found = products(model, jostle.losses.next_token(), sequences(), selection)
        assert close(found, vectors @ whole[places][:, places], SINGLE)


def test_rows_shares_blocks_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = language_model("tied llama")
    for kind in gauss_newton.BLOCK:
        monkeypatch.setitem(gauss_newton.BLOCK, kind, 3)
        monkeypatch.setitem(gauss_newton.PASS_TOKENS, kind, 8)
        monkeypatch.setitem(gauss_newton.HEAD_BYTES, kind, 1)
    monkeypatch.setattr(gauss_newton, "max", lambda least, size: 2 if least == 16 else max(least, size), raising=False)
    shares = np.array([0.1, 0.5, 0.3, 0.7])
    data = Data(sequences(), "train")
    vectors = torch.randn(7, MovingWeights(model, "all").total, dtype=torch.float64)
    with GaussNewton(model, "all", jostle.losses.next_token(), data, shares=shares) as found:
        assert [list(part) for part in found.parts()] == [[1], [3], [0], [2]]
        assert close(found(vectors), vectors @ curvature_of_language(model, shares), SINGLE)
        some = np.array([0, 2 * 0.5, 0, 2 * 0.7])  # two of four, in place of all
        assert close(found(vectors, rows=np.array([3, 1])), vectors @ curvature_of_language(model, some), SINGLE)


@pytest.mark.parametrize("name", ["llama with padding", "gemma2", "phi", "gpt2"])
def test_tangents_of_tokens(name: str) -> None:
    """Against gradients, a token at a time, and differences; the embedding of padding is one that no gradient reaches."""
    model, loss = language_model(name), jostle.losses.next_token()
    data, random = Data(sequences(), "train"), torch.Generator().manual_seed(0)
    batch = data.batch([2, 0, 1])
    with GaussNewton(model, "all", loss, data) as found:
        functional, center = found.model, found.moving.center
        vectors = torch.randn(2, len(center), generator=random, dtype=torch.float64)
        tangents, mask = found.tangents(vectors, [2, 0, 1])
        slopes = jacobian(model, lambda model: loss(model, batch)).unflatten(0, (3, 9))
        step = 1e-6
        ahead, behind = (
            torch.stack([functional.sample_losses(loss, center + way * step * one, batch) for one in vectors])
            for way in (1, -1)
        )
    assert mask is not None
    assert mask.sum(1).tolist() == [6, 5, 2]
    assert close(tangents[:, mask], torch.einsum("stw,kw->kst", slopes, vectors)[:, mask], SINGLE)
    if name == "llama with padding":
        assert (slopes[:, :, :8] == 0).all()
    of_sequences = torch.where(mask, tangents, 0).sum(2) / mask.sum(1)
    if name == "gpt2":  # others compute parts in float32, in which differences are lost
        assert close(of_sequences, (ahead - behind) / (2 * step), 1e-7)


def test_the_model_is_left_as_it_was() -> None:
    model = language_model("gpt2").train()
    model.transformer.h[0].eval()
    model.transformer.wte.weight.requires_grad_(False)

    def state() -> list[Any]:
        return [
            model.config.to_dict(), model.config._attn_implementation, [m.training for m in model.modules()],
            [(name, p.requires_grad, p.grad is None, p.data.clone().numpy().tobytes()) for name, p in model.named_parameters()],
            torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.flash_sdp_enabled(),
        ]  # fmt: skip

    before = state()
    for loss in (jostle.losses.next_token(), UnknownHead()):
        with GaussNewton(model, "*", loss, Data(sequences(), "train")) as found:
            found(torch.ones(1, found.moving.total, dtype=torch.float64))
            assert not any(module.training for module in model.modules())
            assert model.config._attn_implementation == before[1]
        assert state() == before
    with pytest.raises(jostle.InputError):
        curvature(model, weight_penalty, sequences())
    assert state() == before


# --- other models, and losses of a user's own ---


def test_a_classifier_with_batch_statistics() -> None:
    model, (x, y) = convolutions(), images()
    truth = curvature_of_outputs(model, x, lambda z, number: F.cross_entropy(z, y[number]))
    assert close(curvature(model.train(), jostle.losses.classification(), (x, y)), truth)


def test_regression() -> None:
    model, (x, y) = tanh_network(), rows()
    truth = curvature_of_outputs(model, x, lambda z, number: (z - y[number]).square().sum() / 0.5)
    assert close(curvature(model, jostle.losses.regression(noise_variance=0.25), (x, y)), truth)


class WordMeans(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(6, 3, padding_idx=0), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x).mean(1).tanh())


def test_the_embedding_of_padding(caplog: pytest.LogCaptureFixture) -> None:
    """No gradient reaches it, and no curvature, whatever it is; the quickest way is right for it."""
    caplog.set_level(logging.INFO, "jostle")
    torch.manual_seed(0)
    model = WordMeans().double()
    nn.init.normal_(model.words.weight)
    x, y = torch.tensor([[1, 2, 0], [3, 0, 0], [5, 4, 1]]), torch.arange(3)
    found = curvature(model, jostle.losses.classification(), (x, y))
    assert close(found, curvature_of_outputs(model, x, lambda z, number: F.cross_entropy(z, y[number])))
    assert (found[:3] == 0).all()
    with GaussNewton(
        language_model("llama with padding"), "all", jostle.losses.next_token(), Data(sequences(), "train")
    ):
        assert not ways_of(caplog)


def pseudo_huber(z: Tensor) -> Tensor:
    return (1 + z.square()).sqrt().sum(-1)


def called_twice(model: Any, batch: Any) -> Tensor:
    """Convex in the outputs of two calls, which it mixes."""
    x, y = batch
    return pseudo_huber(model(x) - 0.5 * model(-2 * x) - y) + F.softplus(model(x)[:, 0])


def body_and_head(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return pseudo_huber(model[2](model[:2](x)) - y)


def test_losses_of_a_users_own() -> None:
    model, (x, y) = tanh_network(), rows()
    # Of two calls, the outputs are those of one network that makes both.
    twice = Twice(model)
    truth = curvature_of_outputs(
        twice, x, lambda z, number: pseudo_huber(z[:2] - 0.5 * z[2:] - y[number]) + F.softplus(z[0])
    )
    assert close(curvature(model, called_twice, (x, y)), truth)
    # Parts of a model that are called one after another are its outputs as well.
    truth = curvature_of_outputs(model, x, lambda z, number: pseudo_huber(z - y[number]))
    assert close(curvature(model, body_and_head, (x, y)), truth)
    vectors = torch.randn(2, 26, dtype=torch.float64)
    with GaussNewton(model, "all", called_twice, Data((x, y), "train")) as found:
        slopes = jacobian(model, lambda model: called_twice(model, (x, y)))
        tangents, mask = found.tangents(vectors, range(7))
    assert mask is None
    assert close(tangents, vectors @ slopes.T)


class Twice(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.model(x), self.model(-2 * x)], dim=1)


def weight_penalty(model: Any, batch: Any) -> Tensor:
    outputs = (
        model(batch["input_ids"]).logits.square().mean((1, 2))
        if isinstance(batch, dict)
        else model(batch[0]).square().sum(1)
    )
    return outputs + 1e-6 * sum(value.square().sum() for value in model.parameters())


def head_apart(model: Any, batch: Any) -> Tensor:
    return pseudo_huber(F.linear(model[:2](batch[0]), model[2].weight) - batch[1])


def not_convex(model: Any, batch: Any) -> Tensor:
    return (model(batch[0]).square() - 1).square().sum(1)


def no_call(model: Any, batch: Any) -> Tensor:
    return F.linear(batch[0], model[0].weight).square().sum(1)


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (weight_penalty, "which reads weights past the model's outputs"),
        (head_apart, "which reads weights past the model's outputs"),
        (not_convex, "which curves downwards in the model's outputs"),
        (no_call, "which does not call the model, or takes no numbers from it"),
    ],
)
def test_refused_losses(loss: Any, got: str) -> None:
    with pytest.raises(
        jostle.InputError, match=rf"loss: got a function of your own, {got}, expected .*; jostle.sample"
    ):
        curvature(tanh_network(), loss, rows())


# --- models without a forward mode ---


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.head = kind(3, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Cubed(torch.autograd.Function):
    """As functions are written that know nothing of `torch.func`."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return 3 * context.saved_tensors[0] ** 2 * gradient


class CubedWithoutForward(torch.autograd.Function):
    """As they are written for it, without a forward mode."""

    generate_vmap_rule = True
    backward = staticmethod(Cubed.backward)

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        context.save_for_backward(*inputs)


class CubedOnce(Cubed):
    """With a backward pass outside of the graph."""

    backward = staticmethod(torch.autograd.function.once_differentiable(Cubed.backward))


class Activation(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def hides_from_gradients(x: Tensor) -> Tensor:
    """A straight-through estimate: what forward mode sees is not what a gradient sees."""
    with torch.no_grad():
        rest = torch.sin(3 * x) - x
    return x + rest


@pytest.mark.parametrize("ways", [jacobians.WAYS, jacobians.WAYS[1:2]], ids=("forward mode", "two backward"))
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers(
    kind: type[nn.RNNBase], ways: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, where a fused LSTM has no forward mode, as on a GPU; the truth is that of float64."""
    monkeypatch.setattr(gauss_newton, "WAYS", ways)
    torch.manual_seed(0)
    model = Recurrent(kind)
    x, y = torch.randn(6, 4, 3), torch.arange(6) % 2
    vectors = torch.randn(2, sum(p.numel() for p in model.parameters()))
    caplog.set_level(logging.INFO, "jostle")
    with GaussNewton(model, "all", jostle.losses.classification(), Data((x, y), "train")) as found:
        dense = found.dense().double()
        tangents = found.tangents(vectors, range(6))[0].double()
    assert not ways_of(caplog)
    x, model, loss = x.double(), model.double(), jostle.losses.classification()
    assert close(dense, curvature_of_outputs(model, x, lambda z, number: F.cross_entropy(z, y[number])), 1e-5)
    slopes = jacobian(model, lambda model: loss(model, (x, y)))
    assert close(tangents, vectors.double() @ slopes.T, 1e-5)


@pytest.mark.parametrize("way", jacobians.WAYS)
def test_every_way_is_the_same(way: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauss_newton, "WAYS", (way,))
    model, (x, y) = tanh_network(), rows()
    truth = curvature_of_outputs(model, x, lambda z, number: pseudo_huber(z - y[number]))
    assert close(curvature(model, body_and_head, (x, y)), truth)
    language = language_model("gpt2")
    vectors = torch.randn(3, MovingWeights(language, "all").total, dtype=torch.float64)
    with GaussNewton(language, "all", jostle.losses.next_token(), Data(sequences(), "train")) as found:
        assert close(found(vectors), vectors @ curvature_of_language(language), SINGLE)


def test_operations_that_only_autograd_knows(caplog: pytest.LogCaptureFixture) -> None:
    """The same network in operations of PyTorch is the truth; where gradients see less, H is of what they see."""
    caplog.set_level(logging.INFO, "jostle")
    (x, y), loss = rows(), jostle.losses.regression()
    cases = (
        (CubedWithoutForward.apply, lambda x: x**3, 1),
        (Cubed.apply, lambda x: x**3, 2),
        (hides_from_gradients, lambda x: x + (torch.sin(3 * x) - x).detach(), 1),
    )
    for function, seen, ways in cases:
        model, plain = (tanh_network() for _ in range(2))
        model[1], plain[1] = Activation(function), Activation(seen)
        caplog.clear()
        found = curvature(model, loss, (x, y))
        assert len(ways_of(caplog)) == ways, ways_of(caplog)
        assert close(found, curvature_of_outputs(plain, x, lambda z, number: (z - y[number]).square().sum() / 2))


def test_operations_that_nothing_goes_through() -> None:
    model = tanh_network()
    model[1] = Activation(CubedOnce.apply)
    with pytest.raises(
        jostle.InputError, match=r"model: got operations without derivatives .*does not come back.*jostle.sample"
    ):
        curvature(model, jostle.losses.regression(), rows())


# --- kernels, and attention ---


def test_our_kernel_has_no_second_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward pass has no graph: what asks for more is told, and does not go on with less."""
    from jostle import kernels

    weight = torch.randn(5, 3)

    def forward(hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        logits = hidden @ weight.T
        return F.cross_entropy(logits, torch.zeros(2, dtype=torch.long), reduction="none"), logits.logsumexp(1)

    def backward(hidden: Tensor, *rest: Any) -> Tensor:
        return (hidden @ weight.T).softmax(1) @ weight - weight[0]

    monkeypatch.setattr(kernels, "_forward", forward)
    monkeypatch.setattr(kernels, "_backward_narrow", backward)
    hidden = torch.randn(2, 3, requires_grad=True)
    losses = kernels.linear_cross_entropy(hidden, weight, None, torch.zeros(2, dtype=torch.long))
    (slopes,) = torch.autograd.grad(losses.sum(), hidden, create_graph=True)
    assert slopes.norm() > 0.1
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(slopes.sum(), hidden)
    (slopes,) = torch.autograd.grad(losses.sum(), hidden)
    assert not slopes.requires_grad


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_and_loss_are_twice_differentiable(attention: str) -> None:
    """Second derivatives along a line, by autograd twice and by forward mode over it, against differences of gradients."""
    loss = jostle.losses.next_token()
    for name in ("gpt2", "tied llama"):
        model = language_model(name, attention).eval()
        moving = MovingWeights(model, "all")
        functional, batch = FunctionalModel(model, moving), Data(sequences(), "train").whole()
        line = torch.randn(moving.total, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

        def mean(flat: Tensor, functional: Any = functional, batch: Any = batch) -> Tensor:
            return functional.sample_losses(loss, flat, batch).mean()

        with plain_operations():
            forward = torch.func.jvp(torch.func.grad(mean), (moving.center,), (line,))[1]
            ahead, behind = (torch.func.grad(mean)(moving.center + step * line) for step in (1e-6, -1e-6))
            leaf = moving.center.clone().requires_grad_()
            (first,) = torch.autograd.grad(mean(leaf), leaf, create_graph=True)
            (backward,) = torch.autograd.grad(first @ line, leaf)
        assert close(forward, backward, SINGLE)
        if name == "gpt2":
            assert close(forward, (ahead - behind) / 2e-6, 1e-6)


# --- compiled ---


def test_traced_graphs_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler is given: the same numbers, and no zeros without memory in it."""
    graphs: dict[str, list[Any]] = {}

    def traced(self: Any, name: str, function: Callable[..., Any], *inputs: Any) -> Any:
        found, kept = function(*inputs), {}

        def compile_(graph: Any, tensors: list[Tensor], options: Any) -> Any:
            kept["graph"] = graph
            return graph

        monkeypatch.setattr(compiled._inductor, "compile", compile_)
        leaves = pytree.tree_leaves(inputs)
        run: Any = self._compile(name, function, inputs, leaves)
        again = run(*(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        for one, other in zip(pytree.tree_leaves(again), pytree.tree_leaves(found), strict=True):
            assert (one - other).norm() <= 1e-12 * other.norm()
        graphs.setdefault(name, []).append(kept["graph"])
        return again

    model = language_model("gpt2")
    vectors = torch.randn(3, MovingWeights(model, "all").total, dtype=torch.float64)
    with GaussNewton(model, "all", jostle.losses.next_token(), Data(sequences(), "train")) as found:
        monkeypatch.setattr(compiled.Compiled, "__call__", traced)
        assert close(found(vectors), vectors @ curvature_of_language(model), SINGLE)
    assert set(graphs) == {"layer 0 moved", "layer 0 pulled", "curved"}
    assert len(graphs["layer 0 moved"]) > 1  # of both layers
    for graph in itertools.chain.from_iterable(graphs.values()):
        assert "_efficientzerotensor" not in graph.code
    # It would be there, and be read from where nothing is.
    plain = make_fx(lambda x: torch.func.jvp(lambda w: (w * x, x), (x,), (x,))[1])(torch.ones(2))
    assert "_efficientzerotensor" in plain.code


# --- padding to what a GPU likes, and rows that one example has alone ---


@pytest.mark.parametrize("name", ["gpt2", "tied llama"])
def test_more_tokens_at_the_end_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts of unequal lengths, some of whose tokens are not scored."""
    model, data = language_model(name), Data(sequences(), "train")
    vectors = torch.randn(3, MovingWeights(model, "all").total, dtype=torch.float64)
    found, read = [], list[int]()
    body = gauss_newton._LanguageModel._body

    def looked_at(self: Any, batch: Any) -> Any:
        read.append(batch["input_ids"].shape[1] - 1)
        return body(self, batch)

    monkeypatch.setattr(gauss_newton._LanguageModel, "_body", looked_at)
    for multiple in (1, 8):
        monkeypatch.setattr(gauss_newton, "ALIGNED", {"cpu": multiple})
        with GaussNewton(model, "all", jostle.losses.next_token(), data) as curvature:
            read.clear()
            curvature.view._layers = None
            found.append((curvature(vectors), curvature.tangents(vectors, range(len(data)))[0]))
            assert read
            assert {length % multiple for length in read} == {0}
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() <= 1e-12 * other.norm()


def test_curvature_that_one_example_gives_a_row() -> None:
    """Against the trace of the matrix of each example, over labels drawn many times."""
    model, rows, loss = language_model("tied llama"), sequences(), jostle.losses.next_token()
    data, moving = Data(rows, "train"), MovingWeights(model, "all")
    reach = torch.rand(moving.total, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (name,) = embeddings_of(model, moving, loss, data)
    place, shape = moving.slices[name], model.get_input_embeddings().weight.shape
    traces, shares = [], np.array([0.5, 0.5])
    for row in rows[:2]:
        with GaussNewton(model, "all", loss, Data([row], "train")) as curvature:
            traces.append((reach * curvature.dense().diagonal())[place].view(shape).sum(1))
    found = []
    with InPlace(model, moving) as inside:
        for seed in range(60):
            every = [
                largest_in_rows(inside, loss, Data([row], "train"), reach, np.ones(1), seed)[place].view(shape)
                for row in rows[:2]
            ]
            found.append(torch.stack(every)[:, :, 0])
        both = largest_in_rows(inside, loss, Data(rows[:2], "train"), reach, shares, 0)
    draws, expected = torch.stack(found), torch.stack(traces)
    sums = draws.sum(2)
    error = sums.std(0) / len(sums) ** 0.5
    assert ((sums.mean(0) - expected.sum(1)).abs() < 3 * error).all()
    assert (error < 0.1 * expected.sum(1)).all()
    # Of single rows, whose labels are drawn seldom: by how alike they are.
    for mean, other in zip(draws.mean(0), expected, strict=True):
        assert torch.corrcoef(torch.stack([mean, other]))[0, 1] > 0.95
    assert both[place].view(shape).std(1).max() == 0  # one number for all of a row
    assert not both[: place.start].any()
    assert not both[place.stop :].any()

"""The ways of running a chain (plain, in place, compiled, from CUDA graphs) give the same numbers."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch
from torch._dynamo.utils import counters

import jostle
from architectures import CONFIGURATIONS, tiny
from jostle.chains.observing import Observer
from jostle.data.datasets import Data
from jostle.models import in_place
from jostle.models.functional import FunctionalModel
from jostle.models.in_place import InPlace, error_function
from jostle.models.prefix import repeated_blocks
from jostle.models.weights import MovingWeights

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

ATTENTION = {"gemma2": "eager"}
"""Where PyTorch's own attention cannot do what the model needs."""


def assert_the_same(
    name: str, *, device: str, backend: str | None, replay: bool, weights: str = "attention+mlp"
) -> float:
    """Compare losses and gradients in place with the plain function's, at several weights and minibatches.

    Returns the largest difference, relative to what it is of.
    """
    largest = 0.0
    torch._dynamo.reset()
    counters.clear()
    model = tiny(name, ATTENTION.get(name, "sdpa")).to(device)
    loss = jostle.losses.next_token()
    generator = np.random.default_rng(0)
    lengths = (5, 9, 12, 12, 12, 12, 8, 12)
    sequences = [{"input_ids": generator.integers(1, 90, size=length).tolist()} for length in lengths]
    data = Data(sequences, "train", device=torch.device(device))
    moving = MovingWeights(model, weights)
    # A model of its own, which nothing is done to.
    untouched = copy.deepcopy(model)
    plain = FunctionalModel(untouched, MovingWeights(untouched, weights))
    observer = Observer(plain, loss, data, 8)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    required = [parameter.requires_grad for parameter in model.parameters()]
    # The loss tries the model out once; compiled for those few tokens as well, it would reach dynamo's limit of
    # recompilations, and what is compared below would be the plain function twice.
    loss(model, data.batch([0]))
    with InPlace(model, moving) as fast:
        if backend:
            fast.compile(backend)
        if replay:
            fast.replay()
        noise = torch.Generator(device).manual_seed(0)
        chain = moving.center[None].clone()
        for _ in range(3):
            chain += 0.01 * torch.randn(chain.shape, device=device, generator=noise)
            chosen = [generator.choice(np.arange(2, 6), 3, replace=False)]
            for one, two in (
                (observer(fast, chain), observer(plain, chain)),
                (
                    fast.mean_loss_gradient(loss, chain, data, chosen),
                    plain.mean_loss_gradient(loss, chain, data, chosen),
                ),
            ):
                largest = max(largest, float((one - two).norm() / two.norm()))
        assert largest <= 2e-5
        assert not replay or name in ATTENTION or fast.replayed > 0
        assert not backend or counters["stats"]["unique_graphs"] > 0
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert required == [parameter.requires_grad for parameter in model.parameters()]
    return largest


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_in_place(name: str) -> None:
    assert_the_same(name, device="cpu", backend=None, replay=False)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_blocks_that_do_not_move_are_computed_once(name: str) -> None:
    """Late layers alone move: the same numbers, and the first layer runs once for each observed batch."""
    assert_the_same(name, device="cpu", backend=None, replay=False, weights="layers.2.attention")
    model = tiny(name)
    moving = MovingWeights(model, "layers.1-2.mlp")
    data = Data([list(range(1, 9)), list(range(20, 30))], "train")
    loss = jostle.losses.next_token()
    observer = Observer(FunctionalModel(model, moving), loss, data, 1)
    with InPlace(model, moving) as fast:
        first, last = repeated_blocks(model)[0], repeated_blocks(model)[-1]
        calls = {first: 0, last: 0}
        for block in calls:
            forward = block.forward

            def counted(*inputs: Any, block: Any = block, forward: Any = forward, **named: Any) -> Any:
                calls[block] += 1
                return forward(*inputs, **named)

            block.forward = counted
        wrapped = first.forward
        for _ in range(3):
            observer(fast, moving.center[None])
        assert first.forward is wrapped
    # One look at what comes first, then each of two batches once; the moving layers in all three observations.
    assert calls[first] == 3
    assert calls[last] == 1 + 3 * 2


@pytest.mark.parametrize("weights", ["embedding", "all", "layers.0.attention", "head"])
def test_nothing_is_kept_where_something_moves_before(weights: str) -> None:
    assert_the_same("llama", device="cpu", backend=None, replay=False, weights=weights)


class Blocks(torch.nn.Module):
    """A classifier of residual blocks, which add to their input in place or hand it on in something."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.out = torch.nn.ModuleList([Block(kind) for _ in range(3)]), torch.nn.Linear(6, 3)
        self.kind = kind

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.kind == "in place":
            hidden: Any = inputs.clone()
        else:
            hidden = Holder(inputs) if self.kind == "an object" else {"hidden": inputs}
        for block in self.blocks:
            hidden = block(hidden)
        if self.kind != "in place":
            hidden = hidden.values if self.kind == "an object" else hidden["hidden"]
        return self.out(hidden)


class Block(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = torch.nn.Linear(6, 6), kind

    def forward(self, hidden: Any) -> Any:
        if self.kind == "in place":
            hidden += self.layer(hidden)
            return hidden
        if self.kind == "an object":
            return Holder(hidden.values + self.layer(hidden.values))
        added = {"hidden": hidden["hidden"] + self.layer(hidden["hidden"])}
        if self.kind == "a dict":
            return added
        hidden |= added
        return hidden


class Holder:
    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


@pytest.mark.parametrize(("kind", "kept"), [
    ("in place", "what comes after them changes them in place"), ("a dict in place", "what comes after"),
    ("an object", "they are no tensors"), ("a dict", None),
])  # fmt: skip
def test_what_is_kept_is_what_the_block_gave(kind: str, kept: str | None, caplog: pytest.LogCaptureFixture) -> None:
    model = Blocks(kind).double()
    moving, loss = MovingWeights(model, "blocks.2.*"), jostle.losses.classification()
    data = Data((torch.randn(9, 6).double(), torch.arange(9) % 3), "train")
    untouched = copy.deepcopy(model)
    plain = FunctionalModel(untouched, MovingWeights(untouched, "blocks.2.*"))
    observer = Observer(plain, loss, data, 5)
    with InPlace(model, moving) as fast, caplog.at_level(logging.INFO, logger="jostle"):
        for step in range(3):
            chain = moving.center[None] * (1 + 0.1 * step)
            torch.testing.assert_close(observer(fast, chain), observer(plain, chain))
    said = [record.message for record in caplog.records if "not kept" in record.message]
    assert len(said) == (kept is not None)
    assert kept is None or kept in said[0]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_compiled(name: str) -> None:
    # Sizes that are symbols, as a second size makes them, double the seconds of tracing: one architecture has them here.
    with torch._dynamo.config.patch(automatic_dynamic_shapes=name == "llama"):
        assert_the_same(name, device="cpu", backend="aot_eager", replay=False)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler for torch.compile")
def test_compiled_to_machine_code() -> None:
    assert_the_same("gpt-neox", device="cpu", backend="inductor", replay=False)  # with an error function of our own


def test_what_the_user_compiled_is_given_back() -> None:
    model = torch.nn.Linear(3, 2)
    model.compile(backend="eager")
    own = model._compiled_call_impl
    with InPlace(model, MovingWeights(model, "all")) as fast:
        fast.compile("aot_eager")
        assert model._compiled_call_impl is not own
    assert model._compiled_call_impl is own


def test_the_error_function_of_what_is_compiled() -> None:
    x = torch.cat([torch.linspace(-9, 9, 10_001), torch.tensor([0.0, -0.0, 1e-30, torch.inf, -torch.inf])])
    exact = torch.from_numpy(scipy.special.erf(x.double().numpy()))
    np.testing.assert_allclose(error_function(x).double(), exact, rtol=0, atol=6e-7)
    assert error_function(torch.tensor([torch.nan])).isnan().all()
    assert error_function(x.double()) is NotImplemented  # more digits than it has


@CUDA
@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_recorded_as_a_cuda_graph(name: str, backend: str | None, record: Callable[..., None]) -> None:
    record(relative_difference=assert_the_same(name, device="cuda", backend=backend, replay=True))


class OnePlace:
    """What a recording is to its callers, where there is no CUDA: each result is written over the last one."""

    def __init__(self, function: Any, inputs: Any, pool: Any) -> None:
        self._function, self._output = function, function(*inputs).clone()

    def __call__(self, *inputs: Any) -> torch.Tensor:
        return self._output.copy_(self._function(*inputs))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_several_chains_from_one_recording(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chain has its own losses and its own gradient; a single chain's gradient is not copied."""
    if device == "cpu":
        monkeypatch.setattr(in_place, "Graph", OnePlace)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).double().to(device)
    moving, loss = MovingWeights(model, "all"), jostle.losses.classification()
    data = Data((torch.randn(12, 4).double(), torch.arange(12) % 3), "train", device=torch.device(device))
    untouched = copy.deepcopy(model)
    plain = FunctionalModel(untouched, MovingWeights(untouched, "all"))
    observer = Observer(plain, loss, data, 5)
    chains = moving.center + torch.randn(3, moving.total, device=device).double()
    chosen = [np.arange(first, first + 4) for first in (0, 3, 8)]
    with InPlace(model, moving) as fast:
        fast.replay()
        torch.testing.assert_close(observer(fast, chains), observer(plain, chains))
        expected = plain.mean_loss_gradient(loss, chains, data, chosen)
        torch.testing.assert_close(fast.mean_loss_gradient(loss, chains, data, chosen), expected)
        one, other = (fast.mean_loss_gradient(loss, chains[:1], data, chosen[:1]) for _ in range(2))
        assert one.data_ptr() == other.data_ptr()
        assert fast.replayed == 8


@CUDA
@pytest.mark.parametrize(("rows", "width", "words", "biased", "scale", "cap"), [
    (1000, 128, 5000, False, 1.0, None), (90, 96, 400, True, 2.0, 4.0), (77, 64, 333, True, 0.5, None), (300, 1024, 50304, False, 1.0, None),
    (129, 200, 999, True, 1.0, 5.0),
])  # fmt: skip
def test_linear_cross_entropy(rows: int, width: int, words: int, biased: bool, scale: float, cap: float | None) -> None:
    """The kernel against float64, from the same half-precision inputs."""
    from jostle.kernels import linear_cross_entropy

    generator = torch.Generator("cuda").manual_seed(rows)
    shapes = ((rows, width), (words, width), (words,))
    hidden, weight, bias = (torch.randn(*shape, device="cuda", generator=generator).bfloat16() for shape in shapes)
    weight *= 3 / width**0.5
    targets = torch.randint(words, (rows,), device="cuda", generator=generator)
    logits = scale * (hidden.double() @ weight.double().T + (bias.double() if biased else 0))
    if cap:
        logits = cap * torch.tanh(logits / cap)
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    found = linear_cross_entropy(hidden, weight, bias if biased else None, targets, scale=scale, cap=cap)
    np.testing.assert_allclose(found.cpu(), expected.cpu(), rtol=1e-4, atol=1e-4)
    if width <= 128:
        upstream = torch.rand(rows, device="cuda", generator=generator)
        wide = hidden.double().requires_grad_()
        logits = scale * (wide @ weight.double().T + (bias.double() if biased else 0))
        if cap:
            logits = cap * torch.tanh(logits / cap)
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        (expected,) = torch.autograd.grad((upstream * losses).sum(), wide)
        hidden.requires_grad_()
        losses = linear_cross_entropy(hidden, weight, bias if biased else None, targets, scale=scale, cap=cap)
        (found,) = torch.autograd.grad((upstream * losses).sum(), hidden)
        assert (found - expected).norm() <= 0.01 * expected.norm()  # rounded to bfloat16


@CUDA
@pytest.mark.parametrize(("heads", "key_heads", "tokens", "width"), [
    (4, 4, 20, 8), (4, 2, 150, 80), (2, 2, 64, 64), (2, 1, 70, 96), (2, 2, 129, 112), (3, 3, 2, 128), (3, 1, 256, 48),
])  # fmt: skip
def test_causal_attention(heads: int, key_heads: int, tokens: int, width: int) -> None:
    """The kernel against float64, from the same half-precision inputs, wherever they are in memory."""
    from jostle.kernels import can_attend, causal_attention

    generator = torch.Generator("cuda").manual_seed(tokens)
    query = torch.randn(3, tokens, heads, width, device="cuda", generator=generator).bfloat16().transpose(1, 2)
    both = torch.randn(3, tokens, key_heads, 2 * width, device="cuda", generator=generator).bfloat16().transpose(1, 2)
    key, value = both[..., :width], both[..., width:]
    scale = 1.3 * width**-0.5
    wide = (query.double(), *(part.double().repeat_interleave(heads // key_heads, 1) for part in (key, value)))
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, scale=scale).transpose(1, 2)
    assert not can_attend(query, key, value)  # it has no gradient
    with torch.no_grad():
        assert can_attend(query, key, value)
        found = causal_attention(query, key, value, scale)
    assert found.is_contiguous()
    assert (found - expected).norm() <= 4e-3 * expected.norm()


@CUDA
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["gpt-neox", "llama"])
def test_short_attention_in_a_model(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses in half precision are as near to those in float64 as with PyTorch's attention."""
    torch._dynamo.reset()
    half = tiny(name, "sdpa").cuda().bfloat16()
    wide = copy.deepcopy(half).double()
    sequences = [{"input_ids": list(range(first, first + 40))} for first in range(1, 30)]
    loss, batch = jostle.losses.next_token(), Data(sequences, "train", device=torch.device("cuda")).whole()
    with torch.no_grad():
        exact = loss(wide, batch)
        loss(half, batch)  # tries what the model is like
        with InPlace(half, MovingWeights(half, "attention")) as fast:
            fast.compile("inductor" if compiled else None)
            ours = loss(half, batch)
            monkeypatch.setattr("jostle.kernels.SHORT", 0)
            torch._dynamo.reset()
            theirs = loss(half, batch)
    assert not torch.equal(ours, theirs)
    error, usual = (ours - exact).norm(), (theirs - exact).norm()
    assert 0 < error <= 1.3 * usual
    assert usual <= 0.01 * exact.norm()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_weights_are_written_once_and_never_too_late(device: str) -> None:
    """The model follows its chain whenever that moves, by a compiled step too."""
    model = tiny("llama").to(device)
    moving = MovingWeights(model, "attention")
    data = Data([list(range(1, 9)), list(range(20, 30))], "train", device=torch.device(device))
    loss = jostle.losses.next_token()
    untouched = copy.deepcopy(model)
    plain = FunctionalModel(untouched, MovingWeights(untouched, "attention"))
    observer = Observer(plain, loss, data, 2)
    move = torch.compile(lambda weights: weights.add_(0.01), backend="aot_eager")
    with InPlace(model, moving) as fast:
        chain = moving.center[None].clone()
        for step in range(4):
            move(chain) if step % 2 else chain.mul_(1.01)
            torch.autograd.graph.increment_version(chain)
            for _ in range(2):
                seen = observer(fast, chain)
                assert (seen - observer(plain, chain)).norm() <= 2e-5 * seen.norm()
        other = chain + 0.1
        assert (observer(fast, other) - observer(plain, other)).norm() <= 2e-5 * seen.norm()

"""Observation in float8: the same as a naive reference, apart from gradients, and within the error of sampling."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

import jostle
from architectures import tiny
from jostle.chains.observing import Observer
from jostle.data.datasets import Data
from jostle.errors import InputError
from jostle.models.float8 import LEAST_CAPABILITY, Float8, emulated_product, product, quantize
from jostle.models.in_place import InPlace
from jostle.models.weights import MovingWeights

HAS_UNITS = torch.cuda.is_available() and torch.cuda.get_device_capability() >= LEAST_CAPABILITY
FLOAT8 = pytest.mark.skipif(not HAS_UNITS, reason="no GPU with float8 units on this machine")
LOSS = jostle.losses.next_token()


def every_float8() -> np.ndarray:
    """All finite numbers of the format, from its definition: a sign, four bits of exponent (bias 7), three of mantissa."""
    subnormal = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    normal = [(1 + mantissa / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)]
    positive = np.array([*subnormal, *normal[:-1]])  # the last pattern is NaN
    return np.concatenate([-positive[::-1], positive])


def naive_product(inputs: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Each row scaled to the largest number, every entry replaced by the nearest one; multiplied in float64."""
    numbers = every_float8()
    rounded = []
    for matrix in (inputs, weight):
        scale = np.abs(matrix).max(1, keepdims=True) / numbers.max()
        nearest = np.abs((matrix / scale)[:, :, None] - numbers).argmin(2)
        rounded.append(numbers[nearest] * scale)
    return rounded[0] @ rounded[1].T


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs, weight = (torch.randn(rows, 64, generator=generator) for rows in (37, 48))
    inputs[:, 3] *= 50  # an outlier in every row, as transformers have
    inputs[5] = 0
    return inputs * torch.logspace(-3, 3, 37)[:, None], weight * torch.logspace(-2, 0, 48)[:, None]


def test_emulated_product_is_the_naive_one() -> None:
    inputs, weight = operands()
    found = emulated_product(*quantize(inputs), *quantize(weight))
    assert found.dtype == torch.bfloat16
    rest = torch.arange(37) != 5
    expected = naive_product(inputs[rest].double().numpy(), weight.double().numpy())
    scale = np.linalg.norm(inputs[rest], axis=1)[:, None] * np.linalg.norm(weight, axis=1)
    # Half a unit of bfloat16's last place, beside the float32 sums of a row.
    error = np.abs(found[rest].double().numpy() - expected)
    assert (error <= 2.0**-8 * np.abs(expected) + 1e-6 * scale).all()
    assert not found[5].any()
    exact = (inputs[rest].double() @ weight.double().T).numpy()
    assert 1e-3 < np.abs(expected - exact).max() / scale.max() < 2.0**-4  # and it does round


@FLOAT8
def test_the_units_multiply_as_the_emulation_does() -> None:
    inputs, weight = (value.cuda() for value in operands())
    found, expected = (multiply(*quantize(inputs), *quantize(weight)) for multiply in (product, emulated_product))
    # The units sum with about 14 bits.
    assert (found.float() - expected.float()).norm() <= 0.005 * expected.float().norm()


@FLOAT8
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_on_a_gpu_compiled_and_recorded(backend: str | None) -> None:
    """Losses by the units, from a CUDA graph, against the emulation's, at moved weights."""
    model = tiny("llama", "sdpa").cuda().bfloat16()
    data = Data([list(range(first, first + 12)) for first in range(1, 40, 5)], "train", device=torch.device("cuda"))
    moving = MovingWeights(model, "attention+mlp")
    weights = moving.center[None].float() * 1.05
    losses = []
    for emulated in (True, False):
        twin = copy.deepcopy(model)
        with InPlace(twin, MovingWeights(twin, "attention+mlp"), float8=Float8(twin, emulated=emulated)) as place:
            observer = Observer(place, LOSS, data, 4)
            if backend and not emulated:
                place.compile(backend)
            if not emulated:
                place.replay()
            losses.append(observer(place, weights))
            if not emulated:
                assert place.replayed > 0
                torch.testing.assert_close(observer(place, weights), losses[-1])
    assert (losses[0] - losses[1]).norm() <= 0.01 * losses[0].norm()


def test_observation_alone_is_rounded() -> None:
    """Gradients are those of the model, bit for bit; losses are near, follow the weights, and know no neighbours."""
    data = Data([list(range(first, first + 6 + first % 4)) for first in range(1, 80, 9)], "train")
    chosen = [np.arange(4)]
    models = [tiny("llama") for _ in range(2)]
    seen: list[Any] = []
    for model, rounded in zip(models, (False, True), strict=True):
        moving = MovingWeights(model, "attention+mlp")
        place = InPlace(model, moving, float8=Float8(model, emulated=True) if rounded else None)
        with place:
            weights = moving.center[None] * torch.tensor([[1.0], [1.1]])
            observers = [Observer(place, LOSS, data, size) for size in (3, 9)]
            observed = [observer(place, weights) for observer in observers]
            gradient = place.mean_loss_gradient(LOSS, weights[:1], data, chosen)
            torch.testing.assert_close(observed[0], observed[1], rtol=1e-5, atol=1e-5)
            batch = data.batch(range(3))
            mask = LOSS.token_mask(batch).flatten()  # type: ignore[attr-defined]
            alone = place.evaluate(LOSS, weights, batch).flatten(1)[:, mask]
            # The first three sequences in columns of their own, from weights rounded once and on the spot.
            first = Observer(place, LOSS, Data([data.sample(k) for k in range(3)], "train"), 3)
            torch.testing.assert_close(first(place, weights), alone, rtol=1e-6, atol=1e-6)
        seen.append((observed[0], gradient))
    (plain, gradient), (rounded, other) = seen
    assert torch.equal(gradient, other)
    for chain in range(2):
        assert 0 < (plain[chain] - rounded[chain]).norm() < 0.02 * plain[chain].norm()
    assert all(type(module) is not nn.Linear or "kept" not in vars(module) for module in models[1].modules())
    assert sum(type(module) is nn.Linear for module in models[1].modules()) == 3 * 7 + 1


class Sharing(nn.Module):
    """Blocks that share a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), shared) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def test_a_shared_layer_is_given_back() -> None:
    torch.manual_seed(0)
    model, data = Sharing().eval(), (torch.randn(12, 16), torch.arange(12) % 16)
    before = copy.deepcopy(model.state_dict())
    jostle.attribute(
        model, data, data, precision="float8-emulated", chains=1, draws=4, thin=1, batch_size=4, progress=False,
        posterior=jostle.Posterior(n_beta=10, localization=30), sampler=jostle.SGLD(step_size=1e-3),
    )  # fmt: skip
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(type(layer) is nn.Linear for block in model.blocks for layer in (block[0], block[2]))  # type: ignore[index]


def test_weights_are_put_back_whatever_fails() -> None:
    model = Sharing()
    before = copy.deepcopy(model.state_dict())

    @contextlib.contextmanager
    def failing() -> Iterator[None]:
        yield
        raise ValueError("on the way out")

    place = InPlace(model, MovingWeights(model, "all")).__enter__()
    place.until_given_back(failing())
    place.evaluate(lambda network: next(network.parameters()).sum(), place.moving.center[None] + 1)
    assert not torch.equal(next(model.parameters()), next(iter(before.values())))
    with pytest.raises(ValueError, match="on the way out"):
        place.__exit__()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_compiled() -> None:
    torch._dynamo.reset()
    model = tiny("gpt-neox", "sdpa")
    data = Data([list(range(first, first + 10)) for first in range(1, 30, 5)], "train")
    with InPlace(model, MovingWeights(model, "mlp"), float8=Float8(model, emulated=True)) as place:
        observer = Observer(place, LOSS, data, 6)
        weights = place.moving.center[None] * 1.1
        plain = observer(place, weights)
        place.compile("aot_eager")
        assert (observer(place, weights) - plain).norm() <= 1e-3 * plain.norm()


def traces(precision: Any) -> tuple[np.ndarray, np.ndarray]:
    """The mean loss of every sequence at each draw, one chain after the other, of 12 training sequences and 5 queries."""
    generator = np.random.default_rng(0)
    train, query = ([generator.integers(1, 90, size=12).tolist() for _ in range(count)] for count in (12, 5))
    run = jostle.attribute(
        tiny("llama"), train, query, loss=LOSS, precision=precision, chains=2, draws=25, thin=2, burn_in=4,
        posterior=jostle.Posterior(n_beta=10, localization=30, weights="attention+mlp"),
        sampler=jostle.SGLD(step_size=3e-3), batch_size=8, progress=False,
    )  # fmt: skip
    losses = [np.asarray(run.traces.losses(name)[:], np.float64) for name in ("train", "query")]
    first, second = (values.reshape(50, -1, 11).mean(2) for values in losses)
    return first, second


def scores(train: np.ndarray, query: np.ndarray) -> np.ndarray:
    return np.corrcoef(train.T, query.T)[:12, 12:].ravel()


def test_scores_within_the_error_of_sampling() -> None:
    """Rounding moves the order of the scores by less than leaving out a fifth of the draws does, on average."""
    full, rounded = traces("model"), traces("float8-emulated")
    by_rounding = spearmanr(scores(*full), scores(*rounded))[0]
    fifths = [np.arange(50) // 10 != left_out for left_out in range(5)]
    by_sampling = [spearmanr(scores(*full), scores(full[0][kept], full[1][kept]))[0] for kept in fifths]
    print(f"rank correlation {by_rounding:.4f}; without a fifth of the draws {np.round(by_sampling, 3)}")
    assert np.mean(by_sampling) < by_rounding < 1


def test_refusals() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    data = (torch.randn(4, 3), torch.arange(4) % 2)
    with pytest.raises(InputError, match="'float8' on cpu, expected a GPU of compute capability"):
        jostle.attribute(model, data, data, precision="float8")
    with pytest.raises(InputError, match="2 linear layers, none of which"):
        jostle.attribute(model, data, data, precision="float8-emulated")

"""What must not change the numbers does not: batching, order, chains side by side, interruption, blocks."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import jostle
from jostle.chains.chain import Dynamics, Group
from jostle.config import Config, describe
from jostle.data.datasets import Data
from jostle.errors import InputError
from jostle.models.functional import FunctionalModel, SideBySide
from jostle.models.in_place import InPlace
from jostle.models.weights import MovingWeights
from test_ranks import PROCESSES

pytestmark = pytest.mark.filterwarnings("ignore:every step of Gaussian")
"""All rules are thinned alike here."""


def convnet(dtype: torch.dtype) -> nn.Module:
    """A model with BatchNorm and dropout, left in training mode as a careless user would."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 3)
    )  # fmt: skip
    model[1].running_mean = torch.rand(4)
    return model.to(dtype).train()


def images(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, 6, 6, generator=generator, dtype=dtype), torch.arange(count) % 3


TRAIN = images(20, torch.float64)
QUERY = tuple(part[:5] for part in images(30, torch.float64))
SAMPLERS = {
    "SGLD": jostle.SGLD(step_size=1e-3),
    "RMSpropSGLD": jostle.RMSpropSGLD(step_size=1e-4, stabilizer=1e-3),
    "LeimkuhlerMatthews": jostle.LeimkuhlerMatthews(step_size=1e-3),
    "OrnsteinUhlenbeck": jostle.OrnsteinUhlenbeck(step_size=1e-3),
    "BAOAB": jostle.BAOAB(step_size=1e-3),
    "SGNHT": jostle.SGNHT(step_size=1e-3),
    "Gaussian": jostle.Gaussian(),
}


def posterior(sampler: str) -> jostle.Posterior:
    return jostle.Posterior(n_beta=0 if sampler == "Gaussian" else 30, localization=100)


def run(sampler: str = "SGLD", **changes: Any) -> jostle.Run:
    settings: dict[str, Any] = {
        "train": TRAIN, "query": QUERY, "sampling_data": TRAIN, "chains": 3, "draws": 5, "burn_in": 3, "thin": 2,
        "batch_size": 6, "posterior": posterior(sampler), "progress": False,
    }  # fmt: skip
    model = convnet(torch.float64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = jostle.attribute(model, sampler=SAMPLERS[sampler], **(settings | changes))
    # The model comes back as it was given: same weights, same statistics, still in training mode.
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    return result


def losses(result: jostle.Run, name: str = "train") -> np.ndarray:
    return np.asarray(result.traces.losses(name)[:])


def assert_same(left: jostle.Run, right: jostle.Run) -> None:
    for name in ("train", "query"):
        np.testing.assert_allclose(losses(left, name), losses(right, name), rtol=1e-8)
    np.testing.assert_allclose(left.influence().values, right.influence().values, rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("sampler", ["SGLD", "RMSpropSGLD"])
def test_observation_batch_size(sampler: str) -> None:
    whole = run(sampler, observation_batch_size=64)
    assert losses(whole).std(1).min() > 1e-4  # the chain moved
    for size in (1, 7):
        assert_same(whole, run(sampler, observation_batch_size=size))


def test_a_row_for_padding_stays_where_it_is_in_every_chain() -> None:
    """Of an embedding that has one, vmap keeps the first chain's alone; few examples would show it."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.last = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 3)

        def forward(self, words: Tensor) -> Tensor:
            return self.last(self.words(words).sum(1))

    torch.manual_seed(0)
    model = Words()
    words, labels = torch.randint(1, 9, (20, 5)), torch.arange(20) % 3
    words[-3:, 2:] = 0
    settings: dict[str, Any] = {
        "sampler": jostle.SGLD(step_size=1e-2), "chains": 3, "draws": 5, "batch_size": 20, "progress": False,
        "observables": {"row": lambda model: model.words.weight[0]},
    }  # fmt: skip

    def rows(n_beta: float, **more: Any) -> tuple[np.ndarray, int]:
        posterior = jostle.Posterior(n_beta=n_beta, localization=1.0)
        run = jostle.attribute(model, (words, labels), (words, labels), posterior=posterior, **settings, **more)
        return run.traces.observable("row")[:], run.manifest["execution"]["chains_at_once"]

    (got, at_once), (expected, _) = rows(100.0), rows(100.0, chains_at_once=1)
    assert at_once == 1
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    with pytest.raises(InputError, match="padding_idx"):
        rows(100.0, chains_at_once=3)
    assert rows(0.0, chains_at_once=3)[1] == 3  # without a gradient there is nothing to keep


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_chains_at_once(sampler: str) -> None:
    one = run(sampler, chains_at_once=1)
    for count in (2, 3):
        assert_same(one, run(sampler, chains_at_once=count))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_chain_does_not_depend_on_how_many_there_are(sampler: str) -> None:
    three, five = run(sampler), run(sampler, chains=5)
    np.testing.assert_allclose(losses(three), losses(five)[:3], rtol=1e-8)


def test_order_of_observed_data() -> None:
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    straight, shuffled = run(), run(train=tuple(part[order] for part in TRAIN))
    np.testing.assert_allclose(losses(straight)[:, :, order.numpy()], losses(shuffled), rtol=1e-8)
    np.testing.assert_allclose(
        straight.influence().values[order.numpy()], shuffled.influence().values, rtol=1e-8, atol=1e-14
    )


def test_order_of_sampling_data_in_full_batches() -> None:
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    shuffled = tuple(part[order] for part in TRAIN)
    assert_same(run(batch_size=20), run(batch_size=20, sampling_data=shuffled))


def test_batches_of_more_than_tensors() -> None:
    """Texts that the loss itself encodes cannot be told apart by chain side by side; so they are not tried."""
    texts = [(f"{index % 3}{'ab' * (index % 4)}", index % 3) for index in range(12)]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs = torch.stack([torch.full((1, 6, 6), len(text) / 10, dtype=torch.float64) for text in batch[0]])
        return nn.functional.cross_entropy(model(inputs), batch[1], reduction="none")

    settings = {"train": texts, "query": texts[:4], "sampling_data": texts, "loss": loss, "batch_size": 3}
    assert_same(run(**settings), run(**settings, chains_at_once=1))
    with pytest.raises(jostle.InputError, match=r"expected 1 for this model .batches hold more than tensors"):
        run(**settings, chains_at_once=2)


def test_what_cannot_be_mapped_over_chains_runs_in_a_loop() -> None:
    def first_weight(model: nn.Module) -> Tensor:
        return torch.tensor([next(model.parameters()).reshape(-1)[0].item()])

    together, alone = (run(observables={"first": first_weight}, chains_at_once=count) for count in (None, 1))
    np.testing.assert_array_equal(together.traces.observable("first")[:], alone.traces.observable("first")[:])
    assert np.asarray(together.traces.observable("first")[:]).std() > 0


def test_an_observable_may_be_a_view_of_a_weight() -> None:
    def first_row(model: nn.Module) -> Tensor:
        return next(model.parameters())[0].view(-1)

    together, alone = (run(observables={"first": first_row}, chains_at_once=count) for count in (3, 1))
    np.testing.assert_allclose(together.traces.observable("first")[:], alone.traces.observable("first")[:], rtol=1e-8)
    assert np.asarray(alone.traces.observable("first")[:]).std((0, 1)).min() > 0


def test_thinning_takes_every_other_draw() -> None:
    fine, coarse = run(thin=1, draws=9), run(thin=2, draws=5)
    np.testing.assert_array_equal(losses(fine)[:, ::2], losses(coarse))
    np.testing.assert_array_equal(fine.traces.to_xarray("train").step, np.arange(3, 12))


def test_draws_start_at_the_center() -> None:
    result = run(burn_in=0)
    np.testing.assert_allclose(losses(result)[:, 0], np.tile(result.traces.center_losses("train"), (3, 1)), rtol=1e-12)


def test_seed_changes_the_noise() -> None:
    assert np.abs(losses(run(seed=0))[:, 1:] - losses(run(seed=1))[:, 1:]).min() > 0


def interruptions() -> list[tuple[str, str, int, str, int]]:
    """Every way of being interrupted for a rule that carries nothing and one that does; for the others, one way."""
    ways = [*itertools.product(["traces", "covariance"], [1, 3], ["crash", "signal"], [1, 8, 14])]
    few = [("traces", 3, "crash", 8)]
    return [(name, *way) for name in SAMPLERS for way in (ways if name in ("SGLD", "RMSpropSGLD") else few)]


@pytest.mark.parametrize(("sampler", "keep", "thin", "fault", "at_draw"), interruptions())
def test_resumed(
    sampler: str, keep: str, thin: int, fault: str, at_draw: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three chains of five draws, one after another, cut off while a draw is observed: at the first, amid the second
    chain, near the end.
    """
    observe, observed = Dynamics.observe, 0

    def faulty(self: Dynamics, group: Group) -> dict[str, Tensor]:
        nonlocal observed
        observed += 1
        if observed == at_draw and fault == "crash":
            raise RuntimeError("power cut")
        if observed == at_draw:
            os.kill(os.getpid(), signal.SIGINT)
        return observe(self, group)

    monkeypatch.setattr(Dynamics, "observe", faulty)
    settings = {"keep": keep, "thin": thin, "chains_at_once": 1, "out": tmp_path / "run"}
    # A crash can only go back to the last checkpoint; a signal makes one.
    with pytest.raises(RuntimeError if fault == "crash" else KeyboardInterrupt):
        run(sampler, **settings, checkpoint_seconds=0.0 if fault == "crash" else 1e9)
    with pytest.raises(jostle.InputError, match="not finished"):
        jostle.load(tmp_path / "run")
    resumed = run(sampler, **settings)
    assert observed <= 15 + 3  # it went on where it stood; a finished chain's last draw may be looked at again
    whole = run(sampler, **(settings | {"out": None}))  # writes once, at its end
    np.testing.assert_array_equal(resumed.influence().values, whole.influence().values)
    if keep == "traces":
        np.testing.assert_array_equal(losses(resumed), losses(whole))
    assert not list((tmp_path / "run").glob("**/*.partial"))
    assert len(list((tmp_path / "run" / "state").glob("*"))) == (3 if keep == "traces" else 0)


def sample_slowly(out: Path, threads: int) -> None:
    """So that there is time to stop it."""
    torch.set_num_threads(threads)

    def slow(model: nn.Module) -> Tensor:
        time.sleep(0.02)
        return next(model.parameters()).reshape(-1)[:2]

    run(out=out, draws=100, checkpoint_seconds=0.05, chains_at_once=1, observables={"first": slow})


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_resumed_after_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = PROCESSES.Process(target=sample_slowly, args=(out, torch.get_num_threads()))
    process.start()
    deadline = time.monotonic() + 300
    while not list(out.glob("state/*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(300)
    exited = process.exitcode
    process.kill()  # where it minds no signal
    assert exited not in (None, 0)
    assert list(out.glob("state/*.safetensors"))
    settings = {
        "draws": 100,
        "chains_at_once": 1,
        "observables": {"first": lambda m: next(m.parameters())[0, 0, 0, :2]},
    }
    np.testing.assert_array_equal(losses(run(out=out, **settings)), losses(run(**settings)))


def test_a_signal_stops_a_compilation_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def compile(self: InPlace, backend: str | None) -> None:
        if backend is not None:
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("it went on")  # which would mean a run without a compiled model

    with monkeypatch.context() as patched:
        patched.setattr(InPlace, "compile", compile)
        with pytest.raises(KeyboardInterrupt):
            run(out=tmp_path / "run", compile=True, chains_at_once=1)
    assert not (tmp_path / "run" / "manifest.json").exists()  # nor was it laid out
    np.testing.assert_array_equal(losses(run(out=tmp_path / "run", chains_at_once=1)), losses(run(chains_at_once=1)))


def one_step(way: type[FunctionalModel], sampler: str) -> Tensor:
    model = convnet(torch.float32).eval()
    moving = MovingWeights(model, "all")
    functional = way(model, moving)
    loss = jostle.losses.classification()
    config = Config(
        posterior=posterior(sampler), sampler=SAMPLERS[sampler], loss=describe(loss),
        potential_loss=describe(loss), observables=(), chains=3, draws=2, burn_in=1, thin=1, batch_size=6,
        keep="traces", seed=0,
    )  # fmt: skip
    data = Data(images(20, torch.float32), "train")
    dynamics = Dynamics(functional, config, sampling_data=data, potential_loss=loss, observers={}, observables={})
    noise = torch.randn(3, moving.total, generator=torch.Generator().manual_seed(5))
    start = dynamics.start([0, 1, 2])
    group = Group([0, 1, 2], 7, start.weights + 0.01 * noise, start.statistics)
    before = group.weights.clone()
    dynamics.advance(group)
    return group.weights - before


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_one_float32_step_from_equal_state(sampler: str) -> None:
    plain = one_step(FunctionalModel, sampler)
    for way in (SideBySide, InPlace):
        assert (one_step(way, sampler) - plain).norm() <= 1e-6 * plain.norm()


def test_weight_restriction_leaves_the_noise_of_the_others_alone() -> None:
    """A weight's noise depends on its own name, not on which weights move beside it."""
    model = convnet(torch.float64)
    all_weights, some = MovingWeights(model, "all"), MovingWeights(model, "5.*")
    noise = next(jostle.chains.randomness.noise(0, [1], 4, all_weights, torch.device("cpu")))[1]
    restricted = next(jostle.chains.randomness.noise(0, [1], 4, some, torch.device("cpu")))[1]
    np.testing.assert_array_equal(noise[:, -some.total :], restricted)


def test_every_stream_of_noise_is_its_own() -> None:
    """Standard normal numbers, without a correlation between seeds, chains, steps and parameters."""
    model = nn.ParameterDict({name: torch.zeros(20_000) for name in ("a", "b", "c")})
    moving, device = MovingWeights(model, "all"), torch.device("cpu")
    noise = [
        next(jostle.chains.randomness.noise(seed, [0, 1, 10], step, moving, device))[1].unflatten(1, (3, -1))
        for seed in (0, 1, 2**64)
        for step in (0, 1, 10)
    ]
    streams = torch.cat(noise).flatten(0, 1).double()
    assert streams.shape == (81, 20_000)
    error = 20_000**-0.5
    assert streams.mean(1).abs().max() < 5 * error
    assert (streams.square().mean(1) - 1).abs().max() < 5 * 2**0.5 * error
    assert (streams.pow(4).mean(1) - 3).abs().max() < 5 * 96**0.5 * error
    assert torch.corrcoef(streams).fill_diagonal_(0).abs().max() < 5 * error


def test_ragged_sequences_run_side_by_side(caplog: pytest.LogCaptureFixture) -> None:
    from test_posterior import Tied
    from test_traces import sequences

    def losses(at_once: int | None) -> np.ndarray:
        torch.manual_seed(0)
        run = jostle.attribute(
            Tied().double(), sequences(), sequences()[:2], loss=jostle.losses.next_token(), chains=3, draws=4, thin=2,
            posterior=jostle.Posterior(n_beta=20, localization=100), sampler=jostle.SGLD(step_size=1e-3),
            batch_size=2, chains_at_once=at_once, progress=False,
        )  # fmt: skip
        assert at_once or run.manifest["execution"]["chains_at_once"] == 3
        return np.asarray(run.traces.losses("train")[:])

    np.testing.assert_allclose(losses(None), losses(1), rtol=1e-9)

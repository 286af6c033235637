"""Chains spread over threads, and without oneDNN: the same numbers as side by side, and the model as it was."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import jostle
from architectures import tiny
from jostle.chains import execution
from jostle.chains.chain import Dynamics
from jostle.chains.observing import Observer
from jostle.chains.spreading import OnEveryThread, Spread
from jostle.config import Config
from jostle.data.datasets import Data
from jostle.models.functional import FunctionalModel, SideBySide
from jostle.models.weights import MovingWeights

CHAINS, THREADS = 5, 3


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double().eval()


def points() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3


@pytest.mark.parametrize(("network", "sampler"), [
    ("classifier", jostle.SGLD(step_size=1e-3)), ("classifier", jostle.RMSpropSGLD(step_size=1e-4)),
    ("classifier", jostle.SGNHT(step_size=1e-3)), ("llama", jostle.SGLD(step_size=1e-3)),
])  # fmt: skip
def test_the_same_chains(network: str, sampler: Any) -> None:
    if network == "classifier":
        model, source, loss = classifier(), points(), jostle.losses.classification()
    else:
        model, loss = tiny(network).double(), jostle.losses.next_token()
        source = [{"input_ids": list(range(first, first + 6 + first % 3))} for first in range(1, 9)]
    data, moving = Data(source, "train"), MovingWeights(model, "all")
    config = Config(
        posterior=jostle.Posterior(n_beta=20, localization=100), sampler=sampler, loss="", potential_loss="",
        observables=("first",), chains=CHAINS, draws=2, burn_in=0, thin=1, batch_size=3, keep="traces", seed=0,
    )  # fmt: skip
    parts: dict[str, Any] = {
        "sampling_data": data, "potential_loss": loss,
        "observers": {"train": Observer(FunctionalModel(model, moving), loss, data, 4)},
        "observables": {"first": lambda model: next(iter(model.parameters())).flatten()[:2]},
    }  # fmt: skip
    together = Dynamics(SideBySide(model, moving), config, **parts)
    spread = Spread(OnEveryThread(model, moving), config, threads=THREADS, **parts)
    one, two = together.start(list(range(CHAINS))), spread.start(list(range(CHAINS)))
    for _ in range(4):
        together.advance(one)
        spread.advance(two)
    assert one.step == two.step == 4
    assert (one.weights - moving.center).norm() > 1e-2 * one.weights.norm()
    torch.testing.assert_close(two.weights, one.weights, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(two.statistics, one.statistics, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(spread.observe(two), together.observe(one), rtol=1e-10, atol=1e-10)


def test_copies_share_their_tensors() -> None:
    model = classifier()
    everywhere = OnEveryThread(model, MovingWeights(model, "all"))
    seen: list[nn.Module] = []
    thread = Thread(target=lambda: seen.append(everywhere.model))
    thread.start()
    thread.join()
    assert everywhere.model is model
    assert seen[0] is not model
    assert [id(value) for value in seen[0].parameters()] == [id(value) for value in model.parameters()]


def test_threads_have_one_thread_each() -> None:
    from jostle.chains.spreading import _pool

    before = torch.get_num_threads()
    assert set(_pool(THREADS).map(lambda _: torch.get_num_threads(), range(20))) == {1}
    assert torch.get_num_threads() == before


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_chosen_where_it_is_quicker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    """Other ways are taken where trying says so, kept when the run goes on, and change nothing beyond rounding."""
    mkldnn: Any = torch.backends.mkldnn
    settings: dict[str, Any] = {
        "posterior": jostle.Posterior(n_beta=30, localization=100), "sampler": jostle.SGLD(step_size=1e-3),
        "chains": 4, "thin": 2, "batch_size": 8, "progress": False,
    }  # fmt: skip

    def run(name: str, draws: int) -> jostle.Run:
        return jostle.attribute(classifier(), points(), points(), draws=draws, out=tmp_path / name, **settings)

    plain = run("plain", 80)
    assert plain.manifest["execution"]["threads"] == 1
    monkeypatch.setattr(execution, "WORTH_TRYING", 0.0)
    monkeypatch.setattr(execution, "_trial", decreasing(execution._trial))
    monkeypatch.setattr(execution.platform, "machine", lambda: "aarch64")
    before = mkldnn.enabled
    spread = run("spread", 80)
    assert spread.manifest["execution"]["threads"] == 2
    assert spread.manifest["execution"]["onednn"] is not (before and mkldnn.is_available())
    assert mkldnn.enabled == before
    losses = [np.asarray(run.traces.losses("train")[:]) for run in (plain, spread)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)
    run("longer", 60)
    np.testing.assert_array_equal(run("longer", 80).traces.losses("train")[:], losses[1])


def decreasing(trial: Any) -> Any:
    """Each way that is tried seems quicker than the one before: which it is, a busy machine would decide."""
    calls = 0

    def timed(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return trial(*arguments)[0], 100.0 / calls

    return timed

"""Chains spread over threads, and without oneDNN: the same numbers as side by side, and the model as it was."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from pathlib import Path
from threading import Thread, get_ident
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import jostle
from architectures import tiny
from jostle.chains import execution, spreading
from jostle.chains.chain import Dynamics
from jostle.chains.observing import Observer
from jostle.chains.randomness import WORTH_THREADS, noise
from jostle.chains.spreading import OnEveryThread, Spread, _pool, can_spread
from jostle.config import Config
from jostle.data.datasets import Data
from jostle.models import graphs
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
def test_the_same_chains(network: str, sampler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
    spread = Spread(OnEveryThread(model, moving, captured=True), config, threads=THREADS, **parts)
    spread.model.capture_now()
    one, two = together.start(list(range(CHAINS))), spread.start(list(range(CHAINS)))
    for _ in range(4):
        together.advance(one)
    monkeypatch.setattr(spreading, "AWAY_SECONDS", 1e9)
    monkeypatch.setattr(graphs, "MOST_SECONDS", 2.0)  # some of it as graphs, and some as it is
    spread.advance(two, 4)
    assert two.step == 1  # nobody knows yet how long a step takes
    spread.advance(two, 3)
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
    before = torch.get_num_threads()
    assert set(_pool(THREADS, os.getpid()).map(lambda _: torch.get_num_threads(), range(20))) == {1}
    assert torch.get_num_threads() == before


def settings(**others: Any) -> Config:
    chosen: dict[str, Any] = {
        "posterior": jostle.Posterior(n_beta=20, localization=100), "sampler": jostle.SGLD(step_size=1e-9),
        "loss": "", "potential_loss": "", "observables": (), "chains": CHAINS, "draws": 100, "burn_in": 0, "thin": 1,
        "batch_size": 3, "keep": "traces", "seed": 0,
    }  # fmt: skip
    return Config(**chosen | others)


def both_ways(model: nn.Module) -> tuple[Dynamics, Spread]:
    moving, loss, (inputs, labels) = MovingWeights(model, "all"), jostle.losses.classification(), points()
    data = Data((inputs.to(moving.dtype), labels), "train")
    parts: dict[str, Any] = {
        "sampling_data": data, "potential_loss": loss, "observables": {},
        "observers": {"train": Observer(FunctionalModel(model, moving), loss, data, 40)},
    }  # fmt: skip
    together = Dynamics(SideBySide(model, moving), settings(), **parts)
    return together, Spread(OnEveryThread(model, moving, captured=True), settings(), threads=THREADS, **parts)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork where there are threads, which is the point
@pytest.mark.parametrize("work", ["chains", "noise"])
def test_a_fork_has_threads_of_its_own(work: str) -> None:
    once = {"chains": observe_once, "noise": make_noise}[work]
    once()
    child = multiprocessing.get_context("fork").Process(target=once)
    child.start()
    child.join(300)
    exited = child.exitcode
    child.kill()
    assert exited == 0


def observe_once() -> None:
    _, spread = both_ways(classifier())
    spread.observe(spread.start(list(range(CHAINS))))


def make_noise() -> None:
    """Of enough weights for threads; the same as that of each chain by itself."""
    moving, chains, before = MovingWeights(nn.Linear(300, 300), "all"), list(range(CHAINS)), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        values = next(noise(0, chains, 0, moving, torch.device("cpu")))[1]
    finally:
        torch.set_num_threads(before)
    assert values.numel() >= WORTH_THREADS
    for chain in chains:
        assert torch.equal(values[chain], next(noise(0, [chain], 0, moving, torch.device("cpu")))[1][0])


def test_nobody_goes_on_before_all_have_ended() -> None:
    _, spread = both_ways(classifier())
    ended: list[int] = []

    def work(_: int, part: Any) -> None:
        if 0 in part.chains:
            raise ValueError("the first")
        time.sleep(0.2)
        ended.extend(part.chains)

    with pytest.raises(ValueError, match="the first"):
        spread._each(work, spread._parts(spread.start(list(range(CHAINS)))))
    assert len(ended) == CHAINS - 1


def test_what_a_copy_does_not_hold_is_not_spread() -> None:
    """Functions of the user's, which may hold the model itself, and hooks and samplers, which all copies share."""
    loss, model, sampler = jostle.losses.classification(), classifier(), jostle.SGLD(step_size=1e-3)
    assert can_spread(model, (loss, jostle.losses.next_token()), {}, sampler)
    assert not can_spread(model, (loss, lambda network, batch: loss(model, batch)), {}, sampler)
    assert not can_spread(model, (loss,), {"norm": lambda _: next(model.parameters()).norm()[None]}, sampler)
    for register in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        hook = getattr(model[1], f"register_{register}")(lambda *_: None)  # type: ignore[index]
        assert not can_spread(model, (loss,), {}, sampler)
        hook.remove()
    assert can_spread(model, (loss,), {}, sampler)


class Remembering(jostle.SGLD):
    """A user's own, which remembers who asked it to move chains."""

    asked_by: ClassVar[set[int]] = set()

    def step(self, *given: Any, **named: Any) -> Any:
        self.asked_by.add(get_ident())
        return super().step(*given, **named)


class HoldsOn(nn.Module):
    """A layer that finds its weights by a function, which a copy shares."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.of = lambda: layer

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.of()(inputs)


def test_other_numbers_are_noticed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """At steps so small that nothing has moved by the time at which ways are compared."""
    monkeypatch.setattr(execution, "WORTH_TRYING", 0.0)
    monkeypatch.setattr(execution, "_trial", decreasing(execution._trial))
    monkeypatch.setattr(execution.platform, "machine", lambda: "x86_64")
    model = classifier().float()  # whose rounding hides more
    for network, threads in ((model, THREADS), (nn.Sequential(HoldsOn(model[0]), *model[1:]).eval(), 1)):  # type: ignore[index]
        together, spread = both_ways(network)
        with caplog.at_level(logging.INFO, "jostle"):
            chosen = execution.choose(settings(), together, together, spread, at_once=CHAINS, compile=None)
        assert chosen.threads == threads
    assert f"do not run spread over {THREADS} threads, with oneDNN (they give other numbers)" in caplog.text


def test_trials_end_where_they_are_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing to choose from nothing is tried; after Ctrl-C no other way is."""
    tried: list[execution.Execution] = []
    trial = execution._trial

    def counted(dynamics: Any, way: execution.Execution, config: Config) -> Any:
        tried.append(way)
        return trial(dynamics, way, config)

    monkeypatch.setattr(execution, "WORTH_TRYING", 0.0)
    monkeypatch.setattr(execution, "_trial", counted)
    monkeypatch.setattr(execution.platform, "machine", lambda: "x86_64")
    together, spread = both_ways(classifier())
    execution.choose(settings(), together, together, None, at_once=CHAINS, compile=None)
    assert not tried
    options: dict[str, Any] = {"at_once": CHAINS, "compile": None, "interrupted": lambda: len(tried) == 1}
    assert execution.choose(settings(), together, together, spread, **options) == tried[0]
    assert [way.threads for way in tried] == [1]


def test_chosen_where_it_is_quicker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other ways are taken where trying says so, kept when the run goes on, and change nothing beyond rounding."""
    _pool(2, os.getpid())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # not of each operation, which beside other work is slow
    mkldnn: Any = torch.backends.mkldnn
    asked: dict[str, Any] = {
        "posterior": jostle.Posterior(n_beta=30, localization=100), "sampler": jostle.SGLD(step_size=1e-3),
        "chains": 4, "thin": 2, "batch_size": 8, "progress": False,
    }  # fmt: skip

    def run(name: str, draws: int, model: nn.Module | None = None, **others: Any) -> jostle.Run:
        return jostle.attribute(
            model or classifier(), points(), points(), draws=draws, out=tmp_path / name, **(asked | others)
        )

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
    closing = classifier()
    phi = {"first": lambda _: next(closing.parameters()).flatten()[:2]}
    assert run("observable", 80, closing, observables=phi).manifest["execution"]["threads"] == 1
    hooked = classifier()
    hooked.register_forward_hook(lambda *_: None)
    assert run("hooked", 80, hooked).manifest["execution"]["threads"] == 1
    own = run("own", 80, sampler=Remembering(step_size=1e-3))
    assert own.manifest["execution"]["threads"] == len(Remembering.asked_by) == 1
    np.testing.assert_allclose(own.traces.losses("train")[:], losses[0], rtol=1e-9)
    with caplog.at_level(logging.WARNING, "jostle"):
        run("longer", 90, hooked)
    assert "chains were spread over 2 threads and are not now" in caplog.text


def decreasing(trial: Any) -> Any:
    """Each way that is tried seems quicker than the one before: which it is, a busy machine would decide."""
    calls = 0

    def timed(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return trial(*arguments)[0], 100.0 / calls

    return timed


@pytest.mark.parametrize(("load", "threads", "told"), [(3.8, 2, True), (3.8, 1, False), (1.5, 2, False)])
def test_a_busy_machine_is_told_of(
    load: float, threads: int, told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    execution.tell_of_contention.cache_clear()
    data = (torch.randn(6, 3), torch.arange(6) % 2)
    with caplog.at_level(logging.WARNING, logger="jostle"):
        for _ in range(2):  # it is said once
            jostle.attribute(nn.Linear(3, 2), data, data, chains=1, draws=2, thin=1, progress=False)
    assert [record.message for record in caplog.records] == [
        "2 threads on a machine that is busy (load 3.8 on 2 cores): OMP_NUM_THREADS=1 may be many times as fast"
    ] * told

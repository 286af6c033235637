"""A draw's minibatch goes through the model once: its losses come with the gradient of the step that follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import jostle
from architectures import CONFIGURATIONS, tiny
from jostle.chains.chain import Dynamics
from jostle.chains.execution import Execution, make_ready
from jostle.chains.observing import Observer
from jostle.config import Config
from jostle.data.datasets import Data
from jostle.models import in_place
from jostle.models.float8 import Float8
from jostle.models.functional import FunctionalModel
from jostle.models.in_place import InPlace
from jostle.models.weights import MovingWeights
from jostle.runs import job
from test_ways import CUDA, OnePlace

LENGTHS = (5, 9, 12, 7, 12, 3, 8, 12, 4, 6, 12)
SIZE = 3


def settings(**changes: Any) -> Config:
    chosen: dict[str, Any] = {
        "posterior": jostle.Posterior(n_beta=20, localization=100), "sampler": jostle.SGLD(step_size=1e-3),
        "loss": "", "potential_loss": "", "observables": (), "chains": 1, "draws": 9, "burn_in": 0, "thin": 1,
        "batch_size": SIZE, "keep": "traces", "seed": 0,
    }  # fmt: skip
    return Config(**chosen | changes)


def language() -> tuple[nn.Module, Any, Any, Any]:
    generator = np.random.default_rng(0)
    texts = [{"input_ids": generator.integers(1, 90, size=length).tolist()} for length in LENGTHS]
    texts[2]["labels"] = [-100] * 5 + texts[2]["input_ids"][5:]  # not all of its tokens are scored
    for text in texts:
        text.setdefault("labels", text["input_ids"])
    return tiny("llama", "sdpa").double(), texts, texts[:4], jostle.losses.next_token()


def classifier() -> tuple[nn.Module, Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double().eval()
    points = torch.randn(11, 6).double(), torch.arange(11) % 3
    return model, points, tuple(part[:4] for part in points), jostle.losses.classification()


@pytest.mark.parametrize("observed_at_once", [2, 4, 50])
@pytest.mark.parametrize("network", [language, classifier])
@pytest.mark.parametrize("recorded", [False, True])
def test_the_same_losses_and_the_same_gradient(
    recorded: bool, network: Any, observed_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_place, "Graph", OnePlace)  # as a recording on a GPU: results are written over each other
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    model, train, query, loss = network()
    moving, config, examples = MovingWeights(model, "all"), settings(), 0
    sets = {"train": Data(train, "train"), "query": Data(query, "query")}
    plain = FunctionalModel(model, moving)
    observers = {name: Observer(plain, loss, data, observed_at_once) for name, data in sets.items()}

    def count(module: nn.Module, given: Any, named: dict[str, Any]) -> None:
        nonlocal examples
        first = next(iter((*given, *named.values())))
        examples += len(first)

    with InPlace(model, moving) as fast:
        if recorded:
            fast.replay()
        dynamics = Dynamics(
            fast, config, sampling_data=sets["train"], potential_loss=loss, observers=observers, observables={}
        )
        group = dynamics.start([0])
        for step in range(5):
            expected, gradient = dynamics.observe(group), dynamics.gradient(group).clone()
            assert group.ahead is None
            dynamics.shares_passes = True
            watched = model.get_submodule("model") if hasattr(model, "model") else model
            hook = watched.register_forward_pre_hook(count, with_kwargs=True)
            examples = 0
            seen = dynamics.observe(group)
            hook.remove()
            if not recorded or step:  # the first time, it is recorded besides
                assert examples == 11 + 4
            torch.testing.assert_close(seen, expected, rtol=1e-10, atol=1e-10)
            assert group.ahead is not None
            torch.testing.assert_close(group.ahead, gradient, rtol=1e-10, atol=1e-10)
            dynamics.advance(group)
            assert group.ahead is None
            dynamics.shares_passes = False
        assert (group.weights - moving.center).norm() > 1e-2 * group.weights.norm()
        assert not recorded or fast.replayed > 10


@pytest.mark.parametrize(("changes", "worth"), [
    ({}, True), ({"thin": 40}, False), ({"batch_size": 11}, False), ({"control_variates": True}, False),
    ({"posterior": jostle.Posterior(n_beta=0, localization=100)}, False),
])  # fmt: skip
def test_where_it_is_worth_it(changes: dict[str, Any], worth: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "free_memory", lambda device: 1 << 20)
    model, train, _, loss = classifier()
    moving, config = MovingWeights(model, "all"), settings(**changes)
    data = Data(train, "train")

    def dynamics(fast: InPlace, drives: Any = loss, drawn_from: Data = data) -> Dynamics:
        observers = {"train": Observer(fast, loss, data, 4)}
        return Dynamics(
            fast, config, sampling_data=drawn_from, potential_loss=drives, observers=observers, observables={}
        )

    with InPlace(model, moving) as fast:
        assert dynamics(fast).is_worth_sharing(config.thin) == worth


def test_where_it_cannot_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "free_memory", lambda device: 1 << 20)
    model, train, _, loss = classifier()
    moving, data = MovingWeights(model, "all"), Data(train, "train")

    def own(network: nn.Module, batch: Any) -> torch.Tensor:
        return loss(network, batch)

    with InPlace(model, moving) as fast:

        def dynamics(drives: Any = loss, drawn_from: Data = data, observed: Any = loss) -> Dynamics:
            observers = {"train": Observer(fast, observed, data, 4)}
            return Dynamics(
                fast, settings(), sampling_data=drawn_from, potential_loss=drives, observers=observers, observables={}
            )

        assert dynamics().is_worth_sharing(1)
        assert not dynamics(drives=jostle.losses.classification(label_smoothing=0.1)).can_share_passes
        assert not dynamics(drawn_from=Data(train, "sampling_data")).can_share_passes
        assert not dynamics(drives=own, observed=own).can_share_passes
        monkeypatch.setattr(in_place, "free_memory", lambda device: 100)
        assert dynamics().can_share_passes
        assert not dynamics().is_worth_sharing(1)
        # A run that shared is resumed with data that only a function can make batches of.
        batched = Data([(x, y) for x, y in zip(*train, strict=True)], "train", collate=torch.utils.data.default_collate)
        resumed = Dynamics(
            fast, settings(), sampling_data=batched, potential_loss=loss, observables={},
            observers={"train": Observer(fast, loss, batched, 4)},
        )  # fmt: skip
        make_ready(Execution(shares_passes=True), resumed, fast)
        assert not resumed.shares_passes
        make_ready(Execution(shares_passes=True), possible := dynamics(), fast)
        assert possible.shares_passes


@pytest.mark.parametrize(("weights", "half", "alike"), [
    ("all", False, True), ("attention+mlp", False, True), ("layers.2.attention", False, False),
    ("all", True, False), ("attention+mlp", True, True),
])  # fmt: skip
def test_passes_that_are_alike(weights: str, half: bool, alike: bool) -> None:
    """Not where blocks are kept instead, the head's logits would be rounded, or only observations are in float8."""
    model = tiny("llama")
    with InPlace(model, MovingWeights(model, weights), bfloat16=half) as fast:
        assert fast.observes_as_it_moves == alike
    with InPlace(model, MovingWeights(model, weights), float8=Float8(model, emulated=True)) as fast:
        assert not fast.observes_as_it_moves
    if half:
        model.bfloat16()
        with InPlace(model, MovingWeights(model, weights)) as fast:
            assert fast.observes_as_it_moves == alike


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_of_every_architecture(name: str) -> None:
    """A minibatch of other lengths than what is observed beside it."""
    _, train, query, loss = language()
    model = tiny(name).double()
    sets = {"train": Data(train, "train"), "query": Data(query, "query")}
    with InPlace(model, MovingWeights(model, "attention+mlp")) as fast:
        observers = {part: Observer(fast, loss, data, 3) for part, data in sets.items()}
        dynamics = Dynamics(
            fast, settings(), sampling_data=sets["train"], potential_loss=loss, observers=observers, observables={}
        )
        assert dynamics.can_share_passes
        group = dynamics.start([0])
        for _ in range(2):
            expected, gradient = dynamics.observe(group), dynamics.gradient(group).clone()
            dynamics.shares_passes = True
            torch.testing.assert_close(dynamics.observe(group), expected, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(group.ahead, gradient, rtol=1e-9, atol=1e-9)
            dynamics.advance(group)
            dynamics.shares_passes = False


def test_without_room_for_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Memory that runs out ends the sharing, and changes no number."""
    model, train, _, loss = classifier()
    data = Data(train, "train")
    with InPlace(model, MovingWeights(model, "all")) as fast:
        dynamics = Dynamics(
            fast, settings(), sampling_data=data, potential_loss=loss, observables={},
            observers={"train": Observer(fast, loss, data, 4)},
        )  # fmt: skip
        group = dynamics.start([0])
        expected, gradient = dynamics.observe(group), dynamics.gradient(group).clone()
        dynamics.shares_passes = True

        def full(*given: Any) -> Any:
            raise torch.OutOfMemoryError("no room")

        with monkeypatch.context() as patched:
            patched.setattr(fast, "gradient_and_losses", full)
            found = dynamics.observe(group)
        assert not dynamics.shares_passes
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(dynamics.gradient(group), gradient)
        assert "out of memory: minibatches go through the model twice a draw" in caplog.text


def test_a_whole_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps between draws, a burn-in, pairs of chains, and an interruption; there, nothing chooses it by itself."""
    model, train, query, loss = language()
    told = 0

    def run(name: str) -> jostle.Run:
        return jostle.attribute(
            model, train, query, loss=loss, posterior=jostle.Posterior(n_beta=20, localization=100), burn_in=3,
            sampler=jostle.SGLD(step_size=1e-3), chains=2, draws=6, thin=2, batch_size=SIZE, chains_at_once=1,
            antithetic=True, checkpoint_seconds=0, progress=False, out=tmp_path / name,
        )  # fmt: skip

    def interrupted(*given: Any, **named: Any) -> Any:
        nonlocal told
        told += 1
        if told == 9:
            raise RuntimeError("pulled the plug")
        return observe(*given, **named)

    observe, apart = Dynamics.observe, run("apart")
    monkeypatch.setattr(job, "choose", lambda *given, **named: Execution(shares_passes=True))
    fill, filled = Observer._fill, []
    with monkeypatch.context() as patched:
        patched.setattr(Observer, "_fill", lambda *given: filled.append(given) or fill(*given))
        shared = run("shared")
    assert len(filled) == 2 * 6
    assert shared.manifest["execution"]["shares_passes"]
    with monkeypatch.context() as patched:
        patched.setattr(Dynamics, "observe", interrupted)
        with pytest.raises(RuntimeError, match="plug"):
            run("resumed")
    resumed = run("resumed")
    for name in ("train", "query"):
        found = shared.traces.losses(name)[:]
        np.testing.assert_allclose(found, apart.traces.losses(name)[:], rtol=1e-6)
        np.testing.assert_array_equal(found, resumed.traces.losses(name)[:])
    assert resumed.manifest["execution"]["shares_passes"]


@CUDA
def test_a_run_that_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a whole run gives the same traces, and the same when it is interrupted and resumed, to the last bit."""
    model, train, query, loss = language()
    model.cuda()

    def run(name: str, **more: Any) -> jostle.Run:
        return jostle.attribute(
            model, train, query, loss=loss, posterior=jostle.Posterior(n_beta=20, localization=100),
            sampler=jostle.SGLD(step_size=1e-3), chains=2, draws=12, thin=1, batch_size=SIZE, chains_at_once=1,
            progress=False, out=tmp_path / name, **more,
        )  # fmt: skip

    shared = run("shared")
    assert shared.manifest["execution"]["shares_passes"]
    with monkeypatch.context() as patched:
        patched.setattr(Dynamics, "is_worth_sharing", lambda self, thin: False)
        apart = run("apart")
    assert not apart.manifest["execution"]["shares_passes"]
    for name in ("train", "query"):
        np.testing.assert_allclose(shared.traces.losses(name)[:], apart.traces.losses(name)[:], rtol=1e-8)
    told = 0
    draw = Dynamics.observe

    def interrupted(*given: Any, **named: Any) -> Any:
        nonlocal told
        told += 1
        if told == 17:
            raise RuntimeError("pulled the plug")
        return draw(*given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Dynamics, "observe", interrupted)
        with pytest.raises(RuntimeError, match="plug"):
            run("resumed", checkpoint_seconds=0)
    resumed = run("resumed", checkpoint_seconds=0)
    for name in ("train", "query"):
        np.testing.assert_array_equal(shared.traces.losses(name)[:], resumed.traces.losses(name)[:])

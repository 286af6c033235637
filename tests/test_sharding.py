"""A model spread over ranks: gradients, noise, steps and losses are the whole model's, and so are whole runs."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import jostle
from jostle.chains import randomness, thinning
from jostle.data.datasets import Data
from jostle.losses import next_token
from jostle.models.functional import FunctionalModel
from jostle.models.weights import MovingWeights
from jostle.ranks import Ranks
from jostle.runs.integrity import examine
from test_commands import jostle_command
from test_ranks import TASK, await_checkpoints, end, start, torchrun, traces
from test_ranks import sample as unsharded


class Deep(nn.Module):
    """Blocks that are alike, and a head; no number of rows is a multiple of two, and one parameter has a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def regression() -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(23, 5)
    y = x[:, :1] - x[:, 1:2] ** 2
    return {"model": Deep(), "train": (x[:18], y[:18]), "query": (x[18:], y[18:]), "loss": jostle.losses.regression()}


def language() -> dict[str, Any]:
    """A Llama with tied embeddings, whose unembedding the loss reads itself; sequences of unequal lengths."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=12, intermediate_size=18, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    samples = [{"input_ids": torch.randint(1, 31, (4 + number % 5,)).tolist()} for number in range(9)]
    model = transformers.LlamaForCausalLM(config)
    return {"model": model, "train": samples[:6], "query": samples[6:], "loss": next_token()}


TASKS = {"regression": regression, "language": language}


def compare(task: dict[str, Any], weights: str) -> dict[str, float]:
    """How far this rank's rows are from those of the whole model, in double precision."""
    from jostle.models.sharding import Sharded

    crew = Ranks(2).crew
    model = task["model"].double().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train = task["train"] if isinstance(task["train"], list) else tuple(value.double() for value in task["train"])
    moving = MovingWeights(model, weights)
    whole = FunctionalModel(model, moving)
    data = Data(train, "train", collate=None, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    apart = {"loss": 0.0, "gradient": 0.0, "noise": 0.0, "gathered": 0.0}
    with Sharded(model, moving, crew) as sharded:
        part = sharded.moving
        assert 0 < part.total < moving.total
        # Weights change between evaluations: what was put together for one must not be found by the next.
        for chosen in (np.arange(3), np.arange(len(data)), np.array([4])):  # shares of two and one, equal, one and none
            weights_now = moving.center + 0.1 * torch.randn(1, moving.total, generator=generator, dtype=torch.double)
            here = part.keep(weights_now[0])[None]
            expected = whole.evaluate(task["loss"], weights_now, data.batch(chosen))
            got = sharded.evaluate(task["loss"], here, data.batch(chosen))
            apart["loss"] = max(apart["loss"], (got - expected).abs().max().item())
            expected = whole.mean_loss_gradient(task["loss"], weights_now, data, [chosen])[0]
            got = sharded.mean_loss_gradient(task["loss"], here, data, [chosen])[0]
            assert expected.abs().max() > 1e-3
            apart["gradient"] = max(apart["gradient"], (got - part.keep(expected)).abs().max().item())
        for step in range(2):
            ((_, expected),) = randomness.noise(3, [7], step, moving, sharded.device)
            ((_, got),) = randomness.noise(3, [7], step, part, sharded.device)
            apart["noise"] = max(apart["noise"], (got[0] - part.keep(expected[0])).abs().max().item())
        gathered = sharded.gather(here[0])
        if crew.leads:
            apart["gathered"] = (gathered - weights_now[0]).abs().max().item()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} of the model that was passed has moved"
    return apart


CASES = [("regression", "all"), ("regression", "blocks.1.*"), ("language", "all"), ("language", "attention")]


def compared(out: Path) -> str:
    return json.dumps([compare(TASKS[name](), weights) for name, weights in CASES])


def test_gradients_noise_and_losses_are_the_whole_models(tmp_path: Path) -> None:
    out = tmp_path / "compared"
    for said in end(start(2, out, work=compared), out):
        assert said is not None
        for case, apart in zip(CASES, json.loads(said), strict=True):
            assert apart["loss"] < 1e-12, (case, apart)
            assert apart["gradient"] < 1e-12, (case, apart)
            assert apart["noise"] == apart["gathered"] == 0.0, (case, apart)


SETTINGS: dict[str, Any] = {"chains": 3, "draws": 6, "burn_in": 2, "thin": 2, "batch_size": 5, "seed": 3}


def sample(out: Path, *, task: str = "regression", **changes: Any) -> jostle.Run:
    """A small run; ``slow`` makes each of its observations last, so that there is time to interrupt it."""
    settings = SETTINGS | {"sampler": jostle.SGLD(step_size=1e-3), "chains_at_once": 1} | changes
    slow = settings.pop("slow", 0.0)

    def pause(model: nn.Module) -> Tensor:
        time.sleep(slow)
        return torch.zeros(1)

    posterior = jostle.Posterior(n_beta=settings.pop("n_beta", 50.0), localization=100.0)
    return jostle.attribute(
        **TASKS[task](), observables={"pause": pause}, out=out, progress=False, posterior=posterior, **settings
    )  # fmt: skip


def sampled(out: Path, **changes: Any) -> str:
    return f"{sample(out, **changes).draws} draws"


def assert_same(out: Path, reference: jostle.Run) -> None:
    got, expected = traces(jostle.load(out)), traces(reference)
    assert got.keys() == expected.keys() == {"train", "query", "pause"}
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, rtol=2e-5, atol=2e-6)
    assert expected["train"].std(1).min() > 1e-4  # ten times what two runs may differ by
    if reference.traces.keeps_temperature:  # along directions in bfloat16
        heats = [np.asarray(run.traces.trace("temperature")[:]) for run in (jostle.load(out), reference)]
        np.testing.assert_allclose(*heats, rtol=0.01, atol=1e-3)
        assert np.abs(heats[1]).max() > 0.05
    assert examine(out) == []


RULES: dict[str, dict[str, Any]] = {
    "sgld": {},
    "language": {"task": "language"},
    "controlled": {"sampler": jostle.RMSpropSGLD(step_size=1e-5), "control_variates": True},
    "momentum": {"sampler": jostle.BAOAB(step_size=1e-3), "n_beta": 0.0},
}


def all_sampled(out: Path) -> str:
    draws = [sample(out / name, shards=2, **changes).draws for name, changes in RULES.items()]
    # What a crew chooses by the clock it chooses together, however short its pilot.
    thinning.FEWEST_STEPS = 40
    draws.append(sample(out / "auto", shards=2, draws=3, thin="auto").draws)
    return json.dumps(draws)


def test_a_run_is_the_same_but_for_rounding(tmp_path: Path) -> None:
    out = tmp_path / "sharded"
    assert end(start(2, out, work=all_sampled), out) == [json.dumps([6, 6, 6, 6, 3])] * 2
    for name, changes in RULES.items():
        assert_same(out / name, sample(tmp_path / name, **changes))


class Faulty(jostle.SGLD):
    """On rank 1 alone, a large random number makes the first of its weights infinite."""

    limit: ClassVar[float] = 1.5

    def step(self, weights: Tensor, mean_loss_gradient: Tensor, noise: Tensor, *rest: Any, **named: Any) -> Any:
        moved, statistics = super().step(weights, mean_loss_gradient, noise, *rest, **named)
        if os.environ["RANK"] == "1":
            moved[:, 0] = torch.where(noise[:, 0] > self.limit, torch.inf, moved[:, 0])
        return moved, statistics


def test_a_chain_that_fails_on_one_rank_has_failed_on_both(tmp_path: Path) -> None:
    part = MovingWeights(regression()["model"], "all").shard(1, 2)
    expected = []
    for chain in range(SETTINGS["chains"]):
        for step in range(2 + 5 * 2):
            ((_, noise),) = randomness.noise(SETTINGS["seed"], [chain], step, part, torch.device("cpu"))
            if noise[0, 0] > Faulty.limit:
                seen = 2 + max(0, -(-(step + 1 - 2) // 2)) * 2
                expected.append({"chain": chain, "step": seen, "reason": "weights left the finite numbers"})
                break
    assert 0 < len(expected) < SETTINGS["chains"]
    out = tmp_path / "run"
    assert end(start(2, out, work=sampled, shards=2, sampler=Faulty(step_size=1e-3)), out) == ["6 draws"] * 2
    assert sorted(jostle.load(out).manifest["failed_chains"], key=lambda failure: failure["chain"]) == expected


class PlannedError(Exception):
    pass


def planned(out: Path) -> str:
    told: list[str] = []

    def tell(lines: list[str]) -> None:
        told.extend(lines)
        raise PlannedError

    with pytest.raises(PlannedError):
        sample(out, shards=2, dry_run=tell)
    return told[0]


def test_a_plan_is_told_and_nobody_is_missed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for said in end(start(2, out, work=planned), out):
        assert re.match(r"weights that move   96 of a model of 384 bytes, on 2 ranks", said or "")
    assert not out.exists()


def test_one_interrupted_rank_stops_its_crew_at_the_same_step(tmp_path: Path) -> None:
    reference, out = sample(tmp_path / "whole"), tmp_path / "run"
    processes = start(2, out, work=sampled, shards=2, slow=0.2, checkpoint_seconds=0.0)
    await_checkpoints(out, 1)
    os.kill(processes[1].pid or 0, signal.SIGTERM)
    said = end(processes, out)
    assert all(
        (words or "").startswith(("KeyboardInterrupt: stopped", "RankLostError: rank 1 of 2 was inter"))
        for words in said
    )
    assert end(start(2, out, work=sampled, shards=2), out) == ["6 draws"] * 2
    assert_same(out, reference)


def test_two_crews_of_two_and_one_killed_and_one_rank_alone_goes_on(tmp_path: Path) -> None:
    """What is checkpointed is whole: two crews begin, a rank of one of them dies, and a single process ends the run."""
    reference, out = sample(tmp_path / "whole"), tmp_path / "run"
    processes = start(4, out, work=sampled, silence=3.0, shards=2, slow=0.2, checkpoint_seconds=0.0)
    await_checkpoints(out, 2)
    os.kill(processes[3].pid or 0, signal.SIGKILL)
    said = end(processes, out)
    assert said[3] is None
    for rank in (0, 1, 2):
        assert (said[rank] or "").startswith("RankLostError: rank 3 of 4 has given no sign of life for 3 s")
    assert examine(out) != []
    sample(out)
    assert_same(out, reference)


def test_the_command_line(tmp_path: Path) -> None:
    task, out = tmp_path / "task.py", tmp_path / "run"
    task.write_text(TASK)
    process = torchrun(2, task, out, "--shards=2")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    for name, expected in traces(unsharded(tmp_path / "whole")).items():
        np.testing.assert_allclose(traces(jostle.load(out))[name], expected, rtol=2e-5, atol=2e-6)
    refused = jostle_command("run", tmp_path / "other", "--task", f"{task}:build", "--shards", 2, "--auto")
    assert "shards: got --auto, expected the config of jostle calibrate" in refused.stderr


def test_what_cannot_be_sharded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(jostle.InputError, match=r"shards: got 2 with 1 rank, expected a divisor"):
        sample(tmp_path / "run", shards=2)
    thermostat = jostle.SGNHT(step_size=1e-3)
    with pytest.raises(jostle.InputError, match="shards: got SGNHT, which needs all weights at once"):
        sample(tmp_path / "run", shards=2, sampler=thermostat)
    with pytest.raises(jostle.InputError, match="compile: got True with shards"):
        sample(tmp_path / "run", shards=2, compile=True)
    assert not (tmp_path / "run").exists()

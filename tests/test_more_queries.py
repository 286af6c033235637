"""Queries that come later: at kept weights or by walking again, to the numbers of a run that had them from the start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import jostle
import jostle.chains.chain
import test_ranks
from conftest import Says
from jostle.chains import checkpoints, randomness
from jostle.chains.recording import TraceRecorder
from jostle.runs import layout
from jostle.runs.integrity import examine
from jostle.traces.store import Traces
from networks import network
from test_commands import SMALL, jostle_command, place, sources  # noqa: F401
from test_survival import TASK, X, Y, flip, losses, observed, sample

torch.manual_seed(0)
WEIGHT = torch.nn.Linear(3, 2).double().weight.detach()
"""Of `sample`'s model, at w*."""
FEW, MORE = {"query": (X[:2], Y[:2])}, {"query": (X[:5], Y[:5])}


def files(out: Path) -> dict[str, bytes]:
    """Every chunk of a run's traces."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in out.glob("traces.zarr/*/losses/c/**/*")
        if path.is_file()
    }


@pytest.mark.parametrize(("sampler", "keep_weights"), [("SGLD", False), ("SGNHT", False), ("SGNHT", True)])
def test_more_queries(sampler: str, keep_weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit where batches are the same, which those of one example are."""
    settings: dict[str, Any] = {"sampler": sampler, "chains_at_once": 1, "observation_batch_size": 1}
    expected = sample(**settings, **MORE)
    sample(tmp_path / "run", **settings, **FEW, keep_weights=keep_weights)
    before, steps = files(tmp_path / "run"), 0
    advance = jostle.chains.chain.Dynamics.advance

    def counting(self: Any, group: Any, most: int = 1) -> None:
        nonlocal steps
        steps += 1
        advance(self, group)

    monkeypatch.setattr(jostle.chains.chain.Dynamics, "advance", counting)
    seen = observed(monkeypatch)
    run = sample(tmp_path / "run", **settings, **MORE)
    assert seen == []  # nothing that is recorded is looked at again
    # From w* to the last draw, and not farther; before that to the second one, to see whether it is the same.
    assert steps == (0 if keep_weights else 3 + 2 * 11)
    for name in ("train", "query"):
        np.testing.assert_array_equal(losses(run, name), losses(expected, name))
        np.testing.assert_array_equal(run.traces.center_losses(name), expected.traces.center_losses(name))
    np.testing.assert_array_equal(run.influence().values, expected.influence().values)
    after = files(tmp_path / "run")
    assert before.items() <= after.items()
    assert len(after) > len(before)
    assert examine(tmp_path / "run") == []
    assert not (tmp_path / "run" / "widening").exists()
    assert run.manifest["fingerprints"] == expected.manifest["fingerprints"]
    # And on from there, with everything at once.
    most = {"query": (X, Y), "draws": 9, "chains": 3}
    expected, run = sample(**settings, **most), sample(tmp_path / "run", **settings, **most)
    np.testing.assert_array_equal(losses(run, "query"), losses(expected, "query"))
    assert examine(tmp_path / "run") == []
    if keep_weights:
        kept = run.traces.trace("weights")[:]
        assert kept.shape == (3, 9, 8)
        assert np.unique(kept, axis=1).shape == kept.shape


def test_other_batches_differ_by_rounding(tmp_path: Path) -> None:
    model, x, y = torch.nn.Linear(3, 2), X.float(), Y
    settings: dict[str, Any] = {"draws": 6, "chains": 2, "progress": False, "sampler": jostle.SGLD(step_size=1e-4)}
    jostle.attribute(model, (x, y), (x[:2], y[:2]), out=tmp_path, **settings)
    run = jostle.attribute(model, (x, y), (x[:5], y[:5]), out=tmp_path, **settings)
    expected = jostle.attribute(model, (x, y), (x[:5], y[:5]), **settings)
    np.testing.assert_array_equal(losses(run), losses(expected))
    np.testing.assert_allclose(losses(run, "query"), losses(expected, "query"), rtol=2e-6)


def test_a_run_that_stopped_by_itself_keeps_its_draws(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"draws": 60, "until": {"ess": 4}, "chains_at_once": 1, "observation_batch_size": 1}
    draws = sample(tmp_path, **settings, **FEW).draws
    run = sample(tmp_path, **settings, **MORE)
    assert run.draws == draws < 60
    np.testing.assert_array_equal(losses(run, "query"), losses(sample(**settings, **MORE), "query"))


# --- cut off ---


class PowerCutError(RuntimeError):
    pass


@pytest.mark.parametrize("keep_weights", [False, True], ids=["walking again", "kept weights"])
def test_cut_off_anywhere(keep_weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any write to the run, and any draw: it is unfinished, and goes on to the same numbers."""
    settings: dict[str, Any] = {"chains_at_once": 1, "checkpoint_seconds": 0.0, "observation_batch_size": 1}
    examples = {"train": [{"text": str(i)} for i in range(9)]}
    few = FEW | {"examples": examples | {"query": [{"text": "a"}] * 2}}
    more = MORE | {"examples": examples | {"query": [{"text": "a"}] * 5}}
    expected = losses(sample(**settings, **MORE), "query")
    sample(tmp_path / "whole", **settings, **few, keep_weights=keep_weights)
    calls, fails_at = 0, 0

    def cutting(owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def cut(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == fails_at:
                raise PowerCutError
            return work(*arguments, **options)

        monkeypatch.setattr(owner, name, cut)

    for owner, name in ((layout, "replace_file"), (layout, "write_tensors"), (checkpoints, "write_tensors"), (Traces, "record"), (Traces, "widen")):  # fmt: skip
        cutting(owner, name)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    sample(tmp_path / "run", **settings, **more)
    total = calls
    assert total > 12
    kinds = []
    for fails_at in [1, 3, total] if keep_weights else [1, 2, 3, 4, 5, 6, total // 2, total]:  # noqa: B007
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "whole", tmp_path / "run")
        calls = 0
        with pytest.raises(PowerCutError):
            sample(tmp_path / "run", **settings, **more)
        kinds.append([finding.kind for finding in examine(tmp_path / "run")])
        calls = -total
        run = sample(tmp_path / "run", **settings, **more)
        np.testing.assert_array_equal(losses(run, "query"), expected)
        assert len(run.examples("query")) == 5
        assert examine(tmp_path / "run") == []
    # Before the manifest says so, nothing has happened.
    assert kinds[0] == []
    assert set(map(tuple, kinds[2:])) == {("unfinished",)}


@pytest.mark.parametrize("more", [{"draws": 9}, {"chains": 3}, MORE | {"draws": 9}], ids=["draws", "chains", "both"])
def test_cut_off_while_room_is_made(more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any file that says what the run is: it goes on from there, to the same numbers."""
    settings: dict[str, Any] = {"chains_at_once": 1, "observation_batch_size": 1}
    expected = sample(**(settings | FEW | more))
    sample(tmp_path / "whole", **settings, **FEW)
    replace = layout.replace_file
    for fails_at in range(1, 20):
        calls = 0

        def cut(path: Path, content: str | bytes, fails_at: int = fails_at) -> None:
            nonlocal calls
            calls += 1
            if calls == fails_at:
                raise PowerCutError
            replace(path, content)

        out = tmp_path / str(fails_at)
        shutil.copytree(tmp_path / "whole", out)
        with monkeypatch.context() as patch:
            patch.setattr(layout, "replace_file", cut)
            try:
                sample(out, **(settings | FEW | more))
            except PowerCutError:
                assert calls == fails_at
            else:
                break
        run = sample(out, **(settings | FEW | more))
        for name in ("train", "query"):
            np.testing.assert_array_equal(losses(run, name), losses(expected, name))
        assert examine(out) == []
    assert 3 < fails_at < 19


# --- refused ---


def test_what_is_another_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    sample(tmp_path, **FEW, examples={"query": [{"text": "a"}] * 2})
    whole = files(tmp_path), (tmp_path / "manifest.json").read_bytes()
    swapped = {"query": (X[[1, 0, 2]], Y[[1, 0, 2]])}
    fewer = {"query": (X[:1], Y[:1])}
    for other in (swapped, fewer, {"query": (X[:5], 1 - Y[:5])}):
        with pytest.raises(jostle.InputError, match="a run of other queries"):
            sample(tmp_path, **other)
    with pytest.raises(jostle.InputError, match="a run of other settings"):
        sample(tmp_path, **MORE, seed=1)
    with pytest.raises(jostle.InputError, match=r"^examples: got none of the queries, expected all of them"):
        sample(tmp_path, **MORE)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)  # another model
    with pytest.raises(jostle.InputError, match="a run of a model with other weights"):
        sample(tmp_path, **MORE)
    monkeypatch.undo()
    with pytest.raises(jostle.InputError, match=r"^keep_weights: got True for .*, a run begun without") as caught:
        sample(tmp_path, **FEW, keep_weights=True)
    says("weights kept from now on", str(caught.value), 2)
    assert whole == (files(tmp_path), (tmp_path / "manifest.json").read_bytes())
    with pytest.raises(jostle.InputError, match="keep_weights: got keep='covariance'"):
        sample(tmp_path / "sums", keep="covariance", keep_weights=True)
    sample(tmp_path / "sums", keep="covariance", **FEW)
    with pytest.raises(jostle.InputError, match="a run of other queries"):
        sample(tmp_path / "sums", keep="covariance", **MORE)


def test_nothing_is_added_where_all_chains_failed(tmp_path: Path, says: Says) -> None:
    def bursting(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        far = (next(model.parameters()) - WEIGHT).square().sum() > 0.02
        return torch.where(far, torch.inf, jostle.losses.classification()(model, batch))

    def ask(queries: int) -> jostle.Run:
        return sample(tmp_path, query=(X[:queries], Y[:queries]), loss=bursting)

    with pytest.raises(jostle.ChainsFailedError):
        ask(2)
    with pytest.raises(jostle.InputError, match="whose chains all failed, expected draws to see them at") as caught:
        ask(5)
    says("queries for a run whose chains all failed", str(caught.value), 2)


def fail(*_: Any) -> None:
    raise OSError("the disk is gone")


def test_chains_that_come_by_elsewhere_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    """Other hardware may draw other noise; what is seen there has nothing to do with what is recorded."""
    sample(tmp_path, **FEW)
    noise = randomness.noise

    def other(seed: int, *arguments: Any) -> Any:
        return noise(seed + 1, *arguments)

    monkeypatch.setattr(randomness, "noise", other)
    with pytest.raises(jostle.InputError, match=r"^query: got training losses that are .* draw 1 of chain 0") as caught:
        sample(tmp_path, **MORE)
    says("queries added where chains come by elsewhere", str(caught.value), 2)

    def other_later(seed: int, chains: list[int], step: int, *arguments: Any) -> Any:
        return noise(seed + (step > 8), chains, step, *arguments)

    monkeypatch.setattr(randomness, "noise", other_later)
    with pytest.raises(jostle.InputError, match=r"^query: got training losses that are .* draw 5 of chain 0"):
        sample(tmp_path, **MORE)  # only at the last draw, when the first are recorded
    monkeypatch.undo()
    assert examine(tmp_path) == []  # what is there is as it was
    assert losses(jostle.load(tmp_path), "query").shape == (2, 6, 2)
    monkeypatch.setattr(TraceRecorder, "flush", fail)
    with pytest.raises(jostle.errors.StorageError):
        sample(tmp_path, **MORE)
    monkeypatch.undo()
    assert [finding.kind for finding in examine(tmp_path)] == ["unfinished"]
    with pytest.raises(
        jostle.InputError, match=r"^query: got 4 more for .*, which is not finished, expected"
    ) as caught:
        sample(tmp_path, query=(X, Y))
    says("queries for a run that is not finished", str(caught.value), 2)
    assert losses(sample(tmp_path, **MORE), "query").shape == (2, 6, 5)


def breaking(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """The cross entropy but, far from w*, of inputs beyond 100, which is infinite there."""
    inputs, _ = batch
    far = (next(model.parameters()) - WEIGHT).square().sum() > 0.02
    losses = jostle.losses.classification()(model, batch)
    return torch.where((inputs[:, 0] > 100) & far, torch.inf, losses)


@pytest.mark.parametrize("keep_weights", [False, True], ids=["walking again", "kept weights"])
def test_a_query_whose_loss_is_not_finite_changes_nothing(
    keep_weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    inputs = X.clone()
    inputs[4, 0] = 1000

    def ask(queries: int, **more: Any) -> jostle.Run:
        shown = {"query": [{"text": str(i)} for i in range(queries)]}
        return sample(
            tmp_path, query=(inputs[:queries], Y[:queries]), train=(X, Y), loss=breaking, chains_at_once=1,
            keep_weights=keep_weights, examples=shown, source={"queries": queries}, **more,
        )  # fmt: skip

    def everything() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    influence = ask(2).influence().values
    before = everything()
    message = r"^query: got query 4, whose loss is inf at draw [1-5] of chain 0, expected finite losses at every draw"
    with pytest.raises(jostle.InputError, match=message) as caught:
        ask(6, draws=9)
    assert everything() == before
    if not keep_weights:
        says("a query whose loss is not finite at some draw", str(caught.value), 2)
    # Cut off while it is put back: the same again, to the same end.
    replace = layout.replace_file

    def cut(path: Path, content: str | bytes) -> None:
        if path.name == "manifest.json" and isinstance(content, bytes):
            raise PowerCutError
        replace(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(layout, "replace_file", cut)
        with pytest.raises(PowerCutError):
            ask(6)
    with pytest.raises(jostle.InputError, match=message):
        ask(6)
    assert everything() == before
    run = ask(4)
    assert run.failed_chains == []
    np.testing.assert_array_equal(run.influence().values[:, :2], influence)


# --- the commands ---


def test_a_language_model(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    more = [{"text": "five six seven eight"}, {"prompt": "one two", "completion": " three"}, {"text": "nine one"}]
    (tmp_path / "more.jsonl").write_text("\n".join(map(json.dumps, more)))
    shutil.copytree(place / "run", tmp_path / "run")
    command = ["extend", tmp_path / "run", "--query", tmp_path / "more.jsonl"]
    observe, count = jostle.chains.observing.Observer.__call__, 0

    def interrupted(self: Any, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt
        return observe(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(jostle.chains.observing.Observer, "__call__", interrupted)
        result = jostle_command(*command)
    assert result.exit_code == 75
    assert "stopped with all 2 × 12 draws, and not yet all queries at them" in result.stderr
    assert jostle_command("check", tmp_path / "run").exit_code == 75
    result = jostle_command(*command)
    assert result.exit_code == 0  # goes on, and does not add them twice
    assert "queries added to the 2 that were there" in result.stderr
    assert jostle_command("check", tmp_path / "run").exit_code == 0
    same = [*sources(place), "--query", tmp_path / "more.jsonl", *SMALL]
    assert jostle_command("run", tmp_path / "run", *same).exit_code == 0  # the same run, in other words
    assert jostle_command("run", tmp_path / "both", "--config", tmp_path / "run" / "config.yaml").exit_code == 0
    ours, theirs = jostle.load(tmp_path / "run"), jostle.load(tmp_path / "both")
    assert ours.config == theirs.config
    assert ours.config["source"]["query"] == [str(place / "query.jsonl"), str(tmp_path / "more.jsonl")]
    assert ours.examples("query") == theirs.examples("query")
    assert len(ours.examples("query")) == 5
    offsets = [run.traces.columns("query").offsets for run in (ours, theirs)]
    np.testing.assert_array_equal(*offsets)
    np.testing.assert_allclose(losses(ours, "query"), losses(theirs, "query"), rtol=1e-4)
    np.testing.assert_array_equal(losses(ours), losses(theirs))
    top = jostle_command("top", tmp_path / "run", "-q", 4, "--json")
    assert json.loads(top.stdout)["query"] == 4


def test_a_task_and_kept_weights(tmp_path: Path, says: Says) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    command = ["run", tmp_path / "run", "--task", f"{tmp_path / 'mine.py'}:build", *SMALL, "--keep-weights"]
    # 2 chains × 12 draws × 4 weights of 4 bytes.
    plan = jostle_command(*command, "--dry-run")
    assert "960 bytes for traces, 384 bytes for the weights of every draw, 32 bytes for the state" in plan.stdout
    assert jostle_command(*command).exit_code == 0
    assert jostle.load(tmp_path / "run").traces.trace("weights")[:].nbytes == 384
    result = jostle_command("extend", tmp_path / "run", "--query", "more.jsonl")
    assert result.exit_code == 2
    says("more texts for a task", result.stderr.splitlines()[-1], 2)
    assert "let it return more, after those that are there, and jostle resume adds them" in result.stderr
    (tmp_path / "mine.py").write_text(TASK.replace("[:2]", "[:6]"))
    result = jostle_command("resume", tmp_path / "run")
    assert result.exit_code == 0, result.stderr
    assert jostle_command("run", tmp_path / "six", *command[2:-1]).exit_code == 0
    ours, theirs = (losses(jostle.load(tmp_path / name), "query") for name in ("run", "six"))
    assert ours.shape == (2, 12, 6)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert jostle_command("check", tmp_path / "run").exit_code == 0
    flip(next(path for path in (tmp_path / "run/traces.zarr/weights/c").rglob("*") if path.is_file()))
    result = jostle_command("check", tmp_path / "run")
    assert (result.exit_code, "damaged chunks weights/c/" in result.stdout) == (4, True)


# --- over ranks ---


def ask(out: Path, *, queries: int, **settings: Any) -> str:
    model, train, query = network()
    asked = tuple(part[:queries] for part in query)
    run = jostle.attribute(
        model, train, asked, loss=jostle.losses.regression(), out=out, progress=False, chains=3, draws=6, thin=2,
        posterior=jostle.Posterior(n_beta=50.0, localization=100.0), sampler=jostle.SGLD(step_size=1e-3),
        batch_size=8, **settings,
    )  # fmt: skip
    return f"{run.traces.columns('query').samples} queries"


@pytest.mark.parametrize(("shards", "keep_weights"), [(1, False), (2, True)])
def test_over_ranks(shards: int, keep_weights: bool, tmp_path: Path) -> None:
    """Chains spread over two ranks, and a model spread over two, whose weights were kept whole."""
    out, whole = tmp_path / "run", tmp_path / "whole"
    alone: dict[str, Any] = {"chains_at_once": 1, "observation_batch_size": 1}
    ask(out, queries=4, keep_weights=keep_weights, **alone)
    several = {"shards": shards, "observation_batch_size": 1}
    assert test_ranks.end(test_ranks.start(2, out, work=ask, queries=9, **several), out) == ["9 queries"] * 2
    assert examine(out) == []
    ask(whole, queries=9, **alone)
    ours, theirs = jostle.load(out), jostle.load(whole)
    np.testing.assert_array_equal(losses(ours), losses(theirs))
    # A sharded model adds up in another order.
    np.testing.assert_allclose(losses(ours, "query"), losses(theirs, "query"), rtol=0 if shards == 1 else 1e-5)

"""The bench notices what became twice as slow, and only that; it times draws, and nothing else of a run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import language, run, small, vision
from benchmarks.clock import Clock, EnoughDrawsError
from benchmarks.run import ATTEMPTS, regressions, run_small, unmatched
from torch import Tensor

import jostle
from jostle.chains.chain import Dynamics
from jostle.chains.checkpoints import Checkpoints


def test_a_slowed_step_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that keeps the processor busy for twice as long again fails, at every attempt."""
    attempts = 0

    def measure() -> dict[str, float]:
        nonlocal attempts
        attempts += 1
        return small.small_classifier()

    record = run_small({"classifier": measure}, {})
    advance = Dynamics.advance

    def slowed(self: Dynamics, group: Any) -> None:
        started = time.process_time()
        advance(self, group)
        until = time.process_time() + 2 * (time.process_time() - started)
        while time.process_time() < until:
            pass

    monkeypatch.setattr(Dynamics, "advance", slowed)
    slower = run_small({"classifier": measure}, record)
    assert regressions(slower, record)
    assert attempts == 1 + ATTEMPTS


def test_one_bad_moment_is_not_a_regression() -> None:
    ratios = iter([0.9, 2.1])
    measured = run_small({"x": lambda: {"ratio": next(ratios), "seconds": 1.0}}, {"x": {"ratio": 2.0}})
    assert not regressions(measured, {"x": {"ratio": 2.0}})


def test_what_has_no_record_is_named() -> None:
    record = json.loads((Path(run.__file__).parent / "records/small.json").read_text())["workloads"]["small"]
    assert unmatched(small.RATIOS, record) == []
    assert unmatched({"x": 1, "new": 1}, {"x": 1, "gone": 1}) == ["gone", "new"]


def test_both_ways_do_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transcription observes as often as Jostle does, each chain from the same start, and leaves w* in the model."""
    seen: list[Tensor] = []
    observed: list[int] = []
    observe = Dynamics.observe

    def counted(self: Dynamics, group: Any) -> Any:
        observed.extend(group.chains)
        return observe(self, group)

    monkeypatch.setattr(Dynamics, "observe", counted)
    monkeypatch.setattr(small, "ratio", lambda slow, fast: [seen.extend(slow()), fast(), seen.extend(slow())])
    small.small_classifier()
    assert len(seen) == 2 * len(observed) == 2 * 8 * 2
    assert all((seen[first] == seen[0]).all() for first in range(0, 32, 2))


def test_the_clock_leaves_out_the_first_draws_and_the_odd_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, passed, now = torch.nn.Linear(1, 1), [], 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = Clock(tmp_path, end=7, at={3: lambda: passed.append(3)})
    clock(model)  # a trial: there is no manifest yet
    (tmp_path / "manifest.json").touch()
    for seconds in (0.0, 20.0, 20.0, 2.0, 2.0, 10.0):
        now += seconds
        clock(model)
    now += 2.0
    with pytest.raises(EnoughDrawsError):
        clock(model)
    assert clock.seconds_a_draw() == 2.0
    assert clock.seconds(2) == 40.0
    assert passed == [3]


def test_a_draw_of_a_language_model_is_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither preparation nor the checkpoint at the end of a run is in a draw's time, or among its operations."""
    for name, size in {"TRAIN": 6, "QUERY": 3, "TOKENS": 8, "BATCH": 4}.items():
        monkeypatch.setattr(language, name, size)
    monkeypatch.setitem(language.SHAPES, "tiny", language.Shape(1, 16, 2, 64))
    drawn = language.tokens
    monkeypatch.setattr(language, "tokens", lambda count, seed: drawn(count, seed) % 64)
    saved: list[int] = []
    save = Checkpoints.save

    def slow(self: Checkpoints, group: Any, *more: Any) -> None:
        saved.append(group.step)
        save(self, group, *more)

    profiles: list[Any] = []
    monkeypatch.setattr(Checkpoints, "save", slow)
    monkeypatch.setattr(language, "print_kernels", profiles.append)
    table: dict[str, Any] = {}
    ways = ["jostle", "algorithm 1, eager"]
    language.bench("tiny", 1e9, ways, 6, table, lambda: None, profile=True)
    assert saved == []  # nobody asked for scores, so the run was not finished
    assert all(table[way]["seconds"] > 0 for way in ways)
    calls = [{name: count for name, _, count in language.kernels(profiler)} for profiler in profiles]
    # A minibatch and both sets in a batch each; the other way observes them in batches of 4.
    assert [one["aten::embedding"] for one in calls] == [3, 4]
    assert all(0 < sum(ms for _, ms, _ in language.kernels(profiler)) < 1000 for profiler in profiles)

    scores: dict[str, np.ndarray] = {}
    model = language.pythia(language.SHAPES["tiny"], "cpu", torch.float32)
    assert language.with_jostle(model, 6, False, at={}, scores=scores) > 0
    assert saved == [5]
    rows = [[{"input_ids": row} for row in language.tokens(count, seed)] for count, seed in ((6, 0), (3, 1))]
    plain = jostle.attribute(
        model, *rows, loss=jostle.losses.next_token(), sampler=jostle.SGLD(step_size=language.STEP_SIZE), chains=1,
        posterior=jostle.Posterior(
            n_beta=language.N_BETA, localization=language.LOCALIZATION, weights=language.WEIGHTS
        ),
        draws=6, thin=1, batch_size=4, progress=False,
    )  # fmt: skip
    np.testing.assert_allclose(scores["model"], plain.influence(normalize=True).values, atol=1e-6)


def test_all_scores_are_timed_with_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision, "BATCH", 4)
    table: dict[str, Any] = {}
    ways = vision.FULL_WAYS[:2]
    vision.bench_all_scores(ways, table, lambda: None, train=6, query=3, draws=2, device="cpu")
    for way in ways:
        assert table[way]["seconds"] == pytest.approx(table[way]["sampling"] + table[way]["scoring"])

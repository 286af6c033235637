"""The bench notices what became twice as slow, and only that."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks import run, small
from benchmarks.run import ATTEMPTS, regressions, run_small, unmatched
from torch import Tensor

from jostle.chains.chain import Dynamics


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

"""``pytest tests/test_ground_truth.py --record FILE`` writes the numbers that those tests judge."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Before anything reads it: no test may wait for a network.
os.environ["HF_HUB_OFFLINE"] = "1"

RECORDS = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="write the measured numbers to this JSON file")


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Keeps numbers under the name of the test."""
    kept = request.config.stash.setdefault(RECORDS, {})

    def keep(**numbers: float) -> None:
        kept.setdefault(request.node.name, {}).update({name: float(f"{value:.4g}") for name, value in numbers.items()})

    return keep


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--record")
    if path is not None:
        from benchmarks.environment import write_record

        write_record(path, {"tests": session.config.stash.get(RECORDS, {})})

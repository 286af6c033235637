"""``pytest tests/test_ground_truth.py --record FILE`` writes the numbers that those tests judge; on a GPU, so does
``pytest tests/test_ways.py -k cuda_graph --record FILE``: how far compiled and recorded models are from plain ones.

``pytest tests/test_{bad_input,commands,survival,more_queries,stores}.py --errors docs/errors.md`` writes what is said of
bad input and faults. And a browser.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before anything reads it: no test may wait for a network.
os.environ["HF_HUB_OFFLINE"] = "1"
# Power is never cut here, so nothing waits for the disk; the processes that tests start do.
os.fsync = lambda number: None

ERRORS = pytest.StashKey[list[tuple[str, str, int]]]()
Says = Callable[[str, str, int], None]

RECORDS = pytest.StashKey[dict[str, Any]]()


LONGEST = (
    "ways", "ranks", "sharding", "survival", "calibration", "retraining_experiments", "cli", "thermometer", "ground_truth",
    "viewer", "evaluate", "invariance", "attributors", "diagnose", "sampler_laws", "stopping", "conditioning", "fuzz", "stores",
    "language_demo", "sweep", "estimate", "graphs", "thinning", "viewer_files", "spreading", "training", "digits_retraining",
    "viewer_server",
)  # fmt: skip
"""Files of tests that take longest, which begin first: whoever takes one last would keep all other cores waiting."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores: tests wait for processes that they start, for browsers and for clocks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="write the measured numbers to this JSON file")
    parser.addoption("--errors", type=Path, help="write what is said of bad input and faults to this page")


@pytest.fixture
def says(request: pytest.FixtureRequest, tmp_path: Path) -> Says:
    """Notes what is said of a fault, in one line, and the exit code that goes with it."""
    kept = request.config.stash.setdefault(ERRORS, [])

    def note(fault: str, message: str, code: int) -> None:
        assert "\n" not in message
        kept.append((fault, message.removeprefix("jostle: ").replace(str(tmp_path), "PLACE"), code))

    return note


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Keeps numbers under the name of the test."""
    kept = request.config.stash.setdefault(RECORDS, {})

    def keep(**numbers: float) -> None:
        kept.setdefault(request.node.name, {}).update({name: float(f"{value:.4g}") for name, value in numbers.items()})

    return keep


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, for all tests of a file."""
    from playwright.sync_api import sync_playwright

    from viewing import CHROMIUM

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that has no complaint of its own at the end."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    complaints: list[str] = []
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    yield opened
    context.close()
    # The last hover may still have asked when the server was gone.
    complaints = [text for text in complaints if "ERR_CONNECTION_REFUSED" not in text]
    assert not complaints, complaints


def pytest_sessionfinish(session: pytest.Session) -> None:
    errors = session.config.getoption("--errors")
    if errors is not None:
        rows = [
            f"| {fault} | {code} | `{message.replace('|', chr(0x2223)).replace('`', chr(39))}` |"
            for fault, message, code in session.config.stash.get(ERRORS, [])
        ]
        head = [
            "# What is said of bad input and faults",
            "",
            f"{len(rows)} of them, each in one line. Written by the tests that cause them "
            "(`python -m pytest tests/test_{bad_input,commands,survival,more_queries,stores}.py --errors "
            "docs/errors.md`); the exit code is that of the command line. 2 is bad input (nothing is written), 4 damage "
            "that `jostle check` found, 74 a disk or a store that fails (what was recorded is kept, and the same command goes on).",
            "",
            "| what is wrong | exit code | what is said |",
            "| --- | --- | --- |",
        ]
        errors.write_text("\n".join([*head, *rows]) + "\n")
    path = session.config.getoption("--record")
    if path is not None:
        from benchmarks.environment import write_record

        write_record(path, {"tests": session.config.stash.get(RECORDS, {})})

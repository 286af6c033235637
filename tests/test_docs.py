"""The documentation: links lead somewhere, and what is said to run as it stands does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jostle import Scores

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    assert len(PAGES) > 10
    links = [
        (page, link)
        for page in PAGES
        for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE))
        if not link.startswith("http")
    ]  # fmt: skip
    assert len(links) > 100
    for page, link in links:
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_the_example_without_draws_runs_as_it_stands() -> None:
    first, alike, *_ = [block for block in blocks(ROOT / "docs/reading.md", "python") if 'kappa="auto"' not in block]
    names: dict[str, Any] = {}
    exec(first, names)
    assert 100 < names["kappa"] < 1000
    assert isinstance(names["scores"], Scores)
    labels, digit = names["train_set"][1], names["test_set"][1][0]
    assert labels[names["scores"].top(query=0, k=1).helpful[0].index] == digit
    exec(alike, names)
    assert names["cosines"].values.shape == (400, 100)


def test_the_example_of_replaying() -> None:
    names: dict[str, Any] = {}
    exec(blocks(ROOT / "docs/replay.md", "python")[0], names)
    assert names["found"].effects.shape == (200, 10)
    # What was left out is weighed by its derivative: all of them together make the model what it is.
    assert (names["found"].effects.sum(0) > 0).mean() > 0.7


def test_the_examples_of_training_and_of_solving_run_one_after_another() -> None:
    names: dict[str, Any] = {}
    for page in ("training.md", "solve.md"):
        exec(blocks(ROOT / "docs" / page, "python")[0], names)
    solution = names["solution"]
    assert solution.effects.shape == (256, 8)
    assert solution.solved.all()
    # Queries are the first training examples: each is what it would miss most.
    assert (solution.effects.argmax(0) == range(8)).all()
    assert names["rise"] == solution.effects[[3, 7, 20], 0].sum()

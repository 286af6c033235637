"""The viewer in a real browser: what stands on the page is what the estimator says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jostle
from viewing import needs_browser, served, token_run

pytestmark = needs_browser


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return token_run(tmp_path_factory.mktemp("viewer") / "texts")


def correlation(run: Path, train: int, query: int) -> np.ndarray:
    """Scored training tokens × scored query tokens, by the estimator."""
    return jostle.load(run).token_influence(train, query, normalize=True).posterior_correlation


def coloured(page: Any) -> None:
    """Wait until what is chosen is coloured."""
    page.wait_for_selector(".tokens-view[aria-busy='false']")


def query_token(page: Any, position: int) -> Any:
    return page.locator(".query-pane > .text .token").nth(position)


def train_token(page: Any, index: int, position: int) -> Any:
    return page.locator(f".train-pane .card[data-index='{index}'] .token").nth(position)


def told(page: Any) -> float:
    text = page.locator(".tip").inner_text()
    return float(re.search(r"([+−])(\d\.\d+)", text).expand(r"\1\2").replace("−", "-"))


def test_a_click_on_a_query_token_colours_training_tokens_with_the_estimators_numbers(texts: Path, page: Any) -> None:
    with served(texts) as address:
        page.goto(address)
        query_token(page, 3).click()
        coloured(page)
        expected = {index: correlation(texts, index, 0)[:, 2] for index in range(12)}
        for index in page.locator(".train-pane .card").evaluate_all("cards => cards.map(c => +c.dataset.index)")[:3]:
            train_token(page, index, 4).hover()
            assert told(page) == pytest.approx(expected[index][3], abs=6e-5)

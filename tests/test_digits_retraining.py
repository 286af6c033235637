"""The experiment on digits, in a size for every day: scores predict retraining, and controls do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from experiments.digits_retraining import Perceptron, Regression, bank_of, digits, methods

from jostle.evaluate import compare

pytest.importorskip("sklearn")

FLOORS = {
    Regression: {"exact influence": 0.9, "BIF, covariance": 0.35, "BIF, correlation": 0.35, "GradSim": 0.35},
    Perceptron: {"exact influence": 0.2, "BIF, covariance": 0.4, "BIF, correlation": 0.35, "GradSim": 0.25},
}
"""The least LDS per query: some three standard errors below what was measured at this size."""


@pytest.mark.parametrize("kind", [Regression, Perceptron])
def test_lds_on_digits(kind: Any, tmp_path: Path) -> None:
    train, query = digits(train=300, queries=40)
    task = kind(train)
    bank = bank_of(task, train, query, tmp_path / "bank", 40)
    scores, _ = methods(task, train, query, draws=50, with_ekfac=False)
    rows = {row.method: row for row in compare(bank, scores, bootstrap=50).rows}
    found = {name: round(row.per_query.value, 3) for name, row in rows.items()}
    assert all(found[name] > floor for name, floor in FLOORS[kind].items()), found
    for name in ("random", "query difficulty", "subset size"):
        assert abs(rows[name].per_query.value) < 3 * rows[name].per_query.standard_error
    difficulty = rows["query difficulty"].per_subset
    assert difficulty is not None
    assert difficulty.value > 0.7  # on the paper's metric it is enough to know how hard a query is

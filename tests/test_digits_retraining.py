"""The experiment on digits, in a size for every day: scores predict retraining, and controls do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from experiments.digits_retraining import Perceptron, Regression, bank_of, digits, methods

from jostle.evaluate import compare

pytest.importorskip("sklearn")

# Half of what is missing to what was measured, rounded: (least LDS of BIF covariance, of exact influence).
FLOORS = {Regression: (0.5, 0.6), Perceptron: (0.2, 0.15)}


@pytest.mark.parametrize("kind", [Regression, Perceptron])
def test_lds_on_digits(kind: Any, tmp_path: Path) -> None:
    train, query = digits(train=300, queries=60)
    task = kind(train)
    bank = bank_of(task, train, query, tmp_path / "bank", 50)
    scores, _ = methods(task, train, query, draws=50, with_ekfac=False)
    rows = {row.method: row for row in compare(bank, scores, bootstrap=50).rows}
    bif, exact = FLOORS[kind]
    for name, row in rows.items():
        print(name, row.per_query, row.per_subset)
    assert rows["BIF, covariance"].per_query.value > bif
    assert rows["exact influence"].per_query.value > exact
    for name in ("random", "query difficulty", "subset size"):
        assert abs(rows[name].per_query.value) < 3 * rows[name].per_query.standard_error
    assert rows["query difficulty"].per_subset.value > 0.5
    # What the posterior adds to blind perturbations of the weights.
    assert rows["BIF, covariance"].per_query.value > rows["BIF without gradients, covariance"].per_query.value

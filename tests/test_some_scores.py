"""Some rows and columns of the scores, and rankings that hold no matrix: the same numbers as from all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import jostle

TRAIN, QUERIES = 30, 11
ROWS, COLUMNS = [7, 29, 0, 3], [10, 2, 3]


def observed(model: Any) -> torch.Tensor:
    return torch.cat([model.weight.sum(1), model.bias])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> jostle.Run:
    return sampled(tmp_path_factory.mktemp("runs") / "run", keep="traces", observables={"logit": observed})


def sampled(out: Path, *, number: int = 3, **options: Any) -> jostle.Run:
    generator = torch.Generator().manual_seed(0)
    train, query = (
        (torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator))
        for count in (TRAIN, QUERIES)
    )
    torch.manual_seed(0)
    return jostle.attribute(
        nn.Linear(6, 3), train, query, posterior=jostle.Posterior(n_beta=20.0, localization=5.0),
        sampler=jostle.SGLD(step_size=0.02), chains=number, draws=200, batch_size=8, progress=False, out=out, **options,
    )  # fmt: skip


@pytest.mark.parametrize("kappa", [0.0, 10.0])
@pytest.mark.parametrize("normalize", [False, True])
def test_some_scores_are_those_of_all(run: jostle.Run, normalize: bool, kappa: float) -> None:
    every = run.influence(normalize=normalize, kappa=kappa)
    some = run.influence(normalize=normalize, kappa=kappa, train=ROWS, queries=COLUMNS)
    np.testing.assert_allclose(some.values, every.values[np.ix_(ROWS, COLUMNS)], rtol=1e-5, atol=1e-7)
    assert some.provenance["train"] == ROWS
    assert some.provenance["query"] == COLUMNS
    assert some.scale == every.scale
    np.testing.assert_allclose(
        run.influence(normalize=normalize, kappa=kappa, queries=range(4, 6)).values, every.values[:, 4:6], rtol=1e-5, atol=1e-7
    )  # fmt: skip


def test_some_scores_on_an_observable(run: jostle.Run) -> None:
    every = run.influence(on="logit")
    np.testing.assert_allclose(
        run.influence(on="logit", queries=[4]).values, every.values[:, [4]], rtol=1e-5, atol=1e-7
    )
    assert [ranking.query for ranking in run.top(on="logit")] == list(range(every.shape[1]))


@pytest.mark.parametrize("buffer_bytes", [1, 1 << 30], ids=["a column at a time", "all at once"])
@pytest.mark.parametrize("kappa", [0.0, 3.0])
def test_rankings_are_those_of_the_matrix(run: jostle.Run, kappa: float, buffer_bytes: int) -> None:
    every = run.influence(normalize=True, kappa=kappa)
    rankings = run.top(4, normalize=True, kappa=kappa, buffer_bytes=buffer_bytes)
    assert [ranking.query for ranking in rankings] == list(range(QUERIES))
    for ranking in rankings:
        expected = every.top(ranking.query, 4)
        assert ranking.kappa == kappa
        for found, known in ((ranking.helpful, expected.helpful), (ranking.harmful, expected.harmful)):
            assert [entry.index for entry in found] == [entry.index for entry in known]
            assert [entry.score for entry in found] == pytest.approx([entry.score for entry in known], rel=1e-5)
            assert all(entry.standard_error is None for entry in found)


@pytest.mark.parametrize("kappa", [0.0, 3.0, "auto"])
def test_errors_of_what_is_named_are_those_of_the_matrix(run: jostle.Run, kappa: Any) -> None:
    """How long batches are is measured from all losses, whichever are asked for."""
    every = run.influence(normalize=True, kappa=kappa, standard_error=True)
    [ranking] = run.top(5, queries=[6], normalize=True, kappa=kappa, standard_error=True)
    assert every.standard_error is not None
    entries = [*ranking.helpful, *ranking.harmful]
    assert len(entries) == 10
    found = np.array([entry.standard_error for entry in entries])
    known = every.standard_error[[entry.index for entry in entries], 6]
    np.testing.assert_allclose(found, known, rtol=1e-4)


def test_errors_of_parts_do_not_depend_on_what_is_named(tmp_path: Path) -> None:
    mirrored = sampled(tmp_path / "run", antithetic=True, number=4)
    for part in ("odd", "even"):
        every = mirrored.influence(part=part, standard_error=True).standard_error
        some = mirrored.influence(part=part, standard_error=True, train=ROWS, queries=COLUMNS).standard_error
        assert every is not None
        assert some is not None
        np.testing.assert_allclose(some, every[np.ix_(ROWS, COLUMNS)], rtol=1e-4)


def test_a_run_that_kept_sums_has_some_scores_too(tmp_path: Path) -> None:
    run = sampled(tmp_path / "run", keep="covariance")
    every = run.influence()
    np.testing.assert_array_equal(
        run.influence(train=ROWS, queries=COLUMNS).values, every.values[np.ix_(ROWS, COLUMNS)]
    )
    assert run.top(3) == [every.top(query, 3) for query in range(QUERIES)]
    assert [ranking.query for ranking in run.top(3, queries=[5, 1])] == [5, 1]


@pytest.mark.parametrize("wrong", [[11], [-1], [0.5], []])
def test_queries_that_are_not_there(run: jostle.Run, wrong: list[Any]) -> None:
    with pytest.raises(jostle.InputError, match="query: got"):
        run.influence(queries=wrong)


def test_training_examples_that_are_not_there(run: jostle.Run) -> None:
    with pytest.raises(jostle.InputError, match="train: got 30, expected an index below 30"):
        run.influence(train=[3, 30])

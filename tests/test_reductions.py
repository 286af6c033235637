"""A sequence's score from its tokens' losses: the paper's implementations A and B, on sequences of unequal lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import jostle
from architectures import VOCABULARY, tiny

LENGTHS = [9, 4, 14, 2, 7]
QUERIES = [2, 4, 1]


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["float64", "float32"])
def run(request: pytest.FixtureRequest) -> jostle.Run:
    generator = torch.Generator().manual_seed(0)
    data = [{"input_ids": torch.randint(3, VOCABULARY, (length,), generator=generator)} for length in LENGTHS]
    model = tiny("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # otherwise attention is nearly uniform, and all tokens' losses move alike
    return jostle.attribute(
        model.to(request.param), data, [data[index] for index in QUERIES], loss=jostle.losses.next_token(),
        posterior=jostle.Posterior(n_beta=20, localization=300, weights="attention"),
        sampler=jostle.SGLD(step_size=1e-3), chains=2, draws=20, thin=2, progress=False,
    )  # fmt: skip


@pytest.fixture
def rtol(run: jostle.Run) -> float:
    """Blocks and means are rounded apart from each other, at the precision in which losses are recorded."""
    return 1e-9 if run.traces.losses("train").dtype == np.float64 else 1e-4


def token_losses(run: jostle.Run, name: str) -> list[np.ndarray]:
    """Of each sequence, (chain, draw, token) as it would be computed by hand: padded by NaN, so cut to its length."""
    padded = run.traces.to_xarray(name).losses.values.astype(np.float64)
    return [padded[:, :, sample, np.isfinite(padded[0, 0, sample])] for sample in range(padded.shape[2])]


def blocks(run: jostle.Run, *, normalize: bool) -> list[list[np.ndarray]]:
    """Every token × token block of the run: train, then query."""
    return [
        [run.token_influence(train, query, normalize=normalize).values.astype(np.float64) for query in range(3)]
        for train in range(5)
    ]


def reduced(of: list[list[np.ndarray]], reduction: str) -> np.ndarray:
    return np.array([[getattr(block, reduction)() for block in row] for row in of])


def largest(scores: np.ndarray) -> float:
    return float(np.abs(scores).max())


def test_blocks_have_the_scored_tokens(run: jostle.Run) -> None:
    shapes = [[block.shape for block in row] for row in blocks(run, normalize=False)]
    assert shapes == [[(rows - 1, LENGTHS[query] - 1) for query in QUERIES] for rows in LENGTHS]


def test_implementation_b_is_the_covariance_of_sequence_means(run: jostle.Run, rtol: float) -> None:
    by_blocks = reduced(blocks(run, normalize=False), "mean")
    scores = run.influence(normalize=False)
    np.testing.assert_allclose(scores.values, by_blocks, rtol=rtol, atol=rtol * largest(by_blocks))
    assert scores.scale == 20 / 5


def test_sums_add_up(run: jostle.Run, rtol: float) -> None:
    by_blocks = reduced(blocks(run, normalize=False), "sum")
    scores = run.influence(normalize=False, reduction="sum").values
    np.testing.assert_allclose(scores, by_blocks, rtol=rtol, atol=rtol * largest(by_blocks))
    tokens = np.array(LENGTHS) - 1
    means = run.influence(normalize=False, reduction="mean").values
    expected = means * tokens[:, None] * tokens[QUERIES]
    np.testing.assert_allclose(scores, expected, rtol=rtol, atol=rtol * largest(expected))


def test_whole_query_averages_the_columns_of_a_block(run: jostle.Run, rtol: float) -> None:
    block = run.token_influence(2, 1)
    whole = run.token_influence(2, 1, whole_query=True)
    expected = block.values.astype(np.float64).mean(1, keepdims=True)
    np.testing.assert_allclose(whole.values, expected, rtol=rtol, atol=rtol * largest(expected))


def test_implementation_a_is_the_correlation_of_sequence_means(run: jostle.Run, rtol: float) -> None:
    means = [np.stack([tokens.mean(2).ravel() for tokens in token_losses(run, name)]) for name in ("train", "query")]
    by_hand = -np.corrcoef(*means)[:5, 5:]
    scores = run.influence(normalize=True)
    np.testing.assert_allclose(scores.values, by_hand, rtol=rtol, atol=rtol)
    assert scores.scale is None
    # A sequence's mean and its sum differ by a factor, which a correlation does not see.
    np.testing.assert_allclose(run.influence(normalize=True, reduction="sum").values, by_hand, rtol=rtol, atol=rtol)


def test_implementation_a_is_b_divided_by_both_spreads(run: jostle.Run, rtol: float) -> None:
    spreads = [
        np.array([tokens.mean(2).std(ddof=1) for tokens in token_losses(run, name)]) for name in ("train", "query")
    ]
    expected = run.influence().values / np.outer(*spreads)
    np.testing.assert_allclose(run.influence(normalize=True).values, expected, rtol=rtol, atol=rtol)


def test_implementation_a_is_not_the_mean_of_token_correlations(run: jostle.Run) -> None:
    correlations = reduced(blocks(run, normalize=True), "mean")
    scores = run.influence(normalize=True).values
    # A sequence with itself: its mean moves with itself exactly, its tokens with each other only partly.
    for query, sample in enumerate(QUERIES):
        assert scores[sample, query] == pytest.approx(-1, abs=1e-5)
        assert abs(correlations[sample, query]) < 0.9
    assert np.abs(scores - correlations).max() > 0.1

"""Estimators against textbook sums, and their errors against many repetitions."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

import jostle
import reference
from jostle import estimate
from jostle.traces import store
from jostle.traces.store import Columns, SequenceLosses, Strands


def traces(chains: int = 3, draws: int = 40, left: int = 7, right: int = 5, dtype: type = np.float64):
    generator = np.random.default_rng(0)
    common = generator.normal(size=(chains, draws, 1))
    offset = generator.normal(size=(chains, 1, 1))  # chains that do not agree
    return tuple(
        (5 + offset + common * generator.normal(size=n) + 0.3 * generator.normal(size=(chains, draws, n))).astype(dtype)
        for n in (left, right)
    )


@pytest.mark.parametrize("centering", ["pooled", "within"])
@pytest.mark.parametrize("buffer_bytes", [1, 20_000, 1 << 28], ids=["a column at a time", "blocks", "one block"])
def test_covariance_and_correlation(centering: estimate.Centering, buffer_bytes: int) -> None:
    left, right = traces()
    within = centering == "within"
    expected = reference.covariance(left, right, within=within)
    options = {"centering": centering, "buffer_bytes": buffer_bytes}
    result = estimate.covariance(left, right, **options)
    np.testing.assert_allclose(result.values, expected, rtol=1e-10)
    deviations = [np.sqrt(np.diag(reference.covariance(x, x, within=within))) for x in (left, right)]
    correlation = estimate.covariance(left, right, normalize=True, **options)
    np.testing.assert_allclose(correlation.values, expected / np.outer(*deviations), rtol=1e-10)
    # The offsets between chains are a real part of the pooled covariance, and none of the one within.
    total = reference.covariance(left, left) * (3 * 40 - 1)
    inside = reference.covariance(left, left, within=True) * (3 * 39)
    assert result.between_chain_share == pytest.approx(np.mean(1 - np.diag(inside) / np.diag(total)), rel=1e-9)


@pytest.mark.parametrize("centering", ["pooled", "within"])
@pytest.mark.parametrize("normalize", [False, True], ids=["covariance", "correlation"])
@pytest.mark.parametrize("batch_length", [8, 7, 40], ids=["equal batches", "unequal batches", "whole chains"])
def test_jackknife_by_leaving_out_each_batch(centering: estimate.Centering, normalize: bool, batch_length: int) -> None:
    """The blocked jackknife against one that really deletes draws and estimates again (Busing et al.'s formula)."""
    left, right = traces(chains=9)
    options = {"centering": centering, "normalize": normalize}
    fast = estimate.covariance(left, right, standard_error=True, batch_length=batch_length, **options)

    def theta(keep: np.ndarray) -> np.ndarray:
        a, b = left.copy(), right.copy()
        groups = [np.ones(9, bool)] if centering == "pooled" else [np.arange(9) == c for c in range(9)]
        products, squares, count, used = np.zeros((7, 5)), [np.zeros(7), np.zeros(5)], 0, 0
        for group in groups:
            mask = keep & group[:, None]
            if not mask.any():
                continue
            x, y = (part[mask] - part[mask].mean(0) for part in (a, b))
            products += x.T @ y
            squares[0] += (x**2).sum(0)
            squares[1] += (y**2).sum(0)
            count += mask.sum()
            used += 1
        return products / np.sqrt(np.outer(*squares)) if normalize else products / (count - used)

    edges = np.linspace(0, 40, 40 // batch_length + 1).round().astype(int)
    everything = np.ones((9, 40), bool)
    whole, N = theta(everything), everything.size
    pseudo, h = [], []
    for chain in range(9):
        for start, stop in itertools.pairwise(edges):
            keep = everything.copy()
            keep[chain, start:stop] = False
            h.append(N / (stop - start))
            pseudo.append(h[-1] * whole - (h[-1] - 1) * theta(keep))
    g = len(h)
    jackknife = g * whole - sum((1 - 1 / hj) * (hj * whole - p) / (hj - 1) for hj, p in zip(h, pseudo, strict=True))
    variance = sum((p - jackknife) ** 2 / (hj - 1) for hj, p in zip(h, pseudo, strict=True)) / g
    assert fast.standard_error is not None
    np.testing.assert_allclose(fast.standard_error, np.sqrt(variance), rtol=1e-7)
    assert fast.batches == g


def test_batches_with_heavy_tails_count_for_fewer() -> None:
    """Variances of losses that are squares in part: by g − 1 degrees of freedom, 95 % intervals are too narrow."""
    generator = np.random.default_rng(0)
    shares: dict[str, list[float]] = {}
    for _ in range(40):
        losses = generator.normal(size=(4, 100, 50)) + generator.normal(size=(4, 100, 50)) ** 2
        found = estimate.covariance(losses, losses, standard_error=True)
        assert found.standard_error is not None
        assert found.degrees_of_freedom is not None
        assert found.batches is not None
        value, error = found.values.diagonal(), found.standard_error.diagonal()
        for name, freedom in (("by the tails", found.degrees_of_freedom), ("g − 1", found.batches - 1)):
            width = scipy.stats.t.ppf(0.975, freedom) * error
            # The variances of a normal variable, and of its square; such skewed ones are better on a log scale.
            shares.setdefault(name, []).append((np.abs(value - 3) < width).mean())
            shares.setdefault(f"{name}, log", []).append((np.abs(np.log(value / 3)) < width / value).mean())
    covered = {name: np.mean(all_) for name, all_ in shares.items()}
    assert covered["by the tails"] == pytest.approx(0.945, abs=0.015)  # of 2,000: three times 0.0049 are 0.015
    assert covered["by the tails, log"] == pytest.approx(0.95, abs=0.015)
    assert covered["g − 1"] < 0.925
    assert covered["g − 1, log"] < 0.93
    # One loss of many that jumped once does not say it for all; nor do those that hardly ever moved.
    strange = losses.copy()
    strange[0, 0, 0] += 200
    strange[:, :, 1:5] = np.float32(1)
    strange[0, 5, 1:5] = np.nextafter(np.float32(1), np.float32(2))
    freedoms = [
        estimate.covariance(left, left[:, :, ::-1].copy(), standard_error=True).degrees_of_freedom
        for left in (losses.astype(np.float32), strange.astype(np.float32))
    ]
    assert freedoms[1] == pytest.approx(freedoms[0], rel=0.2)
    # Where both sides are the same, correlations of a loss with itself say nothing of others.
    same, turned = (
        estimate.covariance(losses, right, standard_error=True, normalize=True).degrees_of_freedom
        for right in (losses, np.roll(losses, 3, axis=2))
    )
    assert same == pytest.approx(turned, rel=0.3)
    # Where tails are those of a normal distribution, they are what they were: a mean of many draws has no others.
    plain = generator.normal(size=(4, 4000, 50))
    found = estimate.covariance(plain, plain, standard_error=True)
    assert found.batches is not None
    assert found.degrees_of_freedom == pytest.approx(found.batches - 1, rel=0.15)


@pytest.mark.parametrize("normalize", [False, True], ids=["covariance", "correlation"])
@pytest.mark.parametrize(
    ("chains", "draws", "memory"), [(4, 1000, 0.0), (4, 1000, 0.8), (40, 60, 0.9)],
    ids=["independent draws", "autocorrelated draws", "chains shorter than a batch"],
)  # fmt: skip
def test_standard_errors_cover_the_truth(normalize: bool, chains: int, draws: int, memory: float) -> None:
    """95 % intervals of Student's t around estimates from AR(1) chains with a known covariance."""
    generator = np.random.default_rng(1)
    pairs, rho = 500, 0.6

    def autoregressive() -> np.ndarray:
        out = np.empty((chains, draws, pairs))
        out[:, 0] = generator.normal(size=(chains, pairs))
        for t in range(1, draws):
            fresh = generator.normal(size=(chains, pairs))
            out[:, t] = memory * out[:, t - 1] + np.sqrt(1 - memory**2) * fresh
        return out

    common, a, b = autoregressive(), autoregressive(), autoregressive()
    left, right = (np.sqrt(rho) * common + np.sqrt(1 - rho) * own for own in (a, b))
    result = estimate.covariance(left, right, standard_error=True, normalize=normalize)
    assert result.standard_error is not None
    assert result.degrees_of_freedom is not None
    quantile = scipy.stats.t.ppf(0.975, result.degrees_of_freedom)
    for truth, entries in ((rho, np.eye(pairs, dtype=bool)), (0.0, ~np.eye(pairs, dtype=bool))):
        covered = np.abs(result.values - truth)[entries] < quantile * result.standard_error[entries]
        tolerance = 0.01 + 3 * np.sqrt(0.05 * 0.95 / pairs)
        assert covered.mean() == pytest.approx(0.95, abs=tolerance)


def test_too_few_draws_for_an_error_are_said() -> None:
    left, right = traces(chains=2, draws=6)
    remark = estimate.covariance(left, right, standard_error=True, batch_length=6).remark
    assert remark is not None
    assert "only 2 batches of 6 draws" in remark
    assert estimate.covariance(left, right, standard_error=True, batch_length=1).remark is None


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("centering", ["pooled", "within"])
def test_streaming_agrees_with_batch(dtype: type, centering: estimate.Centering) -> None:
    left, right = traces(dtype=dtype, draws=200)
    a, b = (torch.from_numpy(part) for part in (left, right))
    stream = estimate.StreamingCovariance(a[0, 0], b[0, 0])
    for chain in range(3):
        for draw in range(200):
            stream.update(chain, a[chain, draw], b[chain, draw])
    stream.update(7, a[0, 0] * torch.nan, b[0, 0] * torch.nan)
    stream.drop(7)  # a failed chain leaves no mark
    for chain in (2, 0, 1):
        stream.finish(chain)
    for normalize in (False, True):
        batch = estimate.covariance(left, right, centering=centering, normalize=normalize)
        online = stream.estimate(centering=centering, normalize=normalize)
        tolerance = 1e-10 if dtype is np.float64 else 2e-5
        np.testing.assert_allclose(online.values, batch.values, rtol=tolerance, atol=tolerance)
        assert online.between_chain_share == pytest.approx(batch.between_chain_share, rel=1e-4)


@pytest.mark.parametrize(("center", "rise"), [(1000.0, 0.0), (2.0, 3.0)], ids=["large losses", "far above w*"])
def test_streaming_does_not_cancel_in_float32(center: float, rise: float) -> None:
    """Losses that move by 0.01 around 1000, or 300 times as far from their value at w* as they move."""
    generator = np.random.default_rng(2)
    wiggle = generator.normal(size=(1, 500, 1)) * 0.01
    left = (center + rise + wiggle * np.ones(3) + 0.002 * generator.normal(size=(1, 500, 3))).astype(np.float32)
    trace = torch.from_numpy(left)
    stream = estimate.StreamingCovariance(torch.full((3,), center), torch.full((3,), center))
    for draw in trace[0]:
        stream.update(0, draw, draw)
    stream.finish(0)
    np.testing.assert_allclose(stream.estimate().values, reference.covariance(left, left), rtol=1e-3)


def test_sequence_losses_reduce_tokens() -> None:
    generator = np.random.default_rng(3)
    tokens = generator.normal(size=(2, 30, 10))
    offsets = np.array([0, 3, 4, 10])
    columns = Columns(3, offsets, np.arange(10))
    for reduction, function in (("mean", np.mean), ("sum", np.sum)):
        sequences = SequenceLosses(tokens, columns, reduction)
        expected = np.stack([function(tokens[..., a:b], axis=2) for a, b in itertools.pairwise(offsets)], 2)
        np.testing.assert_allclose(sequences[:, :, 0:3], expected)
        np.testing.assert_allclose(sequences[:, :, 1:2], expected[..., 1:2])
        # The covariance of means is the mean of the block of token covariances, and that of sums its sum.
        block = reference.covariance(tokens, tokens)[0:3, 4:10]
        whole = estimate.covariance(sequences, sequences).values
        assert whole[0, 2] == pytest.approx(function(block))


def test_tokens_are_read_once_however_many_sequences_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(3).normal(size=(3, 7, 40)).astype(np.float32)
    read = np.zeros(values.shape, int)

    class Stored:
        shape, dtype, chunks = values.shape, values.dtype, (1, 2, 40)

        def __getitem__(self, index: Any) -> np.ndarray:
            read[index] += 1
            return values[index]

    columns = Columns(10, np.arange(0, 41, 4), np.arange(40))
    sequences = SequenceLosses(Stored(), columns, "mean")
    seen = np.concatenate([sequences[:, :, at : at + 1] for at in range(10)], axis=2)
    np.testing.assert_allclose(seen, values.reshape(3, 7, 10, 4).mean(3), rtol=1e-6)
    assert (read == 1).all()
    monkeypatch.setattr(store, "HELD_BYTES", seen.nbytes - 1)
    unheld = SequenceLosses(Stored(), columns, "mean")
    np.testing.assert_array_equal(unheld[1:, 2:5, 3:6], seen[1:, 2:5, 3:6])
    assert read[:, :, :12].max() == 1  # what was not asked for is not read
    assert unheld.read_per_column == 4


def test_strands_deal_the_tokens_of_a_sequence_out_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(3).normal(size=(2, 30, 10)).astype(np.float32)
    offsets = np.array([0, 3, 4, 10])
    columns = Columns(3, offsets, np.arange(10))
    every = Strands(tokens, columns)
    np.testing.assert_allclose(every[:, :, :], tokens / np.sqrt(np.repeat([3, 1, 6], [3, 1, 6])), rtol=1e-6)
    monkeypatch.setattr(store, "STRANDS", 2)
    parts = [([0, 2], 3), ([1], 3), ([3], 1), ([4, 6, 8], 6), ([5, 7, 9], 6)]  # one of a single token has one
    expected = np.stack([tokens[..., some].sum(2) / np.sqrt(length) for some, length in parts], 2)
    two = Strands(tokens, columns)
    np.testing.assert_allclose(two[:, :, :], expected, rtol=1e-5)
    np.testing.assert_array_equal(two[1:, 3:9, 1:4], two[:, :, :][1:, 3:9, 1:4])
    # Of many draws as many as can be held, and of very many one a sequence.
    monkeypatch.setattr(store, "STRANDS", 16)
    monkeypatch.setattr(store, "STRAND_BYTES", 2 * 60 * 3 * 4)
    np.testing.assert_allclose(Strands(tokens, columns)[:, :, :], expected, rtol=1e-5)
    monkeypatch.setattr(store, "FEW_MOVES", 5)
    whole = SequenceLosses(tokens, columns, "mean")[:, :, :] * np.sqrt([3, 1, 6])
    np.testing.assert_allclose(Strands(tokens, columns)[:, :, :], whole, rtol=1e-5)


def test_a_loss_that_never_moves_correlates_with_nothing() -> None:
    for dtype in (np.float32, np.float64):
        left, right = traces(draws=41, dtype=dtype)
        left[:, :, 2] = 0.1  # has no exact mean in binary
        right[:, :, 3] = 2.3
        values = estimate.covariance(left, right, normalize=True).values
        np.testing.assert_array_equal(values[2], 0)
        np.testing.assert_array_equal(values[:, 3], 0)
        assert np.abs(values[0, 0]) > 0.1


def test_a_loss_that_moves_by_rounding_alone_moves_with_nothing() -> None:
    """In its traces, and in sums that were made of them; also one that was not there at w*."""
    right = np.random.default_rng(0).normal(size=(2, 50, 1)).astype(np.float32)
    value = np.float32(2.3)
    left = np.concatenate([np.where(right > 0, value, np.nextafter(value, np.float32(3))), right], axis=2)
    assert estimate.covariance(left, right, normalize=True).values[0, 0] == 0
    for center in (value, np.float32(0)):
        stream = estimate.StreamingCovariance(torch.tensor([center, 0.0]), torch.zeros(1))
        for chain in range(2):
            for draw in range(50):
                stream.update(chain, *(torch.from_numpy(side[chain, draw]) for side in (left, right)))
            stream.finish(chain)
        np.testing.assert_allclose(stream.estimate(normalize=True).values[:, 0], [0, 1], atol=1e-6)


def test_chains_are_chosen_by_number_or_mask() -> None:
    left, right = traces()
    left[0] += 100
    expected = estimate.covariance(left[1:], right[1:]).values
    mask = np.arange(len(left)) > 0
    for chains in (np.flatnonzero(mask), mask):
        np.testing.assert_allclose(estimate.covariance(left, right, chains=chains).values, expected)
    twice = np.array([1] * len(left))  # as many as there are, and not all of them
    np.testing.assert_allclose(
        estimate.covariance(left, right, chains=twice).values, estimate.covariance(left[twice], right[twice]).values
    )


def test_too_few_draws_to_leave_any_out() -> None:
    for chains, draws in ((1, 2), (2, 1)):
        left, right = traces(chains=chains, draws=draws)
        with pytest.raises(jostle.InputError, match="expected enough draws to leave a batch of them out"):
            estimate.covariance(left, right, standard_error=True)


def test_one_draw_is_refused() -> None:
    left, right = traces(chains=1, draws=1)
    with pytest.raises(jostle.InputError, match="at least two draws"):
        estimate.covariance(left, right)


MEMORY_SCRIPT = """
    import resource, sys
    import numpy as np
    from jostle import estimate
    from jostle.traces.store import Columns, SequenceLosses
    generator = np.random.default_rng(0)
    left = generator.normal(size=(4, 50, 12_000)).astype(np.float32)
    right = generator.normal(size=(4, 50, 4_000)).astype(np.float32)
    out = np.empty((12_000, 4_000), np.float32)
    out[:] = 0
    estimate.covariance(left[:, :, :512], right[:, :, :512], standard_error=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    estimate.covariance(left, right, out=out, buffer_bytes={buffer})
    tokens = SequenceLosses(left, Columns(60, np.arange(61) * 200, np.arange(12_000)), "mean")
    estimate.covariance(tokens, tokens, buffer_bytes={buffer}, standard_error=True)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    np.testing.assert_allclose(out[:5, :5], np.cov(left[..., :5].reshape(200, 5).T, right[..., :5].reshape(200, 5).T)[:5, 5:], rtol=1e-3, atol=1e-4)
"""


def test_blocked_estimate_needs_a_bounded_buffer() -> None:
    buffer = 24 << 20
    script = textwrap.dedent(MEMORY_SCRIPT).format(buffer=buffer)
    grown = int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    kilobytes = 1024 if sys.platform == "darwin" else 1
    assert grown / kilobytes < (buffer >> 10) + 8_000  # beyond the 192 MB of its output


@pytest.mark.parametrize("centering", ["pooled", "within"])
def test_standardized_traces_answer_as_the_estimate_does(centering: Any) -> None:
    generator = np.random.default_rng(3)
    left = (5 + 0.01 * generator.normal(size=(4, 60, 300))).astype(np.float32)
    left[:, :, 7] = 2.0
    right = (left[:, :, :5] + 0.01 * generator.normal(size=(4, 60, 5))).astype(np.float32)
    chains = np.array([0, 2, 3])
    expected = estimate.covariance(left, right, chains=chains, centering=centering, normalize=True).values
    table = estimate.Standardized(left, chains, centering=centering)
    np.testing.assert_allclose(table.correlation(right), expected, atol=2e-6)
    np.testing.assert_allclose(table.correlation(right[:, :, 2]), expected[:, 2], atol=2e-6)
    assert (table.correlation(right)[7] == 0).all()
    back = table.centered([2, 7, 0])
    kept = left[chains][:, :, [2, 7, 0]].astype(np.float64)
    np.testing.assert_allclose(back, kept - kept.mean((0, 1) if centering == "pooled" else 1, keepdims=True), atol=1e-6)
    np.testing.assert_allclose(table.correlation(back[:, :, 0]), table.correlation(left[:, :, 2]), atol=2e-6)


def test_what_is_not_finite_is_not_said_to_be_still() -> None:
    """A loss that never moved has no correlation; one that was never recorded has no known one."""
    trace = np.random.default_rng(0).normal(size=(2, 20, 3))
    trace[:, :, 0], trace[0, 3, 1] = 1.0, np.nan
    values = estimate.covariance(trace, trace[:, :, 2:], normalize=False).values
    assert values[0] == 0
    assert np.isnan(values[1]).all()
    assert values[2] > 0


def autoregressive(generator: np.random.Generator, rho: float, shape: tuple[int, ...]) -> np.ndarray:
    """Stationary series of variance 1 along the second axis."""
    values = generator.normal(size=shape)
    for draw in range(1, shape[1]):
        values[:, draw] = rho * values[:, draw - 1] + np.sqrt(1 - rho**2) * values[:, draw]
    return values


def covered(left: np.ndarray, right: np.ndarray, **options: Any) -> np.ndarray:
    """Which nominal 95 % intervals of correlations hold the truth, of series that are independent of each other."""
    found = estimate.covariance(left, right, normalize=True, standard_error=True, **options)
    assert found.standard_error is not None
    assert found.degrees_of_freedom is not None
    return np.abs(found.values) < scipy.stats.t.ppf(0.975, found.degrees_of_freedom) * found.standard_error


def test_standard_errors_of_a_slow_fifth_cover_the_truth() -> None:
    """Every error rests on the same batches, so that these have to be long enough for what is forgotten late."""
    slow, fast = [], []
    for seed in range(12):
        generator = np.random.default_rng(seed)
        left, right = (generator.normal(size=(4, 200, 50)) for _ in range(2))
        for side in (left, right):
            side[:, :, 40:] = autoregressive(generator, 0.97, (4, 200, 10))
        held = covered(left, right)
        slow.append(held[40:, 40:].mean())
        fast.append(held[:40, :40].mean())
    # 1,200 slow pairs, each worth some ten draws; with batches for the upper quartile it is 0.45.
    assert np.mean(slow) > 0.85
    assert 0.93 < np.mean(fast) < 0.98


def test_standard_errors_see_that_chains_disagree() -> None:
    """A tenth of the variance is a component that a chain never forgets: more draws of it tell nothing."""
    held = []
    for seed in range(20):
        generator = np.random.default_rng(seed)
        sides = [
            np.sqrt(0.9) * generator.normal(size=(4, 200, 20)) + np.sqrt(0.1) * generator.normal(size=(4, 1, 20))
            for _ in range(2)
        ]
        held.append(covered(*sides).mean())
    assert 0.88 < np.mean(held) < 0.98  # 0.74, if each chain is centred at its own mean first


@pytest.mark.parametrize("slow", [slice(0, 100), slice(100, 200)], ids=["slow first", "slow last"])
def test_errors_do_not_depend_on_the_buffer_or_the_order(slow: slice) -> None:
    generator = np.random.default_rng(0)
    left, right = (generator.normal(size=(4, 200, 200)) for _ in range(2))
    for side in (left, right):
        side[:, :, slow] = autoregressive(generator, 0.6, (4, 200, 100))
    wide, narrow = (
        estimate.covariance(left, right, standard_error=True, buffer_bytes=size) for size in (1 << 28, 1 << 21)
    )
    assert narrow.standard_error is not None
    assert wide.standard_error is not None
    np.testing.assert_allclose(narrow.standard_error, wide.standard_error, rtol=1e-9)
    assert narrow.degrees_of_freedom == wide.degrees_of_freedom


def test_the_share_between_chains_is_of_what_moved() -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(size=(4, 50, 6))
    still = np.concatenate([values, np.full((4, 50, 6), 0.25)], axis=2)
    share, with_still = (estimate.covariance(side, values).between_chain_share for side in (values, still))
    assert with_still == pytest.approx(share)
    streaming = estimate.StreamingCovariance(torch.zeros(12, dtype=torch.float64), torch.zeros(6, dtype=torch.float64))
    for chain in range(4):
        for draw in range(50):
            streaming.update(chain, torch.from_numpy(still[chain, draw]), torch.from_numpy(values[chain, draw]))
        streaming.finish(chain)
    assert streaming.estimate().between_chain_share == pytest.approx(share, rel=1e-6)

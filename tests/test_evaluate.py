"""Retraining banks and the metrics: planted answers, references by hand, and what goes wrong."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn

import jostle
from architectures import tiny
from jostle.attributors import (
    FirstOrder,
    exact_influence,
    gradient_similarity,
    query_difficulty,
    random_scores,
    subset_size,
)
from jostle.errors import EstimateWarning, RetrainingFailedWarning
from jostle.evaluate import (
    Bank,
    compare,
    lds,
    leave_one_out,
    leave_one_out_correlation,
    metrics,
    mislabel_detection,
    random_subsets,
    removal,
    removals,
    repeatability,
    retrain,
    self_influence,
)
from jostle.evaluate.report import draw_removal, draw_rows, read_scores
from jostle.evaluate.retraining import Measure
from jostle.scores import Scores
from test_commands import jostle_command

TRAIN, QUERIES = 60, 25


def planted(
    directory: Path, *, noise: float = 0.0, seeds: int = 1, subsets: int = 100, independent: bool = False
) -> tuple[Bank, Scores, np.ndarray]:
    """A bank whose losses are linear in the subset: difficulty + Σ of its members' scores + noise."""
    generator = np.random.default_rng(123)
    values = generator.normal(size=(TRAIN, QUERIES))
    difficulty = 100 * generator.random(QUERIES)
    chosen = random_subsets(TRAIN, subsets, independent=independent)
    bank = Bank.create(directory, chosen, queries=QUERIES, fingerprints={"train": "a", "query": "b"})
    exact = difficulty + chosen.members @ values
    for subset, seed in bank.todo(seeds):
        bank.store(subset, seed, {"loss": exact[subset] + noise * generator.normal(size=QUERIES)})
    return bank, Scores(values=values, method="planted"), difficulty


def test_a_planted_linear_model_has_lds_one_and_its_negative_minus_one(tmp_path: Path) -> None:
    bank, truth, _ = planted(tmp_path / "bank")
    found = lds(bank, truth)
    assert found.value == pytest.approx(1.0, abs=1e-6)
    assert found.standard_error < 1e-6
    assert len(found.each) == QUERIES
    assert lds(bank, Scores(values=-truth.values, method="wrong sign")).value == pytest.approx(-1.0, abs=1e-6)
    assert lds(bank, truth, correlation="pearson").value == pytest.approx(1.0, abs=1e-6)


def test_lds_is_the_mean_of_scipys_correlations(tmp_path: Path) -> None:
    bank, truth, _ = planted(tmp_path / "bank", noise=3.0, seeds=3)
    losses = bank.values().mean(1)
    predicted = np.array([truth.values[bank.subsets.indices(k)].sum(0) for k in range(len(bank))])
    by_query = [scipy.stats.spearmanr(predicted[:, j], losses[:, j])[0] for j in range(QUERIES)]
    by_subset = [scipy.stats.spearmanr(predicted[k], losses[k])[0] for k in range(len(bank))]
    np.testing.assert_allclose(lds(bank, truth).each, by_query, rtol=1e-5)
    assert lds(bank, truth, per="query").value == pytest.approx(np.mean(by_query), rel=1e-5)
    assert lds(bank, truth, per="subset").value == pytest.approx(np.mean(by_subset), rel=1e-5)


def test_a_resampled_correlation_is_that_of_columns_taken_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    left, right = generator.normal(size=(2, 9, 30))
    right += left + 1e4  # far from 0, where squares less squares lose digits
    weights, counts = (generator.multinomial(n, np.full(n, 1 / n), size=5).T.astype(float) for n in (30, 9))
    weights[:, 4] = 0
    weights[3, 4] = 30  # one column alone: nothing varies
    left[7] = 0.1  # whose mean is not 0.1 to the last digit
    found = metrics.correlations(left, right, weights)
    for row, resample in itertools.product(range(9), range(4)):
        often = weights[:, resample].astype(int)
        pair = np.repeat(left[row], often), np.repeat(right[row], often)
        assert found[row, resample] == pytest.approx(0.0 if row == 7 else np.corrcoef(*pair)[0, 1], rel=1e-7)
    assert not found[:, 4].any()
    assert not found[7].any()
    monkeypatch.setattr(metrics, "ROWS_AT_ONCE", 4)
    means = metrics._resampled_mean(left, right, weights, counts)
    np.testing.assert_allclose(means, (found * counts).sum(0) / counts.sum(0), rtol=1e-9)


@pytest.mark.parametrize("seeds", [1, 2])
def test_methods_are_measured_together_as_each_by_itself(
    tmp_path: Path, seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, truth, _ = planted(tmp_path / "bank", noise=3.0, seeds=seeds)
    noisy = truth.values + 2 * np.random.default_rng(5).normal(size=truth.values.shape)
    noisy[:, 3] = 0.1  # a query of which nothing is known
    given = {"truth": truth, "noisy": Scores(values=noisy, method="noisy")}
    by_itself = {
        name: [lds(bank, one, per=per, bootstrap=20) for per in ("query", "subset")] for name, one in given.items()
    }
    monkeypatch.setattr(metrics, "BLOCK_BYTES", 8 * QUERIES * 7)  # several blocks of training examples
    for row in compare(bank, given, controls=False, bootstrap=20).rows:
        for together, alone in zip((row.per_query, row.per_subset), by_itself[row.method], strict=True):
            assert together is not None
            np.testing.assert_allclose(together.each, alone.each, rtol=1e-9)
            np.testing.assert_allclose(together.replicates, alone.replicates, rtol=1e-9)
    assert by_itself["noisy"][0].each[3] == 0


def test_methods_against_another_one(tmp_path: Path) -> None:
    """The difference of two that err alike is known better than either is."""
    bank, truth, _ = planted(tmp_path / "bank", noise=3.0, subsets=40)
    generator = np.random.default_rng(5)
    noisy = truth.values + generator.normal(size=truth.values.shape)
    given = {"truth": truth, "worse": noisy, "as bad": noisy + 0.02 * generator.normal(size=noisy.shape)}
    report = compare(bank, given, against="worse", bootstrap=50)
    rows = {row.method: row for row in report.rows}
    assert rows["worse"].more is None
    for name in ("truth", "as bad"):
        more, expected = rows[name].more, lds(bank, given[name], bootstrap=50) - lds(bank, noisy, bootstrap=50)
        assert more is not None
        assert (more.value, more.standard_error) == pytest.approx((expected.value, expected.standard_error))
    better, level = rows["truth"].more, rows["as bad"].more
    assert better is not None
    assert level is not None
    assert better.interval[0] > 0
    assert level.interval[0] < 0 < level.interval[1]
    assert 20 * level.standard_error < rows["worse"].per_query.standard_error
    heading, *lines = str(report).splitlines()[2:9]
    place = heading.index("difference") + len("difference")
    half = (better.interval[1] - better.interval[0]) / 2
    assert lines[0][:place].endswith(f"  +{better.value:.3f} ± {half:.3f}")
    assert lines[1][place - 8 : place] == 8 * " "
    assert report.notes[-1] == "difference: how far the LDS per query is above that of worse, on the same resamples"
    assert report.to_dict()["methods"][0]["more"]["value"] == better.value
    figure = pytest.importorskip("matplotlib.figure").Figure()
    draw_rows(figure, report.rows, against="worse")
    titles, shown = [panel.get_title() for panel in figure.axes], figure.axes[1]
    assert titles[:2] == ["LDS per query, over subsets", "the same, less that of worse"]
    drawn = [float(bar.lines[0].get_xdata()[0]) for bar in shown.containers]
    assert drawn == pytest.approx([row.more.value for row in report.rows if row.more is not None])
    report.draw(tmp_path / "lds.png")
    with pytest.raises(
        jostle.InputError, match="against: got 'EK-FAC', expected one of the methods: truth, worse, as bad"
    ):
        compare(bank, given, against="EK-FAC")


def test_methods_say_what_they_took(tmp_path: Path) -> None:
    model, slow = fit(np.arange(40), 0), 0.2

    def slowly(network: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(slow)
        return nn.functional.cross_entropy(network(batch[0]), batch[1], reduction="none")

    begun = time.perf_counter()
    similar = gradient_similarity(model, TRAIN_SET, QUERY_SET, loss=slowly)
    took = time.perf_counter() - begun
    assert 2 * slow < similar.provenance["seconds"] <= took
    begun = time.perf_counter()
    products = FirstOrder(model, TRAIN_SET, QUERY_SET)
    made = time.perf_counter() - begun
    first = products.influence()
    assert 0 < first.provenance["seconds"] <= time.perf_counter() - begun
    assert first.provenance["seconds"] > 0.5 * made
    assert Scores.mean_of([first, first]).provenance["seconds"] == 2 * first.provenance["seconds"]
    run = jostle.attribute(
        model, TRAIN_SET, QUERY_SET, posterior=jostle.Posterior(n_beta=10, localization=10), chains=2, draws=8,
        sampler=jostle.SGLD(step_size=1e-3), batch_size=8, progress=False, out=tmp_path / "run",
    )  # fmt: skip
    bank = retrain(fit, TRAIN_SET, QUERY_SET, subsets=random_subsets(40, 6), out=tmp_path / "bank")
    methods = {"similar": similar, "BIF": run.influence(), "array": similar.values, "told": similar}
    rows = {row.method: row.seconds for row in compare(bank, methods, seconds={"told": 7.0}, bootstrap=5).rows}
    assert rows["similar"] == similar.provenance["seconds"]
    assert rows["BIF"] == sum(run.manifest["seconds"].values()) > 0
    assert rows["told"] == 7.0
    assert rows["array"] is rows["random"] is None


def test_controls_tell_the_two_definitions_apart(tmp_path: Path) -> None:
    """What knows only how hard a query is gets nothing per query, and nearly everything per subset."""
    bank, _, difficulty = planted(tmp_path / "bank", noise=1.0)
    knowing = query_difficulty(difficulty, TRAIN)
    headline = lds(bank, knowing)
    assert abs(headline.value) < 3 * headline.standard_error < 0.12
    assert lds(bank, knowing, per="subset").value > 0.9
    shuffled = random_scores(TRAIN, QUERIES)
    for per in ("query", "subset"):
        found = lds(bank, shuffled, per=per)
        assert abs(found.value) < 3 * found.standard_error


def test_shuffled_scores_give_nothing(tmp_path: Path) -> None:
    bank, truth, _ = planted(tmp_path / "bank")
    shuffled = Scores(values=np.random.default_rng(1).permutation(truth.values), method="shuffled")
    found = lds(bank, shuffled)
    assert abs(found.value) < 3 * found.standard_error
    assert found.interval[0] < 0 < found.interval[1]


def test_the_size_of_subsets_is_a_control_where_sizes_differ(tmp_path: Path) -> None:
    """Losses that fall with the number of examples, whichever they are."""
    for independent in (False, True):
        chosen = random_subsets(TRAIN, 200, independent=independent)
        assert (len(set(chosen.members.sum(1))) > 1) == independent
        bank = Bank.create(tmp_path / f"bank {independent}", chosen, queries=4, fingerprints={})
        noise = np.random.default_rng(0).normal(size=(200, 4))
        for k in range(200):
            bank.store(k, 0, {"loss": -chosen.members[k].sum() + noise[k]})
        found = lds(bank, subset_size(TRAIN, 4))
        if independent:
            assert found.value > 0.9
        else:
            assert abs(found.value) < 3 * found.standard_error


def test_seeds_count_once_in_an_error(tmp_path: Path) -> None:
    """A subset that is drawn brings the noise of its seeds: the error is that of a bank of their means."""
    bank, truth, _ = planted(tmp_path / "bank", noise=6.0, seeds=3, subsets=40)
    means = Bank.create(tmp_path / "means", bank.subsets, queries=QUERIES, fingerprints={})
    for subset, losses in enumerate(bank.values().astype(np.float64).mean(1)):
        means.store(subset, 0, {"loss": losses})
    for per in ("query", "subset"):
        several, one = (lds(each, truth, per=per, bootstrap=50) for each in (bank, means))
        np.testing.assert_allclose(several.replicates, one.replicates, atol=1e-3)
        assert several.standard_error == pytest.approx(one.standard_error, rel=0.02)


@pytest.mark.parametrize(("shared", "lowest", "highest"), [(1.0, 0.9, 1.25), (0.0, 0.9, 1.15)])
def test_the_standard_error_is_that_of_repeated_experiments(
    tmp_path: Path, shared: float, lowest: float, highest: float
) -> None:
    """The spread of the LDS over 40 banks with other subsets, queries and noise, against the bootstrap's guess.

    Where a retraining is good or bad for all queries together, as in reality, the guess is right. Noise of each query
    on its own is counted once for queries, once for subsets and once for both: up to √3 too much, never too little.
    So it is for what a worse method is worse by, in which most of what a bank has by chance falls out.
    """
    found, differences = [], []
    for repeat in range(40):
        generator = np.random.default_rng(repeat)
        chosen = random_subsets(TRAIN, 50, seed=repeat)
        bank = Bank.create(tmp_path / str(repeat), chosen, queries=12, fingerprints={})
        values = generator.normal(size=(TRAIN, 12))
        together, alone = generator.normal(size=(2, 50, 1)), generator.normal(size=(2, 50, 12))
        noise = generator.uniform(1, 12, size=12) * (together if shared else alone)
        for seed in (0, 1):
            for k in range(50):
                bank.store(k, seed, {"loss": values[chosen.members[k]].sum(0) + noise[seed, k]})
        found.append(lds(bank, Scores(values=values, method="planted"), bootstrap=60))
        worse = values + 0.7 * generator.normal(size=values.shape)
        differences.append(found[-1] - lds(bank, Scores(values=worse, method="worse"), bootstrap=60))
    for measured in (found, differences):
        spread = np.std([one.value for one in measured], ddof=1)
        guessed = np.mean([one.standard_error for one in measured])
        assert lowest < guessed / spread < highest
        middle = np.mean([one.value for one in measured])
        assert middle > 0.05
        assert np.mean([one.interval[0] < middle < one.interval[1] for one in measured]) > 0.85
    pairs = zip(differences, found, strict=True)
    assert np.mean([difference.standard_error < 0.8 * one.standard_error for difference, one in pairs]) > 0.8
    nothing = found[0] - found[0]
    assert (nothing.value, nothing.standard_error) == (0, 0)
    last = Scores(values=values, method="planted")
    others: list[Any] = [{"bootstrap": 59}, {"bootstrap": 60, "seed": 1}, {"bootstrap": 60, "per": "subset"}]
    for other in [found[0], *(lds(bank, last, **options) for options in others)]:
        with pytest.raises(jostle.InputError, match="what was not resampled alike"):
            _ = found[-1] - other


def test_subsets_may_have_different_numbers_of_seeds(tmp_path: Path) -> None:
    """A subset with one finished seed of two has nothing to resample, and counts as much as the others."""
    bank = Bank.create(tmp_path / "bank", random_subsets(TRAIN, 4), queries=6, fingerprints={})
    generator = np.random.default_rng(0)
    values = generator.normal(size=(TRAIN, 6))
    for subset, seed in ((0, 0), (0, 1), (1, 0), (2, 1), (3, 1)):
        noise = generator.normal(size=6)
        bank.store(subset, seed, {"loss": values[bank.subsets.members[subset]].sum(0) + noise})
    found = lds(bank, Scores(values=values, method="planted"), bootstrap=500)
    losses = np.nanmean(bank.values(), axis=1)
    predicted = bank.subsets.members @ values
    expected = [scipy.stats.spearmanr(predicted[:, j], losses[:, j])[0] for j in range(6)]
    np.testing.assert_allclose(found.each, expected, rtol=1e-5)
    assert 0 < found.standard_error < 1


def test_repeatability(tmp_path: Path) -> None:
    assert repeatability(planted(tmp_path / "one")[0]) is None
    assert repeatability(planted(tmp_path / "quiet", seeds=2)[0]) == pytest.approx(1.0, abs=1e-5)
    loud = repeatability(planted(tmp_path / "loud", noise=1000.0, seeds=2)[0])
    assert loud is not None
    assert abs(loud) < 0.1


def test_queries_are_as_they_were_after_a_model_that_changes_its_input() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(2, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            inputs -= 0.5
            return self.out(inputs)

    inputs, labels = points(8, seed=0)
    before, model = inputs.clone(), Shifted()
    measure = Measure((inputs, labels), jostle.losses.classification(), {}, batch_size=3)
    first, second = (measure(model)["loss"] for _ in range(2))
    expected = nn.functional.cross_entropy(model.out(before - 0.5), labels, reduction="none")
    np.testing.assert_allclose(first, expected.detach(), rtol=1e-5)
    np.testing.assert_array_equal(first, second)
    assert torch.equal(inputs, before)


def test_subsets_are_nested_by_seed_and_of_one_size() -> None:
    few, more, other = random_subsets(40, 5), random_subsets(40, 9), random_subsets(40, 5, seed=1)
    np.testing.assert_array_equal(few.members, more.members[:5])
    assert (few.members != other.members).any()
    assert (more.members.sum(1) == 20).all()
    inclusion = random_subsets(50, 400, share=0.3, independent=True).members
    assert inclusion.mean() == pytest.approx(0.3, abs=4 * np.sqrt(0.21 / inclusion.size))


# A small classifier that is trained in milliseconds.


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    centers = torch.tensor([[1.0, 0.0], [-1.0, 1.0], [0.0, -1.0]])
    return centers[labels] + 0.9 * torch.randn(count, 2, generator=generator), labels


TRAIN_SET, QUERY_SET = points(40, 1), points(12, 2)


def fit(indices: np.ndarray, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Linear(2, 3)
    X, y = TRAIN_SET[0][indices], TRAIN_SET[1][indices]
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=60)

    def closure() -> Any:
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(model(X), y, reduction="sum") + sum(
            parameter.square().sum() for parameter in model.parameters()
        )
        value.backward()
        return value

    optimizer.step(closure)
    return model


def sometimes_fails(indices: np.ndarray, seed: int) -> Any:
    if 0 in indices and 1 in indices:
        raise RuntimeError("out of\nmemory")
    if 2 in indices and 3 in indices:
        return nn.Linear(2, 4)
    if 4 in indices and 5 in indices:
        return None
    if 6 in indices and 7 in indices:
        raise SystemExit("no GPU")
    return fit(indices, seed)


def test_a_bank_keeps_the_losses_of_the_models_and_never_repeats_one(tmp_path: Path) -> None:
    subsets = random_subsets(40, 6)
    seen: list[tuple[int, ...]] = []

    def counted(indices: np.ndarray, seed: int) -> nn.Module:
        seen.append((*indices.tolist(), seed))
        if len(seen) == 4:
            raise KeyboardInterrupt
        return fit(indices, seed)

    with pytest.raises(KeyboardInterrupt):
        retrain(counted, TRAIN_SET, QUERY_SET, subsets=subsets, out=tmp_path / "bank", seeds=2)
    assert Bank(tmp_path / "bank").summary()["finished"] == 3
    bank = retrain(counted, TRAIN_SET, QUERY_SET, subsets=subsets, out=tmp_path / "bank", seeds=2)
    assert len(seen) == 13  # twelve, and the one that was interrupted
    assert bank.values().shape == (6, 2, 12)
    for subset in (0, 5):
        with torch.no_grad():
            logits = fit(subsets.indices(subset), 1)(QUERY_SET[0])
        expected = nn.functional.cross_entropy(logits, QUERY_SET[1], reduction="none")
        np.testing.assert_allclose(bank.values()[subset, 1], expected, rtol=1e-5)
    assert not list((tmp_path / "bank").rglob(".*"))
    # More subsets and seeds go on from there.
    more = retrain(counted, TRAIN_SET, QUERY_SET, subsets=random_subsets(40, 7), out=tmp_path / "bank", seeds=3)
    assert len(seen) == 13 + 3 * 7 - 12
    assert np.isfinite(more.values()).all()


def test_a_time_budget_ends_between_two_retrainings(tmp_path: Path) -> None:
    bank = retrain(fit, TRAIN_SET, QUERY_SET, subsets=random_subsets(40, 5), out=tmp_path / "bank", minutes=-1)
    assert bank.summary()["finished"] == 0
    assert len(bank.todo(1)) == 5


def test_failures_are_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    subsets = random_subsets(40, 30, share=0.4)
    with pytest.warns(RetrainingFailedWarning, match=r"failed, the first.*failures are kept.*retry=True\) tries"):
        bank = retrain(
            sometimes_fails, TRAIN_SET, QUERY_SET, subsets=subsets, out=tmp_path / "bank", like=fit(np.arange(9), 0)
        )
    reasons = {failure["subset"]: failure["reason"] for failure in bank.failures}
    raised = [failure for failure in bank.failures if failure["reason"].startswith("RuntimeError")]
    assert raised
    assert all("in sometimes_fails" in failure["traceback"] for failure in raised)
    for subset in range(30):
        has = subsets.members[subset]
        if has[0] and has[1]:
            assert reasons[subset] == "RuntimeError: out of memory"
        elif has[2] and has[3]:
            # Losses of four classes instead of three can be computed, but are those of something else.
            assert reasons[subset] == "a model of another shape: weight is [4, 2], expected [3, 2]"
        elif has[4] and has[5]:
            assert reasons[subset] == "train returned a NoneType, not a torch.nn.Module"
        elif has[6] and has[7]:
            assert reasons[subset] == "SystemExit: no GPU"
        else:
            assert subset not in reasons
    assert len(reasons) + bank.summary()["finished"] == 30
    assert {reason.split(":")[0] for reason in reasons.values()} == {
        "RuntimeError", "a model of another shape", "train returned a NoneType, not a torch.nn.Module", "SystemExit",
    }  # fmt: skip
    assert f"{len(reasons)} failed" in bank.summary()["text"]
    assert bank.todo(1) == []
    assert len(bank.todo(1, retry=True)) == len(reasons)
    # What is left can be measured.
    scores = gradient_similarity(fit(np.arange(40), 0), TRAIN_SET, QUERY_SET)
    assert np.isfinite(lds(bank, scores).value)


def test_a_mistake_that_is_mended_is_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def mistaken(indices: np.ndarray, seed: int) -> nn.Module:
        raise ValueError("no such column")

    def interrupted(indices: np.ndarray, seed: int) -> nn.Module:
        if seed:
            raise KeyboardInterrupt
        return sometimes_fails(indices, seed)

    subsets = random_subsets(40, 12, share=0.4)

    def call(train: Any, **more: Any) -> Bank:
        return retrain(train, TRAIN_SET, QUERY_SET, subsets=subsets, out=tmp_path, like=fit(np.arange(9), 0), **more)

    with pytest.warns(RetrainingFailedWarning, match="no such column"):
        assert call(mistaken).summary()["finished"] == 0
    with pytest.raises(KeyboardInterrupt):
        call(interrupted, seeds=2)
    bank = Bank(tmp_path)
    finished = bank.summary()["finished"]
    assert finished + len(bank.failures) == 12
    assert 0 < finished < 12
    said = f"jostle: {finished} of 24 retrainings finished, {12 - finished} failed"
    assert f"{said}, the first now: {bank.failures[0]['reason']}; the same call goes on" in capsys.readouterr().err
    with pytest.warns(RetrainingFailedWarning):  # what fails among others is not tried again
        assert call(fit).summary()["finished"] == finished


def test_a_model_with_other_weights_says_which(tmp_path: Path) -> None:
    bank = Bank.create(
        tmp_path / "bank", random_subsets(9, 2), queries=1, fingerprints={}, shapes={"weight": [3, 2], "bias": [3]}
    )
    begins = "a model of another shape: "
    assert bank.require_shapes({"0.weight": [3, 2]}) == f"{begins}it has no weight, expected one of shape [3, 2]"
    more = {"weight": [3, 2], "bias": [3], "scale": [3]}
    assert bank.require_shapes(more) == f"{begins}it has a scale, expected none"
    assert bank.require_shapes({"weight": [3, 2], "bias": [3]}) is None


def test_how_many_are_finished_is_shown_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []

    @contextlib.contextmanager
    def telling(show: bool) -> Iterator[Any]:
        yield told.append if show else lambda what: None

    def fails_with_seed_one(indices: np.ndarray, seed: int) -> nn.Module:
        if seed == 1 and 0 in indices:
            raise RuntimeError("no memory")
        model = fit(indices, seed)
        if seed == 1:
            model.load_state_dict({name: torch.full_like(one, torch.nan) for name, one in model.state_dict().items()})
        return model

    def call(train: Any, *, seeds: int, **options: Any) -> Bank:
        return retrain(
            train,
            TRAIN_SET,
            QUERY_SET,
            subsets=leave_one_out(40, [0, 1]),
            out=tmp_path / "bank",
            seeds=seeds,
            **options,
        )

    with monkeypatch.context() as patched:
        patched.setattr("jostle.evaluate.retraining.telling", telling)
        call(fit, seeds=1)
        assert told == [f"{done} of 2 retrainings finished" for done in range(3)]
        told.clear()
        with pytest.warns(RetrainingFailedWarning):
            call(fails_with_seed_one, seeds=2)  # one raises, of one the losses are not finite
        failed = (
            "",
            ", 1 failed: a loss that is not finite in float32",
            ", 2 failed, the first now: a loss that is not finite in float32",
        )
        assert told == [f"2 of 4 retrainings finished{words}" for words in failed]
        told.clear()
        with pytest.warns(RetrainingFailedWarning):
            call(fit, seeds=2, progress=False)
        assert not told
        with pytest.warns(RetrainingFailedWarning):
            call(fit, seeds=3)  # what failed before is left out
        assert told[-1] == "4 of 6 retrainings finished, 2 failed"
    assert not capsys.readouterr().err
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    call(fit, seeds=3, retry=True)
    captured = capsys.readouterr()
    assert "6 of 6 retrainings finished" in captured.err
    assert not captured.out


def test_a_bank_in_half_precision(tmp_path: Path) -> None:
    bank = Bank.create(tmp_path / "bank", random_subsets(10, 2), queries=3, fingerprints={}, dtype="float16")
    bank.store(0, 0, {"loss": np.array([0.1234567, 1e-3, 20.0])})
    bank.store(1, 0, {"loss": np.array([1e6, 1.0, 2.0])})
    np.testing.assert_allclose(bank.values()[0, 0], [0.1234567, 1e-3, 20.0], rtol=1e-3)
    assert bank.failures[0]["reason"] == "a loss that is not finite in float16"
    assert (tmp_path / "bank" / "retrainings" / "00000-0.safetensors").stat().st_size < 150


def test_a_bank_without_a_result_says_why(tmp_path: Path) -> None:
    bank = Bank.create(tmp_path / "bank", random_subsets(10, 2), queries=3, fingerprints={})
    bank.fail(1, 0, "no memory")
    with pytest.raises(jostle.InputError, match="without a finished retraining; the first of 1 failures: no memory"):
        bank.values()
    bank.store(0, 0, {"loss": np.zeros(4)})
    assert bank.failures[0]["reason"] == "losses of shape (4,) for 3 queries"


def test_an_observable_of_another_shape_is_a_failure(tmp_path: Path) -> None:
    scores = np.random.default_rng(0).normal(size=(50, 4))
    subsets = removals({"mine": scores}, queries=[0, 3], counts=[5], random=1)

    def filled(name: str, *sizes: int | None) -> Bank:
        bank = Bank.create(tmp_path / name, subsets, queries=4, fingerprints={})
        for row, size in enumerate(sizes):
            bank.store(row, 0, {"loss": np.full(4, row)} | ({} if size is None else {"margin": np.ones(size)}))
        return bank

    bank = filled("bank", 4, 4, 3, None)
    begins = "other observables: "
    assert [one["reason"] for one in bank.failures] == [
        f"{begins}margin is [3], expected [4]", f"{begins}it has no margin, expected one of shape [4]",
    ]  # fmt: skip
    np.testing.assert_array_equal(bank.values("margin")[:2, 0], np.ones((2, 4)))
    # The one that was first in time decides for whoever opens the bank, and the others go on.
    assert not Bank(tmp_path / "bank").store(2, 0, {"loss": np.zeros(4), "margin": np.ones(5)})
    assert all(Bank(tmp_path / "bank").store(row, 0, {"loss": np.ones(4), "margin": np.ones(4)}) for row in (2, 3))
    assert removal(bank).brittle == {"random": [0.0], "mine": [0.0]}
    with pytest.raises(jostle.InputError, match=r"margins of shape \(3,\), expected one for each of 4 queries"):
        removal(filled("short", 3, 3, 3, 3))
    # A bank of before shapes were kept: those that are there count.
    old = filled("old", 4)
    (tmp_path / "old" / "bank.json").write_text(json.dumps({**old.about, "observables": None}))
    assert not Bank(tmp_path / "old").store(1, 0, {"loss": np.zeros(4), "margin": np.ones(3)})


def test_other_observables_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    retrain(fit, TRAIN_SET, QUERY_SET, subsets=random_subsets(40, 2), out=tmp_path, observables={"margin": margin})
    with pytest.raises(jostle.InputError, match="got none, expected those of the bank: margin; choose another"):
        retrain(fit, TRAIN_SET, QUERY_SET, subsets=random_subsets(40, 3), out=tmp_path)
    assert not Bank(tmp_path).failures


def test_another_loss_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    def own(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def go_on(place: str, loss: Any) -> None:
        retrain(fit, TRAIN_SET, QUERY_SET, subsets=random_subsets(40, 2), out=tmp_path / place, loss=loss)

    smoothed, plain = jostle.losses.classification(label_smoothing=0.1), jostle.losses.classification()
    go_on("ours", None)
    go_on("ours", plain)
    differs = r"loss is Classification\(label_smoothing=0.1\), expected Classification\(label_smoothing=0.0\); choose"
    for other, words in ((smoothed, differs), (own, r"loss is a function of your own, expected Classification")):
        with pytest.raises(jostle.InputError, match=words):
            go_on("ours", other)
    go_on("own", own)
    go_on("own", own)
    with pytest.raises(jostle.InputError, match="expected a function of your own"):
        go_on("own", None)
    # Of a bank that was begun by hand, or by an older version, it is not known; of one without retrainings it may change.
    about = tmp_path / "own" / "bank.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "measure": None}))
    go_on("own", None)
    go_on("own", own)
    assert json.loads(about.read_text())["measure"] is None
    with pytest.raises(jostle.InputError, match="the first of"), pytest.warns(RetrainingFailedWarning):
        retrain(lambda indices, seed: None, TRAIN_SET, QUERY_SET, subsets=random_subsets(40, 2), out=tmp_path / "none",
                loss=own).values()  # fmt: skip
    go_on("none", None)


def test_a_bank_that_is_open_twice_has_one_of_everything(tmp_path: Path) -> None:
    """One process decides on shapes while another has added subsets, and both before they see the other's."""
    scores = np.random.default_rng(0).normal(size=(20, 3))

    def opened(*counts: int) -> Bank:
        subsets = removals({"mine": scores}, queries=[0], counts=counts, random=1)
        return Bank.create(tmp_path / "bank", subsets, queries=3, fingerprints={})

    few, more = opened(2), opened(2, 4)
    assert few.require_shapes({"weight": [3]}) is None
    assert more.require_shapes({"weight": [4]}) == "a model of another shape: weight is [4], expected [3]"
    again = Bank(tmp_path / "bank")
    assert (len(again), len(again.subsets.labels), again.about["shapes"]) == (5, 5, {"weight": [3]})
    assert len(opened(2)) == 5
    assert few.store(0, 0, {"loss": np.zeros(3), "margin": np.zeros(3)})
    assert not more.store(1, 0, {"loss": np.zeros(3)})


def test_processes_that_decide_at_once_agree(tmp_path: Path) -> None:
    """Of 16 threads with handles of their own, each with another shape, one is right."""
    Bank.create(tmp_path, random_subsets(20, 3), queries=1, fingerprints={})
    banks = [Bank(tmp_path) for _ in range(16)]
    together = threading.Barrier(16)

    def decide(place: int) -> str | None:
        together.wait()
        return banks[place].require_shapes({"weight": [place]})

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        said = [*pool.map(decide, range(16))]
    right = said.index(None)
    assert said.count(None) == 1
    assert {f"expected [{right}]" in str(one) for one in said if one} == {True}
    assert Bank(tmp_path).about["shapes"] == {"weight": [right]}


def test_numbers_of_numpy_and_a_beginning_that_was_interrupted(tmp_path: Path) -> None:
    scores = np.random.default_rng(0).normal(size=(20, 3))
    counts: Any = np.array([1, 5])
    subsets = removals({"mine": scores}, queries=[0, 1], counts=counts)
    assert Bank.create(tmp_path / "bank", subsets, queries=3, fingerprints={}).subsets.labels[-1]["k"] == 5
    for name in ("retrainings", "failures"):
        (tmp_path / "begun" / name).mkdir(parents=True)
    (tmp_path / "begun" / "subsets.npy").write_bytes(b"")
    (tmp_path / "begun" / ".bank.json.01ab23cd.partial").write_text("{")
    assert len(Bank.create(tmp_path / "begun", subsets, queries=3, fingerprints={})) == len(subsets)
    unwritable: Any = {"train": np.float32(1)}
    with pytest.raises(TypeError):
        Bank.create(tmp_path / "new", subsets, queries=3, fingerprints=unwritable)
    assert not (tmp_path / "new").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("")
    with pytest.raises(jostle.InputError, match="which holds something else"):
        Bank.create(tmp_path / "other", subsets, queries=3, fingerprints={})
    for values, words in ((np.zeros((20, 3)), "the same score for every"), (np.full((20, 3), np.nan), "not finite")):
        with pytest.raises(jostle.InputError, match=words):
            removals({"mine": values}, queries=[0], counts=[3])


def test_other_data_and_other_subsets_are_refused(tmp_path: Path) -> None:
    bank = retrain(fit, TRAIN_SET, QUERY_SET, subsets=random_subsets(40, 4), out=tmp_path / "bank")
    model = fit(np.arange(40), 0)
    with pytest.raises(jostle.InputError, match="the queries differ from those of the bank"):
        lds(bank, gradient_similarity(model, TRAIN_SET, points(12, 3)))
    with pytest.raises(jostle.InputError, match="got 40 × 5 numbers, expected 40 train × 12 query"):
        lds(bank, gradient_similarity(model, TRAIN_SET, points(5, 3)))
    run = jostle.attribute(model, points(40, 9), QUERY_SET, draws=4, chains=1, progress=False)
    with pytest.raises(jostle.InputError, match="the training data differ from those of the bank"):
        lds(bank, run.influence())
    for values, words in ((np.full((40, 12), 0.1), "the same score"), (np.full((40, 12), np.nan), "not finite")):
        with pytest.raises(jostle.InputError, match=words):
            lds(bank, Scores(values=values, method="mine"))
    with pytest.raises(jostle.InputError, match="a bank of other subsets"):
        retrain(fit, TRAIN_SET, QUERY_SET, subsets=random_subsets(40, 4, seed=1), out=tmp_path / "bank")
    for train, query, words in (
        (points(40, 9), QUERY_SET, "bank: the training data differ from those of the bank, expected the same examples"),
        (TRAIN_SET, points(12, 3), "bank: the queries differ from"),
        (points(40, 9), points(12, 3), "bank: the training data and queries differ from"),
        (TRAIN_SET, points(5, 3), "got 5 queries for .*bank, expected 12, as in the bank"),
    ):
        with pytest.raises(jostle.InputError, match=words):
            retrain(fit, train, query, subsets=random_subsets(40, 4), out=tmp_path / "bank")
    with pytest.raises(jostle.InputError, match=r"no readable bank\.json"):
        Bank(tmp_path)


def test_what_is_no_bank_and_no_scores_is_refused(tmp_path: Path) -> None:
    bank, truth, _ = planted(tmp_path / "bank", noise=3.0, subsets=20)
    # A bare matrix will do, as on the command line.
    assert lds(bank, truth.values, bootstrap=5).value == lds(bank, truth, bootstrap=5).value
    row = compare(bank, {"mine": truth.values}, controls=False, bootstrap=5).rows[0]
    assert (row.method, row.per_query.value) == ("mine", lds(bank, truth, bootstrap=5).value)
    with_name, bare = (removals({"mine": one}, queries=[1], counts=[3]) for one in (truth, truth.values))
    np.testing.assert_array_equal(bare.members, with_name.members)
    path: Any = str(tmp_path / "bank")
    values: Any = truth.values
    nothing: Any = None
    listed: Any = [truth]
    for ask in (
        lambda: compare(path, {}),
        lambda: lds(path, truth),
        lambda: leave_one_out_correlation(path, truth),
        lambda: removal(path),
        lambda: repeatability(path),
    ):
        with pytest.raises(jostle.InputError, match=r"bank: got '.*', expected a Bank; open it with Bank\('.*'\)"):
            ask()
    by_name = "scores: got a list, expected the scores of each method by its name; write {"
    matrix = "expected Scores, or a numpy array of (train, query) in which negative helps"
    for ask, words in (
        (lambda: lds(nothing, truth), "bank: got a NoneType, expected a Bank; open one with Bank(path)"),
        (lambda: compare(bank, listed), by_name),
        (lambda: removals(listed, queries=[0], counts=[1]), by_name),
        (lambda: removals({"mine": values[0]}, queries=[0], counts=[1]), "got shapes [(25,)], expected one or more"),
        (lambda: compare(bank, {"mine": values.tolist()}), f"scores of mine: got a list, {matrix}"),
        (lambda: lds(bank, values.tolist()), f"scores: got a list, {matrix}"),
        (lambda: lds(bank, values[:, :3]), "scores of array: got 60 × 3 numbers, expected 60 train × 25 query"),
        (lambda: compare(bank, {"mine": values[0]}), "scores of mine: got 25 numbers, expected 60 train × 25"),
        (lambda: lds(bank, values > 0), "got values of type bool, expected an array of numbers"),
    ):
        with pytest.raises(jostle.InputError) as raised:
            ask()
        assert words in str(raised.value)


def test_what_looks_like_a_mistake_is_said(tmp_path: Path) -> None:
    """Seeds or indices that a training does not use, and queries of which a method says nothing."""
    bank, planted_scores, _ = planted(tmp_path / "a", noise=0.1, seeds=2, subsets=10)
    assert not compare(bank, {"mine": planted_scores}).remarks
    values = planted_scores.values.copy()
    values[:, :3] = 1.0
    same, _, difficulty = planted(tmp_path / "b", seeds=2, subsets=10)
    found = compare(same, {"mine": values})
    assert found.remarks == [
        "all seeds of a subset have the same losses: does the training use its seed?",
        f"mine: 3 of {QUERIES} queries have one score for every training example, and count as an LDS of 0",
    ]
    assert str(found).endswith("LDS of 0")
    blind = Bank.create(tmp_path / "c", random_subsets(TRAIN, 5), queries=QUERIES, fingerprints={})
    for subset, seed in blind.todo(2):
        blind.store(subset, seed, {"loss": difficulty + seed})
    assert compare(blind, {"mine": planted_scores}).remarks == [
        "the losses are the same whatever the subset is: does the training use its indices?"
    ]


def test_reports_are_printed_as_tables(tmp_path: Path) -> None:
    bank, truth, _ = planted(tmp_path / "bank", noise=3.0, seeds=2, subsets=20)
    wrong = np.arange(TRAIN) % 6 == 0
    detection = mislabel_detection(-wrong.astype(float) - 0.01 * np.arange(TRAIN), wrong)
    assert (
        str(detection) == "AUROC 1.000 ± 0.000; of the wrong labels 60% in the first 10%, 100% in the first 20%, "
        "100% in the first 50%"
    )
    assert len(repr(detection)) < 200
    report = compare(bank, {"planted by hand": truth}, mislabels={"planted by hand": detection}, bootstrap=20)
    about, repeated, _, heading, *lines, _, last, _ = str(report).splitlines()
    assert about == "40 retrainings of 20 of 20 subsets, up to 2 seeds each"
    assert repeated == f"repeatability of their losses: {report.repeatability:.2f}"
    assert heading.split("  ")[0] == "method"
    names = [line.split("  ")[0] for line in lines]
    assert names == ["planted by hand", "random (control)", "query difficulty (control)", "subset size (control)"]
    for line, row in zip(lines, report.rows, strict=True):
        for title, value in (("LDS per query", row.per_query), ("LDS per subset", row.per_subset)):
            assert line[: heading.index(title) + len(title)].endswith(f" {value}")  # to the right
    assert lines[0].endswith(" 1.000 ± 0.000")
    assert last == "± is a 95 % interval"
    assert "mislabels" not in str(compare(bank, {"mine": truth}, bootstrap=20))
    alone = Bank.create(tmp_path / "alone", leave_one_out(TRAIN), queries=QUERIES, fingerprints={})
    for subset in range(TRAIN):
        alone.store(subset, 0, {"loss": -truth.values[subset]})
    printed = str(compare(alone, {"mine": truth}, controls=False, bootstrap=20)).splitlines()
    assert printed[2:4] == ["method  leave-one-out", "mine    1.000 ± 0.000"]


def test_controls_are_not_held_all_at_once(tmp_path: Path) -> None:
    """Of 47,500 training examples and 10,000 queries each has 3.8 GB."""
    train, queries = 1_000, 2_000
    bank = Bank.create(
        tmp_path / "bank", random_subsets(train, 4), queries=queries, fingerprints={"train": "a", "query": "b"}
    )
    generator = np.random.default_rng(0)
    for subset, seed in bank.todo(1):
        bank.store(subset, seed, {"loss": generator.normal(size=queries)})
    tracemalloc.start()
    found = compare(bank, {}, bootstrap=2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found.rows) == 3
    assert peak < 2.5 * train * queries * 8  # one, the next, and the block of it that is multiplied


def test_texts_without_a_common_word_have_no_bm25(tmp_path: Path) -> None:
    bank, truth, _ = planted(tmp_path / "bank", noise=3.0, subsets=20)
    for words, last in (([1, 2], "subset size"), ([3, 7], "BM25")):
        texts = [[1, 2] if index % 2 else words for index in range(TRAIN)], [[7, 8]] * QUERIES
        assert compare(bank, {"mine": truth}, texts=texts, bootstrap=5).rows[-1].method == last


def test_leave_one_out_against_exact_influence(tmp_path: Path) -> None:
    """Removing an example from a regularized regression: the influence function's home ground."""
    bank = retrain(fit, TRAIN_SET, QUERY_SET, subsets=leave_one_out(40), out=tmp_path / "bank")
    model = fit(np.arange(40), 0)
    # fit() minimizes Σℓ + ‖w‖²: n·H̄ + 2I.
    exact = exact_influence(model, TRAIN_SET, QUERY_SET, posterior=jostle.Posterior(n_beta=40, localization=2))
    found = leave_one_out_correlation(bank, exact)
    assert found.value > 0.97
    # The scale too: a removed example changes the loss by −scale·score, n·scale being n_beta.
    with torch.no_grad():
        full = nn.functional.cross_entropy(model(QUERY_SET[0]), QUERY_SET[1], reduction="none").numpy()
    change = bank.values()[:, 0] - full
    slope = (change * -exact.values).sum() / (exact.values**2).sum()
    assert 1.0 < slope < 1.3  # to first order 1; of 40 examples one has leverage, and is missed a little more
    with pytest.raises(jostle.InputError, match="those of leave_one_out"):
        leave_one_out_correlation(planted(tmp_path / "other")[0], exact)


def margin(model: nn.Module) -> Tensor:
    logits = model(QUERY_SET[0])
    own = logits.gather(1, QUERY_SET[1][:, None])[:, 0]
    others = logits.scatter(1, QUERY_SET[1][:, None], -torch.inf).max(1).values
    return own - others


def test_removing_what_helps_hurts_more_than_removing_blindly(tmp_path: Path) -> None:
    model = fit(np.arange(40), 0)
    exact = exact_influence(model, TRAIN_SET, QUERY_SET, posterior=jostle.Posterior(n_beta=40, localization=2))
    queries = [int(j) for j in np.flatnonzero(margin(model).detach() > 0)[:6]]
    subsets = removals({"exact": exact}, queries=queries, counts=[4, 12], random=3)
    helpful = exact.top(queries[0], k=4).helpful
    row = next(i for i, one in enumerate(subsets.labels) if one["method"] == "exact" and one["query"] == queries[0])
    assert set(np.flatnonzero(~subsets.members[row])) == {entry.index for entry in helpful}
    bank = retrain(fit, TRAIN_SET, QUERY_SET, subsets=subsets, out=tmp_path / "bank", observables={"margin": margin})
    found = removal(bank)
    assert found.counts == [4, 12]
    for k in (0, 1):
        ours, blind = found.rise["exact"][k], found.rise["random"][k]
        assert ours.value - blind.value > 2 * np.hypot(ours.standard_error, blind.standard_error)
    # By hand, for one of them.
    by_hand = bank.values()[row, 0, queries[0]] - bank.values()[0, 0, queries[0]]
    assert found.rise["exact"][0].each[0] == pytest.approx(by_hand)
    assert found.brittle is not None
    assert found.fewest is not None
    margins = bank.values("margin")[:, 0]
    for query in queries:
        rows = [i for i, one in enumerate(subsets.labels) if one["method"] == "exact" and one["query"] == query]
        flipped = [k for k, row in zip([4, 12], rows, strict=True) if margins[row, query] < 0]
        assert found.fewest["exact"][query] == (flipped[0] if flipped else None)
    assert found.brittle["exact"][1] >= found.brittle["random"][1]


def test_equal_lines_of_removals_lie_beside_each_other() -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    counts, methods = [1, 2, 160], ["random", "one", "other"]
    rise, share = [metrics.Measured(float(k), 0.5) for k in range(3)], [0.0, 0.1, 0.1]
    found = metrics.Removal(counts, dict.fromkeys(methods, rise), dict.fromkeys(methods, share), None, 7)
    figure = figure_module.Figure()
    draw_removal(figure, found)
    rises, shares = figure.axes
    for panel in (rises, shares):
        assert [tick.get_text() for tick in panel.get_xticklabels()] == ["1", "2", "160"]
    places = np.array([line.get_xdata() for line in shares.get_lines()])
    assert (np.diff(places, axis=0) > 0.05).all()
    assert np.abs(places - shares.get_xticks()).max() < 0.3  # nearer to their own number than to the next
    np.testing.assert_allclose([one.lines[0].get_xdata() for one in rises.containers], places)
    assert shares.get_ylabel() == "share of n = 7 right answers turned wrong"


def test_blind_removals_turn_answers_each_by_itself(tmp_path: Path) -> None:
    """Two of three repeats are wrong, though their mean margin is right; one that is missing does not count."""
    scores = {"mine": Scores(values=np.random.default_rng(0).normal(size=(8, 2)), method="mine")}
    subsets = removals(scores, queries=[0, 1], counts=[2, 4], random=3)
    bank = Bank.create(tmp_path / "bank", subsets, queries=2, fingerprints={})
    margins = {
        ("random", 2): [3.0, -1.0, 0.5],
        ("random", 4): [3.0, 1.0, -1.0],
        ("mine", 2): [1.0],
        ("mine", 4): [-2.0],
    }
    for row, label in enumerate(subsets.labels):
        given = 1.0 if not label["k"] else margins[label["method"], label["k"]][label.get("repeat", 0)]
        if (label["k"], label.get("repeat")) != (4, 0):
            bank.store(row, 0, {"loss": np.full(2, row), "margin": np.array([given, -1.0])})
    found = removal(bank)
    assert found.right == 1
    _, printed = str(found).split("\n\n")
    assert [line.split() for line in printed.splitlines()] == [
        ["turned", "wrong,", "of", "1", "right", "2", "or", "fewer", "4", "or", "fewer"],
        ["random", "(control)", "33%", "100%"],
        ["mine", "0%", "100%"],
    ]
    assert str(compare(bank, {})).splitlines()[2].split() == [
        "rise", "in", "the", "query's", "loss", "2", "removed", "4", "removed",
    ]  # fmt: skip
    assert found.brittle == {"random": [pytest.approx(1 / 3), 1.0], "mine": [0.0, 1.0]}
    assert found.fewest == {"random": {0: 4, 1: None}, "mine": {0: 4, 1: None}}  # query 1 was never right
    with pytest.raises(jostle.InputError, match="use removal"):
        lds(bank, scores["mine"])
    renamed = removals({"yours": scores["mine"]}, queries=[0, 1], counts=[2, 4], random=3)
    with pytest.raises(jostle.InputError, match="a bank of other subsets"):
        Bank.create(tmp_path / "bank", renamed, queries=2, fingerprints={})
    with pytest.raises(jostle.InputError, match="indices from 0 to 1"):
        removals(scores, queries=[2], counts=[2])
    with pytest.raises(jostle.InputError, match="that is a control's"):
        removals({"random": scores["mine"]}, queries=[0], counts=[2])


def test_a_removal_that_failed_says_nothing_of_brittleness(tmp_path: Path) -> None:
    """Of four queries one has turned wrong and one has not; of two nothing is known, at first or at all."""
    scores = np.random.default_rng(0).normal(size=(30, 4))
    subsets = removals({"mine": scores, "yours": -scores}, queries=range(4), counts=[5, 10], random=2)
    bank = Bank.create(tmp_path / "bank", subsets, queries=4, fingerprints={})
    for row, label in enumerate(subsets.labels):
        method, query, k = label["method"], label.get("query", 0), label["k"]
        if (method, query) == ("mine", 3) or (method, query, k) == ("mine", 2, 5) or (method, k) == ("yours", 10):
            bank.fail(row, 0, "out of memory")
        else:
            wrong = method == "mine" and query in (0, 2)
            bank.store(row, 0, {"loss": np.full(4, float(k)), "margin": np.full(4, -1.0 if wrong else 1.0)})
    with pytest.raises(jostle.InputError, match="no finished removal of 10 by yours"):
        removal(bank)
    row = next(row for row, label in enumerate(subsets.labels) if (label["method"], label["k"]) == ("yours", 10))
    bank.store(row, 0, {"loss": np.full(4, 10.0), "margin": np.array([-1.0, 1.0, 1.0, 1.0])})
    for failed in range(row):
        if subsets.labels[failed]["method"] == "yours" and subsets.labels[failed]["query"] == 0:
            bank._path("retrainings", failed, 0).unlink()
    found = removal(bank)
    assert found.brittle is not None
    assert found.fewest is not None
    assert found.brittle["mine"] == [0.5, pytest.approx(2 / 3)]
    assert found.brittle["yours"] == [0.0, 1.0]
    assert found.fewest["mine"] == {0: 5, 1: None, 2: 10, 3: None}
    # A query that was wrong at first is none that could turn: without another nothing is known.
    alone = Bank.create(tmp_path / "wrong", subsets, queries=4, fingerprints={})
    for row in range(len(subsets)):
        alone.store(row, 0, {"loss": np.full(4, float(row)), "margin": np.full(4, -1.0)})
    report = compare(alone, {})
    assert report.removed is not None
    assert report.removed.right == 0
    assert report.removed.brittle is not None
    assert all(np.isnan(share) for shares in report.removed.brittle.values() for share in shares)
    assert str(report).split("turned wrong, of 0 right")[1].count("?") == 6
    assert "NaN" not in json.dumps(report.to_dict())


def planted_removal(
    directory: Path, seed: int, *, seeds: int, queries: int = 20, repeats: int = 5, fails: tuple[int, ...] = ()
) -> Bank:
    """A bank in which blind removals do nothing and others raise the loss by 0.3; retraining is good or bad for all."""
    generator = np.random.default_rng(seed)
    scores = generator.normal(size=(50, queries))
    subsets = removals({"mine": scores}, queries=range(queries), counts=[5], random=repeats, seed=seed)
    bank = Bank.create(directory, subsets, queries=queries, fingerprints={})
    gain = 0.3 + 0.1 * generator.normal(size=queries)
    for (row, label), index in itertools.product(enumerate(subsets.labels), range(seeds)):
        losses = 2 + 0.1 * generator.normal() + 0.05 * generator.normal(size=queries)
        if label["method"] == "mine":
            losses[label["query"]] += gain[label["query"]]
        if row not in fails:
            bank.store(row, index, {"loss": losses})
    return bank


@pytest.mark.parametrize("seeds", [1, 2])
def test_errors_of_removals_are_those_of_repeated_experiments(tmp_path: Path, seeds: int) -> None:
    """Every rise is above one training on all examples, whose luck all share; it falls out of a difference."""
    found: dict[str, list[metrics.Measured]] = {"random": [], "mine": [], "difference": []}
    for repeat in range(60):
        rise = removal(planted_removal(tmp_path / str(repeat), repeat, seeds=seeds), bootstrap=100).rise
        found["mine"] += rise["mine"]
        found["random"] += rise["random"]
        found["difference"].append(rise["mine"][0] - rise["random"][0])
    for name, truth in (("random", 0.0), ("mine", 0.3), ("difference", 0.3)):
        spread = np.std([one.value for one in found[name]], ddof=1)
        guessed = np.mean([one.standard_error for one in found[name]])
        assert 0.8 < guessed / spread < 1.3
        assert np.mean([one.interval[0] < truth < one.interval[1] for one in found[name]]) > 0.85
        assert np.mean([one.value for one in found[name]]) == pytest.approx(truth, abs=0.05)
    apart, below = (np.mean([one.standard_error for one in found[name]]) for name in ("difference", "mine"))
    assert apart < 0.8 * below
    assert found["mine"][0].each.shape == (20,)
    with pytest.raises(jostle.InputError, match="what was not resampled alike"):
        _ = found["mine"][0] - found["mine"][1]


def test_errors_of_removals_that_cannot_be_known(tmp_path: Path) -> None:
    """One query and one seed; one blind removal; one query that finished. With seeds, one query has an error."""

    def errors(bank: Bank) -> list[float]:
        rise = removal(bank).rise
        return [rise[name][0].standard_error for name in ("random", "mine")]

    single = planted_removal(tmp_path / "single", 0, seeds=1, queries=1)
    assert np.isnan(errors(single)).all()
    assert str(removal(single).rise["mine"][0]).endswith(" ± ?")
    assert compare(single, {}).to_dict()["removal"]["rise"]["mine"][0]["interval"] is None
    blind, mine = errors(planted_removal(tmp_path / "seeds", 0, seeds=40, queries=1))
    # Two means of 40 seeds with 0.1 and 0.05 each; blind ones are 5 of those, and one.
    assert mine == pytest.approx(np.sqrt(2 * 0.0125 / 40), rel=0.25)
    assert 0.01 < blind < 0.03
    blind, mine = errors(planted_removal(tmp_path / "one", 0, seeds=2, repeats=1))
    assert np.isnan(blind)
    assert 0.04 < mine < 0.15
    blind, mine = errors(planted_removal(tmp_path / "finished", 0, seeds=1, fails=(*range(7, 26),)))
    assert np.isnan(mine)
    assert 0.04 < blind < 0.2


def test_mislabel_detection() -> None:
    generator = np.random.default_rng(0)
    wrong = np.zeros(200, bool)
    wrong[generator.permutation(200)[:30]] = True
    perfect = mislabel_detection(-wrong.astype(float), wrong)
    assert perfect.auroc.value == 1.0
    assert perfect.found_at(0.15) == pytest.approx(1.0)
    scores = -(wrong + generator.normal(size=200))
    found = mislabel_detection(scores, wrong)
    pairs = [float(a < b) for a in scores[wrong] for b in scores[~wrong]]
    assert found.auroc.value == pytest.approx(np.mean(pairs))
    assert found.found_at(1.0) == 1.0
    assert 0.02 < found.auroc.standard_error < 0.08
    blind = mislabel_detection(generator.normal(size=200), wrong).auroc
    assert abs(blind.value - 0.5) < 3 * blind.standard_error
    # One is inspected first and 99 tie, the 10 wrong ones among them: 9 more find 9/99 of those, in whatever order.
    tied, last = np.zeros(100), np.arange(100) >= 90
    tied[0] = -1
    for order in (slice(None), slice(None, None, -1)):
        found = mislabel_detection(tied[order], last[order])
        assert [found.found_at(share) for share in (0, 0.01, 0.1, 1)] == pytest.approx([0, 0, 9 / 99, 1])
    with pytest.raises(jostle.InputError, match="some, and not all"):
        mislabel_detection(scores, np.zeros(200, bool))
    with pytest.raises(jostle.InputError, match="other numbers than 0 and 1"):
        mislabel_detection(scores, np.arange(200) % 10)
    with pytest.raises(jostle.InputError, match="the same value for every example"):
        mislabel_detection(np.zeros(200), wrong)


def test_self_influence_is_the_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jostle.evaluate.metrics.BLOCK_BYTES", 8 * 2 * 40 * 7)  # seven examples at a time
    model = fit(np.arange(40), 0)
    run = jostle.attribute(
        model, TRAIN_SET, TRAIN_SET, posterior=jostle.Posterior(n_beta=20, localization=50),
        sampler=jostle.SGLD(step_size=1e-3), chains=2, draws=40, progress=False,
    )  # fmt: skip
    variances = -np.diag(run.influence().values)
    np.testing.assert_allclose(self_influence(run), -variances, rtol=1e-4)
    means = np.asarray(run.traces.losses("train")).mean((0, 1))
    np.testing.assert_allclose(self_influence(run, normalize=True), -variances / means, rtol=1e-4)


def test_self_influence_of_sequences() -> None:
    sequences = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16]]
    run = jostle.attribute(
        tiny("gpt2"), sequences, sequences, loss=jostle.losses.next_token(), chains=2, draws=5, progress=False,
        posterior=jostle.Posterior(n_beta=5, localization=100), sampler=jostle.SGLD(step_size=1e-3), batch_size=2,
    )  # fmt: skip
    np.testing.assert_allclose(self_influence(run), np.diag(run.influence().values), rtol=1e-3)


def test_a_dask_cluster_fills_the_same_bank(tmp_path: Path) -> None:
    """In a process of its own: a cluster starts others, which import what they are given."""
    (tmp_path / "task.py").write_text(TASK)
    script = f"""
import sys
sys.path[:0] = {[str(tmp_path), *sys.path]!r}

if __name__ == "__main__":
    import joblib, numpy as np
    from task import QUERY_SET, TRAIN_SET, fit
    from jostle.evaluate import random_subsets, retrain
    import dask
    from dask.distributed import Client, LocalCluster
    from distributed.utils import get_mp_context
    # Workers are forked from a process that has imported everything once.
    dask.config.set({{"distributed.worker.multiprocessing-method": "forkserver"}})
    get_mp_context().set_forkserver_preload(["distributed", "jostle.evaluate", "task"])
    subsets = random_subsets(20, 6)
    plain = retrain(fit, TRAIN_SET, QUERY_SET, subsets=subsets, out={str(tmp_path / "plain")!r})
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        with joblib.parallel_config(backend="dask"):
            dask = retrain(fit, TRAIN_SET, QUERY_SET, subsets=subsets, out={str(tmp_path / "dask")!r}, jobs=-1)
        done = client.run(lambda dask_worker: len(dask_worker.state.log))
    print(sum(count > 0 for count in done.values()))
    np.testing.assert_allclose(dask.values(), plain.values(), rtol=1e-5)
"""
    path = tmp_path / "script.py"
    path.write_text(script)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    result = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-1]) == 2  # both workers had something to do
    assert json.loads((tmp_path / "dask" / "bank.json").read_text())["shapes"] == {"weight": [3, 2], "bias": [3]}


def test_a_process_that_dies_is_a_failure_and_the_others_go_on(tmp_path: Path) -> None:
    """With as many processes as joblib's configuration says; in a process of its own, as for Dask."""
    (tmp_path / "task.py").write_text(TASK)
    script = f"""
import os, sys, warnings
from pathlib import Path
sys.path[:0] = {[str(tmp_path), *sys.path]!r}

if __name__ == "__main__":
    import joblib, multiprocessing
    from joblib.externals.loky.backend.context import set_start_method
    from task import QUERY_SET, TRAIN_SET, dies
    from jostle.evaluate import random_subsets, retrain
    warnings.simplefilter("ignore")
    # Every death ends both processes: the next ones, too, are forked from one that has imported everything once.
    set_start_method("forkserver")
    multiprocessing.get_context("forkserver").set_forkserver_preload(["jostle.evaluate", "task"])
    with joblib.parallel_config(backend="loky", n_jobs=2):
        retrain(dies, TRAIN_SET, QUERY_SET, subsets=random_subsets(20, 3), out={str(tmp_path / "bank")!r})
    print(os.getpid())
"""
    path = tmp_path / "script.py"
    path.write_text(script)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "PIDS": str(tmp_path)}
    result = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    bank = Bank(tmp_path / "bank")
    assert [(failure["subset"], failure["reason"][:16]) for failure in bank.failures] == [(0, "its process died")]
    assert bank.summary()["finished"] == 2
    processes = {path.suffix[1:] for path in tmp_path.glob("pid.*")}
    assert len(processes) > 1
    assert result.stdout.strip() not in processes


TASK = """
import os
import torch

generator = torch.Generator().manual_seed(0)
TRAIN_SET = torch.randn(20, 2, generator=generator), torch.randint(3, (20,), generator=generator)
QUERY_SET = torch.randn(5, 2, generator=generator), torch.randint(3, (5,), generator=generator)


def fit(indices, seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(TRAIN_SET[0][indices]), TRAIN_SET[1][indices]).backward()
        optimizer.step()
    return model


def dies(indices, seed):
    open(f"{os.environ['PIDS']}/pid.{os.getpid()}", "w").close()
    if indices[0] == 2:  # of three subsets the first
        os._exit(137)  # as what the kernel ends for its memory
    return fit(indices, seed)
"""


# The command.


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bank, a run and a file of scores of the same model and data."""
    path = tmp_path_factory.mktemp("evaluate")
    retrain(fit, TRAIN_SET, QUERY_SET, subsets=random_subsets(40, 40), out=path / "bank", seeds=2)
    model = fit(np.arange(40), 0)
    exact_influence(model, TRAIN_SET, QUERY_SET, posterior=jostle.Posterior(n_beta=40, localization=2)).save(
        path / "exact.safetensors"
    )
    jostle.attribute(
        model, TRAIN_SET, QUERY_SET, posterior=jostle.Posterior(n_beta=40, localization=2), sampler=jostle.SGLD(step_size=0.02),
        chains=4, draws=100, burn_in=100, thin=10, progress=False, out=path / "run",
    )  # fmt: skip
    return path


def test_the_command_prints_methods_and_controls(place: Path) -> None:
    wrong = np.arange(40) < 5
    np.save(place / "wrong.npy", wrong)
    result = jostle_command(
        "evaluate", place / "bank", place / "run", f"mine={place / 'exact.safetensors'}", "--figure", place / "lds.png",
        "--mislabelled", place / "wrong.npy", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    rows = {row["method"]: row for row in found["methods"]}
    assert list(rows) == ["BIF covariance", "BIF correlation", "mine", "random", "query difficulty", "subset size"]
    # Regularized logistic regression: exact influence and the BIF predict retraining on halves well.
    assert rows["mine"]["per_query"]["value"] > 0.85
    assert rows["BIF covariance"]["per_query"]["value"] > 0.75
    for name in ("random", "query difficulty", "subset size"):
        low, high = rows[name]["per_query"]["interval"]
        assert rows[name]["control"]
        assert low < 0 < high
    assert rows["query difficulty"]["per_subset"]["value"] > 0.7
    bank, exact = Bank(place / "bank"), Scores.load(place / "exact.safetensors")
    assert rows["mine"]["per_subset"]["value"] == pytest.approx(lds(bank, exact, per="subset").value)
    expected = mislabel_detection(self_influence(jostle.load(place / "run")), wrong).auroc.value
    assert rows["BIF covariance"]["mislabels"]["value"] == pytest.approx(expected)
    assert found["repeatability"] > 0.99  # a convex problem has one solution
    assert (place / "lds.png").read_bytes()[:4] == b"\x89PNG"
    printed = jostle_command("evaluate", place / "bank", place / "run", "--no-controls")
    assert f"{rows['BIF covariance']['per_query']['value']:.3f} ± " in printed.stdout
    assert "80 retrainings of 40 of 40 subsets, up to 2 seeds each" in printed.stdout
    assert "random" not in printed.stdout


def test_the_command_on_removals(place: Path) -> None:
    exact = Scores.load(place / "exact.safetensors")
    subsets = removals({"exact": exact}, queries=[0, 1, 2], counts=[3, 9], random=2)
    retrain(fit, TRAIN_SET, QUERY_SET, subsets=subsets, out=place / "removed", observables={"margin": margin})
    result = jostle_command("evaluate", place / "removed", "--figure", place / "removal.png")
    assert result.exit_code == 0, result.stderr
    found = removal(Bank(place / "removed"))
    assert f"{found.rise['exact'][1].value:.3f} ± " in result.stdout
    assert f"turned wrong, of {found.right} right" in result.stdout
    assert (place / "removal.png").stat().st_size > 5000
    refused = jostle_command("evaluate", place / "removed", place / "run")
    assert refused.exit_code == 2
    assert "the bank was made from them" in refused.stderr


def test_a_run_without_traces_is_read_without_kappa_and_says_so(place: Path, tmp_path: Path) -> None:
    jostle.attribute(
        fit(np.arange(40), 0), TRAIN_SET, QUERY_SET, chains=2, draws=4, keep="covariance", out=tmp_path / "sums",
        sampler=jostle.Gaussian(), posterior=jostle.Posterior(n_beta=0, localization=100), progress=False,
    )  # fmt: skip
    with pytest.warns(EstimateWarning, match="sums has no traces to read at a κ, and is read as it is"):
        scores, *_ = read_scores([str(tmp_path / "sums"), str(place / "run")], kappa=10.0)
    assert [name for name in scores if "κ" in name] == ["BIF run covariance, κ = 10", "BIF run correlation, κ = 10"]


def test_files_of_one_method_are_called_after_themselves(place: Path, tmp_path: Path) -> None:
    exact = place / "exact.safetensors"
    other = shutil.copy(exact, tmp_path / "later.safetensors")
    assert [*read_scores([str(exact)])[0]] == ["exact"]
    assert [*read_scores([str(exact), str(other)])[0]] == ["exact exact", "exact later"]
    assert [*read_scores([f"mine={exact}", str(other)])[0]] == ["mine", "exact later"]


def test_the_command_refuses_what_is_no_bank_or_no_scores(place: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "constant.npy", np.ones((40, 12)))
    np.save(tmp_path / "flat.npy", np.ones(40))
    for name in ("broken.npy", "broken.safetensors"):
        (tmp_path / name).write_text("no numbers")
    exact, flags = place / "exact.safetensors", tmp_path / "flags.npy"
    np.save(flags, np.arange(7) < 2)
    for arguments, words in (
        ([place / "run"], "no readable bank.json"),
        (
            [place / "bank", tmp_path / "nothing.csv"],
            "nothing.csv, which does not exist, expected the directory of a run",
        ),
        (
            [place / "bank", f"mine={tmp_path / 'constant.npy'}"],
            "scores of mine: got the same score for every training example",
        ),
        ([place / "bank", tmp_path / "flat.npy"], "got 40 numbers, expected 40 train × 12 query"),
        ([place / "bank", tmp_path / "broken.npy"], "which cannot be read"),
        ([place / "bank", tmp_path / "broken.safetensors"], "which cannot be read"),
        ([place / "bank", exact, exact], "two methods called 'exact'"),
        ([place / "bank", f"random={exact}"], "a method called 'random'"),
        ([place / "bank", "--figure", "a.txt"], "a name ending in .png, .svg, .pdf"),
        ([place / "bank", exact, "--kappa", "10"], "kappa: got files of scores to apply it to, expected a run"),
        ([place / "bank", exact, "--mislabelled", flags], "mislabelled: got files of scores to apply it to"),
        ([place / "bank", place / "run", "--mislabelled", flags], "got shape (7,), expected shape (40,)"),
    ):
        result = jostle_command("evaluate", *arguments)
        assert result.exit_code == 2
        assert words in result.stderr
        assert result.stderr.count("\n") == 1

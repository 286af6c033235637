"""What the retraining experiments share, and the comparisons that are built on it, in a tiny size."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import itertools
import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from experiments import (
    calibration,
    cifar10_retraining,
    draws_and_kappa,
    figures,
    halfway,
    holding,
    kept,
    language_retraining,
    mislabels,
    reading,
    resolution,
    samplers,
    steadied,
)
from experiments.figures import BEST, REFERENCE, _difference, _over_seeds, draw, row_of, shown_methods
from experiments.retraining import (
    FIRST_ORDER_AT,
    Budget,
    OutOfTimeError,
    Record,
    Setting,
    analysed_model,
    fill,
    is_judged_by,
    run,
    run_at,
)
from torch import nn

import jostle
from jostle.attributors import FirstOrder, gradient_similarity, layers_alike
from jostle.data.datasets import Data
from jostle.evaluate import Bank, lds, random_subsets
from jostle.models.functional import sample_means
from jostle.traces.store import SequenceLosses
from test_evaluate import QUERY_SET, TRAIN_SET, fit

BIF = {"n_beta": 40.0, "localization": 2.0, "step_size": 0.02, "chains": 2, "thin": 5, "batch_size": 40}


def setting(bank: Bank, draws: int) -> Setting:
    model = nn.Sequential(fit(np.arange(40), 0))
    return Setting(
        "all", model, TRAIN_SET, QUERY_SET, jostle.losses.classification(), {"0.5": bank},
        {"small": {**BIF, "draws": draws}}, methods=("gradients", "trak", "bif"),
    )  # fmt: skip


def filled(path: Path, record: Record, budget: Budget, subsets: int = 20, seeds: int = 1) -> Bank:
    fingerprints = {"train": Data(TRAIN_SET, "train").fingerprint(), "query": Data(QUERY_SET, "query").fingerprint()}
    return fill(
        path / "bank", random_subsets(40, subsets), fit, QUERY_SET, jostle.losses.classification(), fingerprints,
        seeds=seeds, budget=budget, record=record, batch_size=12, key="0.5",
    )  # fmt: skip


def test_scores_without_draws_and_with_the_spread_of_a_few(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.json", {})
    bank = filled(tmp_path, record, Budget(10))
    blind = {"n_beta": 0.0, "sampler": "gaussian", "localization": 2.0, "chains": 4, "draws": 100, "batch_size": 40}
    adam = {"0.5": {"total_rate": 2.0, "weight_decay": 0.1, "batch_size": 4}}
    few = replace(setting(bank, 100), bif={"blind": blind}, methods=("first-order",), adam=adam)
    run(few, tmp_path / "work", record, Budget(10))
    methods = record.content["measured"]["all"]["0.5"]["methods"]
    names = [name for name in methods if name.startswith("first order")]
    # As they are, with a spread, and of layers alike; and of Adam, which has been told a κ: covariances and correlations.
    assert len(names) == 2 * (3 * len(FIRST_ORDER_AT) + len(FIRST_ORDER_AT) + 1)
    assert all(is_judged_by("0.5", name) for name in names)
    assert [name for name in names if not is_judged_by("0.25", name)] == [
        name for name in names if name.endswith("of training 0.5")
    ]
    told = methods[f"{few.in_adam}, covariance, read at κ = that of training 0.5"]
    assert told["per_query"] > 0.6
    assert told["kappa"] not in FIRST_ORDER_AT
    assert all(methods[name]["per_query"] > 0.6 for name in names if name.endswith("read at κ = 10"))
    opened = jostle.load(tmp_path / "work" / "all" / "runs" / "spread_of_40_draws")
    assert len(opened.healthy_chains) * opened.draws == 40
    before = (tmp_path / "record.json").read_bytes()
    run(few, tmp_path / "work", record, Budget(10))  # nothing is left to do
    assert (tmp_path / "record.json").read_bytes() == before
    # Draws themselves, drawn toward what they tend to; gradients are part of their time.
    drawn = replace(few, methods=("bif",))
    run(drawn, tmp_path / "work", record, Budget(10))
    found = record.content["measured"]["all"]["0.5"]["methods"]["BIF blind, toward gradient cosines"]
    opened = jostle.load(tmp_path / "work" / "all" / "runs" / "blind")
    cosines = gradient_similarity(few.model, TRAIN_SET, QUERY_SET, cosine=True)
    expected = opened.influence(normalize=True, standard_error=True).toward(cosines)
    assert found["per_query"] == pytest.approx(lds(bank, expected).value)
    assert found["weights"] == pytest.approx([*expected.provenance["toward"]["weights"].values()], rel=1e-4)
    assert found["seconds"] > methods["BIF blind, correlation"]["seconds"]
    # The same in units in which layers count alike: other draws of their own directory, and their own cosines.
    alike = replace(
        few, methods=("gradients", "bif"), alike=True, only=("BIF blind, layers alike", "gradient cosine, layers alike")
    )
    run(alike, tmp_path / "work", record, Budget(10))
    methods = record.content["measured"]["all"]["0.5"]["methods"]
    model = layers_alike(few.model, TRAIN_SET)
    cosines = gradient_similarity(model, TRAIN_SET, QUERY_SET, cosine=True)
    opened = jostle.load(tmp_path / "work" / "all" / "runs" / "blind__layers_alike")
    expected = opened.influence(normalize=True, standard_error=True).toward(cosines)
    for name, scores in (
        ("BIF blind, layers alike, toward gradient cosines", expected),
        ("gradient cosine, layers alike", cosines),
    ):
        assert methods[name]["per_query"] == pytest.approx(lds(bank, scores).value)
    assert expected.values != pytest.approx(
        jostle.load(tmp_path / "work" / "all" / "runs" / "blind").influence(normalize=True).values, abs=0.1
    )


def test_scores_where_training_begins(tmp_path: Path) -> None:
    """A short step on a subset lowers losses by its gradients where it begins, and not by those of the trained model."""
    start = nn.Sequential(nn.Linear(TRAIN_SET[0].shape[1], 3))
    with torch.no_grad():
        start[0].weight.copy_(torch.randn(3, TRAIN_SET[0].shape[1], generator=torch.Generator().manual_seed(0)))

    def step(indices: np.ndarray, seed: int) -> nn.Module:
        model = copy.deepcopy(start)
        X, y = (part[indices] for part in TRAIN_SET)
        nn.functional.cross_entropy(model(X), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
        return model

    record, budget = Record(tmp_path / "record.json", {}), Budget(10)
    fingerprints = {"train": Data(TRAIN_SET, "train").fingerprint(), "query": Data(QUERY_SET, "query").fingerprint()}
    bank = fill(
        tmp_path / "bank", random_subsets(40, 20), step, QUERY_SET, jostle.losses.classification(), fingerprints,
        seeds=1, budget=budget, record=record, batch_size=12, key="0.5",
    )  # fmt: skip
    jobs = ["first order, 2 labels", "first order, 2 labels, metric of Adam"]
    if importlib.util.find_spec("kronfluence") is not None:
        jobs.append("EK-FAC, damping 1e+06")  # as much as that leaves gradients
    asked = replace(
        setting(bank, 1), bif={}, methods=("first-order", "ekfac"), dampings=(1e6,), only=jobs,
        sgd={"0.5": {"total_rate": 0.05}}, adam={"0.5": {"total_rate": 0.05, "batch_size": 20}},
    )  # fmt: skip
    with pytest.raises(SystemExit, match="it is not known what is trained again, or how"):
        asked.at(0.0)
    asked = replace(asked, start=start, along=lambda part: step(np.arange(round(40 * part)), 0).train())
    run_at((1.0, 0.0), replace(asked, keep=tmp_path / "kept"), tmp_path / "work", record, budget, together=True)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["bank-all-0.5.npz"]  # it is the same for all parts
    between = asked.at(0.5)
    assert between.name == f"{asked.name}, after 0.5 of a training on all"
    assert torch.equal(weights_of(between.model), weights_of(step(np.arange(20), 0)))
    assert not between.model.training
    trained, begun = (
        record.content["measured"][name]["0.5"]["methods"] for name in (asked.name, f"{asked.name}, at the start")
    )
    for job in jobs:
        rest = ", covariance, read at κ = that of training 0.5" if job.startswith("first order") else ""
        least = 0.8 if "Adam" in job else 0.98  # the step was not Adam's; losses have half precision
        assert begun[f"{job}{rest}"]["per_query"] > max(least, trained[f"{job}{rest}"]["per_query"])
    both = record.content["measured"][f"{asked.name}, at 1 and 0 together"]["0.5"]["methods"]
    assert both.keys() == begun.keys() - {"random", "query difficulty", "subset size"}
    plain, told = f"{jobs[0]}, covariance, read at κ = ", "that of training 0.5"
    limits = [FirstOrder(model, TRAIN_SET, QUERY_SET, labels=2) for model in (start, asked.model)]
    mean = jostle.Scores.mean_of([limit.influence(kappa=10.0) for limit in limits])
    assert both[f"{plain}10"]["per_query"] == pytest.approx(lds(bank, mean).value, abs=1e-3)
    assert both[f"{plain}{told}"]["seconds"] == pytest.approx(
        trained[f"{plain}{told}"]["seconds"] + begun[f"{plain}{told}"]["seconds"]
    )
    before = (tmp_path / "record.json").read_bytes()
    run(asked.at(0.0), tmp_path / "work", record, Budget(10))  # nothing is left to do
    assert (tmp_path / "record.json").read_bytes() == before


def test_an_experiment_goes_on_from_its_work_and_its_record(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.json", {"what": "a test"})
    with pytest.raises(OutOfTimeError):
        filled(tmp_path, record, Budget(0))
    bank = filled(tmp_path, record, Budget(10))
    assert bank.summary()["finished"] == 20
    assert record.content["seconds"]["retraining 0.5"]["count"] == 20
    run(setting(bank, 100), tmp_path / "work", record, Budget(10))
    kept = json.loads((tmp_path / "record.json").read_text())
    methods = kept["measured"]["all"]["0.5"]["methods"]
    assert kept["failures"] == {"all": {}}
    assert list(methods) == [
        "random", "query difficulty", "subset size", "GradSim", "gradient cosine", "TRAK", "BIF small, covariance",
        "BIF small, correlation", "BIF small, covariance, read at κ = 10", "BIF small, correlation, read at κ = 10",
    ]  # fmt: skip
    opened = jostle.load(tmp_path / "work" / "all" / "runs" / "small")
    assert methods["BIF small, covariance"]["per_query"] == pytest.approx(lds(bank, opened.influence()).value)
    assert methods["BIF small, covariance"]["per_query"] > 0.6
    held = methods["BIF small, covariance, read at κ = 10"]["per_query"]
    assert held == pytest.approx(lds(bank, opened.influence(kappa=10.0)).value)
    assert held > 0.6
    assert methods["GradSim"]["seconds"] > 0
    # Called again, there is nothing left to do: neither time nor the work directory is needed.
    again = Record(tmp_path / "record.json", {"what": "a test"})
    run(setting(bank, 100), tmp_path / "elsewhere", again, Budget(-1))
    assert again.content["measured"] == kept["measured"]
    draw(tmp_path / "lds.png", kept["measured"], "alpha_retrain")
    assert (tmp_path / "lds.png").stat().st_size > 10_000


def test_some_jobs_are_chosen_by_name(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.json", {})
    bank = filled(tmp_path, record, Budget(10))
    some = replace(setting(bank, 100), only=("BIF small", "TRAK"), read_at=())
    run(some, tmp_path / "work", record, Budget(10))
    methods = list(record.content["measured"]["all"]["0.5"]["methods"])
    assert methods[3:] == ["BIF small, covariance", "BIF small, correlation", "TRAK"]
    before = (tmp_path / "record.json").read_bytes()
    run(some, tmp_path / "elsewhere", record, Budget(-1))  # nothing is left to do
    assert (tmp_path / "record.json").read_bytes() == before
    with pytest.raises(SystemExit, match="no job 'TRACK'; there are: GradSim; gradient cosine; TRAK; BIF small"):
        run(replace(some, only=("TRACK",)), tmp_path / "work", record, Budget(10))


def test_a_bank_that_grew_is_measured_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = Record(tmp_path / "record.json", {})
    bank = filled(tmp_path, record, Budget(10), subsets=10)
    one = replace(setting(bank, 10), methods=("gradients",), only=("GradSim",))
    run(one, tmp_path / "work", record, Budget(10))
    bank = filled(tmp_path, record, Budget(10), subsets=30)
    both = replace(one, banks={"0.5": bank}, only=("gradient cosine", "GradSim"))
    run(both, tmp_path / "work", record, Budget(10))
    assert "all, 0.5: 4 rows of 10 retrainings are measured anew on 30" in capsys.readouterr().out
    found = record.content["measured"]["all"]["0.5"]
    rows = [found["methods"][name] for name in ("gradient cosine", "GradSim")]
    scores = [gradient_similarity(one.model, TRAIN_SET, QUERY_SET, cosine=cosine) for cosine in (True, False)]
    truth = [lds(bank, given, bootstrap=100) for given in scores]
    assert found["retrainings"] == 30
    assert [row["per_query"] for row in rows] == pytest.approx([measured.value for measured in truth])
    apart = truth[0] - truth[1]
    expected = (apart.value, apart.standard_error)
    assert _difference(*([row] for row in rows)) == pytest.approx(expected, rel=0.01)
    before = (tmp_path / "record.json").read_bytes()
    run(both, tmp_path / "elsewhere", record, Budget(-1))  # nothing is left to do
    assert (tmp_path / "record.json").read_bytes() == before
    # Fewer subsets than there are: those alone are trained again.
    bank = filled(tmp_path, record, Budget(10), subsets=5, seeds=2)
    assert np.isfinite(bank.values()[:, :, 0]).sum(0).tolist() == [30, 5]


def test_scores_that_cannot_be_measured_stop_no_others(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.json", {})
    bank = filled(tmp_path, record, Budget(10))
    values = np.random.default_rng(0).normal(size=(40, 12))
    given = {"good": values, "diverged": np.where(values > 2, np.nan, values), "constant": 0 * values}
    made = {name: jostle.Scores(values=one, method=name) for name, one in given.items()}
    one = replace(setting(bank, 10), methods=("gradients",), extra={"three": lambda: made})
    run(one, tmp_path / "work", record, Budget(10))
    kept = json.loads((tmp_path / "record.json").read_text())
    assert list(kept["measured"]["all"]["0.5"]["methods"])[3:] == ["good", "GradSim", "gradient cosine"]
    failures = kept["failures"]["all"]
    assert list(failures) == ["diverged", "constant"]
    assert "not finite" in failures["diverged"]
    assert "same score for every" in failures["constant"]
    # Mended, it is a failure no longer.
    made["diverged"] = made["constant"] = made["good"]
    run(one, tmp_path / "work", record, Budget(10))
    assert record.content["failures"] == {"all": {}}


def test_a_run_is_read_at_what_was_not_asked_for_before(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.json", {})
    bank = filled(tmp_path, record, Budget(10))
    once = replace(setting(bank, 50), methods=("bif",))
    run(once, tmp_path / "work", record, Budget(10))
    run(replace(once, read_at=(0.0, 10.0, 30.0)), tmp_path / "work", record, Budget(10))
    methods = record.content["measured"]["all"]["0.5"]["methods"]
    opened = jostle.load(tmp_path / "work" / "all" / "runs" / "small")
    for kind in ("covariance", "correlation"):
        expected = lds(bank, opened.influence(normalize=kind == "correlation", kappa=30.0)).value
        assert methods[f"BIF small, {kind}, read at κ = 30"]["per_query"] == pytest.approx(expected)
    run(replace(once, read_at=(30.0,)), tmp_path / "elsewhere", record, Budget(-1))  # nothing is left to do


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """No file can grow beyond so many bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_records_and_models_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    record, checkpoint = Record(tmp_path / "record.json", {"what": "a test"}), tmp_path / "work" / "model.pt"
    record.write()
    before = record.path.read_bytes()
    record.content["more"] = [0] * 10_000

    def analysed() -> nn.Module:
        return analysed_model(checkpoint, nets.pop, nets.pop, record, Budget(10))

    nets = [nn.Linear(100, 100) for _ in range(3)]
    with small_files(2_000):
        with pytest.raises(OSError, match="too large"):
            record.write()
        with pytest.raises((OSError, RuntimeError)):
            analysed()
    assert record.path.read_bytes() == before
    trained = analysed()
    assert torch.equal(weights_of(analysed()), weights_of(trained))  # which is read now


def synthetic(per_query: float, **more: Any) -> dict[str, Any]:
    return {"control": False, "per_query": per_query, "per_query_error": 0.02, "per_subset": 2 * per_query,
            "per_subset_error": 0.04, "seconds": 1.0, **more}  # fmt: skip


def test_lines_over_banks_and_seeds(tmp_path: Path) -> None:
    def bank(name: str, level: float, *left_out: str) -> dict[str, Any]:
        found = {
            "random": 0.0, "GradSim": level, "TRAK": level + 0.01, "TRAK, 2 checkpoints": level + 0.02,
            REFERENCE: level + 0.1, "EK-FAC, damping 1e-05": 0.3, "EK-FAC, damping 0.1": 0.5 - level,
            "BIF no gradient, covariance": 0.1, "BIF no gradient, correlation": level + 0.2,
            "BIF no gradient, correlation, read at κ = 10": 0.1, "BIF no gradient, correlation, read at κ = 30": 0.1,
            "BIF no gradient, seed 1, correlation": 0.1, "BIF sweep, correlation": 0.1,
            f"first order, correlation, read at κ = that of training {name}": level + 0.3,
        }  # fmt: skip
        rows = {name: synthetic(value, control=name == "random") for name, value in found.items()}
        return {"methods": {name: row for name, row in rows.items() if name not in left_out}}

    # The second seed lacks one of the two of TRAK, and the only one of GradSim.
    measured = {
        "seed 0": {name: bank(name, level) for name, level in (("0.1", 0.1), ("0.5", 0.3))},
        "seed 1": {name: bank(name, level, "TRAK", "GradSim") for name, level in (("0.1", 0.14), ("0.5", 0.36))},
    }
    settings = list(measured.values())
    told = "first order, κ of the training"
    assert shown_methods(settings) == [
        "random", "GradSim", "TRAK, 2 checkpoints", REFERENCE, "BIF no gradient, correlation",
        "BIF no gradient, correlation, read at κ = 10", told, BEST,
    ]  # fmt: skip
    assert "TRAK" in shown_methods(settings[:1])
    assert shown_methods(settings, "no gradient|TRAK") == ["random", "GradSim", REFERENCE, told, BEST]

    def rows(name: str, bank: str) -> list[Any]:
        return [row_of(name, bank, setting[bank]["methods"]) for setting in settings]

    # Of two seeds, the error of the mean is half of what they differ by.
    assert _over_seeds(rows(REFERENCE, "0.5"), "per_query") == pytest.approx((0.43, 0.03))
    assert _over_seeds(rows(told, "0.1"), "per_subset") == pytest.approx((0.84, 0.04))
    assert _over_seeds(rows(BEST, "0.1"), "per_query") == pytest.approx((0.38, 0.02))  # 0.4 and 0.36, at 0.1
    assert _over_seeds(rows(BEST, "0.5"), "per_query") == pytest.approx((0.43, 0.03))  # as it ships
    assert _over_seeds(rows("GradSim", "0.5"), "per_query") == (0.3, 0.02)
    assert _over_seeds(rows("none", "0.5"), "per_query") is None
    # Seeds are paired: what all methods find easier on one of them is no error of a difference.
    assert _difference(rows(told, "0.1"), rows(REFERENCE, "0.1")) == pytest.approx((0.2, 0.0))
    assert _difference(rows(BEST, "0.1"), rows(REFERENCE, "0.1")) == pytest.approx((0.16, 0.04))
    assert _difference(rows("none", "0.1"), rows(REFERENCE, "0.1")) is None
    # Where gradients were not asked for, the first order that holds nothing has their scores, not their time.
    held = {
        f"first order, 0.1 label{unit}, {kind}, read at κ = {kappa}": synthetic(value + kappa)
        for value, (unit, kind) in enumerate(itertools.product(("", ", layers alike"), ("correlation", "covariance")))
        for kappa in (10, 0)
    }
    for name, value in {"gradient cosine": 0, "GradSim": 1, "GradSim, layers alike": 3}.items():
        row = row_of(name, "0.1", held)
        assert row is not None
        assert row["per_query"] == value
        assert "seconds" not in row
        assert row_of(name, "0.1", {**held, name: synthetic(7)}) == synthetic(7)
    assert row_of("TRAK", "0.1", held) is None
    draw(tmp_path / "seeds.png", measured, "alpha_retrain")
    draw(tmp_path / "seed.png", {"seed 1": settings[1]}, "alpha_retrain", settings)
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("seeds", "seed"))

    # Of one seed, replicates of one bank are paired; others say nothing.
    ours, theirs = ([synthetic(value, per_query_replicates=[value, value + 0.1, value])] for value in (0.5, 0.3))
    assert _difference(ours, theirs) == pytest.approx((0.2, 0.0))
    theirs[0]["per_query_replicates"] = [0.3, 0.3, 0.3]
    assert _difference(ours, theirs) == pytest.approx((0.2, 0.1 * 2**0.5 / 3))
    for other in ([0.3, 0.3], [0.3], []):
        theirs[0]["per_query_replicates"] = other
        assert _difference(ours, theirs) == pytest.approx((0.2, np.nan), nan_ok=True)


def test_mislabels_are_shown_over_seeds() -> None:
    def found(**aurocs: float) -> dict[str, Any]:
        names = {"d6": "EK-FAC, damping 1e-06", "d4": "EK-FAC, damping 0.0001", "d2": "EK-FAC, damping 0.01"}
        return {names.get(name, name): {"auroc": one, "standard_error": 0.01} for name, one in aurocs.items()}

    # The first seed alone would choose 1e-06; the third lacks 0.01.
    seeds = [found(loss=0.5, d6=0.8, d4=0.7, d2=0.9), found(loss=0.6, d6=0.5, d4=0.7, d2=0.9),
             found(loss=0.7, d6=0.5, d4=0.7, margin=0.6)]  # fmt: skip
    assert mislabels.shown_methods(seeds) == ["loss", "EK-FAC, damping 0.0001", "margin"]
    assert mislabels.shown_methods(seeds[:1]) == ["loss", "EK-FAC, damping 0.01"]
    three = [one["loss"] for one in seeds]
    # Student's quantile of two degrees of freedom; the standard deviation is 0.1.
    assert mislabels.interval(three) == pytest.approx((0.6, 4.30265 * 0.1 / 3**0.5), rel=1e-5)
    assert mislabels.interval(three[:1]) == pytest.approx((0.5, 0.0196))


def test_sampling_stops_at_the_end_of_the_budget_and_goes_on(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.json", {})
    bank = filled(tmp_path, record, Budget(10))
    run(replace(setting(bank, 10), methods=()), tmp_path / "work", record, Budget(10))
    long = replace(setting(bank, 10_000_000), methods=("bif",))
    started = time.monotonic()
    with pytest.raises(OutOfTimeError):
        run(long, tmp_path / "work", record, Budget(3 / 60))
    assert time.monotonic() - started < 300
    # Either it was still being prepared, or it stands at a checkpoint.
    manifest = tmp_path / "work" / "all" / "runs" / "small" / "manifest.json"
    assert not manifest.exists() or json.loads(manifest.read_text())["status"] == "sampling"


def test_settings_of_the_experiments_can_be_run(tmp_path: Path) -> None:
    """Each is accepted by its sampler; only sizes are smaller here."""
    grid = language_retraining.sweep(75)
    corners = dict([*grid.items()][:: len(grid) - 1])
    settings = {**cifar10_retraining.BIF, **{f"{name}, language": one for name, one in language_retraining.BIF.items()}}
    # They are for models with curvatures of some thousands; the calibrated ones find their own way here.
    one = Setting("all", fit(np.arange(40), 0), TRAIN_SET, QUERY_SET, jostle.losses.classification(), {}, {})
    for name, given in {**settings, **corners}.items():
        small = {**given, "chains": 1, "draws": 2, "batch_size": 40, "burn_in": min(1, given.get("burn_in", 0))}
        made, about = one.sample(name, small, tmp_path, Budget(10))
        assert about["localization"] == made.config["posterior"]["localization"]
        assert made.draws == 2
        assert about["failed_chains"] == 0


def fine_tuned(
    pretrained: nn.Module, data: Data, indices: np.ndarray, seed: int, *,
    learning_rate: float, batch_size: int, weight_decay: float, epochs: int, steps: int | None = None,
) -> nn.Module:  # fmt: skip
    """The naive way: a new model and a new optimizer each time; it may stop after some steps."""
    model = copy.deepcopy(pretrained).train()
    loss = jostle.losses.next_token()
    generator = np.random.default_rng(seed)
    cuts = range(batch_size, len(indices), batch_size)
    batches = [batch for _ in range(epochs) for batch in np.split(generator.permutation(indices), cuts)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(batches))
    for chosen in batches[:steps]:
        batch = data.batch(chosen)
        sample_means(loss(model, batch), loss, batch).mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([value.detach().flatten().clone() for value in model.parameters()])


def test_one_working_model_is_fine_tuned_as_a_new_one_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    from architectures import VOCABULARY, tiny

    pretrained = tiny("llama", "sdpa")
    before = weights_of(pretrained)
    generator = np.random.default_rng(0)
    rows = [generator.integers(3, VOCABULARY, length).tolist() for length in [12] * 9 + [7]]
    data = Data(rows, "train")
    recipe: dict[str, Any] = {"learning_rate": 3e-3, "batch_size": 4, "weight_decay": 0.01, "epochs": 2}
    tuner = language_retraining.FineTuner(pretrained, data, **recipe)
    calls = [(np.arange(10), 0), (np.arange(4, 8), 1), (np.arange(10), 0)]
    expected = [weights_of(fine_tuned(pretrained, data, *call, **recipe)) for call in calls]
    assert (expected[0] - before).abs().mean() > 1e-3
    for call, truth in zip(calls, expected, strict=True):
        model = tuner(*call)
        assert not model.training
        torch.testing.assert_close(weights_of(model), truth, atol=2e-6, rtol=1e-5)
    half = weights_of(fine_tuned(pretrained, data, *calls[0], **recipe, steps=3))
    torch.testing.assert_close(weights_of(tuner(*calls[0], part=0.5)), half, atol=2e-6, rtol=1e-5)
    assert torch.equal(weights_of(tuner(*calls[0], part=0.0)), before)
    assert torch.equal(weights_of(pretrained), before)

    # What cannot be recorded is said, and taken step by step.
    tuner._to_be_recorded = not torch.cuda.is_available()
    torch.testing.assert_close(weights_of(tuner(*calls[1])), expected[1], atol=2e-6, rtol=1e-5)
    if not torch.cuda.is_available():
        assert capsys.readouterr().out.count("steps are not recorded as a CUDA graph") == 1


def test_steps_lose_less_than_a_thousandth_of_a_standard_deviation() -> None:
    """Whatever is far from 0, tiny, huge, has one draw far off, or does not move at all."""
    values = np.random.default_rng(0).normal(size=(4, 500, 5)) * [1, 1e-7, 1e5, 1, 0] + [100, 0, -1e6, 0, 3]
    values[2, 7, 3] = 1e6
    number, middle, step = kept.in_steps(values)
    assert number.dtype == np.int16
    lost = middle.astype(np.float64) + step.astype(np.float64) * number - values
    assert (np.ptp(lost, axis=(0, 1)) <= 1e-3 * values.std((0, 1))).all()
    assert (np.abs(lost).max((0, 1)) <= 1e-3 * values.std((0, 1)) + 1e-7 * np.abs(values).max((0, 1))).all()
    np.testing.assert_array_equal(number[:, :, 4], 0)


def test_what_is_kept_of_runs_and_banks_says_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(tmp_path / "record.json", {})
    bank = filled(tmp_path, record, Budget(10))
    bank.fail(3, 1, "for a test")
    one = replace(setting(bank, 100), methods=("bif",), keep=tmp_path / "kept")
    monkeypatch.setattr(kept, "FILE_BYTES", 2 * 2 * 60 * 52)  # 60 of the 100 draws
    run_at((1.0,), one, tmp_path / "work", record, Budget(10))
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {
        "bank-all-0.5.npz", "all-small.npz", "all-small.1.npz",
    }  # fmt: skip
    there, mine = (
        jostle.load(tmp_path / "work" / "all" / "runs" / "small"),
        kept.read_run(tmp_path / "kept", "all-small"),
    )
    for part in ("train", "query"):
        truth = there.traces.losses(part)[:]
        np.testing.assert_array_equal(mine.center[part], there.traces.center_losses(part))
        lost = np.abs(mine.losses[part] + mine.center[part] - truth).max((0, 1))
        assert (lost < 1e-3 * truth.std((0, 1))).all()
    packed = kept.KeptBank(tmp_path / "kept" / "bank-all-0.5.npz")
    np.testing.assert_array_equal(packed.values(), bank.values())
    np.testing.assert_array_equal(packed.subsets.members, bank.subsets.members)
    assert packed.summary() == bank.summary()
    for options in ({}, {"normalize": True}, {"normalize": True, "kappa": 10.0}):
        ours, theirs = mine.influence(**options), there.influence(**options)
        assert np.abs(ours.values - theirs.values).max() < 1e-3 * np.abs(theirs.values).max()
        assert lds(packed, ours, bootstrap=0).value == pytest.approx(lds(bank, theirs, bootstrap=0).value, abs=2e-3)
    with pytest.raises(jostle.InputError, match="the training data differ from those of the bank"):
        lds(packed, kept.influence(*mine.losses.values(), {"train": "another"}, normalize=False))
    twice = [np.concatenate([mine.losses[part]] * 2) for part in kept.SETS]  # put together with itself
    rows = draws_and_kappa.rows_of(packed, twice, mine.about["fingerprints"], bootstrap=10)
    assert [row["draws"] for row in rows[:: len(draws_and_kappa.KAPPAS)]] == [48, 100, 200, 400]
    (whole,) = (row for row in rows if row["draws"] == 400 and row["kappa"] == 10)
    assert whole["covariance"] == pytest.approx(lds(packed, mine.influence(kappa=10.0), bootstrap=0).value, abs=1e-6)
    assert whole["covariance_error"] > 0
    (part,) = (row for row in rows if row["draws"] == 100 and row["kappa"] == 0)
    few = mine.influence(normalize=True, draws=25)
    assert part["correlation"] == pytest.approx(lds(packed, few, bootstrap=0).value, abs=1e-6)
    (tmp_path / "kept" / "all-small.1.npz").unlink()
    with pytest.raises(ValueError, match="60 of 100 draws"):
        kept.read_run(tmp_path / "kept", "all-small")


def test_of_sequences_the_mean_over_tokens_is_kept(tmp_path: Path) -> None:
    from architectures import VOCABULARY, tiny

    generator = np.random.default_rng(0)
    rows = [generator.integers(3, VOCABULARY, length).tolist() for length in (6, 9, 4)]
    made = jostle.attribute(
        tiny("llama", "sdpa"), rows, rows[:2], loss=jostle.losses.next_token(), chains=2, draws=5, progress=False,
        posterior=jostle.Posterior(n_beta=10, localization=100), sampler=jostle.SGLD(step_size=1e-3),
    )  # fmt: skip
    kept.write_run(tmp_path, "one", made)
    mine, columns = kept.read_run(tmp_path, "one"), made.traces.columns("train")
    truth = SequenceLosses(made.traces.losses("train"), columns, "mean")[:, :, :]
    np.testing.assert_allclose(mine.losses["train"] + mine.center["train"], truth, atol=1e-3 * truth.std((0, 1)).min())
    first = made.traces.center_losses("train")[columns.of(1)]
    assert mine.center["train"][1] == pytest.approx(first.mean())
    np.testing.assert_allclose(mine.influence().values, made.influence().values, rtol=5e-3, atol=1e-9)


@pytest.mark.filterwarnings("ignore:RMSpropSGLD")  # its remark on the stabilizer
def test_samplers_are_compared_at_equal_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "DRAWS", 20)
    monkeypatch.setattr(samplers, "RULES", {"baoab": "BAOAB"})
    record = Record(tmp_path / "record.json", {})
    setting = samplers.linear(tmp_path, record, Budget(10), train=60, subsets=30)
    # Ridge regression on a subset, by hand.
    indices = setting.banks["0.5"].subsets.indices(3)
    X, y = (part.double().numpy() for part in (setting.train[0][indices], setting.train[1][indices]))
    weights = np.linalg.solve(X.T @ X / 30 + samplers.DECAY * np.eye(10), X.T @ y / 30)
    losses = (setting.query[1].numpy() - setting.query[0].numpy() @ weights)[:, 0] ** 2 / 2
    np.testing.assert_allclose(setting.banks["0.5"].values()[3, 0], losses, rtol=2e-3, atol=1e-6)  # half precision

    paper = {"n_beta": 60.0, "localization": 100.0, "step_size": 1e-3, "burn_in": 0, "batch_size": 60}
    arguments = (setting, paper, 20, tmp_path / "work", record)
    samplers.measure(*arguments, Budget(10), draws=10, seeds=2)
    kept = json.loads((tmp_path / "record.json").read_text())["measured"]["linear regression"]
    table = kept["summary"]["table"]
    assert list(table) == [
        "paper: SGLD", "paper: RMSprop-SGLD", samplers.DEFAULT,
        *(f"{name}{how}" for name in samplers.CONTROLS for how in ("", samplers.READ, samplers.READ_AUTO)),
        "BAOAB, calibrated",
    ]  # fmt: skip
    bank = setting.banks["0.5"]
    run = jostle.load(tmp_path / "work" / "linear_regression" / "runs" / "paper__SGLD__seed_1")
    one = kept["rows"]["paper: SGLD"]["seeds"]["1"]
    assert one[samplers.ALL]["covariance"] == pytest.approx(lds(bank, run.influence()).value, abs=1e-6)
    blind = jostle.load(tmp_path / "work" / "linear_regression" / "runs" / "Gaussian__no_gradient__seed_1")
    held = kept["rows"][f"{samplers.CONTROL}{samplers.READ}"]["seeds"]["1"][samplers.ALL]["correlation"]
    assert held == pytest.approx(lds(bank, blind.influence(kappa=10, normalize=True)).value, abs=1e-6)
    # 20 observations of 60 + 142 examples pay for as many draws that take a gradient of 60 each, 180 passes.
    assert one[samplers.PASSES]["draws"] == (20 * 202 + 180) // (202 + 180)
    assert kept["rows"][samplers.CONTROL]["seeds"]["0"][samplers.PASSES]["draws"] == 20
    assert table["BAOAB, calibrated"][samplers.ALL]["correlation"] is None  # it has half of these draws
    assert kept["baselines"]["exact influence"]["value"] > kept["baselines"]["GradSim"]["value"] + 0.1
    values = [kept["rows"][samplers.DEFAULT]["seeds"][seed][samplers.ALL]["correlation"] for seed in "01"]
    control = max((table[name][samplers.ALL]["correlation"] for name in samplers.CONTROLS), key=lambda one: one["mean"])
    claim = kept["summary"]["claims"][samplers.DEFAULT]["correlation"][f"{samplers.ALL}, against the better control"]
    assert claim["difference"] == pytest.approx(np.mean(values) - control["mean"])
    assert claim["standard_error"] == pytest.approx(np.hypot(abs(values[0] - values[1]) / 2, control["standard_error"]))
    # Called again, there is nothing left to do.
    samplers.measure(*arguments, Budget(-1), draws=10, seeds=2)
    # More seeds of some rows: the references stay as they are, and claims take what there is of each.
    keeping = (dataclasses.replace(setting, keep=tmp_path / "kept"), *arguments[1:])
    some = ["paper*", samplers.CONTROL]
    samplers.measure(*keeping, Budget(10), draws=10, seeds=3, reference_seeds=2, only=some)
    more = json.loads((tmp_path / "record.json").read_text())["measured"]["linear regression"]["summary"]
    third = [name for name, row in more["table"].items() if row["seeds"] == 3]
    assert third == [f"{samplers.CONTROL}{how}" for how in ("", samplers.READ, samplers.READ_AUTO)]
    one = more["table"][third[1]][samplers.TENTH]["covariance"]
    references = (more["table"][name][samplers.ALL]["covariance"] for name in samplers.REFERENCES)
    other = max(references, key=lambda one: one["mean"])
    claim = more["claims"][third[1]]["covariance"]["a tenth against the better reference"]
    assert claim["difference"] == pytest.approx(one["mean"] - other["mean"])
    assert claim["standard_error"] == pytest.approx(np.hypot(one["standard_error"], other["standard_error"]))
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {
        "bank-linear_regression-0.5.npz", "linear_regression-Gaussian__no_gradient__seed_2.npz",
    }  # fmt: skip
    samplers.draw({"linear regression": kept}, tmp_path / "samplers.png")
    assert (tmp_path / "samplers.png").stat().st_size > 10_000


def test_calibration_is_judged_beside_the_best_cell_on_a_fresh_bank(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.json", {})
    grid = {"n_beta": (1_000.0,), "localization": (100.0,), "step_size": (1.0, 1e-3)}
    calibration.measure("diabetes", tmp_path, record, Budget(10), grid=grid, draws=10, subsets=6, seeds=1)
    kept = record.content["measured"]["diabetes"]
    refused, sound = kept["sweep"]["cells"]
    assert refused["fault"].startswith("refused")
    assert kept["sweep"]["best"] == sound["settings"]
    banks = [Bank(tmp_path / "diabetes" / f"bank-{purpose}") for purpose in ("choosing", "judging")]
    assert not np.array_equal(banks[0].subsets.members, banks[1].subsets.members)
    found = kept["summary"]
    best, calibrated = (kept["judged"][which]["1"]["correlation"] for which in ("best cell", "calibrated"))
    assert found["difference"] == pytest.approx(calibrated["value"] - best["value"])
    assert found["within_one_standard_error"] == (found["difference"] >= -best["standard_error"])
    assert found["calibrated"]["bad_chains"] == 0
    assert 0 < found["share_of_the_sweep"] < found["share_with_its_run"]
    calibration.draw(record.content["measured"], tmp_path / "calibration.png")
    assert (tmp_path / "calibration.png").stat().st_size > 10_000


def test_the_same_draws_are_read_at_several_kappas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CASES", {"ridge": lambda: reading.ridge})
    monkeypatch.setattr(reading, "RISES", (0.03,))
    monkeypatch.setattr(reading, "DAMPINGS", (1e-2,))
    monkeypatch.setattr(reading, "LABELS", {reading.FIRST_ORDER: 1, reading.SPREAD: 1})
    record = Record(tmp_path / "record.json", {})
    reading.measure("ridge", tmp_path, record, Budget(10), draws=25, seeds=2)
    kept = json.loads((tmp_path / "record.json").read_text())["measured"]["ridge"]
    assert list(kept["runs"]) == ["rise 0.03, seed 0", "rise 0.03, seed 1", "sampled at κ = 10, seed 0"]
    assert all(run["n_beta"] == 0 for name, run in kept["runs"].items() if name.startswith("rise"))
    found = reading.mean_over_seeds(kept, "rise 0.03", "covariance")
    each = [kept["runs"][f"rise 0.03, seed {seed}"]["lds"]["covariance"]["10"]["lds"] for seed in (0, 1)]
    assert found[10.0] == pytest.approx((np.mean(each), abs(each[0] - each[1]) / 2))
    # Close to w* the losses are nearly linear, and holding them makes up for the missing curvature.
    assert found[10.0][0] > found[0.0][0] + 0.03
    reading.measure("ridge", tmp_path, record, Budget(10), draws=25, seeds=2)
    assert json.loads((tmp_path / "record.json").read_text())["measured"]["ridge"] == kept
    reading.measure_longer("ridge", tmp_path, record, Budget(10), 100)
    longer = json.loads((tmp_path / "record.json").read_text())["measured"]["ridge"]["longer"]["covariance"]["100"]
    same = kept["runs"]["rise 0.03, seed 0"]["lds"]["covariance"]
    for kappa in ("0", "10"):
        assert longer[kappa]["lds"] == pytest.approx(same[kappa]["lds"], abs=1e-3)
    assert "| ridge, 0.03 nats |" in reading.markdown({"ridge": kept}, "covariance")
    reading.draw({"ridge": kept}, tmp_path / "reading.png")
    assert (tmp_path / "reading.png").stat().st_size > 10_000


def test_draws_are_steadied_by_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steadied, "CASES", {"ridge": lambda: reading.ridge})
    monkeypatch.setattr(steadied, "DRAWS", (40, 80))
    monkeypatch.setattr(steadied, "SEEDS", 1)
    record = Record(tmp_path / "record.json", {})
    steadied.measure("ridge", tmp_path, record, Budget(10))
    kept = json.loads((tmp_path / "record.json").read_text())["measured"]["ridge"]
    assert list(kept) == ["40 draws, seed 0", "80 draws, seed 0"]
    for found in (one["κ = 0"] for one in kept.values()):
        assert found["draws"] < found["both"]
        assert all(weight > 0 for weight in found["weights"])
    assert steadied.means(kept, 40, "κ = 0")["both"] == kept["40 draws, seed 0"]["κ = 0"]["both"]
    steadied.measure("ridge", tmp_path, record, Budget(-1))  # nothing is left to do
    assert "| ridge | 0." in steadied.markdown({"ridge": kept}, "κ = 10")
    steadied.draw({"ridge": kept}, tmp_path / "steadied.png")
    assert (tmp_path / "steadied.png").stat().st_size > 10_000


def test_agreement_of_halves_goes_with_the_lds_at_every_kappa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "PARTS", (40, 100))
    record = Record(tmp_path / "record.json", {})
    holding.measure("ridge regression", tmp_path, record, Budget(10), draws=100)
    kept = json.loads((tmp_path / "record.json").read_text())["measured"]["ridge regression"]
    assert list(kept["parts"]) == ["40", "100"]
    train, query = (np.load(tmp_path / "ridge_regression" / "draws-100.npz")[side] for side in ("train", "query"))
    halves = [
        np.cov(train[half].reshape(50, -1).T, query[half].reshape(50, -1).T)[:300, 300:]
        for half in ([0, 1], [2, 3], [0, 2], [1, 3], [0, 3], [1, 2])
    ]
    agree = [
        np.mean([np.corrcoef(first[:, query], second[:, query])[0, 1] for query in range(first.shape[1])])
        for first, second in zip(halves[::2], halves[1::2], strict=True)
    ]
    assert kept["parts"]["100"]["covariance"]["0"]["values"] == pytest.approx(np.mean(agree), rel=1e-4)
    rows = {row["draws"]: row for row in holding.gains({"ridge regression": kept}, "covariance")}
    cells = kept["parts"]["100"]["covariance"]
    assert rows[100]["gain"][10.0] == pytest.approx(cells["10"]["lds"][""]["lds"] - cells["0"]["lds"][""]["lds"])
    # Ten directions in all: a hundred draws know them, and all of them may be held.
    assert rows[100]["auto"] == 10
    assert rows[100]["gain"]["auto"] == rows[100]["gain"][10.0]
    assert "| not tried | 2 |" in holding.summary({"ridge regression": kept}, "covariance")
    assert "(κ = 10) |" in holding.markdown({"ridge regression": kept}, "covariance")
    holding.measure("ridge regression", tmp_path, record, Budget(10), draws=100)
    assert json.loads((tmp_path / "record.json").read_text())["measured"]["ridge regression"] == kept
    holding.draw({"ridge regression": kept}, tmp_path / "holding.png")
    assert (tmp_path / "holding.png").stat().st_size > 10_000


def test_one_step_of_retraining_from_the_warm_start() -> None:
    """Nesterov's first step is (1 + momentum) gradients long, each model's on its own examples."""
    generator = torch.Generator().manual_seed(0)
    X, y = torch.randn(500, 6, generator=generator), torch.randint(0, 3, (500,), generator=generator)
    warm = holding.FromWarmStart(lambda: nn.Linear(6, 3), X, y, (100, 300, 200, 50), rate=0.1, long=5)
    starts = torch.randn(2, 21, generator=generator)
    subsets = [np.arange(100), np.arange(100, 200)]
    after = warm.fit(starts, warm.train, subsets, 1)
    for start, end, subset in zip(starts, after, subsets, strict=True):
        weights = start.clone().requires_grad_()
        weight, bias = weights[:18].view(3, 6), weights[18:]
        logits = warm.train[0][subset] @ weight.T + bias
        gradient = torch.autograd.grad(nn.functional.cross_entropy(logits, warm.train[1][subset]), weights)[0]
        torch.testing.assert_close(end, start - 0.1 * 1.85 * gradient, rtol=1e-4, atol=1e-6)
    told = cifar10_retraining.training_of(1)  # a fifth of the peak, of which a step of 1,024 has 1/(1 + 1/0.15)
    assert told == pytest.approx({"total_rate": 0.2 * 10 * 1.85 * 0.15 / 1.15, "weight_decay": 0.0153 / 10})
    assert warm.total_rate(1) == pytest.approx(0.1 * 1.85)
    assert warm.total_rate(1_000) == pytest.approx(0.1 * 500.5 / 0.15, rel=0.02)


def test_places_along_a_training_are_parts_of_it() -> None:
    """As a scheduler sees them that is called after every step."""
    for case in (halfway.CASES["mlp (AdamW)"](), halfway.CASES["mlp from other weights (SGD)"]()):
        trainer, seen = case.trainer(4), []

        def watch(optimizer: torch.optim.Optimizer, steps: int, seen: list[torch.Tensor] = seen) -> Any:
            weights = [value for group in optimizer.param_groups for value in group["params"]]

            class Watcher:
                def step(self) -> None:
                    seen.append(torch.cat([value.detach().flatten().clone() for value in weights]))

            seen.append(torch.cat([value.detach().flatten().clone() for value in weights]))
            return Watcher()

        trainer.schedule = watch
        trainer(np.arange(400), halfway.SEEDS)
        assert len(seen) == 33
        for place in halfway.PLACES:
            model = case.model(place, 4)
            assert torch.equal(weights_of(model), seen[round(32 * place)])
            assert not model.training


def test_places_along_a_training_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kronfluence")
    monkeypatch.setattr("experiments.resolution.SUBSETS", 8)
    name = "mlp (SGD)"
    monkeypatch.setitem(halfway.CASES, name, lambda: halfway.new(resolution.PROBLEMS["mlp"](), epochs=(4,)))
    record = Record(tmp_path / "record.json", {})
    halfway.measure(name, tmp_path, record, Budget(10))
    found = record.content["measured"][name]["4"]
    assert found["steps"] == 16
    assert list(found["places"]) == ["0", "0.25", "0.5", "0.75", "1"]
    assert all(rows["first order"]["lds"] > 0.9 for rows in found["places"].values())
    assert list(found["together"]) == list(halfway.TOGETHER)
    for rows in found["together"].values():
        assert rows["first order"]["lds"] > found["places"]["0"]["first order"]["lds"]
    together = copy.deepcopy(found["together"])
    del found["places"]["0.5"]
    others = copy.deepcopy(found["places"])
    halfway.measure(name, tmp_path, record, Budget(10))
    assert found["places"].pop("0.5")["first order"]["lds"] > 0.9
    assert (found["places"], found["together"]) == (others, together)
    assert halfway.markdown(record.content["measured"]).count("\n") == 1 + len(halfway.METHODS)
    halfway.draw(record.content["measured"], tmp_path / "figure.png")  # without a place
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_a_line_of_a_place_has_what_was_asked_at_the_first_one(tmp_path: Path) -> None:
    told = "first order, {} label, covariance, read at κ = that of training {}"
    methods = {told.format("0.1", "0.5"): {"per_query": 0.2}, told.format("1", "0.5"): {"per_query": 0.3},
               told.format("0.1", "0.7"): {"per_query": 0.9}, "EK-FAC, damping 0.01": {"per_query": 0.1},
               "EK-FAC, default damping, seed 1": {"per_query": 0.8}}  # fmt: skip
    (ours, _), _, (theirs, _) = figures.PLACE_LINES.values()
    asked = {told.format("0.1", "0.5"), "EK-FAC, damping 0.01", "EK-FAC, default damping, seed 1"}
    assert figures._best(ours, "0.5", methods, asked) == {"per_query": 0.2}
    assert figures._best(ours, "0.5", methods, methods) == {"per_query": 0.3}
    assert figures._best(theirs, "0.5", methods, methods) == {"per_query": 0.1}
    assert figures._best(theirs, "0.5", {}, methods) is None
    row = {"per_query_error": 0.01}
    setting = {
        bank: {"methods": {name: {**found, **row} for name, found in methods.items()}} for bank in ("0.5", "0.7")
    }
    panels = {
        "a": {"here": [setting], "there": [setting | {"0.7": {"methods": {}}}]},
        "b": {"here": [setting], "there": [{}]},
    }
    figures.draw_places(tmp_path / "figure.png", panels, "x")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_parts_of_a_training_are_from_0_to_1() -> None:
    words = ["--data", "d", "--work", "w", "--at"]
    assert cifar10_retraining.read_arguments([*words, "0", "0.25", "1"]).at == [0.0, 0.25, 1.0]
    for bad in ("-0.25", "1.5", "nan"):
        with pytest.raises(SystemExit):
            cifar10_retraining.read_arguments([*words, bad])


def test_a_part_of_a_retraining_on_cifar10_begins_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    X, y = torch.randn(60, 3, 32, 32, generator=generator), torch.randint(0, 10, (60,), generator=generator)
    images: Any = SimpleNamespace(warm_up=(X[:20], y[:20]))
    retrainer = cifar10_retraining.Retrainer(images, (X[20:], y[20:]), 0, epochs=2, warm_up_steps=2, batch_size=20)
    start = weights_of(retrainer.start(0))
    parts = [weights_of(retrainer(np.arange(40), 0, part)) for part in (0.0, 0.5, 1.0)]
    assert torch.equal(parts[0], start)
    assert torch.equal(weights_of(retrainer.start(0)), start)
    monkeypatch.setattr(cifar10_retraining, "schedule_of", lambda steps: [0.2, np.interp(1, [0, 1, 4], [0.2, 1, 0.07])])
    assert torch.equal(parts[1], weights_of(retrainer(np.arange(40), 0)))
    assert not torch.equal(parts[1], parts[2])

"""What the retraining experiments share: budgets of time, records that are gone on from."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from experiments import cifar10_retraining, language_retraining
from experiments.retraining import Budget, OutOfTimeError, Record, Setting, draw, fill, run, sample
from torch import nn

import jostle
from jostle.data import Data
from jostle.evaluate import Bank, lds, random_subsets
from test_evaluate import QUERY_SET, TRAIN_SET, fit

BIF = {"n_beta": 40.0, "localization": 2.0, "step_size": 0.02, "chains": 2, "thin": 5, "batch_size": 40}


def setting(bank: Bank, draws: int) -> Setting:
    model = nn.Sequential(fit(np.arange(40), 0))
    return Setting(
        "all", model, TRAIN_SET, QUERY_SET, jostle.losses.classification(), {"0.5": bank},
        {"small": {**BIF, "draws": draws}}, methods=("gradients", "trak", "bif"),
    )  # fmt: skip


def filled(path: Path, record: Record, budget: Budget) -> Bank:
    fingerprints = {"train": Data(TRAIN_SET, "train").fingerprint(), "query": Data(QUERY_SET, "query").fingerprint()}
    return fill(
        path / "bank", random_subsets(40, 20), fit, QUERY_SET, jostle.losses.classification(), fingerprints,
        seeds=1, budget=budget, record=record, batch_size=12, key="0.5",
    )  # fmt: skip


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
        "BIF small, correlation",
    ]  # fmt: skip
    found = jostle.load(tmp_path / "work" / "all" / "runs" / "small").influence()
    assert methods["BIF small, covariance"]["per_query"] == pytest.approx(lds(bank, found).value)
    assert methods["BIF small, covariance"]["per_query"] > 0.6
    assert methods["GradSim"]["seconds"] > 0
    # Called again, there is nothing left to do: neither time nor the work directory is needed.
    again = Record(tmp_path / "record.json", {"what": "a test"})
    run(setting(bank, 100), tmp_path / "elsewhere", again, Budget(-1))
    assert again.content["measured"] == kept["measured"]
    draw(tmp_path / "lds.png", kept["measured"], "alpha_retrain")
    assert (tmp_path / "lds.png").stat().st_size > 10_000


def test_sampling_stops_at_the_end_of_the_budget_and_goes_on(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.json", {})
    bank = filled(tmp_path, record, Budget(10))
    run(Setting(**{**vars(setting(bank, 10)), "methods": ()}), tmp_path / "work", record, Budget(10))
    long = Setting(**{**vars(setting(bank, 10_000_000)), "methods": ("bif",)})
    started = time.monotonic()
    with pytest.raises(OutOfTimeError):
        run(long, tmp_path / "work", record, Budget(6 / 60))
    assert time.monotonic() - started < 60
    # Either it was still being prepared, or it stands at a checkpoint.
    manifest = tmp_path / "work" / "all" / "runs" / "small" / "manifest.json"
    assert not manifest.exists() or json.loads(manifest.read_text())["status"] == "sampling"


def test_settings_of_the_experiments_can_be_run(tmp_path: Path) -> None:
    """Each is accepted by its sampler; only sizes are smaller here."""
    grid = language_retraining.sweep()
    corners = dict([*grid.items()][:: len(grid) - 1])
    settings = {**cifar10_retraining.BIF, **{f"{name}, language": one for name, one in language_retraining.BIF.items()}}
    for name, given in {**settings, **corners}.items():
        small = {**given, "chains": 1, "draws": 2, "batch_size": 8, "burn_in": min(1, given.get("burn_in", 0))}
        made, about = sample(
            fit(np.arange(40), 0), TRAIN_SET, QUERY_SET, small, weights="all", budget=Budget(10), out=tmp_path / name,
            loss=jostle.losses.classification(),
        )  # fmt: skip
        assert made.draws == 2
        assert about["failed_chains"] == 0

"""What the retraining experiments share: a budget of time, methods that are run once, banks, measurements.

A work directory holds the banks and the scores; the record holds what was measured, and is enough to go on from: what
is in it is not done again, even where the scores are gone.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import json
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from benchmarks.environment import write_record
from torch import nn

import jostle
from experiments import kept
from jostle.asking.requests import SAMPLERS, sampler_of
from jostle.attributors import FirstOrder, ekfac, gradient_similarity, layers_alike, trak
from jostle.errors import EstimateWarning
from jostle.evaluate import Bank, Measure, Report, Subsets, compare
from jostle.evaluate.retraining import shapes_of
from jostle.files import replace_file
from jostle.losses import Loss
from jostle.scores import Scores

DAMPINGS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Tried for EK-FAC beside the paper's 1e-8 and kronfluence's own; the best result is shown, so that it is tuned."""

DEFAULT_RULE = "baoab"
CALIBRATED = ("n_beta", "localization", "step_size", "burn_in", "thin")
READ_AT = 10.0
"""The κ at which runs are read besides (`jostle.conditioning`); fixed in `experiments.reading`, on other models and for
draws without a gradient."""
READ = f", read at κ = {READ_AT:g}"

BOOTSTRAP = 100
METHODS = ("gradients", "first-order", "trak", "ekfac", "bif")
ALIKE = ", layers alike"
"""After the name of what is asked of the model in units in which its layers count alike."""
TOLD = "that of training "
"""Before the name of a bank: scores that are read as its training says are judged by that bank alone."""
FIRST_ORDER_AT = (0.0, 1.0, READ_AT, 100.0, 1000.0)
"""Without the noise of draws, any κ can be looked at."""
LABELS = 2
RECORDS = Path(__file__).parent / "records"

Result = TypeVar("Result")


class OutOfTimeError(Exception):
    """The budget is spent; what was done is kept."""


class Budget:
    """Minutes of wall-clock time, from the start of the script."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def check(self) -> None:
        if self.seconds_left <= 0:
            raise OutOfTimeError

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Ask a run that is being sampled to stop at a checkpoint when the time is over; it goes on the next time."""
        self.check()

        def stop(number: int, frame: Any) -> None:
            raise OutOfTimeError  # while a run is prepared; while it is sampled, it has a handler of its own

        before = signal.signal(signal.SIGTERM, stop)
        timer = threading.Timer(self.seconds_left, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        try:
            yield
        except KeyboardInterrupt as error:
            if self.seconds_left > 0:
                raise
            raise OutOfTimeError from error
        finally:
            timer.cancel()
            signal.signal(signal.SIGTERM, before)


@dataclass
class Setting:
    """One model whose training examples are scored, and the banks that judge the scores."""

    name: str
    model: nn.Module
    train: Any
    query: Any
    loss: Loss
    banks: Mapping[str, Bank]
    bif: Mapping[str, Mapping[str, Any]]
    sampling_data: Any = None
    potential_loss: Loss | None = None
    weights: Any = "all"
    collate: Any = None
    texts: tuple[Sequence[Any], Sequence[Any]] | None = None
    batch_size: int = 256
    precision: Any = "model"
    checkpoints: Sequence[nn.Module] = ()
    ekfac_repeats: int = 1
    methods: Sequence[str] = METHODS
    dampings: Sequence[float] = DAMPINGS
    extra: Mapping[str, Callable[[], dict[str, Scores]]] = field(default_factory=dict)
    keep: Path | None = None
    read_at: Sequence[float] = (READ_AT,)
    adam: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Where models are trained by Adam or AdamW: how those of each bank are (`FirstOrder.kappa_of_training`)."""
    sgd: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The same where they are trained by SGD."""
    start: nn.Module | None = None
    """What they are trained again from."""
    along: Callable[[float], nn.Module] | None = None
    """What such a part of a training on all examples makes of it; it need not be the training of the model."""
    alike: bool = False
    """Ask for gradients and draws in units in which layers count alike, too."""
    labels: float = LABELS
    first_order_at: Sequence[float] = FIRST_ORDER_AT
    label_seeds: int = 1
    only: Sequence[str] = ()
    """Jobs to run, and their order; all where there is none."""
    _cosines: dict[str, Scores] = field(default_factory=dict, init=False)

    @property
    def first_order(self) -> str:
        """What the scores of `FirstOrder` are called."""
        return f"first order, {self.labels:g} label{'s' if self.labels > 1 or not self.labels else ''}"

    @property
    def in_adam(self) -> str:
        return f"{self.first_order}, metric of Adam"

    def at(self, part: float) -> Setting:
        """The same, asked of other weights: 0 is what is trained again, 1 the model, others are `along`.

        Curvature is counted where scores are taken then, and not at the start.
        """
        if part == 1:
            return self
        if self.start is None or (part and self.along is None):
            raise SystemExit(f"{self.name}: it is not known what is trained again, or how")
        model = self.along(part) if part and self.along else self.start
        return replace(
            self, name=f"{self.name}{after(part)}", model=model.eval(), start=None, along=None, checkpoints=(), extra={}
        )

    def keep_banks(self) -> None:
        """Write the banks where they are to be kept for elsewhere, if they are."""
        if self.keep:
            for name, bank in self.banks.items():
                kept.write_bank(self.keep / f"{file_name(f'bank-{self.name}-{name}')}.npz", bank)

    def jobs(self, work: Path, budget: Budget) -> dict[str, Callable[[], dict[str, Scores]]]:
        """What there is to run, by name; each gives one or several kinds of scores."""
        data = {"loss": self.loss, "weights": self.weights, "collate": self.collate}
        buffer = _buffer_bytes()
        groups: dict[str, dict[str, Callable[[], dict[str, Scores]]]] = {name: {} for name in self.methods}
        units = ("", ALIKE) if self.alike else ("",)
        drawn = [  # what a gradient moves would need settings of its own
            (name, unit, settings)
            for unit, (name, settings) in itertools.product(units, self.bif.items())
            if not unit or settings.get("sampler") == "gaussian"
        ]
        groups["gradients"] = {
            f"{name}{unit}": lambda cosine=cosine, name=name, unit=unit: {
                f"{name}{unit}": self._gradients(unit, cosine)
            }
            for unit, (name, cosine) in itertools.product(units, (("GradSim", False), ("gradient cosine", True)))
        }
        groups["first-order"] = {
            self.first_order: lambda: self._first_order(work, budget),
            f"{self.first_order}{ALIKE}": self._first_order_of_layers,
        }
        if self.adam:
            chosen = {"": self.weights} if self.weights == "all" else {"": self.weights, ", all weights": "all"}
            for (label, weights), seed in itertools.product(chosen.items(), range(self.label_seeds)):
                name = f"{self.in_adam}{label}{f', seed {seed}' if seed else ''}"
                groups["first-order"][name] = functools.partial(self._first_order_of_adam, name, weights, seed)
        many = f"TRAK, {len(self.checkpoints)} checkpoints"
        groups["trak"] = {
            name: lambda models=models, name=name: {
                name: trak(models, self.train, self.query, buffer_bytes=buffer, ridge=1e-6, **data)
            }
            for name, models in (("TRAK", [self.model]), (many, list(self.checkpoints)))
            if models
        }
        groups["ekfac"] = {
            f"EK-FAC, {label}": lambda damping=damping, seed=seed, directory=directory, label=label: {
                f"EK-FAC, {label}": ekfac(
                    self.model, self.train, self.query, fit_data=self.sampling_data, damping=damping, seed=seed,
                    directory=directory, batch_size=self.batch_size, **data,
                )
            }
            for label, damping, seed, directory in [
                # Those two fit their own factors, so that their time is the whole time; the others take the first's.
                ("damping 1e-8", 1e-8, 0, work / "ekfac"),
                ("default damping", None, 0, work / ("ekfac-default" if self.ekfac_repeats else "ekfac")),
                *((f"default damping, seed {seed}", None, seed, None) for seed in range(1, self.ekfac_repeats)),
                *((f"damping {damping:g}", damping, 0, work / "ekfac") for damping in self.dampings),
            ]
        }  # fmt: skip
        groups["bif"] = {
            f"BIF {name}{unit}": lambda name=name, unit=unit, settings=settings: self._bif(
                name, unit, settings, work, budget
            )
            for name, unit, settings in drawn
        }
        jobs = dict(self.extra)
        for group in self.methods:
            jobs |= groups[group]
        for name in set(self.only) - jobs.keys():
            raise SystemExit(f"there is no job {name!r}; there are: {'; '.join(jobs)}")
        return {name: jobs[name] for name in self.only or jobs}

    def rows_of(self, job: str, bank: str) -> set[str]:
        """Of what a job gives, what shows that it was done and judged by a bank."""
        if job.startswith("first order"):
            told = [f"{TOLD}{bank}"] if self.labels and bank in (self.adam if "Adam" in job else self.sgd) else []
            at = [*(f"{kappa:g}" for kappa in self.first_order_at), *told]
            return {f"{job}, covariance, read at κ = {kappa}" for kappa in at}
        if job.startswith("BIF"):
            return {f"{job}, covariance{_read_at(kappa)}" for kappa in (0.0, *self.read_at)}
        return {job}

    def _first_order(self, work: Path, budget: Budget) -> dict[str, Scores]:
        """What draws without a gradient tend to near w*; and with the spread of a few, where the BIF has such draws."""
        runs: dict[str, tuple[jostle.Run | None, float]] = {self.first_order: (None, 0.0)}
        for settings in [one for one in self.bif.values() if one.get("sampler") == "gaussian"][:1]:
            few = {**settings, "draws": 40 // settings["chains"]}
            drawn, about = self.sample("spread of 40 draws", few, work, budget)
            runs[f"{self.first_order}, spread of 40 draws"] = drawn, about["seconds"]
        started = time.perf_counter()
        limit = self._limit(self.weights, start=self._begun)
        built = time.perf_counter() - started
        read: dict[str, Scores] = {}
        for name, (drawn, seconds) in runs.items():
            read |= self._read(limit, name, self.sgd, built + seconds, spread=drawn)
        return read

    def _first_order_of_layers(self) -> dict[str, Scores]:
        """The same in the metric in which layers count alike."""
        started = time.perf_counter()
        limit = self._limit(self.weights, metric="layers", start=self._begun)
        return self._read(limit, f"{self.first_order}{ALIKE}", self.sgd, time.perf_counter() - started)

    def _first_order_of_adam(self, name: str, weights: Any, seed: int) -> dict[str, Scores]:
        """The same in the metric of Adam."""
        started = time.perf_counter()
        limit = self._limit(weights, metric="adam", seed=seed)
        return self._read(limit, name, self.adam, time.perf_counter() - started)

    @property
    def _begun(self) -> nn.Module | None:
        """Where curvature is counted for the κ of the training, if one is told; None: at the model itself."""
        return self.start if self.sgd and self.labels else None

    def _read(
        self, limit: FirstOrder, name: str, trainings: Mapping[str, Mapping[str, float]], seconds: float, **more: Any
    ) -> dict[str, Scores]:
        """At several κ, and at the one that each bank's training says; without labels there is no curvature to tell it.

        Each takes the seconds that the products took, and its own.
        """
        at = {f"{kappa:g}": kappa for kappa in self.first_order_at}
        for bank, training in trainings.items() if self.labels else ():
            at[f"{TOLD}{bank}"] = limit.kappa_of_training(**training)
        read = {}
        for (words, kappa), kind in itertools.product(at.items(), ("covariance", "correlation")):
            started = time.perf_counter()
            found = limit.influence(kappa=kappa, normalize=kind == "correlation", **more)
            took = {"seconds": seconds + time.perf_counter() - started}
            read[f"{name}, {kind}, read at κ = {words}"] = replace(found, provenance={**found.provenance, **took})
        return read

    def _limit(self, weights: Any, **more: Any) -> FirstOrder:
        return FirstOrder(
            self.model, self.train, self.query, loss=self.loss, weights=weights, collate=self.collate,
            labels=self.labels, rounded=torch.cuda.is_available(), buffer_bytes=_buffer_bytes(0.65), **more,
        )  # fmt: skip

    def calibrate(self, rule: str, batch_size: int, budget: Budget, **given: Any) -> dict[str, Any]:
        """Settings for a rule, from measurements of the model; what is given is kept."""
        started = time.perf_counter()
        with budget.interrupting():
            chosen = jostle.calibrate(
                self.model, self.train, self.query, sampling_data=self.sampling_data, loss=self.loss,
                potential_loss=self.potential_loss, weights=self.weights, collate=self.collate,
                precision=self.precision, batch_size=batch_size, sampler=SAMPLERS[rule](step_size=1.0), **given,
            )  # fmt: skip
        return {
            "n_beta": chosen.posterior.n_beta, "localization": chosen.posterior.localization,
            "step_size": vars(chosen.sampler)["step_size"], "burn_in": chosen.burn_in, "thin": chosen.thin,
            "rise": chosen.rise, "pilot": chosen.pilot, "seconds": time.perf_counter() - started,
        }  # fmt: skip

    def sample(
        self, name: str, settings: Mapping[str, Any], work: Path, budget: Budget, *, unit: str = ""
    ) -> tuple[jostle.Run, dict[str, Any]]:
        """One run of this setting, in ``work``, and what a record should say of it.

        Settings without a localization are completed by calibration, which is done once.
        """
        options, seconds = dict(settings), 0.0
        if "localization" not in options:
            path = work / f"calibration-{options['batch_size']}.json"
            if not path.is_file():  # a run goes on only with exactly the same settings
                replace_file(path, json.dumps(self.calibrate(DEFAULT_RULE, options["batch_size"], budget)))
            chosen = json.loads(path.read_text())
            seconds = chosen["seconds"]
            print(f"  calibrated: {chosen}", flush=True)
            options = {"sampler": DEFAULT_RULE, **{key: chosen[key] for key in CALIBRATED}, **options}
        model, weights, found_in = self._in_units(unit)
        seconds += found_in
        run, about = sample(
            model, self.train, self.query, options, loss=self.loss, weights=weights, budget=budget,
            out=work / "runs" / file_name(name), sampling_data=self.sampling_data, potential_loss=self.potential_loss,
            collate=self.collate, precision=self.precision,
        )  # fmt: skip
        if self.keep:
            kept.write_run(self.keep, file_name(f"{self.name}-{name}"), run)
        return run, about | {"seconds": about["seconds"] + seconds, **{key: options.get(key) for key in CALIBRATED}}

    def _bif(self, name: str, unit: str, settings: Mapping[str, Any], work: Path, budget: Budget) -> dict[str, Scores]:
        """One run, read as it is and at a larger n_beta; covariance is the paper's B, correlation its A."""
        name += unit
        run, about = self.sample(name, settings, work, budget, unit=unit)
        read = {}
        for kappa, kind in itertools.product((0.0, *self.read_at), ("covariance", "correlation")):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", EstimateWarning)  # what the draws do not support is measured, too
                scores = run.influence(normalize=kind == "correlation", kappa=kappa)
            read[f"BIF {name}, {kind}{_read_at(kappa)}"] = replace(scores, provenance={**scores.provenance, **about})
        if settings.get("sampler") == "gaussian":
            if unit not in self._cosines:
                self._cosines[unit] = self._gradients(unit, cosine=True)
            cosines = self._cosines[unit]
            started = time.perf_counter()
            steadied = run.influence(normalize=True, standard_error=True).toward(cosines)
            own = cosines.provenance["seconds"] - self._in_units(unit)[-1]  # the units are found once
            seconds = about["seconds"] + own + time.perf_counter() - started
            about = {**about, "seconds": seconds, "weights": [*steadied.provenance["toward"]["weights"].values()]}
            read[f"BIF {name}, toward gradient cosines"] = replace(
                steadied, provenance={**steadied.provenance, **about}
            )
        return read

    def _gradients(self, unit: str, cosine: bool) -> Scores:
        """Similarity of gradients; as cosines, what correlations of draws without a gradient tend to near w*."""
        model, weights, seconds = self._in_units(unit)
        started = time.perf_counter()
        found = gradient_similarity(
            model, self.train, self.query, cosine=cosine, loss=self.loss, weights=weights, collate=self.collate,
            buffer_bytes=_buffer_bytes(),
        )  # fmt: skip
        seconds += time.perf_counter() - started
        return replace(found, provenance={**found.provenance, "seconds": seconds})

    def _in_units(self, unit: str) -> tuple[nn.Module, Any, float]:
        """The model in such units, which of its weights move, and the seconds that it took to find them."""
        return self._alike if unit else (self.model, self.weights, 0.0)

    @functools.cached_property
    def _alike(self) -> tuple[nn.Module, Any, float]:
        started = time.perf_counter()
        model = layers_alike(self.model, self.train, loss=self.loss, weights=self.weights, collate=self.collate)
        return model, "all", time.perf_counter() - started


def sample(
    model: nn.Module, train: Any, query: Any, settings: Mapping[str, Any], *, weights: Any, budget: Budget, **more: Any
) -> tuple[jostle.Run, dict[str, Any]]:
    """A run with such settings, and what a record should say of it; out of time it stops, and goes on the next time."""
    options = {"sampler": "sgld", "step_size": None, **settings}
    posterior = jostle.Posterior(
        n_beta=options.pop("n_beta"), localization=options.pop("localization"), weights=weights
    )
    sampler = sampler_of({name: options.pop(name) for name in ("sampler", "step_size")})
    with budget.interrupting():
        run = jostle.attribute(
            model, train, query, posterior=posterior, sampler=sampler, progress=False, **more, **options
        )
    found = run.diagnostics()
    return run, {
        "seconds": sum(run.manifest["seconds"].values()),
        "mean_loss": found["mean_loss"], "mean_loss_at_center": found["mean_loss_at_center"],
        "effective_draws": found["effective_draws"], "verdict": found["verdict"]["level"],
        "failed_chains": len(found["failed_chains"]),
    }  # fmt: skip


def after(part: float) -> str:
    """What is added to the name of a setting that is asked of a part of a training."""
    return "" if part == 1 else f", after {part:g} of a training on all" if part else ", at the start"


def part_of(word: str) -> float:
    """A part of a training."""
    value = float(word)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{word} is not from 0 to 1")
    return value


class Record:
    """What was measured so far; written after every step."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        there = json.loads(path.read_text()) if path.is_file() else {}
        there.pop("environment", None)  # is that of the last writing
        self.content: dict[str, Any] = {"measured": {}, "seconds": {}, **there, **about}

    def write(self) -> None:
        write_record(self.path, self.content)

    def add_seconds(self, key: str, seconds: float, count: int = 1) -> None:
        kept = self.content["seconds"].setdefault(key, {"seconds": 0.0, "count": 0})
        kept["seconds"] += seconds
        kept["count"] += count

    def has(self, setting: str, bank: str, method: str, retrainings: int) -> bool:
        place = self.content["measured"].get(setting, {}).get(bank, {"methods": {}})
        return method in place["methods"] and place["retrainings"] == retrainings

    @contextlib.contextmanager
    def failing(self, setting: str, name: str) -> Iterator[None]:
        """What a method cannot do is a result: it is recorded, and others go on."""
        failures = self.content.setdefault("failures", {}).setdefault(setting, {})
        try:
            yield
        except OutOfTimeError:
            raise
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {str(error)[:300]}"
            print(f"  {name}: {failures[name]}", flush=True)
        else:
            failures.pop(name, None)

    def keep(self, setting: str, bank: str, report: Any, about: Mapping[str, Any]) -> None:
        place = self.content["measured"].setdefault(setting, {}).setdefault(bank, {"methods": {}})
        retrainings = report.summary["finished"]
        before = place.get("retrainings", retrainings)
        if before != retrainings:  # such rows cannot be compared
            dropped = f"{len(place['methods'])} rows of {before} retrainings are measured anew on {retrainings}"
            print(f"  {setting}, {bank}: {dropped}", flush=True)
            place["methods"] = {}
        place |= {"retrainings": retrainings, "failed": len(report.summary["failures"]),
                  "repeatability": report.repeatability}  # fmt: skip
        for row in report.rows:
            place["methods"][row.method] = {
                "control": row.control,
                "per_query": row.per_query.value, "per_query_error": row.per_query.standard_error,
                # Of one bank resampled alike: what two methods differ by has an error of its own.
                "per_query_replicates": row.per_query.replicates.round(5).tolist(),
                "per_subset": row.per_subset.value, "per_subset_error": row.per_subset.standard_error,
                **about.get(row.method, {}),
            }  # fmt: skip


def run_at(
    parts: Sequence[float], setting: Setting, work: Path, record: Record, budget: Budget, *, together: bool = False
) -> None:
    """`run` at each of these parts of a training; and measure the mean of what this call has made at all of them."""
    setting.keep_banks()
    made: list[dict[str, Scores]] = [{} for _ in parts]
    for part, scores in zip(parts, made, strict=True):
        run(setting.at(part), work, record, budget, scores if together else None)
    if together:
        means: dict[str, Scores] = {}
        here = f"{setting.name}, at {' and '.join(f'{part:g}' for part in parts)} together"
        for name in sorted(set().union(*made)):
            with record.failing(here, name):
                several = [one[name] for one in made if name in one]
                if len(several) < len(made):
                    raise ValueError("not made by this call at all places; what is recorded there is not made again")
                mean, seconds = Scores.mean_of(several), sum(one.provenance["seconds"] for one in several)
                means[name] = replace(mean, provenance={**mean.provenance, "seconds": seconds})
        if not means:
            print(f"  {here}: nothing, as this call has made no scores at all of these places", flush=True)
        measure(here, setting.banks, means, record)
        record.write()


def run(
    setting: Setting, work: Path, record: Record, budget: Budget, all_scores: dict[str, Scores] | None = None
) -> None:
    """Score and measure whatever the record does not have yet; a method that fails is recorded and others go on.

    The scores, for all of which there may be no room, are left in ``all_scores`` if it is given.
    """
    work = work / file_name(setting.name)
    work.mkdir(parents=True, exist_ok=True)
    lacking = {
        name: bank
        for name, bank in setting.banks.items()
        if not record.has(setting.name, name, "random", bank.summary()["finished"])
    }
    if lacking:
        budget.check()
        for name, report in judged(lacking, {}, texts=setting.texts):
            record.keep(setting.name, name, report, {})
        record.write()
    measured = record.content["measured"].get(setting.name, {})
    jobs = {
        name: job
        for name, job in setting.jobs(work, budget).items()
        if not all(setting.rows_of(name, bank) <= measured[bank]["methods"].keys() for bank in setting.banks)
    }
    for _, results, seconds in finished(jobs, setting.name, record, budget):
        scores = {}
        for made, given in results.items():
            with record.failing(setting.name, made):
                for bank in (bank for name, bank in setting.banks.items() if is_judged_by(name, made)):
                    bank.check(given)
                scores[made] = replace(given, provenance={"seconds": seconds, **given.provenance})
        measure(setting.name, setting.banks, scores, record)
        if all_scores is not None:
            all_scores |= scores


def measure(setting: str, banks: Mapping[str, Bank], scores: Mapping[str, Scores], record: Record) -> None:
    """Keep and show what banks say of scores, and of what is known about them what a record should have."""
    about = {
        name: {key: value for key, value in given.provenance.items() if key in KEPT} for name, given in scores.items()
    }
    for bank, report in judged(banks, scores, controls=False):
        record.keep(setting, bank, report, about)
        for row in report.rows:
            took = about[row.method]["seconds"]
            print(f"  {bank:24} {row.method:44} {row.per_query}   {row.per_subset}   {took:.1f} s", flush=True)


def judged(banks: Mapping[str, Bank], scores: Mapping[str, Scores], **more: Any) -> Iterator[tuple[str, Report]]:
    """What each bank says of the scores that it judges."""

    def by(name: str) -> tuple[str, Report]:
        own = {made: given for made, given in scores.items() if is_judged_by(name, made)}
        return name, compare(banks[name], own, bootstrap=BOOTSTRAP, **more)

    # Random numbers, sorting and products let go of the interpreter. Controls of a bank may take 10 GB.
    with ThreadPoolExecutor(None if scores else 2) as pool:
        yield from pool.map(by, banks)


def is_judged_by(bank: str, scores: str) -> bool:
    """Whether a bank judges such scores: all but those that are read as another bank's training says."""
    return TOLD not in scores or scores.endswith(f"{TOLD}{bank}")


KEPT = (
    "seconds",
    "mean_loss",
    "mean_loss_at_center",
    "effective_draws",
    "verdict",
    "failed_chains",
    "damping",
    "kappa",
    "dimension",
    "weights",
    *CALIBRATED,
)


def finished(
    jobs: Mapping[str, Callable[[], Result]], setting: str, record: Record, budget: Budget
) -> Iterator[tuple[str, Result, float]]:
    """Give each job's name, result and seconds; one that fails is recorded, and the others go on."""
    for name, job in jobs.items():
        budget.check()
        started = time.perf_counter()
        done = []
        with record.failing(setting, name):
            result = job()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            done.append(result)
        for result in done:
            yield name, result, time.perf_counter() - started
        record.write()


def analysed_model(
    checkpoint: Path, new: Callable[[], nn.Module], trained: Callable[[], nn.Module], record: Record, budget: Budget
) -> nn.Module:
    """Train the model whose training examples are scored, once; later it is read."""
    if checkpoint.is_file():
        model = new()
        model.load_state_dict(torch.load(checkpoint, weights_only=True))
        return model.eval()
    budget.check()
    started = time.perf_counter()
    model = trained()
    written = io.BytesIO()
    torch.save(model.state_dict(), written)
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    replace_file(checkpoint, written.getvalue())
    record.add_seconds("the model that is analysed", time.perf_counter() - started)
    return model


def fill(
    directory: Path,
    subsets: Subsets,
    train_function: Callable[[np.ndarray, int], nn.Module],
    query: Any,
    loss: Loss,
    fingerprints: Mapping[str, str],
    *,
    seeds: int,
    budget: Budget,
    record: Record,
    batch_size: int,
    key: str,
) -> Bank:
    """Fill a bank on this device, one retraining after another, until it is full or the time is over.

    A model is measured before the next one is trained, so that ``train_function`` may return the same one each time.
    Small models do not keep a GPU busy: what a step costs is mostly launching its kernels, which a CUDA graph saves;
    several models side by side would share that cost too, and are not tried here.
    """
    measure = Measure(query, loss, {}, None, batch_size)
    bank = Bank.create(directory, subsets, queries=len(query[0] if isinstance(query, tuple) else query),
                       fingerprints=fingerprints, dtype="float16")  # fmt: skip
    todo = bank.todo(seeds, subsets=len(subsets))
    started = time.perf_counter()
    finished = 0
    try:
        for subset, seed in todo:
            budget.check()
            try:
                model = train_function(subsets.indices(subset), seed)
                failure = bank.require_shapes(shapes_of(model))
                if failure is None:
                    bank.store(subset, seed, measure(model))
                else:
                    bank.fail(subset, seed, failure)
            except (RuntimeError, ValueError) as error:
                bank.fail(subset, seed, f"{type(error).__name__}: {str(error)[:300]}")
            finished += 1
    finally:
        if finished:
            record.add_seconds(f"retraining {key}", time.perf_counter() - started, finished)
            record.write()
    print(f"  bank {key}: {bank.summary()['text']}", flush=True)
    return bank


def parser_of(experiment: str, description: str, *, methods: Sequence[str]) -> argparse.ArgumentParser:
    """What can be said to each of these experiments."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--work", type=Path, required=True, help="banks, checkpoints and runs; called again it goes on")
    parser.add_argument("--record", type=Path, default=RECORDS / f"{experiment}.json")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop cleanly after so long")
    parser.add_argument("--bif", type=Path, help="JSON: settings of the BIF by name, instead of the script's own")
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods)
    return parser


def add_retraining(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """What can be said to those that retrain."""
    parser.add_argument("--queries", type=int)
    parser.add_argument("--retrain", type=float, nargs="+", help="alpha_retrain")
    parser.add_argument("--subsets", type=int, default=100)
    parser.add_argument("--retrain-seeds", type=int, help="average so many retrainings of each subset")
    parser.add_argument(
        "--ekfac-repeats", type=int, help="fits of EK-FAC at its own damping, for its variation; 0: that of 1e-8"
    )
    parser.add_argument("--dampings", type=float, nargs="*", default=DAMPINGS, help="tried for EK-FAC, beside its two")
    parser.add_argument("--scoring-batch", type=int, help="examples in one pass of EK-FAC")
    parser.add_argument("--labels", type=float, default=LABELS, help="drawn for every example, for the first order")
    parser.add_argument(
        "--first-order-at", type=float, nargs="*", metavar="KAPPA", default=FIRST_ORDER_AT,
        help="where the first order is read, besides what trainings say",
    )  # fmt: skip
    parser.add_argument("--label-seeds", type=int, default=1, help="so many times, in the metric of Adam")
    parser.add_argument("--read-at", type=float, nargs="*", metavar="KAPPA", help="where runs are read, besides 0")
    parser.add_argument("--alike", action="store_true", help="gradients and draws besides in units of layers alike")
    parser.add_argument(
        "--at", type=part_of, nargs="+", metavar="PART", default=[1.0],
        help="where scores are taken: 0 is what is trained again, 1 the model that is analysed, between them such a "
        "part of a training on all examples",
    )  # fmt: skip
    parser.add_argument("--together", action="store_true", help="the mean of what is made at all those places, too")
    parser.add_argument("--only", nargs="+", default=(), metavar="JOB", help="these in this order; others are listed")
    add_keep(parser)
    parser.set_defaults(**{"read_at": (READ_AT,), **defaults})


def add_keep(parser: argparse.ArgumentParser) -> None:
    """Where to leave what can be read elsewhere."""
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="write losses of runs and banks there (experiments.kept reads them)"
    )


def conduct(
    arguments: argparse.Namespace,
    about: Mapping[str, Any],
    bif: Mapping[str, Mapping[str, Any]],
    experiment: Callable[[Record, Budget, Mapping[str, Mapping[str, Any]]], None],
) -> dict[str, Any]:
    """Go on until all is done or the time is over, and say which; returns what the record holds."""
    if arguments.bif is not None:
        bif = json.loads(arguments.bif.read_text())
    settings = {
        key: value
        for key, value in vars(arguments).items()
        if not isinstance(value, Path) and key not in ("minutes", "bif", "keep")
    }
    record = Record(arguments.record, {**about, "settings": settings, "bif": bif})
    status = "complete"
    try:
        experiment(record, Budget(arguments.minutes), bif)
    except OutOfTimeError:
        status = "out of time; the same command goes on"
    record.content["status"] = status
    record.write()
    print(status, flush=True)
    return record.content


def measure_each(
    parser: argparse.ArgumentParser,
    experiment: str,
    names: Collection[str],
    about: Mapping[str, Any],
    measure: Callable[[str, argparse.Namespace, Record, Budget], None],
    draw: Callable[[Mapping[str, Any], Path], None],
) -> dict[str, Any]:
    """Measure small models, one after another, until all is done or the time is over; returns what the record holds."""
    parser.add_argument("--only", default=",".join(names))
    parser.add_argument("--work", type=Path, required=True, help="banks, sweeps and draws; called again it goes on")
    parser.add_argument("--record", type=Path, default=RECORDS / f"{experiment}.json")
    parser.add_argument("--figure", type=Path, help="draw what the record has")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop cleanly after so long")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record, budget = Record(arguments.record, about), Budget(arguments.minutes)
    try:
        for name in filter(None, arguments.only.split(",")):
            measure(name, arguments, record, budget)
        print("complete", flush=True)
    except OutOfTimeError:
        print("out of time; the same command goes on", flush=True)
    measured = {name: record.content["measured"][name] for name in names if name in record.content["measured"]}
    if arguments.figure:
        draw(measured, arguments.figure)
    return measured


def _read_at(kappa: float) -> str:
    """After the name of what is read there."""
    return f", read at κ = {kappa:g}" if kappa else ""


def _buffer_bytes(share: float = 1 / 3) -> int:
    """What gradients held at once may take: a share of what is free on the GPU."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what an earlier job held and let go of is free as well
    return int(torch.cuda.mem_get_info()[0] * share) if torch.cuda.is_available() else 2 << 30


def file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]", "_", name)

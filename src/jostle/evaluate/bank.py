"""The retraining bank: what really happens to every query's loss when a model is trained on a part of the data.

A bank is a directory::

    bank.json            what it was made from: fingerprints of the data, subsets, shapes of models and observables
    subsets.npy          which examples each subset holds, as bits
    retrainings/         one file for each (subset, seed) that is done: the losses of all queries
    failures/            one file for each that failed, with the reason

Every retraining is stored when it is done, whole or not at all, and is never done again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.numpy
import torch
from jaxtyping import Float, Int
from torch import nn

from jostle._version import __version__
from jostle.chains.progress import telling
from jostle.data.datasets import Collate, Data
from jostle.errors import InputError, RetrainingFailedWarning, warn
from jostle.evaluate.inputs import Given, require_ranks, scores_of
from jostle.evaluate.subsets import Subsets
from jostle.evaluate.training import TRIED, Trainer
from jostle.files import is_leftover, replace_file, replacing, to_disk
from jostle.losses import Loss
from jostle.losses import classification as classification_loss
from jostle.models.functional import Observable, eval_mode, sample_means

log = logging.getLogger("jostle")

FORMAT = 1
LOSS = "loss"
DATA = {"train": "training data", "query": "queries"}
"""What data are called that have a fingerprint."""

TrainFunction = Callable[[Int[np.ndarray, " member"], int], nn.Module]


class Bank:
    """Losses of queries after retraining on subsets: a directory that can be filled from several places and times."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        try:
            self.about: dict[str, Any] = json.loads((self.directory / "bank.json").read_text())
        except (OSError, ValueError) as error:
            raise InputError(
                "bank", got=f"no readable bank.json in {directory}", expected="the directory of a retraining bank"
            ) from error
        if self.about.get("format") != FORMAT:
            raise InputError("bank", got=f"format {self.about.get('format')}", expected=f"format {FORMAT}")
        packed, labels = np.load(self.directory / "subsets.npy"), self.about["labels"]
        # As many as are labelled: another process may have written more of them since.
        members = np.unpackbits(packed[: len(labels) or None], axis=1, count=self.about["train"]).astype(bool)
        self.subsets = Subsets(members, self.about["kind"], labels)

    @classmethod
    def create(
        cls,
        directory: str | Path,
        subsets: Subsets,
        *,
        queries: int,
        fingerprints: Mapping[str, str],
        dtype: Literal["float32", "float16"] = "float32",
        shapes: Mapping[str, list[int]] | None = None,
    ) -> Bank:
        """Make a bank, or open the one that is there: of the same data, and of these subsets or the first of them.

        Args:
            directory: where it goes.
            subsets: what is trained on. A bank that has the first of them takes the others in addition.
            queries: the number of queries.
            fingerprints: of the ``train`` and ``query`` data; scores of other data are refused.
            dtype: what losses are stored in; half precision halves the space and keeps three digits.
            shapes: the shapes of the model's parameters; default: those of the first model that comes back.
        """
        directory = Path(directory)
        about = {
            "format": FORMAT, "jostle": __version__, "kind": subsets.kind, "train": subsets.members.shape[1],
            "queries": queries, "fingerprints": dict(fingerprints), "dtype": dtype, "shapes": shapes,
            "labels": [dict(label) for label in subsets.labels],
        }  # fmt: skip
        json.dumps(about)  # what cannot be written is found out before anything is
        directory.mkdir(parents=True, exist_ok=True)
        with _alone(directory):
            if (directory / "bank.json").exists():
                there = cls(directory)
                there._require_same(about, subsets)
                if len(subsets) <= len(there.subsets):
                    return there
                about = there.about | {"labels": about["labels"], "shapes": there.about["shapes"] or shapes}
            elif not _is_new(directory):
                raise InputError("bank", got=f"{directory}, which holds something else", expected="a new directory")
            for name in ("retrainings", "failures"):
                (directory / name).mkdir(exist_ok=True)
            packed = np.packbits(subsets.members, axis=1)
            with replacing(directory / "subsets.npy") as temporary, open(temporary, "wb") as file:
                np.save(file, packed)
            replace_file(directory / "bank.json", json.dumps(about))
            to_disk(directory.parent)
            return cls(directory)

    def _require_same(self, about: Mapping[str, Any], subsets: Subsets) -> None:
        fix = "choose another directory, or delete this one"
        for key, of in (("train", "training examples"), ("queries", "queries"), ("kind", "subsets")):
            if self.about[key] != about[key]:
                got = f"{about[key]} {of} for {self.directory}"
                raise InputError("bank", got=got, expected=f"{self.about[key]}, as in the bank", fix=fix)
        ours, theirs = self.about["fingerprints"], about["fingerprints"]
        differing: list[str] = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        if differing:
            which = " and ".join(DATA.get(name, name) for name in differing)
            raise InputError(
                "bank",
                got=f"other data for {self.directory}: the {which} differ from those of the bank",
                expected="the same examples, in the same order",
                fix=fix,
            )
        both = min(len(subsets), len(self.subsets))
        same_labels = list(self.about["labels"])[:both] == about["labels"][:both]
        if not same_labels or not np.array_equal(self.subsets.members[:both], subsets.members[:both]):
            raise InputError(
                "bank",
                got=f"{self.directory}, a bank of other subsets",
                expected="the same ones, or more of them from the same seed",
                fix=fix,
            )

    def __len__(self) -> int:
        return len(self.subsets)

    def __repr__(self) -> str:
        return f"Bank({str(self.directory)!r}: {self.summary()['text']})"

    def todo(self, seeds: int, *, subsets: int | None = None, retry: bool = False) -> list[tuple[int, int]]:
        """Return the (subset, seed) pairs that are neither done nor, unless ``retry``, failed; one seed of all first.

        ``subsets`` restricts them to the first so many subsets.
        """
        known = self._pairs("retrainings") | (set() if retry else self._pairs("failures"))
        rows = len(self) if subsets is None else min(subsets, len(self))
        return [(subset, seed) for seed in range(seeds) for subset in range(rows) if (subset, seed) not in known]

    def store(self, subset: int, seed: int, values: Mapping[str, Float[np.ndarray, " query"]]) -> bool:
        """Keep what one retraining gave: ``"loss"``, one number a query, and any other observables.

        What is not finite, or of another shape than that of the first one, is recorded as a failure.

        Returns:
            Whether it was kept.
        """
        tensors = {}
        for name, value in values.items():
            value = np.asarray(value, np.float32)
            if name == LOSS and value.shape != (self.about["queries"],):
                self.fail(subset, seed, f"losses of shape {value.shape} for {self.about['queries']} queries")
                return False
            with np.errstate(over="ignore"):
                tensors[name] = value.astype(self.about["dtype"])
            if not np.isfinite(tensors[name]).all():
                self.fail(subset, seed, f"a {name} that is not finite in {self.about['dtype']}")
                return False
        differs = self._differs("observables", {name: list(value.shape) for name, value in tensors.items()})
        if differs is not None:
            self.fail(subset, seed, f"other observables: {differs}")
            return False
        path = self._path("retrainings", subset, seed)
        with replacing(path) as temporary:
            safetensors.numpy.save_file(tensors, temporary)
        self._path("failures", subset, seed).unlink(missing_ok=True)
        return True

    def fail(self, subset: int, seed: int, reason: str, where: str = "") -> None:
        """Record that one retraining failed, and why; ``where`` is a traceback."""
        text = json.dumps({"subset": subset, "seed": seed, "reason": reason, "traceback": where})
        replace_file(self._path("failures", subset, seed), text)

    def why(self, subset: int, seed: int) -> str:
        """Return why a retraining failed; nothing where it did not, or has succeeded since in another process."""
        with contextlib.suppress(FileNotFoundError):
            return json.loads(self._path("failures", subset, seed).read_text())["reason"]
        return ""

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The retrainings that failed, with their reasons, and the tracebacks of what they raised."""
        return [json.loads(path.read_text()) for path in sorted((self.directory / "failures").glob("*.json"))]

    @property
    def observables(self) -> list[str]:
        """What was kept of every retraining: ``"loss"``, and others that were asked for."""
        return sorted(self._kept_shapes() or {})

    def _kept_shapes(self) -> dict[str, list[int]] | None:
        """Of the first in order, which speaks for all; None before there is one."""
        done = sorted(self._pairs("retrainings"))
        if not done:
            return None
        found = safetensors.numpy.load_file(self._path("retrainings", *done[0]))
        return {name: list(value.shape) for name, value in found.items()}

    def values(self, name: str = LOSS) -> Float[np.ndarray, "subset seed query"]:
        """Return what retrainings gave, NaN where one is missing; losses unless another observable is named."""
        pairs = sorted(self._pairs("retrainings"))
        if not pairs:
            failures = self.failures
            why = f"; the first of {len(failures)} failures: {failures[0]['reason']}" if failures else ""
            raise InputError("bank", got=f"{self.directory} without a finished retraining{why}", expected="some")
        if name not in self.observables:
            raise InputError("observable", got=repr(name), expected=f"one of {', '.join(self.observables)}")
        first = safetensors.numpy.load_file(self._path("retrainings", *pairs[0]))[name]
        result = np.full((len(self), 1 + max(seed for _, seed in pairs), *first.shape), np.nan, np.float32)
        for subset, seed in pairs:
            found = safetensors.numpy.load_file(self._path("retrainings", subset, seed))
            if name not in found or found[name].shape != first.shape:
                raise InputError(
                    "bank",
                    got=f"no {name} of shape {first.shape} of subset {subset}, seed {seed}",
                    expected="the same observables of every retraining",
                    fix="fill another directory",
                )
            result[subset, seed] = found[name]
        return result

    def summary(self) -> dict[str, Any]:
        """Say how far the bank is, and what failed."""
        done, failures = self._pairs("retrainings"), self.failures
        seeds = 1 + max((seed for _, seed in done), default=-1)
        text = f"{len(done)} retrainings of {len({subset for subset, _ in done})} of {len(self)} subsets"
        text += f", up to {seeds} seeds each" if seeds > 1 else ""
        if failures:
            first = failures[0]
            text += f"; {len(failures)} failed, the first (subset {first['subset']}, seed {first['seed']}): "
            text += first["reason"]
        return {"finished": len(done), "subsets": len(self), "seeds": seeds, "failures": failures, "text": text}

    def check(self, scores: Given, name: str = "") -> None:
        """Refuse scores of other data, of another size, that are not finite, or that are constant, by their name."""
        scores = scores_of(scores, name)
        called = f"scores of {name or scores.method}"
        expected = (self.about["train"], self.about["queries"])
        if scores.shape != expected:
            raise InputError(
                called,
                got=f"{' × '.join(map(str, scores.shape))} numbers",
                expected=f"{expected[0]} train × {expected[1]} query, as in the bank",
            )
        theirs = scores.provenance.get("fingerprints", {})
        for name, ours in self.about["fingerprints"].items():
            if name in theirs and theirs[name] != ours:
                raise InputError(
                    called,
                    got=f"those of other data: the {DATA.get(name, name)} differ from those of the bank",
                    expected="those of the examples that the bank was retrained on, in the same order",
                )
        require_ranks(scores, called)

    def require_shapes(self, shapes: dict[str, list[int]]) -> str | None:
        """Say how a model differs in shape from those before it; None where it does not. The first one decides."""
        differs = self._differs("shapes", shapes)
        return None if differs is None else f"a model of another shape: {differs}"

    def _differs(self, key: str, shapes: Mapping[str, Any]) -> str | None:
        """Compare shapes, or what else all have alike, with those of bank.json.

        The first to come, in whatever process, writes them there.
        """
        if self.about.get(key) is None:
            with _alone(self.directory):
                path = self.directory / "bank.json"
                about = json.loads(path.read_text())
                if about.get(key) is None:
                    # An older bank.json knows nothing of observables, though the bank may have some.
                    about[key] = (self._kept_shapes() if key == "observables" else None) or shapes
                    replace_file(path, json.dumps(about))
            self.about[key] = about[key]
        for name in [*self.about[key], *shapes]:
            expected, got = self.about[key].get(name), shapes.get(name)
            if got is None:
                return f"it has no {name}, expected one of shape {expected}"
            if expected is None:
                return f"it has a {name}, expected none"
            if expected != got:
                return f"{name} is {got}, expected {expected}"
        return None

    def _pairs(self, kind: str) -> set[tuple[int, int]]:
        names = (path.stem.split("-") for path in (self.directory / kind).glob("[0-9]*-[0-9]*.*"))
        return {(int(subset), int(seed)) for subset, seed in names}

    def _path(self, kind: str, subset: int, seed: int) -> Path:
        suffix = "safetensors" if kind == "retrainings" else "json"
        return self.directory / kind / f"{subset:05d}-{seed}.{suffix}"


def require_bank(bank: Any) -> None:
    """Refuse what is no bank: the path of one, above all."""
    if not isinstance(bank, Bank):
        is_path = isinstance(bank, str | Path)
        raise InputError(
            "bank",
            got=repr(str(bank)) if is_path else f"a {type(bank).__name__}",
            expected="a Bank",
            fix=f"open it with Bank({str(bank)!r})" if is_path else "open one with Bank(path)",
        )


def retrain(
    train_function: TrainFunction,
    train: Any,
    query: Any,
    *,
    subsets: Subsets,
    out: str | Path,
    seeds: int = 1,
    loss: Loss | None = None,
    observables: Mapping[str, Observable] | None = None,
    collate: Collate | None = None,
    batch_size: int = 256,
    dtype: Literal["float32", "float16"] = "float32",
    like: nn.Module | None = None,
    jobs: int | None = None,
    minutes: float | None = None,
    retry: bool = False,
    progress: bool = True,
) -> Bank:
    """Train a model on every subset, several times, and keep the loss of every query.

    Runs through joblib: ``jobs`` processes here, or whatever ``joblib.parallel_config`` says (Dask, Ray, ...). Each
    result is stored as it comes; the same call again goes on with what is missing. A call of ``train_function`` that
    raises, returns a model of another shape, or ends its process of ``jobs`` is recorded and the others go on.

    Args:
        train_function: ``train(indices, seed) -> model``. All its randomness should come from the seed. A `Trainer`
            trains many small models at once, where that is quicker.
        train: the training examples, of which subsets are taken; only their fingerprint and number are used here.
        query: the examples whose losses are kept.
        subsets: `random_subsets`, `leave_one_out` or `removals`.
        out: the directory of the bank.
        seeds: how often each subset is trained on, with seeds 0, 1, ...; losses are averaged over them.
        loss: as for `jostle.attribute`; a sequence's loss is the mean of its tokens'.
        observables: what else to keep of every model: ``{"name": f(model) -> (p,)}``; `removal` wants a margin.
        collate: makes a batch of a list of samples.
        batch_size: queries in one pass.
        dtype: what losses are stored in.
        like: a model of the shape that is expected; default: the first that comes back.
        jobs: how many processes train at once; −1 for one a core. Default: what ``joblib.parallel_config`` says, or 1.
        minutes: begin no retraining after so long.
        retry: try again what failed before. Where nothing has finished yet, it is tried again anyway.
        progress: show how many are finished where stderr is a terminal or a notebook, and a line a minute elsewhere.

    Returns:
        The bank, finished or not; `Bank.summary` says how far it is.
    """
    import joblib
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    if seeds < 1:
        raise InputError("seeds", got=seeds, expected="a positive number of retrainings of each subset")
    data = {name: Data(source, name, collate=collate) for name, source in (("train", train), ("query", query))}
    if not isinstance(subsets, Subsets):
        raise InputError(
            "subsets",
            got=f"a {type(subsets).__name__}",
            expected="random_subsets, leave_one_out, removals, or of your own: Subsets(members, 'random')",
            fix="members[k, i] says whether subset k holds example i",
        )
    wrong_length = isinstance(train, tuple) and subsets.members.shape[1] == len(train)
    if subsets.members.shape[1] != len(data["train"]):
        raise InputError(
            "subsets",
            got=f"subsets of {subsets.members.shape[1]}",
            expected=f"{len(data['train'])}, as in train",
            fix="len() of a tuple of tensors is how many tensors there are" if wrong_length else "",
        )
    bank = Bank.create(
        out, subsets, queries=len(data["query"]), dtype=dtype, shapes=None if like is None else shapes_of(like),
        fingerprints={name: one.fingerprint() for name, one in data.items()},
    )  # fmt: skip
    if isinstance(train_function, Trainer):
        train_function.require_data(train, bank.about["fingerprints"]["train"], collate)
        differs = bank._differs("training", train_function.about())
        if differs is not None:
            raise InputError("train_function", got=f"another training than the bank's: {differs}",
                             expected="the same", fix="choose another directory")  # fmt: skip
    kept = bank.about.get("observables")
    if kept is not None and kept.keys() != {LOSS, *(observables or {})}:
        raise InputError(
            "observables",
            got=", ".join(observables or {}) or "none",
            expected=f"those of the bank: {', '.join(sorted(kept.keys() - {LOSS})) or 'none'}",
            fix="choose another directory",
        )
    measure = Measure(query, loss or classification_loss(), dict(observables or {}), collate, batch_size)
    deadline = None if minutes is None else time.monotonic() + 60 * minutes

    retry = retry or not bank.summary()["finished"]  # what none could do was a mistake, and may be mended
    todo = bank.todo(seeds, subsets=len(subsets), retry=retry)
    unfinished = len(bank.todo(seeds, subsets=len(subsets), retry=True))
    processes: Any = joblib.effective_n_jobs  # takes None, whatever its types say
    every, failed = len(subsets) * seeds, unfinished - len(todo)
    first = ""
    at_once = 1
    if isinstance(train_function, Trainer) and todo and (deadline is None or time.monotonic() <= deadline):
        with telling(progress) as tell:
            tell("trying how many models to train at once")
            at_once, how = _at_once(train_function, subsets, todo)
        at_once = min(at_once, -(-len(todo) // processes(jobs)))  # every process has some
        if progress:
            print(f"jostle: models are trained {how}", file=sys.stderr, flush=True)

    def how_far() -> str:
        """What earlier calls did counts, too."""
        also = f", {failed:,} failed" if failed else ""
        # Whoever sees that all do need not wait for the others.
        why = f"{', the first now' if failed > 1 else ''}: {first}" if first else ""
        return f"{every - unfinished:,} of {every:,} retrainings finished{also}{why}"

    # Dispatched one by one, so that none begins after the deadline; collected as they come, so that all are kept.
    options: dict[str, Any] = {"return_as": "generator_unordered", "pre_dispatch": "n_jobs", "batch_size": 1}

    def outcomes(pairs: Iterable[tuple[int, int]], alone: bool = False) -> Iterator[_Outcome]:
        nonlocal at_once
        left, broken = iter(pairs), True

        def next_group() -> list[tuple[int, int]]:
            return list(itertools.islice(left, 1 if alone else at_once))

        while broken:
            begun: list[tuple[int, int]] = []

            def tasks(begun: list[tuple[int, int]] = begun) -> Iterator[Any]:
                while deadline is None or time.monotonic() <= deadline:
                    group = next_group()
                    if not group:
                        return
                    begun.extend(group)
                    indices = [subsets.indices(subset) for subset, _ in group]
                    yield joblib.delayed(_retrain)(train_function, measure, indices, group)

            parallel: Any = joblib.Parallel(n_jobs=jobs, **options)
            broken = False
            try:
                for outcome in itertools.chain.from_iterable(parallel(tasks())):
                    begun.remove((outcome.subset, outcome.seed))
                    yield outcome
            except TerminatedWorkerError:
                # It takes the others down with it: whoever dies alone, too, did it.
                broken, at_once = not alone, -(-at_once // 2)
                for pair in begun:
                    died = _Outcome(*pair, {}, {}, "its process died: out of memory, perhaps, or it crashed")
                    yield from [died] if alone else outcomes([pair], alone=True)

    try:
        with telling(progress) as tell:
            tell(how_far())
            for outcome in outcomes(todo):
                failure, kept = outcome.failure or bank.require_shapes(outcome.shapes), False
                if failure is None:
                    kept = bank.store(outcome.subset, outcome.seed, outcome.values)
                else:
                    bank.fail(outcome.subset, outcome.seed, failure, outcome.traceback)
                if not kept:
                    first = first or bank.why(outcome.subset, outcome.seed)
                unfinished, failed = unfinished - kept, failed + (not kept)
                tell(how_far())
    except KeyboardInterrupt:
        if progress:
            print(f"jostle: {how_far()}; the same call goes on", file=sys.stderr, flush=True)
        raise
    if bank.failures:
        again = "failures are kept, and the same call leaves them out; retrain(..., retry=True) tries them again"
        if not bank.summary()["finished"]:
            again = "the same call tries them again"
        warn(f"{bank.summary()['text']}; {again}", RetrainingFailedWarning)
    return bank


@dataclass(frozen=True)
class Measure:
    """What is kept of a model: the loss of every query, and observables."""

    query: Any
    loss: Loss
    observables: Mapping[str, Observable]
    collate: Collate | None = None
    batch_size: int = 256

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> dict[str, Float[np.ndarray, " query"]]:
        """Evaluate, with dropout off and batch statistics frozen."""
        with eval_mode(model):
            data = Data(self.query, "query", collate=self.collate, device=next(model.parameters()).device)
            parts = []
            for start in range(0, len(data), self.batch_size):
                # A copy, since a model may change its input, and the next one sees the same queries.
                batch = data.batch(np.arange(start, min(start + self.batch_size, len(data))))
                parts.append(sample_means(self.loss(model, batch), self.loss, batch).float())
            found = {LOSS: torch.cat(parts).cpu().numpy()}
            return found | {name: phi(model).float().cpu().numpy() for name, phi in self.observables.items()}


@dataclass(frozen=True)
class _Outcome:
    subset: int
    seed: int
    values: dict[str, np.ndarray]
    shapes: dict[str, list[int]]
    failure: str | None = None
    traceback: str = ""


def _at_once(train: Trainer, subsets: Subsets, todo: list[tuple[int, int]]) -> tuple[int, str]:
    """How many models to train at once, and how that is said; ``todo`` is sorted, so that such stand side by side."""
    steps = [train.steps(int(size)) for size in subsets.members.sum(1)]
    todo.sort(key=lambda pair: steps[pair[0]])
    (commonest, count), *_ = Counter(steps[subset] for subset, _ in todo).most_common()
    alike = [pair for pair in todo if steps[pair[0]] == commonest]
    some = alike[: 1 if train.at_once == 1 else max(TRIED)]
    if len(some) > 1:  # randomness may be what cannot be stacked
        some[1] = next((pair for pair in alike if pair[1] != some[0][1]), some[1])
    found = train.most_at_once([(subsets.indices(subset), seed) for subset, seed in some], of=count)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def _retrain(
    train_function: TrainFunction, measure: Measure, indices: list[np.ndarray], pairs: list[tuple[int, int]]
) -> list[_Outcome]:
    """Several retrainings at once, wherever they run; one by one where that fails, to tell which it was."""
    jobs = [(own, seed) for own, (_, seed) in zip(indices, pairs, strict=True)]
    if isinstance(train_function, Trainer) and len(jobs) > 1:
        try:
            models = train_function.together(jobs)
            return [
                _outcome(lambda model=model: model, measure, *pair) for model, pair in zip(models, pairs, strict=True)
            ]
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            log.warning("%d models at once failed (%s), so they are trained one by one", len(pairs), error)
    return [
        _outcome(lambda job=job: train_function(*job), measure, *pair) for job, pair in zip(jobs, pairs, strict=True)
    ]


def _outcome(train: Callable[[], Any], measure: Measure, subset: int, seed: int) -> _Outcome:
    """One retraining; what goes wrong in it is a result."""
    try:
        model = train()
        if not isinstance(model, nn.Module):
            return _Outcome(subset, seed, {}, {}, f"train returned a {type(model).__name__}, not a torch.nn.Module")
        return _Outcome(subset, seed, measure(model), shapes_of(model))
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        return _Outcome(subset, seed, {}, {}, reason, traceback.format_exc())


def shapes_of(model: nn.Module) -> dict[str, list[int]]:
    """Return the shapes of a model's parameters, by name."""
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def _is_new(directory: Path) -> bool:
    """Whether nothing is there but what an interrupted beginning of a bank leaves."""
    for path in directory.iterdir():
        if path.name in ("retrainings", "failures") and path.is_dir():
            if any(path.iterdir()):
                return False
        elif path.name != "subsets.npy" and not any(is_leftover(path, name) for name in ("subsets.npy", "bank.json")):
            return False
    return True


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold off other processes that read bank.json to write it again; where a file system cannot, go on without."""
    descriptor = None
    try:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            descriptor = os.open(directory, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)

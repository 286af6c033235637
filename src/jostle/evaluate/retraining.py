"""Training models again, on every subset of a bank that has not been done yet."""

from __future__ import annotations

import itertools
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import nn

from jostle.chains.progress import telling
from jostle.data.datasets import Collate, Data
from jostle.errors import InputError, RetrainingFailedWarning, warn
from jostle.evaluate.bank import LOSS, Bank
from jostle.evaluate.subsets import DROPS, Subsets
from jostle.evaluate.training import TRIED, Job, Trainer
from jostle.losses import Loss, described
from jostle.losses import classification as classification_loss
from jostle.models.functional import Observable, eval_mode, sample_means

log = logging.getLogger("jostle")

TrainFunction = Callable[[Int[np.ndarray, " member"], int], nn.Module]


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
            trains many small models at once, where that is quicker. For drops it has a method
            ``with_weights(weights, seed) -> model`` as well (`Trainer.with_weights`), which is called instead.
        train: the training examples, of which subsets are taken; only their fingerprint and number are used here.
        query: the examples whose losses are kept.
        subsets: `random_subsets`, `random_drops`, `leave_one_out` or `removals`.
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
            expected="random_subsets, random_drops, leave_one_out, removals, or of your own: "
            "Subsets(members, 'random')",
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
    if subsets.kind == DROPS:
        _require_weights(train_function, subsets, dtype)
    bank = Bank.create(
        out, subsets, queries=len(data["query"]), dtype=dtype, shapes=None if like is None else shapes_of(like),
        fingerprints={name: one.fingerprint() for name, one in data.items()},
    )  # fmt: skip
    # Of functions that are not ours there is nothing to know them by.
    training = {"by": "a function of your own"}
    if isinstance(train_function, Trainer):
        train_function.require_data(train, bank.about["fingerprints"]["train"], collate)
        training = {"by": "a Trainer"} | train_function.about()
    loss = loss or classification_loss()
    measured = {"loss": described(loss)}
    bank.require_manner("train_function", "training", training)
    bank.require_manner("loss", "measure", measured)
    kept = bank.about.get("observables")
    if kept is not None and kept.keys() != {LOSS, *(observables or {})}:
        raise InputError(
            "observables",
            got=", ".join(observables or {}) or "none",
            expected=f"those of the bank: {', '.join(sorted(kept.keys() - {LOSS})) or 'none'}",
            fix="choose another directory",
        )
    bank.keep_manner(training=training, measure=measured)
    measure = Measure(query, loss, dict(observables or {}), collate, batch_size)
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
                    jobs_of = [_job(subsets, *pair) for pair in group]
                    yield joblib.delayed(_retrain)(train_function, measure, jobs_of, group)

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
    steps = [train.steps(len(_job(subsets, subset, 0).indices)) for subset in range(len(subsets))]
    todo.sort(key=lambda pair: steps[pair[0]])
    (commonest, count), *_ = Counter(steps[subset] for subset, _ in todo).most_common()
    alike = [pair for pair in todo if steps[pair[0]] == commonest]
    some = alike[: 1 if train.at_once == 1 else max(TRIED)]
    if len(some) > 1:  # randomness may be what cannot be stacked
        some[1] = next((pair for pair in alike if pair[1] != some[0][1]), some[1])
    found = train.most_at_once([_job(subsets, *pair) for pair in some], of=count)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def _retrain(
    train_function: TrainFunction, measure: Measure, jobs: list[Job], pairs: list[tuple[int, int]]
) -> list[_Outcome]:
    """Several retrainings at once, wherever they run; one by one where that fails, to tell which it was."""
    if isinstance(train_function, Trainer) and len(jobs) > 1:
        try:
            models = train_function.together(jobs)
            return [
                _outcome(lambda model=model: model, measure, *pair) for model, pair in zip(models, pairs, strict=True)
            ]
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            log.warning("%d models at once failed (%s), so they are trained one by one", len(pairs), error)
    return [
        _outcome(lambda job=job: _train(train_function, job), measure, *pair)
        for job, pair in zip(jobs, pairs, strict=True)
    ]


def _train(train_function: Any, job: Job) -> Any:
    if job.weights is None:
        return train_function(job.indices, job.seed)
    return train_function.with_weights(job.weights, job.seed)


def _job(subsets: Subsets, subset: int, seed: int) -> Job:
    """A training on one subset; of drops, one on all examples, where those that are left out have weight 0."""
    if subsets.kind != DROPS:
        return Job(subsets.indices(subset), seed)
    members = subsets.members[subset]
    return Job(np.arange(len(members)), seed, members.astype(np.float64))


def _require_weights(train_function: Any, subsets: Subsets, dtype: str) -> None:
    """Refuse what cannot train with weights, has nothing to compare drops with, or rounds small changes away."""
    if not callable(getattr(train_function, "with_weights", None)):
        raise InputError(
            "train_function",
            got=f"a {type(train_function).__name__} that cannot leave out examples of a batch",
            expected="a Trainer, or an object with a method with_weights(weights, seed) -> model",
            fix="multiply each example's loss by its weight, and divide by what the batch has without weights",
        )
    if not subsets.members.all(1).any():
        raise InputError(
            "subsets", got="drops without a row of all examples", expected="one to compare with, as of random_drops()"
        )
    if dtype == "float16":
        raise InputError("dtype", got=dtype, expected="float32 for drops, which change losses by little")


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

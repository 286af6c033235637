"""`jostle.replay`: what leaving out a training example would do to a query, by the exact derivative of a training."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from jostle.chains.progress import telling
from jostle.config import fingerprint_names
from jostle.data.datasets import Collate, Data, fingerprint_tensors
from jostle.errors import EstimateWarning, InputError, require_folder, warn
from jostle.losses import described
from jostle.models.functional import eval_mode, sample_means
from jostle.scores import Scores
from jostle.traces.tensor_files import read_tensors, write_tensors
from jostle.training.backwards import Backwards, Costs
from jostle.training.records import Recorded
from jostle.training.repeatable import Microbatch, Repeatable, Repetition, Timeline
from jostle.training.steps import Root

log = logging.getLogger("jostle")

SMOOTHING = 0.1
"""c of √(v̂ + c·mean v̂), by which Adam's steps are divided in the derivative, with the mean over a tensor."""

SAVED_EVERY, SAVING = 60.0, 0.05
"""Seconds from one time that work is written down to the next, and what share of the time that may take."""

QUERIES = 8
"""Queries whose losses are differentiated at once."""


CHECKED, SHARE = 20, 0.02
"""Trainings without random examples, and without how many of them, that predictions are held against."""

RESAMPLED = 1000

LITTLE, NEARLY = 0.01, 0.1
"""A repetition may differ from the training that was recorded by this share of what leaving out so many changes."""


@dataclass(frozen=True)
class Check:
    """Predictions beside trainings that were really done again without some random examples.

    Attributes:
        real: the change of each query's loss, (training, query).
        predicted: the sum of the effects of what was left out.
        left_out: how many examples each training went without.
    """

    real: Float[np.ndarray, "training query"]
    predicted: Float[np.ndarray, "training query"]
    left_out: int

    @property
    def correlation(self) -> tuple[float, float]:
        """Of real and predicted changes, each query's less their mean, and its standard error: trainings resampled."""
        return self._resampled(lambda x, y: (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))

    @property
    def slope(self) -> tuple[float, float]:
        """Of real on predicted changes, likewise."""
        return self._resampled(lambda x, y: (x * y).sum() / (x * x).sum())

    def _resampled(self, measure: Callable[[np.ndarray, np.ndarray], float]) -> tuple[float, float]:
        def measured(rows: np.ndarray) -> float:
            return measure(*(one[rows] - one[rows].mean(0) for one in (self.predicted, self.real)))

        count, generator = len(self.real), np.random.default_rng(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            every = [measured(generator.integers(0, count, count)) for _ in range(RESAMPLED)]
            # Where one training is drawn every time, there is nothing to go together.
            return float(measured(np.arange(count))), float(np.nanstd(every))

    def __str__(self) -> str:
        (correlation, error), (slope, own) = self.correlation, self.slope
        without = "1 random example" if self.left_out == 1 else f"{self.left_out} random examples"
        return (
            f"{len(self.real)} trainings without {without}: correlation {correlation:.2f} ± "
            f"{1.96 * error:.2f}, slope {slope:.2f} ± {1.96 * own:.2f}"
        )


@dataclass(frozen=True, eq=False)
class Replay:
    """What leaving training examples out would do to each query's loss, to first order, along the training's own path.

    Attributes:
        effects: the rise of each query's loss, in nats, if a training example had been left out: positive means that it
            helped. Left out is: its loss has weight 0, all else stays.
        tokens: for each training example, what its tokens do, (token, query); a query's column sums to the effect. None
            where they were not asked for.
        check: predictions beside trainings that were really done again; None if there are none.
        provenance: what it was made from.
        errors: of the mean of several trainings, the standard error that their seeds leave; None of one training.
    """

    effects: Float[np.ndarray, "train query"]
    tokens: list[Float[np.ndarray, "token query"]] | None = None
    check: Check | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    errors: Float[np.ndarray, "train query"] | None = None

    def __repr__(self) -> str:
        train, query = self.effects.shape
        checked = "" if self.check is None else f"; {self.check}"
        return f"Replay({train} train × {query} query, effects in nats{checked})"

    @property
    def scores(self) -> Scores:
        """The same as `Scores`, for lists, files and evaluation: negative helps, so these are minus the effects."""
        return self.scores_with(self.provenance)

    def scores_with(self, provenance: Mapping[str, Any]) -> Scores:
        """Return the scores with another provenance."""
        return Scores(
            values=np.negative(self.effects), standard_error=self.errors, method="replay", scale=1.0,
            provenance={**provenance},
        )  # fmt: skip


def smooth_root(share: float) -> Root:
    """√(v + share·mean v): near v = 0 the derivative of what is divided by √v says nothing of larger changes."""

    def root(square: Tensor) -> Tensor:
        square = square + share * square.detach().mean()
        there = square > 0  # nowhere else has there been a gradient
        return torch.where(there, torch.where(there, square, 1.0).sqrt(), 0.0)

    return root


def replay(
    training: Repeatable | Sequence[Repeatable],
    query: Any,
    *,
    collate: Collate | None = None,
    tokens: bool = False,
    smoothing: float = SMOOTHING,
    check: int = CHECKED,
    share: float = SHARE,
    out: str | Path | None = None,
    progress: bool = False,
) -> Replay:
    """Return what leaving out each training example would do to each query's loss, in nats.

    The training is repeated once, and then gone through backwards: the derivative of a query's loss by the weight of
    each example's loss, through every step of the optimizer.

    Args:
        training: what is repeated; ``Trainer.repeatable(seed)`` has that of a `jostle.evaluate.Trainer`. Of several
            from different seeds, effects are the mean: what an example does in a training like these.
        query: the query examples.
        collate: makes a batch of a list of samples.
        tokens: return what each training token does, too.
        smoothing: of what Adam's steps are divided by, in the derivative alone; 0: none.
        check: train so many times more, each without random examples, and hold predictions against that; 0: do not.
        share: of the examples that each of these goes without.
        out: of one training: a file for the scores, ending in .safetensors. Work is written down beside it once a
            minute, in a file that ends in .unfinished: the same call goes on from there after a crash, to the same
            numbers.
        progress: show it.

    Raises:
        InputError: an optimizer that is not known; an ``out`` that is there, or that was begun for something else.

    Example:
        >>> found = jostle.replay(trainer.repeatable(seed=0), query)
        >>> found.scores.top(query=0)
    """
    started = time.perf_counter()
    if not smoothing >= 0:
        raise InputError("smoothing", got=smoothing, expected="a share of the mean, from 0 on")
    if check and not (isinstance(check, int | np.integer) and check >= 2):
        raise InputError("check", got=repr(check), expected="0, or a whole number of trainings from 2 on")
    if not 0 < share < 1:
        raise InputError("share", got=share, expected="a share of the examples between 0 and 1")
    if not isinstance(training, Repeatable):
        if out is not None:
            raise InputError("out", got="a file for several trainings", expected="one for each",
                             fix="replay them one by one, and take jostle.Scores.mean_of")  # fmt: skip
        given: dict[str, Any] = {"collate": collate, "tokens": tokens, "smoothing": smoothing, "share": share}
        return _mean([
            replay(one, query, **given, check=check, progress=progress) for one in training
        ])  # fmt: skip
    repetition = Repetition(training)
    device = repetition.parameters[0].device
    asked = Data(query, "query", collate=collate, device=device)
    about = {"smoothing": smoothing, "tokens": tokens, "check": check, "share": share}
    work = _Work(None if out is None else Path(out), lambda: {**about, **_identity(repetition, asked)}, device)
    found = _Found(len(training.data), len(asked), tokens)
    with telling(progress) as tell:
        timeline = Timeline(repetition, tell=tell)
        log.info("states before each step: %s", timeline.plan)
        timeline.go()
        repeated = _repeated(training, repetition, asked, tell) if isinstance(training, Recorded) else None
        backwards = Backwards(repetition, smooth_root(smoothing))
        end = fingerprint_tensors(dict(repetition.model.state_dict()))
        left, costs = work.restore(found, end) or (len(repetition), None)
        if costs is None:
            parts = np.array_split(np.arange(len(asked)), math.ceil(len(asked) / QUERIES))
            costs = backwards.of_queries([asked.batch(part) for part in parts])
        for number, moved in timeline.backwards(left):
            costs = backwards.step(costs, number, moved, found.add)
            tell(f"back at step {number} of {len(repetition)}")
            work.keep(found, end, number, costs)
        checked = _checked(training, asked, found.effects, check, share, tell) if check else None
    bad = np.flatnonzero(~np.isfinite(found.effects).all(0))
    if len(bad):
        warn(f"the derivative of query {bad[0]} is not finite: its training amplifies every change", EstimateWarning)
    provenance = {
        "steps": len(repetition), "smoothing": smoothing, "states_apart": timeline.apart,
        "fingerprints": {
            "train": training.data.fingerprint(), "query": asked.fingerprint(), "weights": end,
            "moving": fingerprint_names([name for name, one in training.model.named_parameters() if one.requires_grad]),
        },
        "seconds": time.perf_counter() - started,
    }  # fmt: skip
    provenance |= {} if checked is None else {"check": str(checked)}
    provenance |= {} if repeated is None else {"repeated": repeated}
    result = Replay(found.effects, found.tokens, checked, provenance)
    work.finish(result.scores)
    return result


def _mean(several: Sequence[Replay]) -> Replay:
    """The mean of replays of several trainings, and what seeds leave as its error."""
    if not several:
        raise InputError("training", got="none", expected="a training, or several")
    first = several[0].provenance["fingerprints"]
    for one in several[1:]:
        for name in ("train", "query", "moving"):
            if one.provenance["fingerprints"][name] != first[name]:
                raise InputError("training", got=f"trainings of different {name}", expected="the same but for seeds")
    effects = np.stack([one.effects for one in several])
    errors = None if len(several) == 1 else effects.std(0, ddof=1) / math.sqrt(len(several))
    tokens = None
    if several[0].tokens is not None:
        tokens = [np.mean(rows, 0) for rows in zip(*(one.tokens or [] for one in several), strict=True)]
    checks = [one.check for one in several if one.check is not None]
    checked = None
    if checks:
        real, predicted = (np.concatenate([getattr(one, name) for one in checks]) for name in ("real", "predicted"))
        checked = Check(real, predicted, checks[0].left_out)
    about = {**several[0].provenance, "trainings": len(several)}
    about["seconds"] = sum(one.provenance["seconds"] for one in several)
    about["fingerprints"] = {name: value for name, value in first.items() if name != "weights"}
    return Replay(effects.mean(0), tokens, checked, about, errors)


def _identity(repetition: Repetition, query: Data) -> dict[str, Any]:
    """What tells one replay from another."""
    training, optimizer = repetition.about, repetition.optimizer
    steps = hashlib.sha256()
    for step in training.steps:
        for part in step:
            steps.update(np.asarray(part.examples, np.int64).tobytes())
            steps.update(repr((part.share, part.counted, part.digest)).encode())
        steps.update(b"|")
    groups = [
        {
            name: float(value) if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]
    return {
        "weights": fingerprint_tensors(dict(training.model.state_dict())),
        "train": training.data.fingerprint(),
        "query": query.fingerprint(),
        "steps": steps.hexdigest()[:16],
        "optimizer": f"{repetition.kind} {groups} clipped to {training.clip_norm}",
        "loss": f"{described(training.objective.loss)}, {training.objective.count_alike} alike",
    }


class _Work:
    """Work as it is written down, to go on from.

    Args:
        out: where scores will be; None: nothing is written.
        identity: says what is worked on.
        device: of the model.

    Raises:
        InputError: the scores are there, or something else was begun in this place.
    """

    def __init__(self, out: Path | None, identity: Callable[[], dict[str, Any]], device: torch.device) -> None:
        self._out, self._device = out, device
        self._written, self._took = time.perf_counter(), 0.0
        if out is None:
            return
        if out.suffix != ".safetensors":
            raise InputError("out", got=str(out), expected="the name of a file ending in .safetensors")
        require_folder("out", out)
        if out.exists():
            raise InputError("out", got=f"{out}, which is there", expected="the name of a new file")
        self._unfinished = out.with_name(out.name + ".unfinished")
        self._identity = identity()

    def restore(self, found: _Found, end: str) -> tuple[int, Costs] | None:
        """Put back what was found before, and return the step that the way back had come to, and what it stood at."""
        if self._out is None or not self._unfinished.exists():
            return None
        tensors, about = read_tensors(self._unfinished)
        differ = [name for name, value in self._identity.items() if about["identity"].get(name) != value]
        if differ or set(about["identity"]) != set(self._identity):
            raise InputError(
                "out",
                got=f"{self._unfinished}, which was begun with other {' and '.join(differ) or 'settings'}",
                expected="the same call",
                fix="delete it, or name another file",
            )
        if about["end"] != end:
            raise InputError(
                "training",
                got="weights at its end that are not those of before",
                expected="a training that comes out the same to the bit",
                fix=f"delete {self._unfinished}, and it begins again",
            )
        log.info("going on from step %d", about["step"])
        found.restore(tensors)
        return about["step"], Costs.of_tensors(tensors, self._device)

    def keep(self, found: _Found, end: str, step: int, costs: Costs) -> None:
        """Write down where the way back stands, now and then."""
        now = time.perf_counter()
        if self._out is None or now - self._written < max(SAVED_EVERY, self._took / SAVING):
            return
        about = {"identity": self._identity, "end": end, "step": step}
        write_tensors(self._unfinished, {**costs.tensors(), **found.tensors()}, about)
        self._written = time.perf_counter()
        self._took = self._written - now

    def finish(self, scores: Scores) -> None:
        """Write the scores."""
        if self._out is not None:
            scores.save(self._out)
            self._unfinished.unlink(missing_ok=True)


def _checked(
    training: Repeatable,
    query: Data,
    effects: Float[np.ndarray, "train query"],
    count: int,
    share: float,
    tell: Callable[[str], None],
) -> Check:
    examples = len(training.data)
    left_out = max(1, round(share * examples))
    generator, losses, predicted = np.random.default_rng(0), [], []
    for number in range(count + 1):
        weights = np.ones(examples)
        if number:
            weights[generator.permutation(examples)[:left_out]] = 0
        repetition = Repetition(training, weights)
        repetition.go()
        losses.append(_losses(repetition.model, training, query))
        predicted.append((1 - weights) @ effects)
        tell(f"checked by {number} of {count} trainings")
    return Check(np.stack(losses[1:]) - losses[0], np.stack(predicted[1:]), left_out)


@torch.no_grad()
def _losses(model: nn.Module, training: Repeatable, query: Data) -> Float[np.ndarray, " query"]:
    """The queries' losses, in full precision: changes of them are small."""
    loss = training.objective.in_full_precision.loss
    with eval_mode(model):
        parts = [query.batch(part) for part in np.array_split(np.arange(len(query)), -(-len(query) // QUERIES))]
        return torch.cat([sample_means(loss(model, part), loss, part) for part in parts]).double().cpu().numpy()


def _repeated(training: Recorded, repetition: Repetition, query: Data, tell: Callable[[str], None]) -> str:
    """Hold the repetition against what was recorded; what differs may be a tenth of what leaving out 1 % changes.

    Raises:
        InputError: more than that differs.
    """
    found = training.compare(repetition)
    if found.equal:
        return str(found)
    here = _losses(repetition.model, training, query)
    recorded = copy.deepcopy(repetition.model)
    with torch.no_grad():
        for name, value in {**dict(recorded.named_parameters()), **dict(recorded.named_buffers())}.items():
            if name in training.end:
                value.copy_(training.end[name])
    there = _losses(recorded, training, query)
    tell("the repetition differs; once more, without 1 % of the examples")
    weights = np.ones(len(training.data))
    weights[np.random.default_rng(0).permutation(len(weights))[: max(1, round(LITTLE * len(weights)))]] = 0
    without = Repetition(training, weights)
    without.go()
    apart, changed = (
        float(np.sqrt(np.square(one - here).mean())) for one in (there, _losses(without.model, training, query))
    )
    told = f"{found}; queries' losses differ by {apart:.2g}, and leaving out 1 % changes them by {changed:.2g}"
    if not apart < NEARLY * changed:
        raise InputError("training", got=f"one that does not repeat: {told}", expected="a difference of under a tenth")
    log.info("%s", told)
    return told


class _Found:
    """Effects as they are summed up, from the last step to the first."""

    def __init__(self, train: int, query: int, tokens: bool) -> None:
        self.effects = np.zeros((train, query), np.float64)
        self._by_token: list[np.ndarray] | None = [np.zeros((0, query))] * train if tokens else None

    @property
    def tokens(self) -> list[np.ndarray] | None:
        return self._by_token

    def tensors(self) -> dict[str, Tensor]:
        """All of it, by name."""
        rows = self._by_token or []
        kept = {"found/effects": torch.from_numpy(self.effects)}
        if rows:
            kept["found/tokens"] = torch.from_numpy(np.concatenate(rows))
            kept["found/lengths"] = torch.tensor([len(row) for row in rows])
        return kept

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what `tensors` gave."""
        self.effects = tensors["found/effects"].numpy()
        if "found/tokens" in tensors:
            ends = np.cumsum(tensors["found/lengths"].numpy())
            self._by_token = np.split(tensors["found/tokens"].numpy(), ends[:-1])

    def add(self, part: Microbatch, of_losses: Float[Tensor, "query sample ..."]) -> None:
        values = np.negative(of_losses.double().cpu().numpy())
        np.add.at(self.effects, part.examples, values.sum(tuple(range(2, values.ndim))).T)
        if self._by_token is None:
            return
        if values.ndim < 3:
            raise InputError("tokens", got="a loss of one number a sample", expected="a loss of tokens")
        for example, own in zip(part.examples, values.transpose(1, 2, 0), strict=True):
            there = self._by_token[example]
            total = np.zeros((max(len(there), len(own)), own.shape[1]))
            total[: len(there)] += there
            total[: len(own)] += own
            self._by_token[example] = total

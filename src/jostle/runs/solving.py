"""`jostle.solve`: what leaving out a training example would do to a query, in nats, by how the model was trained."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike
from torch import Tensor, nn

from jostle.chains.progress import telling
from jostle.curvature.descent import NotConvexError, NotFiniteError, examples_of_step
from jostle.curvature.gauss_newton import PASS_TOKENS, GaussNewton, tokens_of
from jostle.curvature.labels import loss_counts, of_the_first, these
from jostle.curvature.per_example import PerExample, fingerprints_of
from jostle.curvature.response import Filter, Response, Responses, is_small
from jostle.curvature.rows import largest_in_rows
from jostle.data.datasets import Collate, Data
from jostle.errors import EstimateWarning, InputError, warn
from jostle.losses import LanguageHead, Loss, described
from jostle.losses import classification as classification_loss
from jostle.models.functional import eval_mode, free_memory, token_mask
from jostle.models.in_place import InPlace
from jostle.models.weights import MovingWeights, WeightSelection
from jostle.scores import Scores
from jostle.training import MomentComparison, Training, compare_second_moments, require_similar_moments
from jostle.training.moments import FEW, estimate_second_moments

log = logging.getLogger("jostle")

WITHIN = 0.2
"""The share of the spread of a query's effects that chance may leave as their error, for a typical query. It is
independent of the effects: a fifth lowers a correlation with them by two percent; a tenth takes four times as long."""

FAR = 2.0
"""A query whose error is so many times what a typical one may have is not solved."""

RUNS = 16
"""Of which an answer is the mean, at most."""

ROUNDED = 0.05
"""By how much products in bfloat16 may differ from those in full precision, for the first few queries. Most of it is
chance again, and differs from step to step."""

ROUNDED_VECTORS = 2
"""Of which products are compared."""

PROBES = 64
"""Training examples by whose scores it is judged whether a query is solved."""

PROBE_BYTES = {"cuda": 8 << 30, "cpu": 1 << 30}
"""What their gradients may take; but there are at least `FEWEST_PROBES`."""

FEWEST_PROBES = 8

QUERY_BYTES = 4 << 30
"""What vectors of the queries that are solved at once may take in a machine's memory; of a GPU's, half of the free."""

VECTORS = 8
"""Vectors that a run holds for each query."""


@dataclass(frozen=True, eq=False)
class Solution:
    """What leaving training examples out would do to each query's loss.

    Attributes:
        effects: the rise of each query's loss, in nats, if a training example had been left out: positive means that it
            helped. Left out is: its loss has weight 0, all else stays.
        errors: of the effects of each query, the standard error that chance leaves, in nats: a root mean square over
            some examples. What the theory itself leaves out (docs/solve.md) is not in it.
        together: the mean product of two examples' errors, for each query: errors of one query go together, as all of
            its effects come from one vector.
        spreads: the standard deviation of each query's effects, over some of the examples.
        solved: whether each query's error is below twice what was asked for, a share of the spread of its effects.
        tokens: for each training example, what its tokens do, (token, query); a query's column sums to the effect.
            Tokens without a loss have 0. None where they were not asked for.
        moments: the optimizer's second moments beside those estimated at the checkpoint, for each tensor.
        provenance: what it was made from.
    """

    effects: Float[np.ndarray, "train query"]
    errors: Float[np.ndarray, " query"]
    together: Float[np.ndarray, " query"]
    spreads: Float[np.ndarray, " query"]
    solved: np.ndarray
    tokens: list[Float[np.ndarray, "token query"]] | None = None
    moments: list[MomentComparison] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        train, query = self.effects.shape
        unsolved = f", {(~self.solved).sum()} queries not solved" if not self.solved.all() else ""
        error = float(np.median(self.errors / np.maximum(self.spreads, np.finfo(np.float64).tiny)))
        chance = f", known to {error:.2g} of their spread" if error else ""
        return f"Solution({train} train × {query} query, effects in nats, positive: it helped{chance}{unsolved})"

    @property
    def scores(self) -> Scores:
        """The same as `Scores`, for lists, files and evaluation: negative helps, so these are minus the effects."""
        return self.scores_with(self.provenance)

    def scores_with(self, provenance: Mapping[str, Any]) -> Scores:
        """Return the scores with another provenance."""
        return Scores(
            values=np.negative(self.effects),
            method="solve",
            scale=1.0,
            provenance={
                **provenance,
                "errors": self.errors.tolist(),
                "unsolved": np.flatnonzero(~self.solved).tolist(),
            },
        )

    def effect_of_removing(
        self, examples: ArrayLike, query: int | None = None
    ) -> tuple[Float[np.ndarray, " query"], Float[np.ndarray, " query"]]:
        """Return the rise of the queries' losses if all these examples were left out, in nats, and its standard error.

        Args:
            examples: their indices, or a mask.
            query: one query; all by default.

        Example:
            >>> rise, error = solution.effect_of_removing([3, 7])
        """
        given = np.asarray(examples)
        if given.size and not (np.issubdtype(given.dtype, np.integer) or given.dtype == bool):
            raise InputError(
                "examples", got=f"an array of {given.dtype}", expected="indices, or a mask of all examples"
            )
        count, queries = self.effects.shape
        if given.dtype == bool and given.shape != (count,):
            raise InputError("examples", got=f"a mask of shape {given.shape}", expected=f"one of {count} examples")
        chosen = np.flatnonzero(given) if given.dtype == bool else np.unique(given.astype(int))
        if chosen.size and not (chosen[0] >= 0 and chosen[-1] < count):
            raise InputError("examples", got=chosen[[0, -1]].tolist(), expected=f"indices from 0 to {count - 1}")
        if query is not None and not 0 <= query < queries:
            raise InputError("query", got=query, expected=f"an index from 0 to {queries - 1}")
        asked = slice(None) if query is None else slice(query, query + 1)
        many = len(chosen)
        variances = many * np.square(self.errors[asked]) + many * (many - 1) * self.together[asked]
        return self.effects[chosen][:, asked].sum(0), np.sqrt(np.maximum(variances, 0))


def solve(
    model: nn.Module,
    train: Any,
    query: Any,
    *,
    training: Training,
    loss: Loss | None = None,
    weights: WeightSelection | None = None,
    collate: Collate | None = None,
    filter: Filter = "descent",
    tokens: bool = False,
    within: float = WITHIN,
    runs: int = RUNS,
    seed: int = 0,
    progress: bool = False,
) -> Solution:
    """Return what leaving out each training example would do to each query's loss, in nats.

    Training defines a Gaussian posterior around the checkpoint: its precision is the curvature of the mean loss, damped
    by weight decay and by how far the learning rates could move each weight. Under it, the effect of an example on a
    query is a covariance of their losses to first order, which is solved for here without a draw.

    Args:
        model: the trained model. It is left as it was.
        train: training examples: all, or with ``training.total`` a part of them.
        query: the query examples.
        training: how the model was trained.
        loss: the loss that was trained with, and that is asked about; it must see the model only through its outputs,
            and be convex in them. Default: ``losses.classification()``.
        weights: which weights moved in training. Default: those that ``training`` names, or all.
        collate: makes a batch of a list of samples.
        filter: "descent", where training ends, or "minimum", where it would stand still.
        tokens: return what each training token does, too.
        within: how well effects shall be known: the error of a typical query (the median) as a share of the spread of
            its effects. Half of it takes four times as long. Queries whose error is over twice that are named.
        runs: stop after so many in any case; each repeats training once, backwards.
        seed: of what is drawn.
        progress: show it.

    Raises:
        InputError: a training of another model, second moments that are not this model's, or a loss without a
            Gauss–Newton matrix.

    Example:
        >>> training = jostle.Training.from_optimizer(optimizer, model, rates=rates, batch_size=32)
        >>> solution = jostle.solve(model, train, query, training=training)
        >>> solution.scores.top(query=0)
    """
    started = time.perf_counter()
    if filter not in get_args(Filter):
        raise InputError("filter", got=repr(filter), expected=" or ".join(map(repr, get_args(Filter))))
    for name, value, least in (("runs", runs, 2), ("seed", seed, 0)):
        if not isinstance(value, int | np.integer) or value < least:
            raise InputError(name, got=repr(value), expected=f"a whole number from {least}")
    if not within > 0:
        raise InputError("within", got=within, expected="a share of the spread above 0")
    training.check(model)
    loss = loss or classification_loss()
    if weights is None:
        named = {name for group in training.groups for name in group.parameters}  # not patterns: names as they are
        weights = "all" if training.total_rate is not None else lambda name, parameter: name in named
    moving = MovingWeights(model, weights)
    device = moving.center.device
    sets = {
        name: Data(source, name, collate=collate, device=device)
        for name, source in (("train", train), ("query", query))
    }
    work = _Work(model, weights, moving, loss, sets["train"], sets["query"], training, filter, seed)
    with eval_mode(model), telling(progress) as tell:
        moments = work.measure(tell, tokens)
        found = list(work.answers(tokens, within, runs, tell))
    effects, by_token = np.concatenate([one[1] for one in found], axis=1), None
    if tokens:
        by_token = [np.concatenate(parts, axis=1) for parts in zip(*(one[2] for one in found), strict=True)]
    responses = [one[0] for one in found]
    errors, together, spreads = (
        np.concatenate([getattr(one, name) for one in responses]) for name in ("errors", "together", "spreads")
    )
    solved = errors <= FAR * within * spreads
    solution = Solution(
        effects, errors, together, spreads, solved, by_token, moments,
        {
            "fingerprints": {
                **{name: data.fingerprint() for name, data in sets.items()}, **fingerprints_of(model, moving)
            },
            "training": training.to_dict(),
            "filter": filter,
            "within": within,
            "runs": max(one.runs for one in responses),
            "passes": max(one.visits for one in responses) / len(sets["train"]),
            "seed": seed,
            "seconds": time.perf_counter() - started,
        },
    )  # fmt: skip
    if not solved.all():
        few = np.flatnonzero(~solved)[:5]
        named = ", ".join(f"{j} (error {errors[j] / max(spreads[j], 1e-300):.0%} of the spread)" for j in few)
        more = ", ..." if (~solved).sum() > len(few) else ""
        warn(f"{(~solved).sum()} of {len(solved)} queries are not solved: {named}{more}; raise runs", EstimateWarning)
    return solution


@dataclass
class _Work:
    """What one solve goes through.

    Attributes:
        counts: how many losses each training example has.
        shares: what each of them counts in the mean loss of all of training.
        reach, hold: how far training moves each weight, and the curvature that weight decay adds.
    """

    model: nn.Module
    weights: WeightSelection
    moving: MovingWeights
    loss: Loss
    train: Data
    query: Data
    training: Training
    filter: Filter
    seed: int
    counts: Float[np.ndarray, " train"] = field(init=False)
    shares: Float[np.ndarray, " train"] = field(init=False)
    reach: Float[Tensor, " weight"] = field(init=False)
    hold: Float[Tensor, " weight"] = field(init=False)

    def measure(self, tell: Callable[[str], None], tokens: bool) -> list[MomentComparison]:
        """Learn what training was in this model's weights: reach, hold, and each example's share."""
        rows: list[MomentComparison] = []
        moments = None
        with InPlace(self.model, self.moving) as model:
            if tokens and of_the_first(model, self.loss, self.train).ndim == 1:
                raise InputError("tokens", got="a loss of one number a sample", expected="a loss of tokens")
            self.counts, asked = (
                loss_counts(model, self.loss, data).numpy().astype(np.float64) for data in (self.train, self.query)
            )
            for data, counts in ((self.train, self.counts), (self.query, asked)):
                if not counts.all():
                    got = f"example {np.flatnonzero(counts == 0)[0]}, of which no token is scored"
                    raise InputError(data.name, got=got, expected="examples with a loss", fix="leave it out")
            if self.training.optimizer != "sgd":
                tell("second moments at the checkpoint")
                together = PASS_TOKENS["cuda" if model.device.type == "cuda" else "cpu"]
                moments = estimate_second_moments(
                    model, self.loss, self.train, self.training, seed=self.seed,
                    at_once=max(1, together // tokens_of(self.train)),
                )  # fmt: skip
                own = self.training.flat_second_moments(self.moving)
                if own is not None:
                    rows = compare_second_moments(own, moments, self.moving)
                    if len(self.train) >= FEW:  # of fewer, an estimate says nothing that could refuse them
                        require_similar_moments(rows)
                    moments = own
        diagonals = self.training.diagonals(self.moving, moments)
        self.reach, self.hold = diagonals.reach, diagonals.hold
        self.shares = self.training.shares(self.counts)
        return rows

    def answers(
        self, tokens: bool, within: float, runs: int, tell: Callable[[str], None]
    ) -> Iterator[tuple[Responses, Float[np.ndarray, "train query"], list[np.ndarray]]]:
        """Give responses, effects and effects of tokens, of a block of queries after another."""
        probes, stiffest = self._probes(), None
        if not is_small(self.moving) and examples_of_step(self.train, self.moving.center.device) < len(self.train):
            tell("rows that few examples have")
            with InPlace(self.model, self.moving) as model:
                stiffest = largest_in_rows(
                    model, self.loss, self.train, self.reach, self.shares / self.shares.sum(), self.seed
                )
        exact = GaussNewton(self.model, self.weights, self.loss, self.train, shares=self.shares / self.shares.sum())
        curvature = self._rounded(exact, probes)
        with curvature:
            tell("the curvature")
            with self._naming_what_is_not_finite():
                response = Response(
                    curvature, self.reach, self.hold, filter=self.filter, probes=probes, stiffest=stiffest,
                    seed=self.seed,
                )  # fmt: skip
        for block in self._blocks():
            tell(f"queries {block.start} to {block.stop - 1}")
            with InPlace(self.model, self.moving) as model:
                each = PerExample(model, self.loss)
                gradients = torch.cat([rows.clone() for _, rows in each(self.query, block)])
            finite = torch.isfinite(gradients).all(1)
            if not finite.all():
                got = f"example {block[int(finite.logical_not().nonzero()[0, 0])]}, whose gradient is not finite"
                raise InputError("query", got=got, expected="finite gradients")

            def told(what: str, block: range = block) -> None:
                tell(f"queries {block.start} to {block.stop - 1} of {len(self.query)}, {what}")

            by_token: list[np.ndarray] = []
            with curvature, self._naming_what_is_not_finite():
                found = response(gradients, within=within, runs=runs, tell=told)
            del gradients
            if tokens:
                with exact:
                    by_token = self._token_effects(exact, found.vectors)
            yield found, self._effects(found.vectors), by_token

    def _may_be_rounded(self) -> bool:
        """Whether products in bfloat16 are quicker, and known to work: of language models, on a GPU."""
        if not self.moving.center.is_cuda or self.moving.center.dtype != torch.float32 or is_small(self.moving):
            return False
        return LanguageHead.of(self.loss, self.model, self.train.batch(range(1))) is not None

    def _rounded(self, exact: GaussNewton, probes: Float[Tensor, "probe weight"]) -> GaussNewton:
        """The same products in bfloat16, where they may be and are nearly the same."""
        if not self._may_be_rounded():
            return exact
        rounded = GaussNewton(
            self.model, self.weights, self.loss, self.train, shares=exact.shares, dtype=torch.bfloat16
        )  # fmt: skip
        few, found = self.reach * probes[:ROUNDED_VECTORS], []
        for curvature in (exact, rounded):
            with curvature:
                found.append(self.reach.sqrt() * curvature(few, rows=np.arange(min(FEWEST_PROBES, len(self.train)))))
        size = found[0].norm()
        differ = float(found[0].sub_(found[1]).norm() / size)
        log.info("products in bfloat16 differ by %.2g", differ)
        return rounded if differ <= ROUNDED else exact

    @contextlib.contextmanager
    def _naming_what_is_not_finite(self) -> Iterator[None]:
        """Say which example it is that has made the curvature what it is."""
        try:
            yield
        except NotConvexError:
            raise InputError(
                "loss", got=f"{described(self.loss)}, which curves downwards in the model's outputs",
                expected="a loss that is convex in them", fix="jostle.sample asks nothing of a loss",
            ) from None  # fmt: skip
        except NotFiniteError:
            with InPlace(self.model, self.moving) as model:
                for some, rows in PerExample(model, self.loss)(self.train, range(len(self.train))):
                    self._finite(rows, some)
            got = "a curvature that is not finite, or of which no length of steps is stable"
            raise InputError("loss", got=got, expected="finite curvature at every training example") from None

    def _probes(self) -> Float[Tensor, "probe weight"]:
        """Gradients of some training examples, each as much as it counts."""
        kind = "cuda" if self.moving.center.is_cuda else "cpu"
        size = self.moving.total * self.moving.dtype.itemsize
        count = min(PROBES, len(self.train), max(FEWEST_PROBES, PROBE_BYTES[kind] // size))
        chosen = np.sort(np.random.default_rng((self.seed, 1)).permutation(len(self.train))[:count])
        some = these(self.train, chosen)
        probes = torch.empty(count, self.moving.total, dtype=self.moving.dtype, device=self.moving.center.device)
        with InPlace(self.model, self.moving) as model:
            each = PerExample(model, self.loss)
            for place, rows in each(some, range(count)):
                probes[place.start : place.stop] = self._finite(rows, chosen[place.start : place.stop])
        return probes.mul_(torch.from_numpy(self.shares[chosen]).to(probes)[:, None])

    def _finite(
        self, rows: Float[Tensor, "sample weight"], examples: Sequence[int] | np.ndarray
    ) -> Float[Tensor, "sample weight"]:
        bad = torch.isfinite(rows).all(1).logical_not().nonzero()
        if len(bad):
            got = f"example {examples[int(bad[0, 0])]}, whose gradient is not finite"
            raise InputError("train", got=got, expected="finite gradients", fix="leave it out")
        return rows

    def _blocks(self) -> Iterator[range]:
        """Queries that are solved together."""
        free = free_memory(self.moving.center.device)
        room = QUERY_BYTES if free is None else free // 2
        size = max(1, room // (VECTORS * self.moving.total * self.moving.dtype.itemsize))
        # Blocks of about one size: the last is not much quicker for being small.
        count = -(-len(self.query) // size)
        bounds = np.linspace(0, len(self.query), count + 1).astype(int)
        yield from itertools.starmap(range, itertools.pairwise(bounds.tolist()))

    def _effects(self, vectors: Float[Tensor, "query weight"]) -> Float[np.ndarray, "train query"]:
        """ω·gᵢᵀx of every example and query."""
        effects = np.empty((len(self.train), len(vectors)), np.float32)
        with InPlace(self.model, self.moving) as model:
            each = PerExample(model, self.loss)
            for some, rows in each(self.train, range(len(self.train))):
                effects[some.start : some.stop] = (self._finite(rows, some) @ vectors.T).float().cpu().numpy()
        return effects * self.shares[:, None].astype(np.float32)

    def _token_effects(self, exact: GaussNewton, vectors: Tensor) -> list[Float[np.ndarray, "token query"]]:
        """Of each example, ω/T·∇ℓₜᵀx of every token: 0 where it has no loss."""
        effects: list[np.ndarray] = [np.empty(0)] * len(self.train)

        def length(index: int, padded: int) -> int:
            """Of one example, by itself."""
            if self.train.lengths is not None:
                return int(self.train.lengths[index])
            alone = token_mask(self.loss, self.train.batch([index]))
            return padded if alone is None else alone.shape[1]

        for part in exact.parts():
            tangents, mask = exact.tangents(vectors, part)
            if mask is not None:
                tangents = torch.where(mask, tangents, 0.0)
            values = tangents.movedim(0, 2).float().cpu().numpy()
            for row, index in zip(values, part, strict=True):
                effects[index] = row[: length(index, len(row))] * np.float32(self.shares[index] / self.counts[index])
        return effects

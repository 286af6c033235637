"""The BIF to first order, in closed form: what draws without a gradient tend to near w*, however many there are.

Near w* a loss moves by gᵢᵀδ. Of draws δ ~ N(0, I/γ) the covariance of two losses is then gᵢᵀgⱼ/γ, and read at κ
(`jostle.conditioning`), with H the gradients of what is held as rows, K = HHᵀ and λ = λmax(K)/κ,

    values = −(G·gⱼ − G·Hᵀ·(K + λI)⁻¹·H·gⱼ),   to a factor of γ.

By Woodbury's identity that is −G·(I + HᵀH/λ)⁻¹·gⱼ: an influence function whose Hessian is HᵀH, damped to κ. A run can
hold no losses but those that were recorded (H = G, the empirical Fisher matrix). Here there is a choice, and what is
held are the losses of labels that the model itself would give, a few for every example: the mean of HᵀH over such
labels is the Fisher matrix, which is the Hessian of a log-likelihood but for a model's own curvature. Labels of tokens
are drawn one by one, so that gradients of different tokens are uncorrelated, as those of real text are not.

The localization need not be the same for all weights: of draws δ ~ N(0, M/γ) all of the above holds with gᵢᵀMgⱼ for
gᵢᵀgⱼ. A model that is trained by Adam moves each weight by the step that it has divided by the root of a mean square,
so that M = diag(1/√v), with v the mean square of the weight's gradient over the examples, says how far training would
move it (``metric="adam"``). Or each layer may count alike, by one over the mean of v over its weights
(``metric="layers"``): where layers differ in how strongly they act, a few would otherwise have all the say.

How far to hold, the training says. Along a direction of curvature h an optimum follows a change of the data by 1/h,
and gradient descent from w*, whose learning rates sum to τ and whose weight decay is w, by about 1/(h + w + 1/τ); Adam
the same, in its own metric. So κ = λmax/(w + 1/τ), with λmax the largest curvature of the mean loss
(`FirstOrder.kappa_of_training`).

There are no draws, so κ may be as large as the digits of the products allow; but no order beyond the first. Draws at a
distance from w* know more, and few of them know best how far each loss moves: losses of examples that a model has
learnt move by more than their gradients say. So gradients may say which losses move together, and a run how far.
"""

from __future__ import annotations

import functools
import itertools
import math
import numbers
import os
import time
from collections.abc import Sequence
from typing import Any, Protocol, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import grad

from jostle.attributors.metrics import Metric, root_of_metric
from jostle.chains.progress import telling
from jostle.curvature.labels import batches, loss_counts, relabelled, these
from jostle.curvature.per_example import BUFFER_BYTES, Gradients, PerExample, fingerprints_of, products
from jostle.data.datasets import Collate, Data
from jostle.errors import InputError
from jostle.losses import Batch, Loss
from jostle.losses import classification as classification_loss
from jostle.models.checks import check_unchanged
from jostle.models.functional import FunctionalModel, eval_mode, free_memory
from jostle.models.in_place import InPlace
from jostle.models.weights import MovingWeights, WeightSelection
from jostle.scores import Scores

KAPPA = 100.0
"""The best of six, or level with it, for the five models that it was tried on (docs/reading-measured.md)."""

EXAMPLES = 256
"""By which the curvature where training begins is compared with that of w*."""

SHARES = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
"""Of the examples, for which labels are proposed where there is no room for all."""

SOLVED = 4096
"""Examples whose equations are solved at once."""

TINY = torch.finfo(torch.float64).tiny

ITERATIONS, CLOSE = 1000, 1e-9
"""Of the largest eigenvalue, which sets no more than a scale: it may be a little off."""


class Draws(Protocol):
    """What is asked of a `jostle.Run`."""

    manifest: dict[str, Any]
    config: dict[str, Any]

    @property
    def healthy_chains(self) -> np.ndarray:
        """The chains that did not fail."""
        ...

    @property
    def traces(self) -> Any:
        """The recorded losses."""
        ...


class FirstOrder:
    """Products of all gradients at w*, from which scores can be read at any κ.

    Takes the gradients of all examples and of drawn labels, a few times over where the buffer is smaller than they are,
    and keeps products of the labels with each other, with the examples and the queries, in double precision on the
    model's device: a matrix of (labels × examples)², and a few more like it while scores are read.

    Args:
        model: the trained model, at w*.
        train: the training examples.
        query: the query examples.
        loss: as for `jostle.attribute`; per-token losses are averaged over their sequence.
        weights: which weights the gradients are of.
        collate: makes a batch of a list of samples.
        labels: how many labels are drawn from the model for each training example, or for each of its tokens; each
            takes a gradient of every example, and the matrix grows with the square of how many there are. Below 1, one
            is drawn for that share of the examples, by chance: enough for a small κ. With 0, or a loss of which labels
            cannot be drawn (any but those of `jostle.losses`), the losses themselves are held.
        seed: of the labels.
        metric: "isotropic", all weights alike; "layers", those of each tensor by one over the mean square of their
            gradients; or "adam", each weight as far as Adam would move it: for what is trained again by Adam or AdamW.
        start: the model from which it is trained again, where that is not w*: `kappa_of_training` then counts the
            curvature that is there. Its batch norms must have statistics of their own weights: after few steps of
            training, running means are still those of where it began.
        rounded: round gradients to bfloat16 before they are multiplied, which on a GPU is many times as fast, and twice
            as many fit the buffer. Three digits of every number of a gradient are more than its labels are known to.
        buffer_bytes: what the gradients held at once may take.
        progress: show how many gradients were taken.
    """

    def __init__(
        self,
        model: nn.Module,
        train: Any,
        query: Any,
        *,
        loss: Loss | None = None,
        weights: WeightSelection = "all",
        collate: Collate | None = None,
        labels: float = 4,
        seed: int = 0,
        metric: Metric = "isotropic",
        start: nn.Module | None = None,
        rounded: bool = False,
        buffer_bytes: int = BUFFER_BYTES,
        progress: bool = False,
    ) -> None:
        started = time.perf_counter()
        if not isinstance(labels, numbers.Real) or not (
            0 <= labels <= 1 or (labels > 1 and float(labels).is_integer())
        ):
            expected = "a whole number, or for a share of the examples one between 0 and 1"
            raise InputError("labels", got=repr(labels), expected=expected)
        if metric not in get_args(Metric):
            raise InputError("metric", got=repr(metric), expected=" or ".join(map(repr, get_args(Metric))))
        loss, moving = loss or classification_loss(), MovingWeights(model, weights)
        with eval_mode(model), InPlace(model, moving) as in_place, telling(progress) as tell:
            sets = {
                name: Data(source, name, collate=collate, device=in_place.device)
                for name, source in (("train", train), ("query", query))
            }
            drawn = labels if hasattr(loss, "draw_labels") else 0
            count = len(sets["train"])
            _require_room(count, len(sets["query"]), drawn, in_place.device)
            for data in sets.values():
                check_unchanged(in_place, loss, data)
            start = None if start is model else start
            if start is not None:
                _require_start(start, weights, in_place, drawn)
            each = PerExample(in_place, loss, buffer_bytes)
            if metric != "isotropic":
                tell("the mean square of every weight's gradient")
                each.scale = root_of_metric(each, sets["train"], metric)
            tell("drawing labels")
            labelled = sets["train"]
            if 0 < drawn < 1:
                some = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[: _held_count(count, drawn)]
                labelled = these(labelled, np.sort(some.numpy()))
            held = relabelled(in_place, loss, labelled, math.ceil(drawn), seed)
            # In one call, so that where they fit the buffer each gradient is taken once. Of the training examples with
            # each other none are needed where labels are held.
            kept = [(each, data) for data in (*(held or [sets["train"]]), sets["query"])]
            rest = [(each, sets["train"])] if held else []
            left, right = (Gradients(parts, rounded=rounded) for parts in (kept, kept + rest))
            found = torch.from_numpy(products(left, right, buffer_bytes, tell=tell))
            self._fingerprints = {name: data.fingerprint() for name, data in sets.items()}
            held_count = max(1, len(held)) * len(labelled)
            share = held_count / count
            holding, asked = slice(held_count), slice(held_count, len(left))
            trained = slice(len(left), None) if held else holding
            # In double precision, and part by part: all of them at once would be several times as many.
            scores, across, own_asked, own = (
                found[rows, columns].to(in_place.device, torch.float64)
                for rows, columns in ((asked, trained), (holding, trained), (holding, asked), (holding, holding))
            )
            # Gradients are of means over T tokens; held is each token, so that a sequence's sum counts by 1/√T.
            lengths = loss_counts(in_place, loss, labelled).to(in_place.device, torch.float64)
            counted = (lengths / share).sqrt().repeat(max(1, len(held)))
            squares = torch.cat([left.squares, right.squares[len(left) :]])
            self._scores, self._squares = scores.T, (squares[trained], squares[asked])
            self._across, self._asked = across.mul_(counted[:, None]), own_asked.mul_(counted[:, None])
            self._held = own.mul_(counted).mul_(counted[:, None])
            self._relative_curvature = 1.0
            if start is not None:
                tell("the curvature where training begins")
                with eval_mode(start), InPlace(start, MovingWeights(start, weights)) as begin:
                    self._relative_curvature = _relative_curvature(
                        begin, in_place, loss, sets["train"], math.ceil(drawn), seed, each.scale, buffer_bytes
                    )
            if metric == "layers" and held:
                tell("how fast training moves what counts most")
                _, pattern = self._direction
                along = _gradient_of_sum(in_place, loss, held, pattern / pattern.norm().clamp(min=TINY) * counted)
                self._along = float(along.square().sum())
        self._fingerprints |= fingerprints_of(model, moving)
        self._count = count
        about_labels = 0 if not held else int(share) if share.is_integer() else share
        self._about = {"labels": about_labels, "seed": seed, "metric": metric, "rounded": rounded}
        if start is not None:
            self._about["curvature_at_start"] = self._relative_curvature
        self._seconds = time.perf_counter() - started

    @functools.cached_property
    def _direction(self) -> tuple[float, Float[Tensor, " held"]]:
        """Where there is most curvature."""
        return _leading(self._held)

    @property
    def _largest(self) -> float:
        found, _ = self._direction
        if not math.isfinite(found) or not found:
            got = "gradients that are all 0" if found == 0 else "gradients that are no finite numbers"
            expected = "weights that move the losses that are held" + (
                ", or more labels" if self._about["labels"] else ""
            )
            raise InputError("train", got=got, expected=expected)
        return found

    def influence(self, *, kappa: float = KAPPA, normalize: bool = False, spread: Draws | None = None) -> Scores:
        """Return the scores read at κ; negative helps.

        Args:
            kappa: 0 is `gradient_similarity`; the larger, the more the training losses are held. For a model that is
                trained again for a few steps only, 1 or less is better.
            normalize: −correlations instead of −covariances; at κ = 0, −cosines.
            spread: a run of draws without a gradient (`jostle.Gaussian`) on the same data: every loss moves as far as
                it did there, instead of by the length of its gradient. A few tens of draws are enough.
        """
        require_kappa(kappa)
        started = time.perf_counter()
        scores, (train, query) = self._scores, self._squares
        if kappa:
            damped = self._held.clone()
            damped.diagonal().add_(self._largest / kappa)
            root, failed = torch.linalg.cholesky_ex(damped)
            del damped  # as large as all the rest
            if failed:
                expected = "one at which the products of gradients, in single precision, still have digits"
                raise InputError("kappa", got=f"{kappa:g}", expected=expected, fix="lower it")
            solved = torch.cholesky_solve(self._asked, root)
            scores = torch.addmm(scores, self._across.T, solved, alpha=-1)
            if normalize:
                known = [
                    torch.linalg.solve_triangular(root, some, upper=False).square().sum(0)
                    for some in self._across.split(SOLVED, dim=1)
                ]
                train = train - torch.cat(known)
                query = query - (self._asked * solved).sum(0)
        factors = None
        if normalize:
            factors = [side.clamp(min=torch.finfo(side.dtype).tiny).rsqrt() for side in (train, query)]
        elif spread is not None:
            factors = [self._widths(name, spread) for name in ("train", "query")]
        if factors is not None:
            scores = (scores * factors[0][:, None]).mul_(factors[1])
        return Scores(
            values=-scores.float().cpu().numpy(),
            method="first order",
            normalized=normalize,
            scale=None,
            provenance={
                "fingerprints": self._fingerprints,
                "kappa": float(kappa),
                "spread": spread is not None and not normalize,
                "seconds": self._seconds + time.perf_counter() - started,
                **self._about,
            },
        )

    def kappa_of_training(
        self, total_rate: float, *, weight_decay: float = 0.0, batch_size: float | None = None
    ) -> float:
        """Return the κ that belongs to how the model is trained again.

        Curvature is that of w*, or of ``start`` in the directions in which w* has its own: early in training there is
        far less of it. Where layers count alike, it is how fast SGD moves the losses that have most curvature there: of
        their pattern a, aᵀKa with K in the metric of SGD, instead of λmax(K).

        Args:
            total_rate: the learning rates of all steps, summed, of the training that is to be predicted; of SGD with
                momentum m, that divided by 1 − m (Adam's own needs no such thing), or less where that is not many
                steps: as far as a gradient of 1 would lead. Infinite for training to the end.
            weight_decay: what each step takes off the weights, as a multiple of its learning rate: AdamW's and SGD's.
                (That of `torch.optim.Adam` is divided by √v as gradients are, and holds less.)
            batch_size: examples in a step. It counts in the metric of Adam alone, and is needed there: its steps are
                divided by the size of a batch's gradient, √(batch size) smaller than that of a single example's.

        Raises:
            InputError: the losses themselves are held, whose gradients are no curvature.
        """
        if not self._about["labels"]:
            expected = "labels of the model: they show its curvature"
            raise InputError("labels", got="0, or a loss of which none can be drawn", expected=expected, fix="give a κ")
        if batch_size is None:
            if self._about["metric"] == "adam":
                expected = "the examples in a step of that training, by whose root Adam's steps are larger"
                raise InputError("batch_size", got="none", expected=expected)
            batch_size = 1
        if not (isinstance(batch_size, numbers.Real) and float(batch_size) > 0):
            raise InputError("batch_size", got=repr(batch_size), expected="a positive number")
        damping = damping_of(total_rate, weight_decay)
        largest = self._largest  # which refuses what nothing moves
        curvature = self._relative_curvature * (self._along if self._about["metric"] == "layers" else largest)
        curvature /= self._count
        return curvature * (math.sqrt(batch_size) if self._about["metric"] == "adam" else 1.0) / damping

    def _widths(self, name: str, run: Draws) -> Float[Tensor, " sample"]:
        """How many times as far as its gradient says each loss moves in a run."""
        if run.config["posterior"]["n_beta"]:
            got = f"a run with n_beta {run.config['posterior']['n_beta']:g}, in which training losses are held already"
            raise InputError("spread", got=got, expected="draws without a gradient (jostle.Gaussian)")
        theirs, ours = run.manifest["fingerprints"].get(name), self._fingerprints[name]
        if theirs != ours:
            raise InputError("spread", got=f"{name} of fingerprint {theirs}", expected=f"{ours}: the same data")
        losses = run.traces.sequence_losses(name)[:, :, :][run.healthy_chains]
        squares = self._squares[name == "query"]
        moved = torch.from_numpy(losses.std((0, 1), dtype=np.float64)).to(squares)
        return torch.where(squares > 0, moved / squares.sqrt(), 0.0)


def require_kappa(kappa: Any) -> None:
    """Refuse what is no κ."""
    if not (isinstance(kappa, numbers.Real) and 0 <= float(kappa) < math.inf):
        expected = "0 or a positive number" + (": there is no noise to choose it by" if isinstance(kappa, str) else "")
        raise InputError("kappa", got=repr(kappa), expected=expected)


def damping_of(total_rate: float, weight_decay: float) -> float:
    """What holds the weights of a model that is trained for a while; refuses what is no training."""
    if not (isinstance(total_rate, numbers.Real) and float(total_rate) > 0):
        raise InputError("total_rate", got=repr(total_rate), expected="a positive number")
    if not (isinstance(weight_decay, numbers.Real) and 0 <= float(weight_decay) < math.inf):
        raise InputError("weight_decay", got=repr(weight_decay), expected="0 or a positive number")
    damping = weight_decay + 1 / total_rate
    if not damping:
        got = "training to the end without weight decay"
        raise InputError("total_rate", got=got, expected="something that holds the weights")
    return damping


def _held_count(train: int, labels: float) -> int:
    """How many losses are held: those of drawn labels, or those of the examples."""
    return max(1, round(labels * train)) if labels else train


def _require_room(train: int, query: int, labels: float, device: torch.device) -> None:
    """Refuse products that the memory cannot hold, before hours are spent on gradients."""

    def needed(labels: float) -> int:
        held = _held_count(train, labels)
        # In double precision: of what is held the matrix, damped, factored; its products with the examples, and those
        # of the queries with both, once more while scores are read.
        read = 8 * (3 * held**2 + held * train + 2 * held * query + 4 * train * query)
        single = 4 * (held + query) * (held + query + (train if labels else 0))
        return read + (0 if device.type == "cuda" else single)  # which stay in the machine's memory

    room = _memory(device)
    if room is None or needed(labels) <= room:
        return
    fewer = [*range(math.ceil(labels) - 1, 0, -1), *(share for share in SHARES if share < labels)]
    fits = next((some for some in fewer if needed(some) <= room), None)
    size = f"their products take {needed(labels) / 1e9:,.3g} GB of {room / 1e9:,.3g}"
    raise InputError(
        "labels",
        got=f"{labels:g} for each of {train:,} examples, with {query:,} queries: {size}",
        expected="products that fit into memory",
        fix="score fewer examples" if fits is None else f"labels={fits:g}, or score fewer examples",
    )


def _memory(device: torch.device) -> int | None:
    """What a GPU has free, or the machine has in all; None where it does not say."""
    if device.type == "cuda":
        return free_memory(device)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _require_start(start: nn.Module, weights: WeightSelection, model: InPlace, labels: float) -> None:
    """Refuse a start that cannot be compared with the model, before gradients are taken."""
    if not labels:
        expected = "labels of the model: they show its curvature"
        raise InputError("start", got="labels=0, or a loss of which none can be drawn", expected=expected)
    if not isinstance(start, nn.Module):
        raise InputError("start", got=type(start).__name__, expected="a model, as the one that is scored")
    for device in {value.device for value in start.parameters()} - {model.device}:
        raise InputError("start", got=f"a model on {device}", expected=f"one on {model.device}")
    there = MovingWeights(start, weights)
    if (there.names, there.shapes) != (model.moving.names, model.moving.shapes):
        raise InputError("start", got="a model with other weights", expected="one with those of the model")


def _relative_curvature(
    start: InPlace, model: InPlace, loss: Any, data: Data, labels: int, seed: int, scale: Tensor | None, buffer: int
) -> float:
    """ρ with which ρ·F comes nearest to the Fisher matrix F₀ of where training begins: ⟨F₀, F⟩/⟨F, F⟩.

    Of some examples, and of the products of different ones alone: an example's own labels are not independent.
    """
    places = np.linspace(0, len(data) - 1, min(len(data), EXAMPLES)).round().astype(int)
    few, sides = these(data, places), []
    for place in (start, model):
        each = PerExample(place, loss, buffer)
        each.scale = scale
        sides.append(Gradients([(each, drawn) for drawn in relabelled(place, loss, few, labels, seed)]))
    lengths = loss_counts(model, loss, few).numpy()
    drawn = len(sides[1]) // len(places)  # of a single output one label says it all, however many are asked for
    counted = np.tile(np.outer(lengths, lengths) * (1 - np.eye(len(places))), (drawn, drawn))
    across, own = (float((products(side, sides[1], buffer) ** 2 * counted).sum()) for side in sides)
    if not own:
        raise InputError("train", got="gradients that have nothing in common", expected="several examples alike")
    return across / own


def _gradient_of_sum(
    model: InPlace, loss: Loss, sets: Sequence[Data], weights: Float[Tensor, " held"]
) -> Float[Tensor, " weight"]:
    """Σ wᵢgᵢ of the examples of all sets, one after another; in as many passes as a step of training would take."""
    plain, center = FunctionalModel(model.model, model.moving), model.moving.center.to(model.moving.dtype)
    weights, place = weights.to(model.moving.dtype), 0
    total = torch.zeros_like(center, dtype=torch.float64)

    def weighted(flat: Tensor, batch: Batch, rest: Tensor) -> tuple[Tensor, Tensor]:
        losses = plain.sample_losses(loss, flat, batch)
        return losses.to(rest.dtype) @ rest[: len(losses)], losses

    for batch in itertools.chain.from_iterable(batches(model, loss, data) for data in sets):
        gradient, losses = grad(weighted, has_aux=True)(center, batch, weights[place:])
        total += gradient
        place += len(losses)
    return total


def _leading(products: Float[Tensor, "held held"]) -> tuple[float, Float[Tensor, " held"]]:
    """The largest eigenvalue and its vector, by power iteration: all of them would take as long as the rest."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(len(products), generator=generator, dtype=products.dtype).to(products.device)
    found = 0.0
    for _ in range(ITERATIONS):
        vector = products @ (vector / vector.norm())
        before, found = found, float(vector.norm())
        if not abs(found - before) > CLOSE * found:  # nor where it is no number
            break
    return found, vector

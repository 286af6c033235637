"""The BIF to first order, in closed form: what draws without a gradient tend to near w*, however many there are.

Near w* a loss moves by gᵢᵀδ. Of draws δ ~ N(0, I/γ) the covariance of two losses is then gᵢᵀgⱼ/γ, and read at κ
(`jostle.conditioning`), with H the gradients of what is held as rows, K = HHᵀ and λ = λmax(K)/κ,

    values = −(G·gⱼ − G·Hᵀ·(K + λI)⁻¹·H·gⱼ),   to a factor of γ.

By Woodbury's identity that is −G·(I + HᵀH/λ)⁻¹·gⱼ: an influence function whose Hessian is the empirical Fisher matrix,
damped to κ. What is held are the training examples (H = G); of per-token losses it is strands of tokens, as where draws
are read (`jostle.traces.store.Strands`): gₜgₜᵀ of tokens stands for the Hessian, gᵢgᵢᵀ of whole sequences does not.
There is no Monte Carlo error, so κ may be as large as one likes; but no order beyond the first. Draws at a distance
from w* know more, and few of them know best how far each loss moves: losses of examples that a model has learnt move by
more than their gradients say. So gradients may say which losses move together, and a run how far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from jostle.attributors.gradients import BUFFER_BYTES, Gradients, PerExample, products
from jostle.conditioning import check_kappa
from jostle.data.datasets import Collate, Data
from jostle.errors import InputError
from jostle.losses import Batch, Loss
from jostle.losses import classification as classification_loss
from jostle.models.functional import eval_mode, real_tokens, token_mask
from jostle.models.in_place import InPlace
from jostle.models.weights import MovingWeights, WeightSelection
from jostle.scores import Scores

KAPPA = 100.0
"""The best of six for the five models that it was tried on (docs/reading.md); others are reported there."""

TOGETHER = 256
"""Sequences whose tokens are counted at once."""

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


@dataclass(frozen=True, eq=False)
class Strand:
    """The loss of every so-many-th token of a sequence, as its share of the sequence's mean loss."""

    loss: Loss
    number: int
    strands: int

    def __call__(self, model: nn.Module, batch: Batch) -> Float[Tensor, " sample"]:
        """Return one number a sequence; a sequence's strands add up to its mean loss."""
        losses = self.loss(model, batch)
        real = real_tokens(losses, self.loss, batch)
        ours = real & ((real.cumsum(1) - 1) % self.strands == self.number)
        return torch.where(ours, losses, 0).sum(1) / real.sum(1)


class FirstOrder:
    """Products of all gradients at w*, from which scores can be read at any κ.

    Takes the gradients of all examples, or strands, a few times over where the buffer is smaller than they are, and
    keeps their products with each other and with those of the queries, in double precision on the model's device: for
    all strands of all examples a matrix of that size, and a few more like it while scores are read.

    Args:
        model: the trained model, at w*.
        train: the training examples.
        query: the query examples.
        loss: as for `jostle.attribute`; per-token losses are averaged over their sequence.
        weights: which weights the gradients are of.
        collate: makes a batch of a list of samples.
        strands: into how many the tokens of a sequence are dealt, where losses are per token. More of them were better
            wherever that was measured; each takes a gradient of every sequence.
        buffer_bytes: what the gradients held at once may take.
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
        strands: int = 4,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        if not isinstance(strands, int) or strands < 1:
            raise InputError("strands", got=strands, expected="a whole number, 1 or more")
        loss, moving = loss or classification_loss(), MovingWeights(model, weights)
        with eval_mode(model), InPlace(model, moving) as in_place:
            sets = {
                name: Data(source, name, collate=collate, device=in_place.device)
                for name, source in (("train", train), ("query", query))
            }
            lengths = _lengths(in_place, loss, sets["train"])
            count = 1 if lengths is None else min(strands, int(lengths.max()))
            losses = [loss] if count == 1 else [Strand(loss, number, count) for number in range(count)]
            parts = [(PerExample(in_place, one, buffer_bytes), sets["train"]) for one in losses]
            # Of all at once, so that where they fit the buffer each gradient is taken once.
            gradients = Gradients([*parts, (PerExample(in_place, loss, buffer_bytes), sets["query"])])
            found = torch.from_numpy(products(gradients, gradients, buffer_bytes)).to(in_place.device, torch.float64)
            self._fingerprints = {name: data.fingerprint() for name, data in sets.items()}
        self._strands, self._samples = count, len(sets["train"])
        held = count * self._samples
        self._held, self._asked = found[:held, :held], found[:held, held:]
        self._query_squares = found.diagonal()[held:]
        # An example's gradient is the sum of its strands', which are shares of a mean over T tokens; held, they are
        # sums over √T.
        roots = torch.ones(self._samples) if lengths is None else lengths.sqrt()
        self._roots = roots.to(self._held).repeat(count)

    def _together(self, strands: Float[Tensor, "strand other"]) -> Float[Tensor, "sample other"]:
        """Sums over the strands of each example."""
        return strands if self._strands == 1 else strands.unflatten(0, (self._strands, self._samples)).sum(0)

    def influence(self, *, kappa: float = KAPPA, normalize: bool = False, spread: Draws | None = None) -> Scores:
        """Return the scores read at κ; negative helps.

        Args:
            kappa: 0 is `gradient_similarity`; the larger, the more the training losses are held. For a model that is
                trained again for a few steps only, 1 or less is better.
            normalize: −correlations instead of −covariances; at κ = 0, −cosines.
            spread: a run of draws without a gradient (`jostle.Gaussian`) on the same data: every loss moves as far as
                it did there, instead of by the length of its gradient. A few tens of draws are enough.
        """
        check_kappa(kappa)
        if kappa == "auto":
            raise InputError("kappa", got="'auto'", expected="a number: there is no noise to choose it by")
        among, asked, query = self._held, self._asked, self._query_squares
        if spread is not None:
            squares = self._together(self._together(among).T).diagonal()
            wider, widths = (self._widths(name, now, spread) for name, now in (("train", squares), ("query", query)))
            wider = wider.repeat(self._strands)
            among, asked = (among * wider[:, None]).mul_(wider), asked * torch.outer(wider, widths)
            query = query * widths.square()
        across = self._together(among)
        scores, train = self._together(asked), self._together(across.T).diagonal()
        if kappa:
            roots = self._roots
            damped = (among * roots[:, None]).mul_(roots)
            damped.diagonal().add_(_largest(damped) / kappa)
            root = torch.linalg.cholesky(damped)
            across, asked = across * roots, asked * roots[:, None]
            solved = torch.cholesky_solve(asked, root)
            scores = scores - across @ solved
            if normalize:
                train = train - torch.linalg.solve_triangular(root, across.T, upper=False).square().sum(0)
                query = query - (asked * solved).sum(0)
        if normalize:
            lengths = (side.clamp(min=torch.finfo(side.dtype).tiny).sqrt() for side in (train, query))
            scores = scores / torch.outer(*lengths)
        return Scores(
            values=-scores.float().cpu().numpy(),
            method="first order",
            normalized=normalize,
            scale=None,
            provenance={"fingerprints": self._fingerprints, "kappa": float(kappa)},
        )

    def _widths(self, name: str, squares: Float[Tensor, " sample"], run: Draws) -> Float[Tensor, " sample"]:
        """How many times as far as its gradient says each loss moves in a run."""
        if run.config["posterior"]["n_beta"]:
            got = f"a run with n_beta {run.config['posterior']['n_beta']:g}, in which training losses are held already"
            raise InputError("spread", got=got, expected="draws without a gradient (jostle.Gaussian)")
        theirs, ours = run.manifest["fingerprints"].get(name), self._fingerprints[name]
        if theirs != ours:
            raise InputError("spread", got=f"{name} of fingerprint {theirs}", expected=f"{ours}: the same data")
        losses = run.traces.sequence_losses(name)[:, :, :][run.healthy_chains]
        moved = torch.from_numpy(losses.std((0, 1), dtype=np.float64)).to(squares)
        return torch.where(squares > 0, moved / squares.sqrt(), 0.0)


def _lengths(model: InPlace, loss: Loss, data: Data) -> Float[Tensor, " sample"] | None:
    """How many tokens of each sequence have a loss; None where a sample has one loss."""
    first = data.batch(range(1))
    found = model.evaluate(loss, model.moving.center[None], first)[0]
    if found.ndim == 1:
        return None
    if token_mask(loss, first) is None:
        return torch.full((len(data),), float(found.shape[1]))
    blocks = (range(start, min(start + TOGETHER, len(data))) for start in range(0, len(data), TOGETHER))
    masks = (token_mask(loss, data.batch(some)) for some in blocks)
    return torch.cat([mask.sum(1).double().cpu() for mask in masks if mask is not None])


def _largest(products: Float[Tensor, "train train"]) -> float:
    """The largest eigenvalue, by power iteration: all of them would take as long as the rest."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(len(products), generator=generator, dtype=products.dtype).to(products.device)
    found = 0.0
    for _ in range(ITERATIONS):
        vector = products @ (vector / vector.norm())
        before, found = found, float(vector.norm())
        if abs(found - before) <= CLOSE * found:
            break
    if not found:
        raise InputError("train", got="gradients that are all 0", expected="weights that move training losses")
    return found

"""The BIF to first order, in closed form: what draws without a gradient tend to near w*, however many there are.

Near w* a loss moves by gᵢᵀδ. Of draws δ ~ N(0, I/γ) the covariance of two losses is then gᵢᵀgⱼ/γ, and read at κ
(`jostle.conditioning`), with G the gradients of the training examples as rows, K = GGᵀ and λ = λmax(K)/κ,

    values = −λ·(K + λI)⁻¹·G·gⱼ,   to a factor of γ.

By Woodbury's identity that is −G·(I + GᵀG/λ)⁻¹·gⱼ: an influence function whose Hessian is the empirical Fisher matrix,
damped to κ. There is no Monte Carlo error, so κ may be as large as one likes; but no order beyond the first. Draws at a
distance from w* know more, and few of them know best how far each loss moves: losses of examples that a model has
learnt move by more than their gradients say. So gradients may say which losses move together, and a run how far.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from jostle.attributors.gradients import BUFFER_BYTES, gradient_self_influence, gradient_similarity
from jostle.conditioning import check_kappa
from jostle.data.datasets import Collate
from jostle.errors import InputError
from jostle.losses import Loss
from jostle.models.weights import WeightSelection
from jostle.scores import Scores

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

    Takes the gradients of all examples, a few times over where the buffer is smaller than they are, and keeps
    train × train and train × query products, in double precision on the model's device.

    Args:
        model: the trained model, at w*.
        train: the training examples.
        query: the query examples.
        loss: as for `jostle.attribute`; per-token losses are averaged over their sequence.
        weights: which weights the gradients are of.
        collate: makes a batch of a list of samples.
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
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        given: dict[str, Any] = {"loss": loss, "weights": weights, "collate": collate}
        device = next(model.parameters()).device

        def products(values: np.ndarray) -> Tensor:
            return -torch.from_numpy(values).to(device, torch.float64)

        asked = gradient_similarity(model, train, query, buffer_bytes=buffer_bytes, **given)
        self._fingerprints = asked.provenance["fingerprints"]
        self._query = products(asked.values)
        self._train = products(gradient_similarity(model, train, train, buffer_bytes=buffer_bytes, **given).values)
        self._query_squares = products(gradient_self_influence(model, query, **given))

    def influence(self, *, kappa: float = 10.0, normalize: bool = False, spread: Draws | None = None) -> Scores:
        """Return the scores read at κ; negative helps.

        Args:
            kappa: 0 is `gradient_similarity`; the larger, the more the training losses are held.
            normalize: −correlations instead of −covariances; at κ = 0, −cosines.
            spread: a run of draws without a gradient (`jostle.Gaussian`) on the same data: every loss moves as far as
                it did there, instead of by the length of its gradient. A few tens of draws are enough.
        """
        check_kappa(kappa)
        if kappa == "auto":
            raise InputError("kappa", got="'auto'", expected="a number: there is no noise to choose it by")
        products, asked = self._train, self._query
        train, query = products.diagonal(), self._query_squares
        if spread is not None:
            wider, widths = (self._widths(name, now, spread) for name, now in (("train", train), ("query", query)))
            products, asked = products * torch.outer(wider, wider), asked * torch.outer(wider, widths)
            train, query = train * wider.square(), query * widths.square()
        held = asked
        if kappa:
            slack = _largest(products) / kappa
            root = torch.linalg.cholesky(products + slack * torch.eye(len(products)).to(products))
            solved = torch.cholesky_solve(asked, root)
            held = slack * solved
            if normalize:
                train = slack * (1 - slack * torch.cholesky_inverse(root).diagonal())
                query = query - (asked * solved).sum(0)
        if normalize:
            lengths = (side.clamp(min=torch.finfo(side.dtype).tiny).sqrt() for side in (train, query))
            held = held / torch.outer(*lengths)
        return Scores(
            values=-held.float().cpu().numpy(),
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

"""The exact damped influence function of small models, and the Laplace expansion that ties it to the BIF.

With gᵢ, Hᵢ the gradient and Hessian of ℓᵢ, A = nβ·H̄ + γI (+ λI) the Hessian of the potential, and Σ = A⁻¹, the
covariance of two losses under the Laplace approximation N(μ, Σ) of the localized posterior is

    Cov(ℓᵢ, φⱼ) ≈ gᵢᵀΣgⱼ + ½·tr(HᵢΣHⱼΣ) + …

Its first term is the damped influence function: −(nβ/n)·gᵢᵀΣgⱼ = −gᵢᵀ(nH̄ + (γ/β)I)⁻¹gⱼ. For a quadratic loss the
two terms are the whole covariance.

Reference: Kreer et al., *Bayesian Influence Functions for Hessian-Free Data Attribution*, appendix A.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import grad, hessian

from jostle.data.datasets import Collate, Data
from jostle.errors import InputError
from jostle.losses import Loss
from jostle.losses import classification as classification_loss
from jostle.models.checks import check_unchanged
from jostle.models.functional import FunctionalModel, eval_mode
from jostle.models.weights import MovingWeights
from jostle.posterior import Posterior
from jostle.scores import Scores, timed

MOST_WEIGHTS = 5_000
"""A Hessian of this many weights takes 200 MB in float64; beyond it, this attributor is the wrong tool."""

MOST_BYTES = 4 << 30
"""What the Hessians of single examples may take together."""


@torch.no_grad()  # of the weights that do not move, nothing is asked
@timed
def exact_influence(
    model: nn.Module,
    train: Any,
    query: Any,
    *,
    posterior: Posterior,
    sampling_data: Any = None,
    loss: Loss | None = None,
    potential_loss: Loss | None = None,
    order: Literal[1, 2] = 1,
    newton_steps: int = 0,
    collate: Collate | None = None,
) -> Scores:
    """Damped influence by an explicit Hessian: −gᵢᵀ(nβ·H̄ + γI)⁻¹gⱼ, the leading term of the BIF −Cov(ℓᵢ, ℓⱼ).

    Derivatives are taken in the model's own precision and solved for in float64. Scores have the BIF's sign and scale,
    so the two can be compared number by number.

    Args:
        model: the trained model, at w*.
        train: the training examples.
        query: the query examples.
        posterior: nβ, γ and which weights move, as for `jostle.attribute`.
        sampling_data: the examples whose mean loss is L̄; default ``train``.
        loss: the recorded loss; per-token losses are averaged over their sequence.
        potential_loss: the loss in the potential, where it differs.
        order: 1 for the damped influence function; 2 adds the Laplace expansion's next term −½·tr(HᵢΣHⱼΣ).
        newton_steps: Newton steps from w* towards the mode μ of the localized posterior, where gradients are then
            taken; needed where w* is not a minimum. One is exact for a quadratic loss.
        collate: makes a batch of a list of samples.

    Raises:
        InputError: too many weights move for an explicit Hessian, or the Hessian is not positive definite.
    """
    if order not in (1, 2):
        raise InputError("order", got=order, expected="1 or 2")
    loss = loss or classification_loss()
    with eval_mode(model):
        moving = MovingWeights(model, posterior.weights)
        if moving.total > MOST_WEIGHTS:
            raise InputError(
                "weights",
                got=f"{moving.total:,} moving weights",
                expected=f"at most {MOST_WEIGHTS:,} for an explicit Hessian",
                fix="move fewer weights, or use jostle.attribute",
            )
        functional = FunctionalModel(model, moving)
        sources = {"train": train, "query": query, "sampling_data": train if sampling_data is None else sampling_data}
        train_data, query_data, drawn_from = (
            Data(source, name, collate=collate, device=functional.device) for name, source in sources.items()
        )
        check_unchanged(functional, potential_loss or loss, drawn_from)
        check_unchanged(functional, loss, train_data)

        whole = drawn_from.whole()

        def mean_loss(flat: Tensor) -> Tensor:
            return functional.sample_losses(potential_loss or loss, flat, whole).mean()

        center = mode = moving.center
        potential = posterior.potential(center)
        for _ in range(newton_steps):
            step = torch.linalg.solve(
                _precision(hessian(mean_loss)(mode), posterior),
                potential.gradient(mode, grad(mean_loss)(mode)).double(),
            )
            mode = mode - step.to(mode.dtype)
        precision = _precision(hessian(mean_loss)(mode), posterior)
        smallest = torch.linalg.eigvalsh(precision)[0].item()
        if smallest <= 0:
            raise InputError(
                "posterior",
                got=f"a potential with curvature {smallest:.3g} in some direction",
                expected="a positive definite Hessian",
                fix=f"raise localization above {posterior.localization - smallest:.3g}",
            )
        hessian_bytes = 8 * moving.total**2 * (len(train_data) + len(query_data))
        if order == 2 and hessian_bytes > MOST_BYTES:
            raise InputError(
                "order",
                got=f"2, with a Hessian for each example: {hessian_bytes / 2**30:.1f} GB",
                expected=f"at most {MOST_BYTES / 2**30:.0f} GB",
                fix="move fewer weights, or pass fewer examples",
            )
        covariance = torch.linalg.inv(precision)
        g_train, h_train = _derivatives(functional, loss, train_data, mode, order)
        g_query, h_query = _derivatives(functional, loss, query_data, mode, order)
        values = -g_train @ covariance @ g_query.T
        if h_train is not None and h_query is not None:
            left = (h_train @ covariance).flatten(1)
            right = (h_query @ covariance).transpose(1, 2).flatten(1)
            values = values - 0.5 * left @ right.T
        fingerprints = {"train": train_data.fingerprint(), "query": query_data.fingerprint()}
    return Scores(
        values=values.cpu().numpy(),
        method="exact" if order == 1 else "laplace",
        # The factor is that of an example's own loss in the potential.
        scale=None if potential_loss else posterior.n_beta / len(drawn_from),
        provenance={"order": order, "newton_steps": newton_steps, "fingerprints": fingerprints},
    )


def _precision(mean_hessian: Float[Tensor, "weight weight"], posterior: Posterior) -> Float[Tensor, "weight weight"]:
    """A = nβ·H̄ + γI + λI."""
    identity = torch.eye(len(mean_hessian), dtype=torch.float64, device=mean_hessian.device)
    damping = posterior.localization + posterior.prior_precision
    return posterior.n_beta * mean_hessian.double() + damping * identity


def _derivatives(
    model: FunctionalModel, loss: Loss, data: Data, at: Tensor, order: int
) -> tuple[Float[Tensor, "sample weight"], Float[Tensor, "sample weight weight"] | None]:
    gradients, hessians = [], []
    for index in range(len(data)):
        batch = data.batch(np.array([index]))

        def sample_loss(flat: Tensor, batch: Any = batch) -> Tensor:
            return model.sample_losses(loss, flat, batch)[0]

        gradients.append(grad(sample_loss)(at).double())
        if order == 2:
            hessians.append(hessian(sample_loss)(at).double())
    return torch.stack(gradients), torch.stack(hessians) if order == 2 else None

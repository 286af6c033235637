"""How far the mean loss rises without a gradient, and so how far it may rise at most with one.

Draws from q, the localization alone (nβ = 0), are exact and cheap. With a gradient E[L̄] falls as nβ grows, for any
loss, since dE[L̄]/dnβ = −Var(L̄); so it lies below its mean over all smaller nβ, which is the free energy

    F = −(1/nβ)·log E_q[exp(−nβ·L̄)] ≤ E_q[L̄].

A mean over a few draws in the place of E_q gives an F̂ that errs upwards, and by Markov's inequality it lies more than
a/nβ below F with probability e⁻ᵃ at most, however L̄ is distributed. Chains far above F̂ do not sample their target.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from jostle.chains import randomness
from jostle.chains.observing import Observer
from jostle.chains.recording import sequence_means
from jostle.models.functional import FunctionalModel
from jostle.posterior import Posterior

MOST, FEWEST, SHARE = 16, 8, 0.04
"""So many draws without a gradient at most, and at most this share of the run's; none where that is too few."""


def rise_without_gradient(
    model: FunctionalModel,
    observer: Observer,
    posterior: Posterior,
    *,
    draws: int,
    seed: int,
    interrupted: Callable[[], bool] = lambda: False,
    tell: Callable[[str], None] = lambda what: None,
) -> dict[str, Any] | None:
    """The rise of the mean loss over w* without a gradient: its mean, that one's standard error, and F̂ − L̄(w*).

    Args:
        model: the model.
        observer: of the examples whose mean loss drives the chain.
        posterior: what the chains sample.
        draws: of the run, by all chains.
        seed: of the run. The noise is that of chains −1, −2, ..., which are nobody's.
        interrupted: asked between draws.
        tell: is told of every draw.

    Returns:
        None where there is nothing to measure: too few draws, no gradient, nothing but a gradient, no finite loss.

    Raises:
        KeyboardInterrupt: when ``interrupted()``.
    """
    pull, n_beta = posterior.localization + posterior.prior_precision, posterior.n_beta
    count = min(MOST, int(SHARE * draws))
    if count < FEWEST or not n_beta or not pull:
        return None
    center = model.moving.center
    weights = torch.empty_like(center)[None]
    at_center = sequence_means(observer.center_losses, observer.columns).double().mean().item()
    rises = np.empty(count)
    for number in range(count):
        if interrupted():
            raise KeyboardInterrupt
        tell(f"the rise without a gradient, draw {number + 1} of {count}")
        for part, noise in randomness.noise(seed, [-1 - number], 0, model.moving, model.device):
            # The mean of both Gaussians, and their variance.
            weights[:, part] = center[part] * (posterior.localization / pull) + noise / math.sqrt(pull)
        losses = observer(model, weights)[0]
        rises[number] = sequence_means(losses, observer.columns).double().mean().item() - at_center
    model.let_go()
    rises[np.isnan(rises)] = math.inf  # a draw as far out as can be
    if not np.isfinite(rises).any():
        return None
    finite = bool(np.isfinite(rises).all())
    return {
        "draws": count,
        "examples": observer.columns.samples,
        "mean": float(rises.mean()) if finite else None,
        "standard_error": float(rises.std(ddof=1) / math.sqrt(count)) if finite else None,
        "free_energy": free_energy(rises, n_beta),
    }


def free_energy(rises: np.ndarray, n_beta: float) -> float:
    """F̂ = −(1/nβ)·log of the mean of exp(−nβ·rise)."""
    return float((math.log(len(rises)) - np.logaddexp.reduce(-n_beta * rises)) / n_beta)

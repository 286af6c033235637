"""Whether the scores of a run can be trusted: numbers, and a verdict in words.

All but the temperature is read off the recorded losses, in one pass and with bounded memory: the mean loss at every
draw, and a few columns, evenly spaced. A trace shows what losses did; it cannot show what they did not visit.
`docs/diagnostics.md` says what each number means, and why its thresholds are where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from jostle.diagnose.measures import (
    THE_SAME,
    agreement,
    between_chain_share,
    convergence,
    drift,
    effective_draws,
    effective_sizes,
    half_scores,
    learning_coefficient,
    mean_error,
    moving,
    pair_products,
    runaway,
    some,
    split_r_hat,
    temperature,
)
from jostle.diagnose.sample import PROBED_SERIES, Sample, read_sample, spread
from jostle.diagnose.verdict import Reason, command, in_python, judge
from jostle.estimate import FEWEST_DRAWS, covariance_from_sums

__all__ = [
    "THE_SAME",
    "Reason",
    "Sample",
    "agreement",
    "between_chain_share",
    "command",
    "convergence",
    "diagnose",
    "diagnose_sums",
    "drift",
    "effective_draws",
    "effective_sizes",
    "half_scores",
    "in_python",
    "learning_coefficient",
    "moving",
    "pair_products",
    "read_sample",
    "runaway",
    "split_r_hat",
    "spread",
    "temperature",
]


@np.errstate(over="ignore", invalid="ignore")  # chains that ran away are called so, in words
def diagnose(config: Mapping[str, Any], manifest: Mapping[str, Any], sample: Sample | None) -> dict[str, Any]:
    """Return the diagnostics of a run that kept its traces; ``sample`` is None where every chain failed."""
    found = _begin(config, manifest)
    if sample is None:
        return found | {"verdict": judge(config, found)}
    alone = sample.independent
    if sample.mirrored:
        found["chains"] = len(alone.chains)
        found["remarks"].append("chains are antithetic pairs; everything here counts a pair as one chain")
    found |= {"mean_loss_at_center": sample.center_loss, "mean_loss": float(sample.healthy_mean_loss.mean())}
    found["rise"] = found["mean_loss"] - found["mean_loss_at_center"]
    train, other = moving(alone.train), moving(alone.other)
    found["unmoved_share"] = 1 - train.shape[2] / alone.train.shape[2]
    found["unmoved_queries"] = 1 - other.shape[2] / max(1, alone.other.shape[2])
    groups = {
        "losses": np.concatenate([some(train, PROBED_SERIES // 2), some(other, PROBED_SERIES // 2)], axis=2),
        "products": pair_products(train, other),
        "mean_loss_series": alone.healthy_mean_loss[:, :, None],
    }
    if alone.tokens is not None:
        tokens = [moving(side) for side in alone.tokens]
        picked = [some(side, PROBED_SERIES // 2) for side in tokens]
        groups |= {"tokens": np.concatenate(picked, axis=2), "token_products": pair_products(*tokens)}
    found |= {name: convergence(series) for name, series in groups.items()}
    found["autocorrelation_time"], found["effective_draws"] = effective_draws(alone)
    if train.shape[1] < FEWEST_DRAWS:
        found["remarks"].append(f"chains of {train.shape[1]} draws are too short to tell how many are effective")
    found["between_chain_share"] = between_chain_share(train)
    found["drift"] = drift(alone.healthy_mean_loss)
    found["runaway"] = runaway(sample, config, manifest)
    found["agreement"] = agreement(alone)
    found["temperature"] = temperature(alone.temperature)
    found["local_learning_coefficient"] = learning_coefficient(
        config, manifest, found["rise"], mean_error(alone.healthy_mean_loss)
    )
    return found | {"verdict": judge(config, found)}


def _begin(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
    scale = manifest["scale"]  # nβ/n, where the loss that drives the chain is the one recorded
    return {
        "failed_chains": manifest["failed_chains"],
        "remarks": list(manifest["remarks"]),
        "chains": config["chains"] - len(manifest["failed_chains"]),
        "draws": config["draws"],
        "sampled_from": round(config["posterior"]["n_beta"] / scale) if scale else None,
    }


def diagnose_sums(
    config: Mapping[str, Any], manifest: Mapping[str, Any], sums: Mapping[str, Tensor], center: Tensor
) -> dict[str, Any]:
    """Return what the sums of a run without traces tell: mean losses, and the share of the variance between chains.

    Chains that agree have means that differ by their Monte Carlo error alone, so of C chains with N effective draws in
    all the share of the variance between them is about (C − 1)/N. That estimates N, roughly: it rests on C − 1 degrees
    of freedom, and shared drift does not show in it. ``center`` are the losses at w*, by example or by token.
    """
    found = _begin(config, manifest)
    rise = float(sums["left_mean"].mean())
    share = covariance_from_sums(dict(sums)).between_chain_share
    # Of sequences only the rise is known: which token belongs to which is not kept.
    known = len(center) == len(sums["left_mean"])
    center_loss = float(center.double().mean()) if known else None
    found |= {
        "mean_loss_at_center": center_loss,
        "mean_loss": None if center_loss is None else center_loss + rise,
        "rise": rise,
        "between_chain_share": share,
        "effective_draws_by_share": (found["chains"] - 1) / share if share > 0 and found["chains"] > 1 else None,
        "local_learning_coefficient": learning_coefficient(config, manifest, rise, None),
        "temperature": temperature(sums["temperature"].numpy() if "temperature" in sums else None),
        "unknown": ["r_hat", "ess", "drift", "agreement", "autocorrelation_time", "effective_draws"],
    }
    return found | {"verdict": judge(config, found)}

"""The paper's hyperparameters, by the name of the experiment they were used in.

Reference: Kreer et al., *Bayesian Influence Functions for Hessian-Free Data Attribution*, appendix B.2. The paper
observes every step (``thin`` 1) and does not say which results use plain SGLD and which RMSprop-SGLD.
"""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "vision": {
        "batch_size": 256, "chains": 15, "draws": 1000, "burn_in": 10, "thin": 1,
        "step_size": 1e-4, "n_beta": 10.0, "localization": 1000.0,
    },
    "language": {
        "batch_size": 64, "chains": 5, "draws": 1000, "burn_in": 100, "thin": 1,
        "step_size": 8e-7, "n_beta": 2000.0, "localization": 7000.0,
    },
    "scaling": {
        "batch_size": 32, "chains": 4, "draws": 500, "burn_in": 0, "thin": 1,
        "step_size": 5e-6, "n_beta": 30.0, "localization": 300.0, "weights": "attention+mlp",
    },
    "retraining-resnet": {
        "batch_size": 1024, "chains": 4, "draws": 100, "burn_in": 0, "thin": 1,
        "step_size": 1e-5, "n_beta": 200.0, "localization": 10_000.0,
    },
    "retraining-llm": {
        "batch_size": 128, "chains": 4, "draws": 300, "burn_in": 150, "thin": 1,
        "step_size": 2e-6, "n_beta": 800.0, "localization": 50_000.0,
    },
}  # fmt: skip

RISE = 0.3
"""Of the mean loss over w*, in nats, in a calibration; docs/calibration.md has the evidence."""

KAPPA = 10.0
"""κ = nβ·λmax/γ, in a calibration; docs/calibration.md has the evidence."""

CALIBRATED = ("sampler", "step_size", "n_beta", "localization", "burn_in", "thin")
"""What a calibration chooses, where it is not given."""

LANGUAGE_WEIGHTS = "attention"
"""What moves of a language model: with every weight, each token's own embedding row drowns the rest."""

DEFAULTS: dict[str, Any] = {
    "batch_size": 32, "chains": 4, "draws": 100, "burn_in": 50, "thin": "auto",
    "step_size": 1e-5, "n_beta": 30.0, "localization": 10_000.0, "sampler": "sgld", "seed": 0,
}  # fmt: skip
"""Of the command line, where neither a preset nor a flag says otherwise: with εγ/2 = 0.05, twenty steps forget w*."""

IMPLIED: dict[str, dict[str, Any]] = {"gaussian": {"n_beta": 0.0, "burn_in": 1, "thin": 1}}
"""What a sampler that is asked for by name brings along, over presets and config files: the control of a run needs its
localization, and neither its gradients nor its steps between draws."""

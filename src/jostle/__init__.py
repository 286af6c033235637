"""Jostle the weights, and see which losses move together."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jostle._version import __version__

if TYPE_CHECKING:
    from jostle import attributors, evaluate, losses, training
    from jostle.calibration import Calibration, calibrate
    from jostle.errors import ChainsFailedError, InputError
    from jostle.posterior import Posterior
    from jostle.runs.replaying import Replay, replay
    from jostle.runs.run import Run, load
    from jostle.runs.sampling import attribute
    from jostle.runs.solving import Solution, solve
    from jostle.samplers import (
        BAOAB,
        SGLD,
        SGNHT,
        Gaussian,
        LeimkuhlerMatthews,
        OrnsteinUhlenbeck,
        RMSpropSGLD,
        Sampler,
    )
    from jostle.scores import Scores
    from jostle.training import Training

# Names are imported when they are first used: `jostle --help` should not wait for torch.
_HOMES = {
    "BAOAB": "jostle.samplers",
    "Calibration": "jostle.calibration",
    "ChainsFailedError": "jostle.errors",
    "Gaussian": "jostle.samplers",
    "InputError": "jostle.errors",
    "LeimkuhlerMatthews": "jostle.samplers",
    "OrnsteinUhlenbeck": "jostle.samplers",
    "Posterior": "jostle.posterior",
    "RMSpropSGLD": "jostle.samplers",
    "Replay": "jostle.runs.replaying",
    "Run": "jostle.runs.run",
    "SGLD": "jostle.samplers",
    "SGNHT": "jostle.samplers",
    "Sampler": "jostle.samplers",
    "Scores": "jostle.scores",
    "Solution": "jostle.runs.solving",
    "Training": "jostle.training",
    "attribute": "jostle.runs.sampling",
    "attributors": "jostle.attributors",
    "calibrate": "jostle.calibration",
    "evaluate": "jostle.evaluate",
    "load": "jostle.runs.run",
    "losses": "jostle.losses",
    "replay": "jostle.runs.replaying",
    "solve": "jostle.runs.solving",
    "training": "jostle.training",
}

__all__ = [
    "BAOAB",
    "SGLD",
    "SGNHT",
    "Calibration",
    "ChainsFailedError",
    "Gaussian",
    "InputError",
    "LeimkuhlerMatthews",
    "OrnsteinUhlenbeck",
    "Posterior",
    "RMSpropSGLD",
    "Replay",
    "Run",
    "Sampler",
    "Scores",
    "Solution",
    "Training",
    "__version__",
    "attribute",
    "attributors",
    "calibrate",
    "evaluate",
    "load",
    "losses",
    "replay",
    "solve",
    "training",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jostle' has no attribute {name!r}")
    module = importlib.import_module(_HOMES[name])
    return module if _HOMES[name] == f"jostle.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)

"""What can go wrong, by name."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path


class JostleError(Exception):
    """Base of every error that Jostle raises on purpose."""


class InputError(JostleError, ValueError):
    """Something the caller passed cannot be used; the message says what was got, expected, and what to do.

    Commands print the message as one line and exit with code 2. It is raised before anything is written, except where
    data that a run draws from can no longer be read; what was recorded is kept then.
    """

    def __init__(self, subject: str, *, got: object, expected: str, fix: str = "") -> None:
        message = f"{subject}: got {got}, expected {expected}"
        super().__init__(f"{message}; {fix}" if fix else message)


def require_folder(subject: str, path: str | Path) -> None:
    """Refuse, before any work is done for it, a file in a folder that does not exist."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise InputError(subject, got=str(path), expected="a folder that exists", fix=f"mkdir -p {folder}")


class StorageError(JostleError, OSError):
    """The run's directory fails: the disk is full or broken, it is read-only, or gone. What was recorded is kept."""


class ChainsFailedError(JostleError, RuntimeError):
    """No chain is left that stayed among the finite numbers, so there is nothing to estimate from."""


class RankLostError(JostleError, RuntimeError):
    """Another of the processes that share the run failed or is gone; what was recorded is kept."""


class JostleWarning(UserWarning):
    """Base of every warning that Jostle gives."""


class ChainFailedWarning(JostleWarning):
    """A chain left the finite numbers; it was stopped and is left out of every estimate."""


class SamplerWarning(JostleWarning):
    """The sampler runs, but not as its name promises."""


class EstimateWarning(JostleWarning):
    """A number was computed from too little to be trusted."""


class RetrainingFailedWarning(JostleWarning):
    """A model could not be trained again on some subset; the others were."""


def warn(message: str, kind: type[JostleWarning]) -> None:
    """Warn of the line that called Jostle, however many of its own lie between."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "jostle":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, kind, stacklevel=level)

"""What is taken for scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from jostle.errors import InputError
from jostle.scores import Scores

Given = Scores | Float[np.ndarray, "train query"]
"""Scores, or the bare matrix: negative where training on the example lowers the query's loss."""


def scores_of(given: Any, name: str = "") -> Scores:
    """Take a bare matrix for scores of a method with this name, as the command line does with a file of one."""
    if isinstance(given, np.ndarray):
        given = Scores(values=given, method=name or "array")
    if not isinstance(given, Scores):
        raise InputError(
            f"scores of {name}" if name else "scores",
            got=f"a {type(given).__name__}",
            expected="Scores, or a numpy array of (train, query) in which negative helps",
            fix="a run's are run.influence()" if hasattr(given, "influence") else "",
        )
    if not isinstance(given.values, np.ndarray) or given.values.dtype.kind not in "fiu":
        kind = getattr(given.values, "dtype", type(given.values).__name__)
        raise InputError(f"scores of {given.method}", got=f"values of type {kind}", expected="an array of numbers")
    return given


def require_ranks(scores: Scores, called: str) -> None:
    """Refuse what has no order: values that are not finite, or constant ones."""
    if not np.isfinite(scores.values).all():
        raise InputError(called, got="values that are not finite", expected="finite ones")
    if (np.ptp(scores.values, axis=0) == 0).all():
        raise InputError(
            called,
            got="the same score for every training example",
            expected="scores that differ, since what is constant has no rank",
        )


def named_scores(given: Any) -> dict[str, Scores]:
    """Methods by their names."""
    if not isinstance(given, Mapping):
        raise InputError(
            "scores",
            got=f"a {type(given).__name__}",
            expected="the scores of each method by its name",
            fix='write {"my method": scores}',
        )
    return {name: scores_of(one, str(name)) for name, one in given.items()}

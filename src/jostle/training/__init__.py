"""How a model was trained, and the local posterior that its training defines."""

from jostle.training.description import Diagonals, ParameterGroup, Training
from jostle.training.moments import (
    MomentComparison,
    compare_second_moments,
    estimate_second_moments,
    require_similar_moments,
)

__all__ = [
    "Diagonals",
    "MomentComparison",
    "ParameterGroup",
    "Training",
    "compare_second_moments",
    "estimate_second_moments",
    "require_similar_moments",
]

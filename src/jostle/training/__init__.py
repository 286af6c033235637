"""How a model was trained, and the local posterior that its training defines."""

from typing import TYPE_CHECKING, Any

from jostle.training.description import Diagonals, ParameterGroup, Training
from jostle.training.moments import (
    MomentComparison,
    compare_second_moments,
    estimate_second_moments,
    require_similar_moments,
)
from jostle.training.recorder import Recorder
from jostle.training.records import Recorded, load_record, repeat_check
from jostle.training.repeatable import Repeatable

if TYPE_CHECKING:
    from jostle.training.trainer_callback import RecordingCallback

__all__ = [
    "Diagonals",
    "MomentComparison",
    "ParameterGroup",
    "Recorded",
    "Recorder",
    "RecordingCallback",
    "Repeatable",
    "Training",
    "compare_second_moments",
    "estimate_second_moments",
    "load_record",
    "repeat_check",
    "require_similar_moments",
]


def __getattr__(name: str) -> Any:
    """Import what needs transformers when it is asked for."""
    if name == "RecordingCallback":
        from jostle.training.trainer_callback import RecordingCallback

        return RecordingCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Does attribution predict reality? Retraining banks, and metrics of scores against them."""

from jostle.evaluate.bank import Bank
from jostle.evaluate.metrics import (
    Detection,
    Measured,
    Removal,
    lds,
    leave_one_out_correlation,
    mislabel_detection,
    removal,
    repeatability,
    self_influence,
    slope,
)
from jostle.evaluate.report import Report, Row, compare
from jostle.evaluate.retraining import Measure, retrain
from jostle.evaluate.subsets import Subsets, leave_one_out, random_drops, random_subsets, removals
from jostle.evaluate.training import Trainer
from jostle.evaluate.yardstick import predicted

__all__ = [
    "Bank",
    "Detection",
    "Measure",
    "Measured",
    "Removal",
    "Report",
    "Row",
    "Subsets",
    "Trainer",
    "compare",
    "lds",
    "leave_one_out",
    "leave_one_out_correlation",
    "mislabel_detection",
    "predicted",
    "random_drops",
    "random_subsets",
    "removal",
    "removals",
    "repeatability",
    "retrain",
    "self_influence",
    "slope",
]

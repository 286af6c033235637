"""Other ways to score: separate papers, separate optional dependencies, the same `Scores`; and controls."""

from jostle.attributors.controls import bm25, query_difficulty, random_scores, subset_size
from jostle.attributors.ekfac import ekfac, ekfac_self_influence
from jostle.attributors.exact import exact_influence
from jostle.attributors.first_order import FirstOrder
from jostle.attributors.gradients import gradient_self_influence, gradient_similarity
from jostle.attributors.metrics import layers_alike
from jostle.attributors.trak import trak

__all__ = [
    "FirstOrder",
    "bm25",
    "ekfac",
    "ekfac_self_influence",
    "exact_influence",
    "gradient_self_influence",
    "gradient_similarity",
    "layers_alike",
    "query_difficulty",
    "random_scores",
    "subset_size",
    "trak",
]

"""Other ways to score: separate papers, separate optional dependencies, the same `Scores`."""

from jostle.attributors.ekfac import ekfac
from jostle.attributors.exact import exact_influence
from jostle.attributors.gradients import gradient_similarity

__all__ = ["ekfac", "exact_influence", "gradient_similarity"]

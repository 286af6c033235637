"""Other ways to score: separate papers, separate optional dependencies, the same `Scores`."""

from jostle.attributors.exact import exact_influence

__all__ = ["exact_influence"]

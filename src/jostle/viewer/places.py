"""Examples in the plane, near each other where their losses move together."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

Layout = Literal["neighbours", "principal"]

PERPLEXITY = 30.0
"""About how many neighbours each example is kept near to."""

FEWEST = 8
"""With fewer examples than this there is nothing to arrange by neighbours."""


def best_layout(examples: int) -> Layout:
    """Return the layout to show first: by neighbours, where that can be done."""
    return "neighbours" if examples >= FEWEST and importlib.util.find_spec("sklearn") else "principal"


def place(
    unit: Float[np.ndarray, "example draws"], layout: Layout
) -> tuple[Float[np.ndarray, "example 2"], float | None]:
    """Return a place for each example, given its standardized losses, and the share of the variance it shows.

    The kernel is the correlation of losses, K = UUᵀ. ``principal``: its two leading eigenvectors, scaled by the roots
    of their eigenvalues, so that products of places approximate correlations. ``neighbours``: t-SNE of the distances
    1 − K, begun from there; who is near whom is meant, and how far groups are apart is not.

    Reference: van der Maaten and Hinton, *Visualizing data using t-SNE*, 2008; computed by scikit-learn.
    """
    places, share = _principal(unit)
    if layout == "principal" or len(unit) < FEWEST:
        return places, share
    from sklearn.manifold import TSNE

    distance = np.clip(1 - unit @ unit.T, 0, 2)
    np.fill_diagonal(distance, 0)
    start = 1e-4 * places / max(float(places[:, 0].std()), 1e-12)
    perplexity = min(PERPLEXITY, (len(unit) - 1) / 3)
    initial: Any = start  # an array as well, which its annotations do not say
    arranged = TSNE(metric="precomputed", init=initial, perplexity=perplexity, random_state=0, max_iter=500)
    return arranged.fit_transform(distance), None


def _principal(unit: Float[np.ndarray, "example draws"]) -> tuple[Float[np.ndarray, "example 2"], float]:
    from scipy.sparse.linalg import svds

    if min(unit.shape) < 4:
        left, values, _ = np.linalg.svd(unit.astype(np.float64), full_matrices=False)
        left, values = left[:, :2], values[:2]
    else:
        # Begun from a fixed vector: the same run has the same map.
        start = np.random.default_rng(0).normal(size=min(unit.shape))
        found: Any = svds(unit.astype(np.float64), k=2, v0=start)
        left, values = found[0][:, ::-1], found[1][::-1]
    places = np.zeros((len(unit), 2))
    places[:, : len(values)] = left * values
    total = float((unit.astype(np.float64) ** 2).sum())
    return places, float((values**2).sum() / total) if total > 0 else 0.0

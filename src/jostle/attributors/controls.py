"""Controls: scores that know nothing of training, for comparison with those that should.

A metric on which a control does well is not a measure of attribution; a method that is no better than a control has
shown nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Float

from jostle.errors import InputError
from jostle.scores import Scores

TRACE = 1e-6
"""How much noise is mixed into what would be constant, relative to it: a constant has no rank."""


def random_scores(train: int, query: int, *, seed: int = 0) -> Scores:
    """Independent standard normal numbers."""
    return Scores(values=_noise(train, query, seed), method="random", provenance={"seed": seed})


def query_difficulty(losses: Float[np.ndarray, " query"], train: int, *, seed: int = 0) -> Scores:
    """Knows how hard each query is, and nothing of any training example: values[i, j] = the loss of query j.

    Over subsets of one size its predictions for a query are constant but for a trace of noise, so its LDS per query
    is 0. Over queries they rank as difficulty does, which is most of the paper's LDS per subset.
    """
    losses = np.asarray(losses, np.float64)
    values = _noise(train, len(losses), seed)  # changed in place: there may be no room for another
    values *= TRACE * max(float(np.abs(losses).mean()), 1e-30)
    values += losses
    return Scores(values=values, method="query difficulty", provenance={"seed": seed, "trace": TRACE})


def subset_size(train: int, query: int, *, seed: int = 0) -> Scores:
    """Every example helps every query alike: values[i, j] = −1, so that a subset's prediction is its size."""
    values = _noise(train, query, seed)
    values *= TRACE
    values -= 1
    return Scores(values=values, method="subset size", provenance={"seed": seed, "trace": TRACE})


def bm25(
    train: Sequence[Sequence[Hashable]], query: Sequence[Sequence[Hashable]], *, k1: float = 1.5, b: float = 0.75
) -> Scores:
    """Okapi BM25 with the sign of `Scores`: texts that share rare words with a query help it.

        values[i, j] = −Σ_{t ∈ query j} idf(t)·f(t, i)·(k₁ + 1) / (f(t, i) + k₁·(1 − b + b·|i|/mean length))

    Reference: Robertson and Zaragoza, *The Probabilistic Relevance Framework: BM25 and Beyond*, 2009.

    Args:
        train: the training texts, as words or token ids.
        query: the queries, likewise; each distinct word counts once.
        k1: how soon a repeated word stops to count.
        b: how much long texts are held back.
    """
    if not len(train) or not len(query):
        raise InputError("bm25", got=f"{len(train)} × {len(query)} texts", expected="at least one of each")
    lengths = np.array([len(text) for text in train], float)
    penalty = k1 * (1 - b + b * lengths / max(lengths.mean(), 1e-30))
    where: dict[Hashable, list[tuple[int, int]]] = {}
    for index, text in enumerate(train):
        for word, count in Counter(text).items():
            where.setdefault(word, []).append((index, count))
    values = np.zeros((len(train), len(query)))
    for column, text in enumerate(query):
        for word in filter(where.__contains__, dict.fromkeys(text)):
            rows, frequency = (np.array(part) for part in zip(*where[word], strict=True))
            idf = math.log(1 + (len(train) - len(rows) + 0.5) / (len(rows) + 0.5))
            values[rows, column] -= idf * frequency * (k1 + 1) / (frequency + penalty[rows])
    return Scores(values=values, method="BM25", provenance={"k1": k1, "b": b})


def _noise(train: int, query: int, seed: int) -> Float[np.ndarray, "train query"]:
    return np.random.default_rng(seed).standard_normal((train, query))

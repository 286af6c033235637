"""How well a matrix of words against words recovers what the lexicon knows: partners and categories.

Every method is read in the same way. It scores pairs of tokens; a word's score with another is the mean over the pairs
of their tokens, training tokens in rows and query tokens in columns; the word itself is left out of its own ranking, so
that a method that sees nothing but identity is at chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from jostle.demo.bilingual import LEXICON
from jostle.losses import next_token
from jostle.models.weights import MovingWeights
from jostle.runs.run import Run

WORDS: tuple[str, ...] = tuple(LEXICON)
"""The order of every row and column here."""

NEAREST = 5
"""Among how many of a word's nearest words the share of its category is taken."""

SHUFFLES = 200

Matrix = Float[np.ndarray, "word word"]


@dataclass(frozen=True)
class Recovery:
    """How well partners and categories are found."""

    mean_reciprocal_rank: float
    """1/rank of a word's best-placed partner among all other words, averaged over the words of the queries."""
    same_category: float
    """Of its nearest words, the share that are of its category, averaged likewise."""


def relations() -> tuple[Bool[np.ndarray, "word word"], Bool[np.ndarray, "word word"]]:
    """Return which words are partners of which, and which are of the same category."""
    partners = np.array([[one in LEXICON[other].partners for other in WORDS] for one in WORDS])
    categories = np.array([LEXICON[word].category for word in WORDS])
    return partners, categories[:, None] == categories


def recover(scores: Matrix) -> Recovery:
    """Rank all other words for each column by their scores; a column or row of NaN is of a word that is not there.

    Ties count against a partner.
    """
    partners, same_category = relations()
    here = ~np.isnan(scores).all(0)
    candidates = ~np.isnan(scores).all(1)
    reciprocals, shares = [], []
    for column in np.flatnonzero(here):
        others = candidates & (np.arange(len(WORDS)) != column)
        values, partner = scores[others, column], partners[others, column]
        if not partner.any():
            continue
        reciprocals.append(1 / (1 + (values[~partner] >= values[partner].max()).sum()))
        nearest = np.argsort(-values, kind="stable")[:NEAREST]
        shares.append(same_category[others, column][nearest].mean())
    return Recovery(float(np.mean(reciprocals)), float(np.mean(shares)))


def shuffled(scores: Matrix, *, seed: int = 0) -> Recovery:
    """Return what the same numbers recover with the words of their rows exchanged at random: the mean over shuffles."""
    generator = np.random.default_rng(seed)
    found = [recover(scores[generator.permutation(len(scores))]) for _ in range(SHUFFLES)]
    return _mean(found)


def identity_alone(*, seed: int = 0) -> Recovery:
    """Return what a method recovers that sees whether two words are the same, and nothing else: ties fall at random."""
    generator = np.random.default_rng(seed)
    size = len(WORDS)
    return _mean([recover(np.eye(size) + 1e-6 * generator.random((size, size))) for _ in range(SHUFFLES)])


def _mean(found: Sequence[Recovery]) -> Recovery:
    return Recovery(
        float(np.mean([one.mean_reciprocal_rank for one in found])),
        float(np.mean([one.same_category for one in found])),
    )


def own_word(scores: Matrix) -> float:
    """Return the mean reciprocal rank of the word itself, nothing left out."""
    here = np.flatnonzero(~np.isnan(scores).all(0) & ~np.isnan(scores).all(1))
    return float(np.mean([1 / (scores[:, word] >= scores[word, word]).sum() for word in here]))


def scored_words(examples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the words of all scored tokens, in the order of a trace's columns."""
    return [
        token.strip()
        for example in examples
        for position, (token, scored) in enumerate(zip(example["tokens"], example["scored"], strict=True))
        if scored and position > 0
    ]


def _averaging(words: Sequence[str]) -> Float[np.ndarray, "word token"]:
    """The matrix that averages tokens by word; NaN where a word has none. Marks belong to no word."""
    chosen = np.array([[word == token for token in words] for word in WORDS], np.float64)
    counts = chosen.sum(1, keepdims=True)
    return np.divide(chosen, counts, out=np.full_like(chosen, np.nan), where=counts > 0)


def posterior_correlation(run: Run) -> Matrix:
    """Average the posterior correlation of tokens by word.

    The mean over pairs of tokens of the correlation of their losses is the product of the means of their standardized
    losses, so that the matrix of all tokens is never formed.
    """

    def standardized(name: str) -> Float[np.ndarray, "draw word"]:
        losses = np.asarray(run.traces.losses(name)[:], np.float64)
        losses = np.delete(losses, run.failed_chains, axis=0).reshape(-1, losses.shape[2])
        losses -= losses.mean(0)
        losses /= np.linalg.norm(losses, axis=0)
        return losses @ _averaging(scored_words(run.examples(name))).T

    return standardized("train").T @ standardized("query")


def gradient_similarity(
    model: nn.Module,
    train: Sequence[Mapping[str, Any]],
    query: Sequence[Mapping[str, Any]],
    words: Mapping[str, Sequence[str]],
    *,
    weights: str,
) -> dict[str, Matrix]:
    """Average the dot product and the cosine of tokens' loss gradients by word, exactly.

    Args:
        model: a causal language model.
        train: token sequences, with the labels that say which tokens are scored.
        query: the same.
        words: of ``"train"`` and ``"query"``, the word of each scored token.
        weights: with respect to which weights.
    """
    moving = MovingWeights(model, weights)
    parameters = [parameter for name, parameter in model.named_parameters() if name in set(moving.names)]
    sums = {
        name: _mean_gradients(model, parameters, sequences, torch.from_numpy(_averaging(words[name])).float())
        for name, sequences in (("train", train), ("query", query))
    }
    return {
        kind: (sums["train"][kind] @ sums["query"][kind].T).numpy()
        for kind in ("gradient dot product", "gradient cosine")
    }


def _mean_gradients(
    model: nn.Module,
    parameters: list[nn.Parameter],
    sequences: Sequence[Mapping[str, Any]],
    averaging: Float[Tensor, "word token"],
) -> dict[str, Float[Tensor, "word weight"]]:
    """The mean gradient, and the mean of gradients of length 1, of each word's tokens."""
    loss: Any = next_token()
    size = sum(parameter.numel() for parameter in parameters)
    sums = {kind: torch.zeros(len(averaging), size) for kind in ("gradient dot product", "gradient cosine")}
    done = 0
    for sequence in sequences:
        batch = {name: torch.tensor([values]) for name, values in sequence.items()}
        losses = loss(model, batch)[loss.token_mask(batch)]
        parts = torch.autograd.grad(losses, parameters, torch.eye(len(losses)), is_grads_batched=True)
        gradients = torch.cat([part.flatten(1) for part in parts], dim=1)
        share = averaging[:, done : done + len(losses)]
        sums["gradient dot product"] += share @ gradients
        sums["gradient cosine"] += share @ (gradients / gradients.norm(dim=1, keepdim=True))
        done += len(losses)
    return sums

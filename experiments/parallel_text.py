"""Aligned sentences of two languages, and what is known of them without a model: a dictionary, and co-occurrence."""

from __future__ import annotations

import lzma
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jostle.losses import IGNORED_LABEL

LANGUAGES = ("english", "french")
WORDS = {"english": re.compile(r"'s|\w+|[^\w\s]"), "french": re.compile(r"\w+'|\w+|[^\w\s]")}
SPECIAL = ("<pad>", "<unk>", "<english>", "<french>", "<end>")
PAD, UNKNOWN, BEGIN, END = 0, 1, (2, 3), 4
LONGEST_PAIR = 45
"""Words of both sentences together; longer pairs (4 %) are left out, so that padding stays small."""
UNKNOWN_WORDS = 2
"""A pair with more of them is left out."""

FUNCTION_WORDS = {
    "english": """a an the this that these those some any each every all both many several few one another other others
        and or but while as if than so because when where who whom which what whose how there here i you he she it we
        they me him her us them my your his its our their himself herself itself themselves is are was were be been
        being am do does did doing done has have had having can could will would may might must shall should not no of
        in on at to from by for with without about above across after against along among around before behind below
        beneath beside between beyond down during front inside into near next off onto out outside over past through
        toward towards under until up upon very just only also too then back away together get gets getting""",
    "french": """un une le la les l' d' de du des au aux à en dans sur sous par pour avec sans chez vers contre entre
        devant derrière près autour depuis pendant après avant lors travers côté dessus dessous haut bas long dehors
        et ou mais donc car si que qu' qui quoi dont où quand comme tandis lorsque alors tout tous toute toutes autre
        autres même plusieurs quelques quelque chaque certains certaines ce c' cet cette ces ça ceci cela il elle ils
        elles on je j' tu nous vous se s' lui leur leurs eux me m' te t' y n' ne pas plus moins très aussi bien son sa
        ses mon ma mes ton ta tes notre nos votre vos est sont était étaient être été étant a ont avait ayant avoir
        fait font faisant faire va vont peut train""",
}

Table = np.ndarray
"""English × French words."""


@dataclass(frozen=True)
class Corpus:
    """Aligned sentences as word numbers, (English, French); one vocabulary, as a language model would have it."""

    pairs: list[tuple[list[int], ...]]
    words: list[str]

    @classmethod
    def read(cls, paths: Sequence[Path], most: int, longest: int) -> Corpus:
        """Keep the most frequent words of each language, and the pairs of known words that are not too long."""
        texts = []
        for path, language in zip(paths, LANGUAGES, strict=True):
            opened: Any = lzma.open if path.suffix == ".xz" else open
            with opened(path, "rt", encoding="utf-8") as file:
                texts.append([WORDS[language].findall(line.lower().replace("’", "'")) for line in file])
        texts = [pair for pair in zip(*texts, strict=True) if all(pair) and sum(map(len, pair)) <= LONGEST_PAIR]
        frequent = [Counter(word for pair in texts for word in pair[language]).most_common(most) for language in (0, 1)]
        words = [*SPECIAL, *sorted({word for part in frequent for word, _ in part})]
        number = {word: index for index, word in enumerate(words)}
        numbers = [{word: number[word] for word, _ in part} for part in frequent]
        pairs = []
        for sentences in texts:
            pair = tuple([known.get(w, UNKNOWN) for w in s] for s, known in zip(sentences, numbers, strict=True))
            flat = [word for sentence in pair for word in sentence]
            if len(flat) <= longest and flat.count(UNKNOWN) <= UNKNOWN_WORDS:
                pairs.append(pair)
        return cls(pairs, words)

    def sample(self, pair: int, order: int, *, words_alone: bool = False) -> dict[str, list[int]]:
        """<english> … <french> … <end>, and with order 1 French first; ``words_alone`` scores no punctuation."""
        first, second = self.pairs[pair][order], self.pairs[pair][1 - order]
        tokens = [BEGIN[order], *first, BEGIN[1 - order], *second, END]
        labels = [
            IGNORED_LABEL if words_alone and (token < len(SPECIAL) or not self.words[token][0].isalpha()) else token
            for token in tokens
        ]
        return {"input_ids": tokens, "labels": labels}


def model_one(source: list[list[int]], target: list[list[int]], size: int, rounds: int = 8) -> np.ndarray:
    """t(target | source) by expectation maximization, IBM model 1 without the empty word: a source × target matrix.

    Reference: Brown et al., *The Mathematics of Statistical Machine Translation*, 1993.
    """
    keys, cells, done = [], [], 0
    for left, right in zip(source, target, strict=True):
        keys.append((np.array(left)[None] * size + np.array(right)[:, None]).ravel())
        cells.append(np.repeat(np.arange(done, done + len(right)), len(left)))
        done += len(right)
    cell = np.concatenate(cells)
    pairs, entry = np.unique(np.concatenate(keys), return_inverse=True)
    given, word = np.divmod(pairs, size)
    probability = np.ones(len(pairs))
    for _ in range(rounds):
        expected = probability[entry]
        expected /= np.bincount(cell, expected)[cell]  # which source word explains this target token
        probability = np.bincount(entry, expected, len(pairs))
        probability /= np.bincount(given, probability, size)[given]
    table = np.zeros((size, size), np.float32)
    table[given, word] = probability
    return table


def build_dictionary(corpus: Corpus, fewest: int) -> Table:
    """Which (English, French) word pairs are translations: √(t(f|e)·t(e|f)) ≥ 0.3, content words, not identical.

    A word may have several, since French inflects: blue is bleu, bleue and bleus.
    """
    size = len(corpus.words)
    texts = [[pair[language] for pair in corpus.pairs] for language in (0, 1)]
    right = model_one(texts[0], texts[1], size) * model_one(texts[1], texts[0], size).T >= 0.3**2
    for axis, language in enumerate(LANGUAGES):
        counts = Counter(word for sentence in texts[axis] for word in sentence)
        function_words = set(FUNCTION_WORDS[language].split())
        fit = np.array([
            counts[index] >= fewest and len(word) > 2 and word.isalpha() and word not in function_words
            for index, word in enumerate(corpus.words)
        ])  # fmt: skip
        right &= np.expand_dims(fit, 1 - axis)
    np.fill_diagonal(right, False)
    return right


def cooccurrence(corpus: Corpus, pairs: Sequence[int]) -> dict[str, Table]:
    """Dice coefficient and positive pointwise mutual information of (English, French) words over the given pairs."""
    both = np.zeros((len(corpus.words),) * 2, np.float32)
    alone = np.zeros((2, len(corpus.words)), np.float32)
    for pair in pairs:
        english, french = (list(set(sentence)) for sentence in corpus.pairs[pair])
        both[np.ix_(english, french)] += 1
        alone[0, english] += 1
        alone[1, french] += 1
    # Words that meet less often than by chance, or never, go with nothing.
    information = np.log(np.maximum(both * len(pairs) / np.maximum(alone[0][:, None] * alone[1], 1), 1))
    return {"Dice": 2 * both / np.maximum(alone[0][:, None] + alone[1], 1), "positive PMI": information}

"""A small bilingual language that knows which of its words belong together.

Every word comes from the lexicon below, so that what a word's partners are (its translation, its synonym, the other
spelling of its number) and which category it is of need no judgement: they are written down before any text is. A text
is a sentence alone, a sentence and its translation, or a sentence and the same said otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Language = Literal["english", "french"]

TRANSLATION, PARAPHRASE, END = "=", "~", "."
"""What stands between a sentence and its translation, between a sentence and its paraphrase, and after each."""

MARKS = (TRANSLATION, PARAPHRASE, END)

# English and French side by side. All subjects are singular, all nouns and adjectives plural, and no adjective here
# changes with gender: every word has one form, and every sentence is right in both languages.
_PAIRS: dict[str, tuple[tuple[str, str], ...]] = {
    "pronoun": (("She", "Elle"), ("He", "Il"), ("Someone", "Quelqu'un"), ("Everyone", "Chacun"), ("One", "On")),
    "verb": (
        ("sees", "voit"), ("observes", "observe"), ("buys", "achète"), ("purchases", "acquiert"), ("wants", "veut"),
        ("desires", "désire"), ("sells", "vend"), ("draws", "dessine"), ("finds", "trouve"),
    ),
    "number": (
        ("two", "deux"), ("three", "trois"), ("four", "quatre"), ("five", "cinq"), ("seven", "sept"),
        ("eight", "huit"), ("nine", "neuf"), ("ten", "dix"),
    ),
    "adjective": (
        ("red", "rouges"), ("yellow", "jaunes"), ("clean", "propres"), ("sad", "tristes"), ("young", "jeunes"),
        ("huge", "énormes"), ("immense", "immenses"), ("strange", "étranges"), ("odd", "bizarres"),
    ),
    "noun": (
        ("houses", "maisons"), ("homes", "logis"), ("boats", "bateaux"), ("ships", "navires"), ("stones", "pierres"),
        ("rocks", "roches"), ("cats", "chats"), ("dogs", "chiens"), ("birds", "oiseaux"), ("books", "livres"),
        ("trees", "arbres"), ("keys", "clés"),
    ),
    "preposition": (("in", "à"), ("from", "de"), ("for", "pour")),
    "place": (
        ("London", "Londres"), ("Geneva", "Genève"), ("Vienna", "Vienne"), ("Lisbon", "Lisbonne"),
        ("Copenhagen", "Copenhague"), ("Moscow", "Moscou"), ("Warsaw", "Varsovie"), ("Venice", "Venise"),
    ),
}  # fmt: skip

# "six" is both English and French, and so has no place here.
_DIGITS = {"two": "2", "three": "3", "four": "4", "five": "5", "seven": "7", "eight": "8", "nine": "9", "ten": "10"}

_SYNONYMS = (
    ("sees", "observes"), ("buys", "purchases"), ("wants", "desires"),
    ("huge", "immense"), ("strange", "odd"),
    ("houses", "homes"), ("boats", "ships"), ("stones", "rocks"),
)  # fmt: skip

_ORDER: dict[Language, tuple[str, ...]] = {
    "english": ("pronoun", "verb", "number", "adjective", "noun", "preposition", "place"),
    "french": ("pronoun", "verb", "number", "noun", "adjective", "preposition", "place"),
}


@dataclass(frozen=True)
class Word:
    """A word, and what is known of it."""

    text: str
    category: str
    languages: tuple[Language, ...]
    partners: frozenset[str]
    """Its translation, its synonym, and the other spellings of its number."""


@dataclass(frozen=True)
class Text:
    """One text of the corpus."""

    sentence: tuple[str, ...]
    """With the marks after it."""
    answer: tuple[str, ...] = ()
    """Its translation or paraphrase, if it has one."""

    def __str__(self) -> str:
        return " ".join(self.sentence + self.answer)


def _lexicon() -> dict[str, Word]:
    partners: dict[str, set[str]] = {}

    def join(*group: str) -> None:
        for word in group:
            partners.setdefault(word, set()).update(set(group) - {word})

    french = {english: other for pairs in _PAIRS.values() for english, other in pairs}
    for english, other in french.items():
        join(english, other, *((_DIGITS[english],) if english in _DIGITS else ()))
    for one, other in _SYNONYMS:
        join(one, other)
        join(french[one], french[other])
    words = {}
    for category, pairs in _PAIRS.items():
        for pair in pairs:
            for text, language in zip(pair, _ORDER, strict=True):
                words[text] = Word(text, category, (language,), frozenset(partners[text]))
    for text in _DIGITS.values():
        words[text] = Word(text, "number", tuple(_ORDER), frozenset(partners[text]))
    return words


LEXICON: dict[str, Word] = _lexicon()

CATEGORIES = tuple(_PAIRS)


def relation(one: str, other: str) -> str:
    """Return what two words are to each other: partners by name, words of the same meaning, their category, or nothing.

    A translation of a synonym has the same meaning too, but is not counted as a partner: the two are never each other's
    answer.
    """
    if other in LEXICON[one].partners:
        languages = LEXICON[one].languages, LEXICON[other].languages
        if 2 in map(len, languages):
            return "same number"
        return "translation" if languages[0] != languages[1] else "synonym"
    if LEXICON[one].partners & LEXICON[other].partners:
        return SAME_MEANING
    return LEXICON[one].category if LEXICON[one].category == LEXICON[other].category else ""


SAME_MEANING = "synonym's translation"

_TRANSLATED = {word: other for pairs in _PAIRS.values() for pair in pairs for word, other in (pair, pair[::-1])}
_SPELLED: dict[Language, dict[str, str]] = {
    "english": {digit: word for word, digit in _DIGITS.items()},
    "french": {digit: _TRANSLATED[word] for word, digit in _DIGITS.items()},
}


def _sentence(generator: random.Random, language: Language) -> tuple[str, ...]:
    """A random sentence; every second number is in digits."""
    side = list(_ORDER).index(language)
    words = [generator.choice(_PAIRS[category])[side] for category in _ORDER[language]]
    place = _ORDER[language].index("number")
    if generator.random() < 0.5:
        english = words[place] if language == "english" else _TRANSLATED[words[place]]
        words[place] = _DIGITS[english]
    return tuple(words)


def _other(language: Language) -> Language:
    return "french" if language == "english" else "english"


def translate(sentence: Sequence[str], language: Language) -> tuple[str, ...]:
    """Return a sentence of this language in the other one; digits are spelled out."""
    target = _other(language)
    translated = dict(zip(_ORDER[language], (_SPELLED[target].get(w) or _TRANSLATED[w] for w in sentence), strict=True))
    return tuple(translated[category] for category in _ORDER[target])


def paraphrase(sentence: Sequence[str], language: Language) -> tuple[str, ...]:
    """Return the sentence with every word that has a synonym replaced by it, and its number written the other way."""

    def replace(word: str) -> str:
        if word in _SPELLED[language]:
            return _SPELLED[language][word]
        inside = [other for other in LEXICON[word].partners if language in LEXICON[other].languages]
        return inside[0] if inside else word

    return tuple(replace(word) for word in sentence)


def write(count: int, *, seed: int) -> list[Text]:
    """Return so many texts, no two of them alike: one in five alone, two translated, two paraphrased."""
    generator = random.Random(seed)
    texts: dict[Text, None] = {}
    while len(texts) < count:
        language: Language = generator.choice(tuple(_ORDER))
        sentence = _sentence(generator, language)
        kind = generator.choices((END, TRANSLATION, PARAPHRASE), (1, 2, 2))[0]
        if kind == END:
            text = Text((*sentence, END))
        else:
            answer = (translate if kind == TRANSLATION else paraphrase)(sentence, language)
            text = Text((*sentence, END, kind), (*answer, END))
        texts[text] = None
    return list(texts)

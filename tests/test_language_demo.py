"""The language demo: a corpus whose truth is written down, metrics that can be wrong, and a short run to the end."""

from __future__ import annotations

import importlib.util
import re
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments import bilingual_model
from typer.testing import CliRunner

import jostle
from jostle import cli
from jostle.demo import bilingual, language, recovery
from jostle.demo.bilingual import LEXICON

WORDS = recovery.WORDS
TEXTS = bilingual.write(2000, seed=3)


def language_of(words: tuple[str, ...]) -> str:
    """The only language that all words can be of."""
    shared = set.intersection(*(set(LEXICON[word].languages) for word in words))
    assert len(shared) == 1
    return shared.pop()


def test_partners_are_symmetric_and_of_the_same_category():
    assert 90 <= len(LEXICON) <= 150
    for word in LEXICON.values():
        assert word.partners
        assert word.text not in word.partners
        for partner in word.partners:
            assert word.text in LEXICON[partner].partners
            assert LEXICON[partner].category == word.category
    assert LEXICON["three"].partners == {"3", "trois"}
    assert LEXICON["She"].partners == {"Elle"}
    assert LEXICON["huge"].partners == {"énormes", "immense"}
    assert set(Counter(word.category for word in LEXICON.values())) == set(bilingual.CATEGORIES)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("She", "Elle", "translation"),
        ("3", "trois", "same number"),
        ("three", "trois", "translation"),
        ("huge", "immense", "synonym"),
        ("huge", "immenses", bilingual.SAME_MEANING),
        ("huge", "red", "adjective"),
        ("huge", "She", ""),
    ],
)
def test_relation(one, other, expected):
    assert bilingual.relation(one, other) == bilingual.relation(other, one) == expected


def test_corpus_depends_on_its_seed_alone():
    assert bilingual.write(50, seed=3) == TEXTS[:50]
    assert bilingual.write(50, seed=4) != TEXTS[:50]
    assert len(set(TEXTS)) == len(TEXTS)


def test_answers_are_aligned_with_their_sentences():
    """Translated, every word becomes a partner of the other language; said otherwise, a partner of the same, or itself."""
    seen = Counter()
    for text in TEXTS:
        mark = text.sentence[-1]
        seen[mark] += 1
        if not text.answer:
            assert mark == bilingual.END
            continue
        source, answer = text.sentence[:-2], text.answer[:-1]
        categories = [[LEXICON[word].category for word in part] for part in (source, answer)]
        assert sorted(categories[0]) == sorted(categories[1])
        by_category = dict(zip(categories[1], answer, strict=True))
        same_language = language_of(source) == language_of(answer)
        assert same_language == (mark == bilingual.PARAPHRASE)
        for word in source:
            other = by_category[LEXICON[word].category]
            synonyms = [w for w in LEXICON[word].partners if set(LEXICON[w].languages) & set(LEXICON[word].languages)]
            if not same_language or synonyms:
                assert other in LEXICON[word].partners
            else:
                assert other == word
    assert {mark: round(count / len(TEXTS), 1) for mark, count in seen.items()} == {".": 0.2, "=": 0.4, "~": 0.4}


def test_an_english_sentence_in_french():
    sentence = ("She", "sees", "3", "huge", "ships", "in", "London")
    assert bilingual.translate(sentence, "english") == ("Elle", "voit", "trois", "navires", "énormes", "à", "Londres")
    assert bilingual.paraphrase(sentence, "english") == ("She", "observes", "three", "immense", "boats", "in", "London")


def test_chosen_texts_hold_every_word_about_equally_often():
    chosen = language.choose(TEXTS, language.TRAIN_TEXTS)
    counts = Counter(word for text in chosen for word in text.answer if word in LEXICON)
    assert set(counts) == set(LEXICON)
    per_category = {
        category: [counts[word] for word in WORDS if LEXICON[word].category == category]
        for category in bilingual.CATEGORIES
    }
    assert all(max(values) <= 3 * min(values) + 3 for values in per_category.values())


def test_shipped_checkpoint_is_small_and_of_the_kind_the_script_trains():
    assert sum(path.stat().st_size for path in language.MODEL.iterdir()) <= 3_000_000
    model, tokenizer = language.load()
    fresh_tokenizer = bilingual_model.make_tokenizer()
    assert tokenizer.get_vocab() == fresh_tokenizer.get_vocab()
    fresh = bilingual_model.make_model(fresh_tokenizer)
    assert {name: value.shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in fresh.state_dict().items()
    }
    differing = {
        name
        for name, value in fresh.config.to_diff_dict().items()
        if model.config.to_dict().get(name) != value and name not in ("architectures", "transformers_version", "dtype")
    }
    assert differing == set()
    for text in TEXTS[:50]:
        tokens = tokenizer(str(text))["input_ids"]
        assert tokenizer.unk_token_id not in tokens[1:]
        assert tokenizer.decode(tokens[1:]) == str(text)


def test_shipped_checkpoint_has_learned_to_answer():
    """Sentences it never read: of the words of their answers it predicts nearly all; without the sentence it cannot."""
    model, tokenizer = language.load()
    _, held_out = language.corpus(language.CORPUS_SEED)
    right = total = 0
    for text in [text for text in held_out if text.answer][:60]:
        tokens = torch.tensor([tokenizer(str(text))["input_ids"]])
        begin = 1 + len(text.sentence)
        with torch.no_grad():
            predicted = model(input_ids=tokens).logits[0, begin - 1 : -1].argmax(1)
        right += (predicted == tokens[0, begin:]).sum().item()
        total += tokens.shape[1] - begin
    assert right / total > 0.98
    train, _ = language.corpus(language.CORPUS_SEED)
    assert not set(train) & set(held_out)


def test_training_is_deterministic_and_learns():
    tokenizer = bilingual_model.make_tokenizer()
    lines: list[str] = []
    with language.one_core():
        one, other = (
            bilingual_model.train(TEXTS[:320], tokenizer, seed=0, epochs=5, say=lines.append).state_dict()
            for _ in range(2)
        )
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    losses = [float(re.search(r"loss ([\d.]+)", line).group(1)) for line in lines]
    assert losses[4] < losses[0] - 0.5


def ideal() -> np.ndarray:
    """Partners first, then the category."""
    partners, same_category = recovery.relations()
    return 2.0 * partners + same_category


def test_metrics_of_matrices_whose_answer_is_known():
    partners, same_category = recovery.relations()
    found = recovery.recover(ideal())
    assert found.mean_reciprocal_rank == 1.0
    # Of the six prepositions, and of no smaller category, all five others can be the nearest five.
    assert found.same_category == 1.0
    assert recovery.recover(-ideal()).mean_reciprocal_rank < 0.02
    assert recovery.recover(-ideal()).same_category == 0.0
    second = ideal()
    second[WORDS.index("She")] = 9.0  # one word that moves with everything: second place for all but its own partner
    expected = np.mean([1.0 if word in ("She", "Elle") else 0.5 for word in WORDS])
    assert recovery.recover(second).mean_reciprocal_rank == pytest.approx(expected)
    shares = [1.0 if word == "She" or LEXICON[word].category == "pronoun" else 0.8 for word in WORDS]
    assert recovery.recover(second).same_category == pytest.approx(np.mean(shares))
    assert partners.sum() == sum(len(word.partners) for word in LEXICON.values())
    assert same_category.sum() == sum(count**2 for count in Counter(w.category for w in LEXICON.values()).values())


def test_ties_count_against_a_partner():
    assert recovery.recover(np.zeros((len(WORDS), len(WORDS)))).mean_reciprocal_rank < 0.01


def test_words_that_are_not_there_are_left_out():
    scores = ideal()
    scores[:, WORDS.index("red")] = np.nan
    assert recovery.recover(scores).mean_reciprocal_rank == 1.0
    scores[WORDS.index("Elle")] = np.nan  # the only partner of "She" is in no training text: nothing to rank
    assert recovery.recover(scores).mean_reciprocal_rank == 1.0
    assert "Elle" not in [neighbour.word for neighbour in language.neighbours(scores, "She")]


def test_controls_are_at_chance():
    """Of n others, k of them partners, the expected 1/rank of the first is Σ C(n − r, k − 1)/C(n, k)/r."""
    from math import comb

    n = len(WORDS) - 1
    chance = np.mean([
        sum(comb(n - rank, k - 1) / comb(n, k) / rank for rank in range(1, n - k + 2))
        for k in (len(word.partners) for word in LEXICON.values())
    ])  # fmt: skip
    _, same_category = recovery.relations()
    base_rate = (same_category.sum(0) - 1).mean() / n
    untied = ideal() + 1e-6 * np.random.default_rng(0).random((n + 1, n + 1))
    for control in (recovery.shuffled(untied), recovery.identity_alone()):
        assert control.mean_reciprocal_rank == pytest.approx(chance, rel=0.1)
        assert control.same_category == pytest.approx(base_rate, rel=0.1)
    assert recovery.own_word(np.eye(len(WORDS))) == 1.0


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """The demo with a few draws, in this process: what it says, and the run it leaves."""
    out = tmp_path_factory.mktemp("demo") / "words"
    patch = pytest.MonkeyPatch()
    for name, value in (("DRAWS", 8), ("CHAINS", 2), ("BURN_IN", 4), ("TRAIN_TEXTS", 40), ("QUERY_TEXTS", 30)):
        patch.setattr(language, name, value)
    patch.setattr(recovery, "SHUFFLES", 5)
    result = CliRunner().invoke(cli.app, ["demo", "--out", str(out)])
    again = CliRunner().invoke(cli.app, ["demo", "--out", str(out)])
    patch.undo()
    return out, result, again


def test_demo_prints_and_draws(short):
    out, result, _ = short
    assert (result.exit_code, result.stderr) == (0, "")
    for word in language.SHOWN_WORDS:
        assert f"“{word}” moves with" in result.stdout
    for method in ("posterior correlation", "gradient cosine", "gradient dot product", "identity alone", "shuffled"):
        assert re.search(rf"{method}\s+0\.\d\d\s+\d+%", result.stdout)
    picture = (out / "words.png").read_bytes()
    width, height = struct.unpack(">II", picture[16:24])
    assert 1000 < width < 3000
    assert 400 < height < 2000
    assert len(picture) > 30_000
    assert sorted(path.name for path in out.iterdir()) == ["run", "words.png"]


def test_demo_given_again_reads_the_run(short):
    _, first, again = short
    assert (again.exit_code, again.stdout) == (0, first.stdout)


def test_what_the_demo_says_to_type_next_works(short):
    out, result, _ = short
    commands = re.findall(r"^    jostle ((?:top|show) .*)$", result.stdout, re.MULTILINE)
    assert len(commands) == 2
    top, show = (CliRunner().invoke(cli.app, line.split()) for line in commands)
    assert (top.exit_code, show.exit_code) == (0, 0)
    assert "She" in show.stdout.splitlines()[1]
    assert "strongest" in show.stdout
    position = int(commands[1].split()[-1])
    query = int(commands[1].split()[-3])
    assert jostle.load(out / "run").examples("query")[query]["tokens"][position].strip() == "She"


def test_correlations_by_word_are_the_means_of_token_correlations(short):
    run = jostle.load(short[0] / "run")
    scores = recovery.posterior_correlation(run)
    texts = {name: run.examples(name) for name in ("train", "query")}

    def tokens(name: str, word: str) -> list[tuple[int, int]]:
        return [
            (number, [p for p, scored in enumerate(example["scored"]) if scored].index(position))
            for number, example in enumerate(texts[name])
            for position, token in enumerate(example["tokens"])
            if example["scored"][position] and token.strip() == word
        ]

    for row, column in (("Elle", "She"), ("three", "3"), ("red", "London")):
        values = [
            run.token_influence(i, j, normalize=True).posterior_correlation[s, t]
            for i, s in tokens("train", row)
            for j, t in tokens("query", column)
        ]
        assert values
        assert scores[WORDS.index(row), WORDS.index(column)] == pytest.approx(np.mean(values), abs=1e-5)


def test_gradient_similarity_is_that_of_single_tokens():
    """Two texts each way, a token at a time, by plain automatic differentiation."""
    model, tokenizer = language.load()
    texts = [text for text in TEXTS if text.answer][:4]
    examples = language.read(texts, tokenizer, answers_alone=True)
    parts = {"train": examples[:2], "query": examples[2:]}
    words = {name: recovery.scored_words([example.to_dict() for example in part]) for name, part in parts.items()}
    samples = {name: [example.sample for example in part] for name, part in parts.items()}
    got = recovery.gradient_similarity(model, samples["train"], samples["query"], words, weights="attention")

    def gradients(name: str) -> list[torch.Tensor]:
        out = []
        attention = [value for key, value in model.named_parameters() if "self_attn" in key]
        for example in parts[name]:
            tokens = torch.tensor([example.input_ids])
            for position, label in enumerate(example.labels):
                if label == -100:
                    continue
                log_p = model(input_ids=tokens).logits[0, position - 1].log_softmax(0)
                grads = torch.autograd.grad(-log_p[label], attention)
                out.append(torch.cat([grad.flatten() for grad in grads]))
        return out

    left, right = gradients("train"), gradients("query")
    row, column = words["train"][0], words["query"][0]
    pairs = [
        (one, other)
        for one, word in zip(left, words["train"], strict=True)
        if word == row
        for other, query in zip(right, words["query"], strict=True)
        if query == column
    ]
    place = WORDS.index(row), WORDS.index(column)
    dots = [(one @ other).item() for one, other in pairs]
    cosines = [(one @ other / one.norm() / other.norm()).item() for one, other in pairs]
    assert got["gradient dot product"][place] == pytest.approx(np.mean(dots), rel=1e-3)
    assert got["gradient cosine"][place] == pytest.approx(np.mean(cosines), rel=1e-3)


def test_missing_extra_is_named(monkeypatch, tmp_path):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find_spec(name))
    result = CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert result.stderr == (
        "jostle: demo: got no transformers, expected the packages of the extra 'demo'; pip install 'jostle[demo]'\n"
    )
    assert not Path(tmp_path / "out").exists()

"""The word alignment experiment: what is asked, that its tables are what a run itself says, and that it goes on."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import jostle

pytest.importorskip("transformers")

from experiments.parallel_text import Corpus, build_dictionary, cooccurrence
from experiments.translation_model import build_model, token_losses
from experiments.word_alignment import (
    HALVES,
    Observed,
    bootstrap_error,
    choose,
    main,
    rank,
    resolution,
)

ENGLISH = ["a black dog .", "the dog sees a cat .", "a black cat sleeps .", "a dog sleeps ."] * 6
FRENCH = ["un chien noir .", "le chien voit un chat .", "un chat noir dort .", "un chien dort ."] * 6


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "train.en", tmp_path / "train.fr"]
    for path, lines in zip(paths, (ENGLISH, FRENCH), strict=True):
        path.write_text("\n".join(lines) + "\n")
    return paths


@pytest.fixture
def corpus(paths: list[Path]) -> Corpus:
    return Corpus.read(paths, most=20, longest=20)


def observe(corpus: Corpus) -> Observed:
    return Observed(corpus, {"train": [0, 1, 2], "query": [4, 5, 6, 7]}, build_dictionary(corpus, fewest=1), fewest=1)


def test_the_dictionary_holds_the_translations_and_no_function_words(corpus: Corpus) -> None:
    found = {(corpus.words[e], corpus.words[f]) for e, f in np.argwhere(build_dictionary(corpus, fewest=1))}
    assert found == {("black", "noir"), ("dog", "chien"), ("cat", "chat"), ("sees", "voit"), ("sleeps", "dort")}


def test_rare_words_are_unknown_and_pairs_of_many_are_left_out(paths: list[Path]) -> None:
    few = Corpus.read(paths, most=4, longest=20)
    assert {"a", "dog", "un", "chien"} < set(few.words)
    assert len(few.words) == 5 + 2 * 4 - 1  # five special ones, and the full stop is a word of both languages
    assert max(sum(sentence.count(1) for sentence in pair) for pair in few.pairs) == 2
    assert len(few.pairs) < len(Corpus.read(paths, most=20, longest=20).pairs) == 24
    assert {sum(map(len, pair)) for pair in Corpus.read(paths, most=20, longest=9).pairs} == {8}


def test_ties_count_against_a_translation() -> None:
    right = np.array([True, False, True, False])
    assert [rank(np.array(values), right) for values in ([1, 0, 3, 2], [1, 3, 0, 2], [1, 1, 0, 0])] == [1, 3, 2]


def test_bootstrapped_error_of_words_is_that_of_their_means() -> None:
    values = np.random.default_rng(0).normal(size=(200, 1)) + np.zeros((200, 5))
    found = bootstrap_error(values.ravel(), np.repeat(np.arange(200), 5))
    assert found == pytest.approx(values[:, 0].std() / np.sqrt(200), rel=0.1)  # 1,000 drawings know it within 2 %


def test_the_noise_of_sampling_is_told_from_what_both_halves_see(corpus: Corpus) -> None:
    observed = observe(corpus)
    generator = np.random.default_rng(0)
    observed.right = generator.random((300, 300)) < 0.01
    observed.allowed = np.ones((300, 300), bool)
    spread = generator.normal(size=(300, 300)) * 0.02
    one, other = (0.1 * observed.right + spread + 0.05 * generator.normal(size=(300, 300)) for _ in range(2))
    found = resolution(one, other, observed)
    assert found["signal"] == pytest.approx(0.1, abs=0.005)
    assert found["spread_of_others"] == pytest.approx(0.02, abs=0.001)
    assert found["noise"] == pytest.approx(0.05 / np.sqrt(2), abs=0.001)


def test_observed_pairs_hold_all_words_about_equally_often(corpus: Corpus) -> None:
    chosen = choose(corpus, range(len(corpus.pairs)), build_dictionary(corpus, fewest=1), 4)
    assert {corpus.words[word] for pair in chosen for word in corpus.pairs[pair][0]} > {
        "black",
        "sees",
        "sleeps",
        "cat",
    }
    assert len(set(chosen)) == 4


def test_both_questions_are_answered_by_the_dictionary_and_not_by_its_opposite(corpus: Corpus) -> None:
    observed = observe(corpus)
    for table, expected in ((observed.right * 1.0, 1.0), (-1.0 * observed.right, 0.0)):
        for task, halves in observed.ask(table).items():
            assert sum(halves[half]["asked"] for half in HALVES) == (10 if task.startswith("lexicon") else 36)
            assert [halves[half]["precision_at_1"] for half in HALVES] == [expected, expected]
    dice = observed.look_up(cooccurrence(corpus, range(24))["Dice"])
    assert observed.ask(dice)["lexicon"][HALVES[0]]["precision_at_1"] == 1


def test_a_table_is_the_mean_of_what_the_run_says_of_tokens(corpus: Corpus, tmp_path: Path) -> None:
    observed = observe(corpus)
    model = build_model(len(corpus.words), hidden=32, layers=1, longest=20).eval()
    run = jostle.attribute(
        model, observed.samples["train"], observed.samples["query"], loss=jostle.losses.next_token(),
        sampler=jostle.Gaussian(), posterior=jostle.Posterior(n_beta=0, localization=100, weights="embedding"),
        chains=2, draws=20, burn_in=1, thin=1, out=tmp_path / "run", progress=False,
    )  # fmt: skip
    tokens = torch.tensor(observed.samples["query"][3]["input_ids"])[None]  # the second pair, French first
    at = run.traces.columns("query").of(3)
    scored = [(language, corpus.words[word], is_second) for language, word, is_second in observed.tokens["query"][at]]
    french, english = ["le", "chien", "voit", "un", "chat"], ["the", "dog", "sees", "a", "cat"]
    assert scored == [(1, word, 0) for word in french] + [(0, word, 1) for word in english]
    losses = token_losses(model, tokens)[0, [*range(5), *range(7, 12)]]
    assert np.allclose(run.traces.center_losses("query")[at], losses.detach(), atol=1e-5)
    losses = [np.asarray(run.traces.losses(name)[:]).reshape(40, -1) for name in ("train", "query")]
    columns = losses[0].shape[1]
    scores = np.corrcoef(*losses, rowvar=False)[:columns, columns:]
    block = -run.token_influence(1, 3, normalize=True).values
    assert np.allclose(scores[run.traces.columns("train").of(1), at], block, atol=1e-5)
    found = observed.by_word(scores)

    def mean(train: tuple[int, str, int], query: tuple[int, str, int]) -> float:
        sides = []
        for name, (language, text, is_second) in (("train", train), ("query", query)):
            key = [language, corpus.words.index(text), is_second]
            sides.append([place for place, token in enumerate(observed.tokens[name].tolist()) if token == key])
        return float(scores[np.ix_(*sides)].mean())

    expected = np.mean([
        half
        for one, other in ((0, 1), (1, 0), (1, 1))
        for half in (mean((0, "dog", one), (1, "chat", other)), mean((1, "chat", other), (0, "dog", one)))
    ])  # fmt: skip
    row = np.flatnonzero(observed.words[0] == corpus.words.index("dog"))[0]
    column = np.flatnonzero(observed.words[1] == corpus.words.index("chat"))[0]
    assert found[row, column] == pytest.approx(expected, abs=1e-6)


def test_the_whole_experiment_runs_and_goes_on_from_what_it_has(paths: list[Path], tmp_path: Path) -> None:
    flags = [
        "--english", str(paths[0]), "--french", str(paths[1]), "--work", str(tmp_path / "work"), "--record",
        str(tmp_path / "record.json"), "--words", "20", "--longest", "20", "--hidden", "32", "--layers", "1",
        "--epochs", "1", "--batch-size", "8", "--held-out", "8", "--pairs", "4", "--fewest", "1", "--least", "1",
        "--draws", "40", "--chains", "2", "--settings", "embedding@0.2",
    ]  # fmt: skip
    main(flags)
    first = json.loads((tmp_path / "record.json").read_text())
    assert first["settings"]["embedding@0.2"]["draws"] == 40
    assert first["settings"]["embedding@0.2"]["mean_loss"] > first["settings"]["embedding@0.2"]["mean_loss_at_center"]
    assert first["methods"]["Dice, observed pairs"]["lexicon"][HALVES[1]]["precision_at_1"] > 0.5
    (tmp_path / "record.json").unlink()
    main([*flags, "embedding@0.2@no-gradient", "--figure", str(tmp_path / "figure.png")])
    second = json.loads((tmp_path / "record.json").read_text())
    assert second["settings"]["embedding@0.2"] == first["settings"]["embedding@0.2"]
    assert second["methods"]["BIF embedding@0.2"] == first["methods"]["BIF embedding@0.2"]
    assert second["settings"]["embedding@0.2@no-gradient"]["n_beta"] == 0
    assert (tmp_path / "figure.png").stat().st_size > 10_000

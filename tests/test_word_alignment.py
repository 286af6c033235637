"""The word alignment experiment: what is asked, and that its reduction is what a run itself says."""

from pathlib import Path

import numpy as np
import pytest
import torch

import jostle

pytest.importorskip("transformers")

from experiments.word_alignment import (
    Corpus,
    Observed,
    Task,
    TokenLosses,
    build_dictionary,
    build_model,
    difference,
    reduce_run,
)

ENGLISH = ["a black dog .", "the dog sees a cat .", "a black cat sleeps .", "a dog sleeps ."] * 4
FRENCH = ["un chien noir .", "le chien voit un chat .", "un chat noir dort .", "un chien dort ."] * 4


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    paths = [tmp_path / "train.en", tmp_path / "train.fr"]
    for path, lines in zip(paths, (ENGLISH, FRENCH), strict=True):
        path.write_text("\n".join(lines) + "\n")
    return Corpus.read(paths, None, fewest=1)


def test_the_dictionary_holds_the_translations_and_no_function_words(corpus: Corpus) -> None:
    found = {(corpus.words[e], corpus.words[f]) for e, f in np.argwhere(build_dictionary(corpus, fewest=1))}
    assert found == {("black", "noir"), ("dog", "chien"), ("cat", "chat"), ("sees", "voit"), ("sleeps", "dort")}


def test_ranks_count_ties_against_and_leave_out_what_is_not_allowed() -> None:
    right = np.array([[[True, False, False], [False, True, False], [False, False, False]]])
    allowed = np.array([[[True, True, False], [True, True, True], [True, True, True]]])
    none = np.zeros((1, 1, 1), bool)
    task = Task((right, none), (allowed, none), whole_blocks=True)
    scores = np.array([[[0.5, 0.4, 0.9], [0.7, 0.7, 0.1], [0.0, 0.0, 0.0]]])
    assert task.ranks((scores, np.zeros((1, 1, 1)))).tolist() == [1, 2]  # the third word is not asked
    assert task.chance == pytest.approx((1 / 2 + 1 / 3) / 2)


def test_reduced_correlations_are_those_of_the_run(corpus: Corpus, tmp_path: Path) -> None:
    observed = Observed(corpus, [0, 1], [2, 3], fewest=1)
    sequences = [[corpus.sequence(pair, order) for pair in observed.pairs] for order in (0, 1)]
    for row, places in enumerate(observed.places):
        for order, by_language in enumerate(places):
            for language, at in enumerate(by_language):
                assert np.array_equal(np.array(sequences[order][row])[at], observed.words[row][language])
    model = build_model(len(corpus.words), hidden=32, layers=1).eval()
    run = jostle.attribute(
        model, *sequences, loss=jostle.losses.next_token(), sampler=jostle.Gaussian(),
        posterior=jostle.Posterior(n_beta=0, localization=100, weights="attention"),
        chains=2, draws=20, burn_in=1, thin=1, out=tmp_path / "run", progress=False,
    )  # fmt: skip
    for order, name in enumerate(("train", "query")):
        tokens = torch.tensor(sequences[order][1])[None]
        seen = run.traces.center_losses(name)[run.traces.columns(name).of(1)]
        assert np.allclose(seen, TokenLosses(model)(tokens)[0].detach().numpy(), atol=1e-5)
    reduced = reduce_run(run, observed, "cpu")
    assert max(difference(run, observed, reduced["correlation"]["alignment"], row) for row in range(4)) < 1e-5
    assert difference(run, observed, reduced["shuffled draws"]["alignment"], 1) > 0.1
    # The lexicon: the mean over all tokens of a held-out "cat" and a trained "chien", in both orders.
    losses = [np.asarray(run.traces.losses(name)[:]).reshape(40, -1) for name in ("train", "query")]
    starts = [np.asarray(run.traces.columns(name).offsets) for name in ("train", "query")]

    def columns(word: str, language: int, rows: tuple[int, ...]) -> np.ndarray:
        return np.stack([
            losses[order][:, starts[order][row] + place - 1]
            for row in rows
            for order in (0, 1)
            for place in observed.places[row][order][language]
            if corpus.words[sequences[order][row][place]] == word
        ])  # fmt: skip

    cat, chien = columns("cat", 0, (2, 3)), columns("chien", 1, (0, 1))
    expected = np.corrcoef(cat, chien)[: len(cat), len(cat) :].mean()
    given = np.flatnonzero(observed.types[0][0] == corpus.words.index("cat"))[0]
    wanted = np.flatnonzero(observed.types[1][1] == corpus.words.index("chien"))[0]
    assert reduced["correlation"]["all tokens, given english"][given, wanted] == pytest.approx(expected, abs=1e-5)

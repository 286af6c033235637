"""Scores of draws, steadied by scores without noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import jostle
from jostle.attributors import FirstOrder, gradient_similarity
from jostle.errors import EstimateWarning
from jostle.scores import Scores
from test_commands import jostle_command


def made(values: np.ndarray, errors: np.ndarray | None = None, **more: object) -> Scores:
    return Scores(values=values, method="made", standard_error=errors, **more)  # pyright: ignore[reportArgumentType]


def planted(noise: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What gradients say, what is true, and what draws say of it with errors that differ from pair to pair."""
    generator = np.random.default_rng(0)
    first, beyond, errors = generator.standard_normal((3, 400, 300))
    errors = noise * np.abs(errors)
    truth = 0.7 * first + 0.5 * beyond
    return first, truth, truth + errors * generator.standard_normal(truth.shape), errors


@pytest.mark.parametrize("noise", [0.1, 0.7, 3.0])
def test_the_mixture_is_the_best_there_is(noise: float) -> None:
    """Though it sees the truth nowhere: that of a regression on the truth itself."""
    first, truth, drawn, errors = planted(noise)
    found = made(drawn, errors).toward(made(first))
    best = np.linalg.lstsq(np.stack([first.ravel(), drawn.ravel()], 1), truth.ravel(), rcond=None)[0]
    np.testing.assert_allclose([*found.provenance["toward"]["weights"].values()], best, atol=0.01)
    off = {name: np.mean((values - truth) ** 2) for name, values in
           (("found", found.values), ("drawn", drawn), ("first", best[0] * first))}  # fmt: skip
    assert off["found"] < min(off["drawn"], off["first"])
    assert found.standard_error is None  # that of the draws alone would leave out how far the others are off
    assert found.provenance["toward"]["share_of_noise"] == pytest.approx((errors**2).sum() / (drawn**2).sum())


def network() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    train, query = ((torch.randn(n, 5), torch.randint(3, (n,))) for n in (60, 40))
    return model, train, query


def drawn_from(model: nn.Module, train: Any, query: Any, **more: Any) -> jostle.Run:
    posterior = jostle.Posterior(n_beta=0, localization=8.0)
    return jostle.attribute(
        model, train, query, sampler=jostle.Gaussian(), posterior=posterior, chains=4, progress=False, **more
    )


def test_a_few_draws_and_gradients_know_more_than_either() -> None:
    """Against twenty times as many draws, by correlations and by covariances."""
    model, train, query = network()
    limit = FirstOrder(model, train, query, labels=0)
    few, many = (drawn_from(model, train, query, draws=draws, seed=seed) for seed, draws in ((1, 50), (2, 1000)))
    for normalize in (True, False):
        steady = limit.influence(kappa=0, normalize=normalize)
        drawn = few.influence(normalize=normalize, standard_error=True)
        truth = many.influence(normalize=normalize).values
        a, b = (found := drawn.toward(steady)).provenance["toward"]["weights"].values()
        assert a > 0
        assert 0.1 < b < 0.9
        scaled = steady.values * (steady.values * truth).sum() / (steady.values**2).sum()
        errors = [np.mean((values - truth) ** 2) for values in (found.values, drawn.values, scaled)]
        assert errors[0] < 0.9 * min(errors[1:])
        with pytest.raises(jostle.InputError, match="scores of draws, which has noise"):
            drawn.toward(drawn)
    untrained = gradient_similarity(nn.Sequential(nn.Linear(5, 3)), train, query)
    with pytest.raises(jostle.InputError, match="scores of another model"):
        few.influence(standard_error=True).toward(untrained)
    # At the same κ = 0, cosines are correlations to first order.
    cosines = gradient_similarity(model, train, query, cosine=True)
    drawn = few.influence(normalize=True, standard_error=True)
    expected = drawn.toward(limit.influence(kappa=0, normalize=True)).values
    np.testing.assert_allclose(drawn.toward(cosines).values, expected, atol=1e-4)
    with pytest.raises(jostle.InputError, match="the spread of a run, which has noise"):
        few.influence(standard_error=True).toward(limit.influence(kappa=0, spread=few))


def test_from_the_command_line(tmp_path: Path) -> None:
    model, train, query = network()
    run = drawn_from(model, train, query, draws=50, out=tmp_path / "run")
    cosines = gradient_similarity(model, train, query, cosine=True)
    cosines.save(tmp_path / "steady.safetensors")

    def export(steady: str, *more: str) -> Any:
        return jostle_command("export", tmp_path / "run", tmp_path / "a.csv", "--toward", tmp_path / steady, *more)

    done = export("steady.safetensors")
    assert done.exit_code == 0, done.output
    expected = run.influence(normalize=True, standard_error=True).toward(cosines)
    weight = expected.provenance["toward"]["weights"]["own"]
    assert 0.2 < weight < 0.9
    assert f"{weight:.2f} × draws" in done.output
    written = np.genfromtxt(tmp_path / "a.csv", delimiter=",", names=True)
    assert "standard_error" not in (written.dtype.names or ())
    np.testing.assert_allclose(written["score"], expected.values.ravel(), rtol=1e-5)
    for steady, more, said in (
        ("nowhere.safetensors", (), "which cannot be read"),
        ("steady.safetensors", ("--covariance",), "jostle first-order FILE ... --covariance --kappa 0"),
        ("steady.safetensors", ("--kappa", "3"), "toward: got correlations at κ = 0"),
    ):
        refused = export(steady, *more)
        assert (refused.exit_code, said in refused.stderr) == (2, True), refused.output


def test_what_is_on_the_border() -> None:
    first, _, drawn, errors = planted(0.7)
    with pytest.warns(EstimateWarning, match="nothing is left of scores drawn toward made"):
        far_too_noisy = made(drawn, 10 + errors).toward(made(first))
    assert far_too_noisy.provenance["toward"]["weights"]["own"] == 0
    assert np.corrcoef(far_too_noisy.values.ravel(), first.ravel())[0, 1] == pytest.approx(1)
    unrelated = np.random.default_rng(1).standard_normal(first.shape)
    assert np.abs(made(drawn, errors).toward(made(unrelated)).provenance["toward"]["weights"]["steady"]) < 0.01
    for dtype in (np.float32, np.float64):  # of a multiple of itself rounding must not decide
        with pytest.warns(EstimateWarning, match="nothing is left"):
            same = made(drawn.astype(dtype), errors).toward(made((2 * drawn).astype(dtype)))
        np.testing.assert_allclose(same.values, drawn, rtol=1e-5)
    against = made(drawn, errors).toward(made(-first))  # what says the opposite is left out
    assert [*against.provenance["toward"]["weights"].values()] == [
        0,
        pytest.approx(1 - (errors**2).sum() / (drawn**2).sum()),
    ]


def test_refuses() -> None:
    first, _, drawn, errors = planted(0.7)
    with pytest.raises(jostle.InputError, match=r"no standard errors.*standard_error=True"):
        made(drawn).toward(made(first))
    with pytest.raises(jostle.InputError, match=r"got 399 × 300 scores \(train × query\), expected 400 × 300"):
        made(drawn, errors).toward(made(first[:-1]))
    with pytest.raises(jostle.InputError, match="got covariances, expected correlations, as these"):
        made(drawn, errors, normalized=True).toward(made(first))
    for what, said in (("train", "other train data"), ("weights", "another model"), ("moving", "other weights")):
        one, other = ({"fingerprints": {what: name}} for name in "ab")
        with pytest.raises(jostle.InputError, match=f"scores of {said}"):
            made(drawn, errors, provenance=one).toward(made(first, provenance=other))
    for ours, theirs in (({"train": [2, 1]}, {}), ({}, {"kappa": 100.0}), ({"on": "margin"}, {})):
        with pytest.raises(jostle.InputError, match=r"steady: got .* as these"):
            made(drawn, errors, provenance=ours).toward(made(first, provenance=theirs))
    for bad in (made(np.where(first > 3, np.nan, first)), made(first, provenance={})):
        with pytest.raises(jostle.InputError, match="not finite"):
            made(drawn, np.where(errors > 2, np.nan, errors)).toward(bad)
    with pytest.raises(jostle.InputError, match="more than noise"):
        made(0 * drawn, errors).toward(made(first))
    with pytest.raises(jostle.InputError, match=r"noise as large as they are.*take more draws"):
        made(drawn, 10 + errors).toward(made(-first))


def test_the_mean_of_several_is_of_the_same_pairs() -> None:
    first, truth, _, errors = planted(0.7)
    about = {"fingerprints": {"train": "a", "weights": "one"}, "kappa": 3.0, "train": [0, 1]}
    other = {"fingerprints": {"train": "a", "weights": "two"}, "kappa": 5.0, "train": [0, 1]}
    both = made(first, errors, scale=0.1, provenance=about), made(truth, errors, scale=0.1, provenance=other)
    mean = Scores.mean_of(both)
    np.testing.assert_allclose(mean.values, (first + truth) / 2, rtol=1e-12)
    assert (mean.method, mean.scale, mean.normalized, mean.standard_error) == ("made, mean of 2", 0.1, False, None)
    prints = {"train": "a", "weights": "one+two"}
    assert mean.provenance == {"train": [0, 1], "fingerprints": prints, "mean_of": [about, other]}
    alike = Scores.mean_of([made(first, provenance=about), made(truth, provenance=about)])
    assert alike.provenance == {**about, "mean_of": [about, about]}
    assert alike.top(0).kappa == 3.0
    whole = made(np.rint(first).astype(np.int64)), made(np.rint(truth).astype(np.float16))
    np.testing.assert_allclose(Scores.mean_of(whole).values, (np.rint(first) + np.rint(truth)) / 2, atol=1e-6)
    np.testing.assert_array_equal(first, planted(0.7)[0])  # what is averaged is left as it was
    assert Scores.mean_of([made(first, scale=0.1), made(truth)]).scale is None
    for wrong, said in (
        (made(truth[:-1]), r"scores\[1\]: got 399 × 300 scores \(train × query\), expected 400 × 300, as these"),
        (made(truth, normalized=True), r"scores\[1\]: got correlations, expected covariances"),
        (truth, r"scores\[1\]: got a ndarray, expected Scores"),
        (
            made(truth, provenance={**other, "metric": "adam"}),
            r"scores\[1\]: got metric adam, expected metric None, as the first",
        ),
        (made(truth, provenance={**other, "damping": 1e-8}), "got damping 1e-08, expected damping None"),
        (made(truth, provenance={**other, "spread": True}), "got spread True, expected spread False"),
        (replace(made(truth, provenance=other), method="EK-FAC"), "got scores of EK-FAC, expected those of made"),
        (made(truth, provenance={**other, "fingerprints": {"train": "b"}}), "scores of other train data"),
        (made(truth, provenance={**other, "on": "margin"}), r"scores\[1\]: got on margin, expected query"),
    ):
        with pytest.raises(jostle.InputError, match=said):
            Scores.mean_of([both[0], wrong])
    # Whatever the first one knows of itself.
    with pytest.raises(jostle.InputError, match=r"scores\[2\]: got scores of other train data"):
        Scores.mean_of([made(first), *(made(first, provenance={"fingerprints": {"train": name}}) for name in "ab")])
    linear = nn.Linear(8, 3)
    X = torch.randn(20, 8)
    data = X, X.argmax(1) % 3
    runs = [
        jostle.attribute(
            linear, data, data, chains=2, draws=draws, sampler=jostle.Gaussian(), progress=False,
            posterior=jostle.Posterior(n_beta=0, localization=localization),
        )
        for draws, localization in ((8, 100.0), (10, 200.0))
    ]  # fmt: skip
    drawn = [run.influence(normalize=True) for run in runs]  # of any settings
    np.testing.assert_allclose(Scores.mean_of(drawn).values, (drawn[0].values + drawn[1].values) / 2, rtol=1e-5)
    noisy = replace(drawn[0], standard_error=np.full(drawn[0].shape, 0.1))
    for steady in (drawn[1], Scores.mean_of(drawn), Scores.mean_of([Scores.mean_of(drawn)])):
        with pytest.raises(jostle.InputError, match="scores of draws, which has noise"):
            noisy.toward(steady)
    with pytest.raises(jostle.InputError, match="scores: got none"):
        Scores.mean_of([])
    np.testing.assert_allclose(Scores.mean_of(one for one in both).values, mean.values)  # pyright: ignore[reportArgumentType]

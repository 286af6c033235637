"""The small models on which closed-form influence is judged, their banks, and how methods are compared with them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from experiments.small_models import ARCHITECTURES, CHARACTERS, MODELS, WINDOW
from experiments.solve_small import BANKS, METHODS, make_bank, measured, trained

from jostle.evaluate import Measure

DIGITS = MODELS["logistic-adamw-short"]


def test_the_list_is_what_it_says() -> None:
    reporting = [about for about in MODELS.values() if about.purpose == "reporting"]
    assert len(reporting) == 12
    # What was chosen on is not what is reported.
    assert not {about.data for about in reporting} & {about.data for about in MODELS.values() if about not in reporting}
    for about in MODELS.values():
        forgotten = about.weight_decay * about.total_rate
        assert forgotten < 0.2 or (forgotten >= 3 and about.name.endswith("long"))
        assert 500 <= about.train <= 1000
        assert (~about.drops().members).sum(1).tolist() == [0] + 100 * [round(0.02 * about.train)]


def test_the_transformer_looks_only_back() -> None:
    torch.manual_seed(0)
    model = ARCHITECTURES["transformer"]()
    tokens = torch.randint(CHARACTERS, (3, WINDOW))
    other = tokens.clone()
    other[:, 20] = (other[:, 20] + 1) % CHARACTERS
    before, after = model(tokens), model(other)
    assert torch.equal(before[:, :20], after[:, :20])
    assert ((before - after)[:, 20:].abs().amax(2) > 1e-4).all()


def test_what_training_ends_with(tmp_path: Path) -> None:
    """Weights and second moments are those of the loop by hand."""
    train, _ = DIGITS.examples(None)
    of = trained(DIGITS, train, tmp_path)
    model, random = DIGITS.new(0), np.random.default_rng(0)
    moments = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=DIGITS.rate, weight_decay=DIGITS.weight_decay)
    for batch in np.concatenate([random.permutation(800) for _ in range(3)]).reshape(60, 40):
        optimizer.zero_grad()
        F.cross_entropy(model(train[0][batch]), train[1][batch]).backward()
        for name, value in model.named_parameters():
            assert value.grad is not None
            moments[name] += 0.001 * (value.grad**2 - moments[name])
        optimizer.step()
    assert of.second_moments is not None
    for (name, value), got in zip(model.named_parameters(), of.model.parameters(), strict=True):
        torch.testing.assert_close(got, value, rtol=0, atol=1e-6)
        torch.testing.assert_close(of.second_moments[name], moments[name] / (1 - 0.999**60), rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("name", sorted(path.stem for path in BANKS.glob("*.npz")))
def test_banks_are_of_the_list(name: str) -> None:
    bank, about = np.load(BANKS / f"{name}.npz"), MODELS[name]
    told = json.loads(str(bank["about"]))
    assert told["model"] == asdict(about)
    assert bank["drops"].shape == (101, 50)
    assert bank["drops"].dtype == np.float32
    assert np.isfinite(bank["drops"]).all()
    # What is due to rounding is far below what the drops change.
    assert told["repeated"] < 0.1 * told["spread"]
    if about.purpose == "choosing":
        assert bank["halves"].shape == (100, 2, 50)


def test_a_bank_is_its_training_again(tmp_path: Path) -> None:
    bank = np.load(BANKS / f"{DIGITS.name}.npz")
    train, query = DIGITS.examples(None)
    model = DIGITS.trainer(train).with_weights(DIGITS.drops().members[3].astype(float), 0)
    got = Measure(query, DIGITS.loss, {})(model)["loss"]
    np.testing.assert_allclose(got, bank["drops"][3], atol=2e-5)
    assert np.abs(got - bank["drops"][0]).max() > 1e-3


def test_the_bank_goes_on_and_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("experiments.solve_small.BANKS", tmp_path / "banks")
    monkeypatch.setattr("experiments.small_models.DROPS", 6)
    few = replace(DIGITS, purpose="reporting", name="few")
    given: Any = (few, *few.examples(None), tmp_path / "work")
    make_bank(*given, minutes=0.0)
    assert "not finished" in capsys.readouterr().out
    make_bank(*given, minutes=None)
    kept = np.load(tmp_path / "banks" / "few.npz")
    np.testing.assert_allclose(kept["drops"], np.load(BANKS / f"{DIGITS.name}.npz")["drops"][:7], atol=2e-5)
    assert "halves" not in kept
    make_bank(*given, minutes=None)
    assert "there" in capsys.readouterr().out.splitlines()[-1]


def test_planted_effects_are_found() -> None:
    """Leaving out what helps makes a loss rise; half of that comes true, and a method that is wrong says nothing."""
    random = np.random.default_rng(2)
    truth, wrong = random.normal(size=(2, DIGITS.train, 50))
    lost = ~DIGITS.drops().members @ truth
    halves = -0.5 * (DIGITS.halves().members @ truth)[:, None].repeat(2, 1)
    effects = {"truth": truth, "EK-FAC, bad": wrong, "EK-FAC, better": wrong + truth}
    table = measured(effects, DIGITS, {"drops": 1 + 0.5 * lost, "halves": halves})
    assert table["truth"]["LDS"].value == pytest.approx(1, abs=1e-6)
    assert table["truth"]["LDS of halves"].value == pytest.approx(1, abs=1e-6)
    assert table["truth"]["slope"].value == pytest.approx(0.5, rel=1e-6)
    assert abs(table["EK-FAC, bad"]["LDS"].value) < 0.05
    difference = table["truth"]["LDS, less EK-FAC's best"]
    assert difference.value == pytest.approx(1 - table["EK-FAC, better"]["LDS"].value)
    assert "LDS, less EK-FAC's best" not in table["EK-FAC, better"]
    assert difference.standard_error == pytest.approx(table["EK-FAC, better"]["LDS"].standard_error, rel=1e-6)


def test_methods_are_in_nats_and_help_where_positive(tmp_path: Path) -> None:
    """Of a training that has hardly begun, the effect is that of gradient descent: rates times products of gradients."""
    about = MODELS["logistic-sgd-short"]
    train, query = about.examples(None)
    of = trained(about, train, tmp_path)
    effect = METHODS["gradient dot product"](of, train, query) * about.total_rate
    found = measured({"EK-FAC, in its place": effect}, about, dict(np.load(BANKS / f"{about.name}.npz")))
    row = found["EK-FAC, in its place"]
    assert row["LDS"].value > 0.95
    # Curvature has made less of it: hτ is about 1.5 there.
    assert 0.4 < row["slope"].value < 0.7

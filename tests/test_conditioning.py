"""Reading at a larger n_beta: against exact conditioning of Gaussians, and against the formula with all its matrices."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import jostle
from jostle.cli import app
from jostle.conditioning import (
    CHOICES,
    LEAST_SUPPORT,
    LITTLE_SUPPORT,
    MOST_MOVES,
    Conditioned,
    Moves,
    jackknife_error,
    supports,
)
from jostle.errors import EstimateWarning
from jostle.estimate import covariance
from jostle.evaluate import Bank, lds, random_subsets


class Weights(nn.Module):
    """Nothing but weights: losses are linear in them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(count))


def linear_loss(model: Any, batch: Any) -> torch.Tensor:
    """ℓᵢ = 3 + gᵢᵀw."""
    return 3 + batch @ model.values


def sampled(train: torch.Tensor, query: torch.Tensor, localization: float, draws: int, out: Path | None) -> jostle.Run:
    return jostle.attribute(
        Weights(train.shape[1]), train, query, loss=linear_loss, sampler=jostle.Gaussian(), burn_in=1, thin=1, chains=4, draws=draws,
        posterior=jostle.Posterior(n_beta=0.0, localization=localization), progress=False, out=out,
    )  # fmt: skip


def test_linear_losses_are_conditioned_as_gaussians_are(tmp_path: Path) -> None:
    """Cov_κ(ℓᵢ, φⱼ) = gᵢᵀ(γI + Σ gg ᵀ/λ)⁻¹gⱼ, within the error of 8,000 independent draws."""
    generator = torch.Generator().manual_seed(0)
    train, query = (torch.randn(count, 5, generator=generator) for count in (12, 6))
    run = sampled(train, query, 2.0, 2_000, tmp_path / "run")
    for kappa in (1.0, 10.0, 100.0):
        scores = run.influence(kappa=kappa)
        g, h = train.double().numpy(), query.double().numpy()
        held = np.linalg.eigvalsh(g @ g.T / 2.0)[-1] / kappa
        truth = g @ np.linalg.inv(2.0 * np.eye(5) + g.T @ g / held) @ h.T
        spread = np.sqrt(
            np.outer(*(np.diag(x @ np.linalg.inv(2.0 * np.eye(5) + g.T @ g / held) @ x.T) for x in (g, h)))
        )
        # Each score is a mean of 8,000 products; the map, estimated too, adds a little.
        assert np.abs(-scores.values - truth).max() < 5 * np.sqrt(2 / 8_000) * spread.max()
        assert np.corrcoef(-scores.values.ravel(), truth.ravel())[0, 1] > 0.999
        assert scores.scale is None
        assert scores.provenance["kappa"] == kappa


def by_the_formula(Z: np.ndarray, A: np.ndarray, B: np.ndarray, kappa: float) -> np.ndarray:
    """Cov(a, b) − Cov(a, ℓ)(K + λI)⁻¹Cov(ℓ, b), from centred draws."""
    count = len(Z) - 1
    K = Z.T @ Z / count
    held = np.linalg.eigvalsh(K)[-1] / kappa
    return A.T @ B / count - A.T @ Z / count @ np.linalg.solve(K + held * np.eye(len(K)), Z.T @ B / count)


@pytest.mark.parametrize("centering", ["pooled", "within"])
@pytest.mark.parametrize("examples", [4, 60])  # fewer and more than draws
def test_the_map_of_the_draws_is_the_formula(centering: Any, examples: int) -> None:
    generator = np.random.default_rng(0)
    train, query = (generator.normal(size=(3, 8, count)) + generator.normal(size=(3, 1, 1)) for count in (examples, 5))
    chains = np.array([0, 2])
    moves = Moves(train, chains, centering)
    found = covariance(Conditioned(train, moves, 7.0), Conditioned(query, moves, 7.0)).values
    flat = []
    for trace in (train, query):
        kept = trace[chains]
        flat.append((kept - kept.mean((0, 1) if centering == "pooled" else 1, keepdims=True)).reshape(16, -1))
    np.testing.assert_allclose(found, by_the_formula(flat[0], flat[0], flat[1], 7.0), rtol=1e-9, atol=1e-12)


def test_small_kappa_is_what_was_sampled_and_large_kappa_holds_the_training_losses(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    train, query = (torch.randn(count, 5, generator=generator) for count in (3, 6))
    run = sampled(train, query, 2.0, 50, tmp_path / "run")
    plain = run.influence()
    for centering in ("pooled", "within"):
        expected = run.influence(centering=centering).values
        np.testing.assert_allclose(
            run.influence(kappa=1e-9, centering=centering).values, expected, rtol=1e-4, atol=1e-5
        )
    np.testing.assert_array_equal(run.influence(kappa=0.0).values, plain.values)
    # What the three training losses say is settled, and they move with nothing any more; but not the other directions.
    assert np.abs(run.influence(kappa=1e6).values).max() < 1e-4 * np.abs(plain.values).max()
    normalized = run.influence(kappa=10.0, normalize=True)
    assert np.abs(normalized.values).max() <= 1
    assert normalized.provenance["between_chain_share"] == pytest.approx(plain.provenance["between_chain_share"])


def test_token_blocks_still_add_up_to_the_sequence(tmp_path: Path) -> None:
    """The map is linear in the draws, so the mean of a token block is the score of the sequences."""
    from architectures import tiny

    generator = np.random.default_rng(0)
    sequences = [{"input_ids": generator.integers(1, 20, length).tolist()} for length in (5, 9, 7)]
    run = jostle.attribute(
        tiny("llama"), sequences, sequences[:2], loss=jostle.losses.next_token(), sampler=jostle.Gaussian(), burn_in=1, thin=1, chains=2,
        draws=30, posterior=jostle.Posterior(n_beta=0.0, localization=100.0), progress=False, out=tmp_path / "run",
    )  # fmt: skip
    whole = run.influence(kappa=10.0).values
    for train in range(3):
        for query in range(2):
            block = run.token_influence(train, query, kappa=10.0).values
            assert block.mean() == pytest.approx(whole[train, query], rel=1e-3, abs=1e-7)
    assert not np.allclose(whole, run.influence().values, rtol=0.1)


def token_losses(model: Any, batch: Any) -> torch.Tensor:
    """ℓᵢₜ = 3 + gᵢₜᵀw, of three tokens a sequence."""
    return 3 + batch @ model.values


def test_tokens_are_held_rather_than_sequences(tmp_path: Path) -> None:
    """Cov_κ(ℓᵢ, φⱼ) = gᵢᵀ(γI + Σ gₜgₜᵀ/3λ)⁻¹gⱼ with gᵢ the mean of gᵢₜ, within the error of 8,000 independent draws."""
    generator = torch.Generator().manual_seed(0)
    train, query = (torch.randn(count, 3, 5, generator=generator) for count in (12, 6))
    run = jostle.attribute(
        Weights(5), train, query, loss=token_losses, sampler=jostle.Gaussian(), burn_in=1, thin=1, chains=4, draws=2_000,
        posterior=jostle.Posterior(n_beta=0.0, localization=2.0), progress=False, out=tmp_path / "run",
    )  # fmt: skip
    tokens, g, h = train.double().reshape(-1, 5).numpy(), train.double().mean(1).numpy(), query.double().mean(1).numpy()
    for kappa in (1.0, 10.0, 100.0):
        truths = []
        for held in (tokens / np.sqrt(3), g):
            variance = np.linalg.eigvalsh(held @ held.T / 2.0)[-1] / kappa
            weights = np.linalg.inv(2.0 * np.eye(5) + held.T @ held / variance)
            truths.append(g @ weights @ h.T)
        scores = run.influence(kappa=kappa)
        spread = np.sqrt((truths[0] ** 2).mean())
        distances = [float(np.abs(-scores.values - truth).max()) for truth in truths]
        assert distances[0] < 0.2 * spread
        assert distances[0] < 0.5 * distances[1]


@pytest.mark.parametrize("normalize", [False, True])
def test_standard_errors_are_those_of_other_draws(normalize: bool) -> None:
    """The mean of the estimated variances against the variance over 60 independent runs, of 6 × 4 scores."""
    generator = np.random.default_rng(0)
    g, h = generator.normal(size=(6, 5)), generator.normal(size=(4, 5))
    found, claimed = [], []
    for _ in range(60):
        weights = generator.normal(size=(4, 50, 5))
        train, query = weights @ g.T, weights @ h.T
        moves = Moves(train, np.arange(4))
        found.append(covariance(*(Conditioned(x, moves, 10.0) for x in (train, query)), normalize=normalize).values)
        error, batches = jackknife_error(moves, train, query, np.arange(4), 10.0, mirrored=False, normalize=normalize)
        assert batches.count >= 4
        claimed.append(error**2)
    ratio = np.mean(claimed) / np.var(found, axis=0, ddof=1).mean()
    # 24 entries that depend on each other, each variance from 60 runs: some 10 %.
    assert 0.75 < ratio < 1.35


def support_by_hand(train: np.ndarray, query: np.ndarray, kappa: float) -> float:
    """√(2r/(1 + r)) at κ over that at 0, from all matrices; an even number of chains, or one with as many draws."""
    roots = []
    for held in (kappa, 1e-12):
        scores = []
        for part in range(2):
            Z, B = (
                np.split(trace, 2, axis=0 if len(trace) > 1 else 1)[part].reshape(-1, trace.shape[2])
                for trace in (train, query)
            )
            Z, B = Z - Z.mean(0), B - B.mean(0)
            scores.append(by_the_formula(Z, Z, B, held))
        r = np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(scores[0].T, scores[1].T, strict=True)])
        roots.append(np.sqrt(2 * r / (1 + r)))
    return roots[0] / roots[1]


def two_kinds_of_directions(directions: int, train: int = 60, queries: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients that agree in three directions, in which losses move most, and have many besides."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.cat([torch.full((3,), 5.0), torch.ones(directions)])
    return tuple(torch.randn(count, 3 + directions, generator=generator) * sizes for count in (train, queries))


def test_support_is_the_agreement_of_halves() -> None:
    generator = np.random.default_rng(0)
    g, h = (side.double().numpy() for side in two_kinds_of_directions(30))
    weights = generator.normal(size=(3, 40, 33))
    train, query = weights @ g.T + 5, weights @ h.T - 2
    kappas = (1.0, 10.0, 100.0)
    for chains in (np.array([0, 2]), np.array([1])):
        found = supports(train, query, chains, kappas)
        assert found is not None
        for kappa in kappas:
            assert found[kappa] == pytest.approx(support_by_hand(train[chains], query[chains], kappa), rel=1e-6)
    # Of mirrored pairs both are in one half: where there is one pair, its draws are halved.
    pair = np.array([0, 2])
    mirrored = supports(train, query, pair, kappas, together=2)
    first, second = (
        np.concatenate([trace[pair][:, :20], trace[pair][:, 20:]]).reshape(2, 40, -1) for trace in (train, query)
    )
    assert mirrored is not None
    assert mirrored[10.0] == pytest.approx(support_by_hand(first, second, 10.0), rel=1e-6)
    # A column that never moved has no scores to agree on.
    still = np.concatenate([query, np.ones((3, 40, 1))], axis=2)
    known = supports(train, query, pair, kappas)
    with_it = supports(train, still, pair, kappas)
    assert known is not None
    assert with_it == pytest.approx(known, rel=1e-6)
    assert supports(train[:1, :19], query[:1, :19], np.arange(1), kappas) is None
    # Nor is there anything to hold in a half in which nothing moved, by fewer examples than draws or by more.
    for examples in (60, 20):
        stands = np.concatenate([train[:1], np.repeat(train[1:2, :1], 40, 1)])[:, :, :examples]
        assert supports(stands, query[:2], np.arange(2), kappas) is None
    # Of two training examples halves agree altogether, or disagree so.
    for seed in range(10):
        few = np.random.default_rng(seed).normal(size=(2, 20, 2))
        found = supports(few, few, np.arange(2), kappas)
        assert found is not None
        assert all(np.isfinite(value) and value >= 0 for value in found.values())


class Counted:
    """A trace that counts how often its numbers are read."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape, self.dtype, self.read = values, values.shape, values.dtype, 0

    def __getitem__(self, index: Any) -> np.ndarray:
        found = self.values[index]
        self.read += found.size
        return found


@pytest.mark.parametrize("examples", [60, 200], ids=["more draws than examples", "fewer"])
def test_support_reads_the_losses_once_where_their_moves_are_known(examples: int) -> None:
    generator = np.random.default_rng(0)
    weights = generator.normal(size=(4, 40, 9))
    train, query = (weights @ generator.normal(size=(9, count)) for count in (examples, 10))
    counted, chains = Counted(train), np.array([0, 3])
    moves = Moves(counted, chains)
    before, counted.read = counted.read, 0
    found = supports(counted, query, chains, (10.0,), moves=moves)
    assert counted.read == before
    assert found == pytest.approx({10.0: support_by_hand(train[chains], query[chains], 10.0)}, rel=1e-6)
    half = torch.arange(80) < 40
    some = moves.among(half)
    directions, sizes = some.directions, some.sizes
    Z = train[0] - train[0].mean(0)
    np.testing.assert_allclose((directions * sizes) @ directions.T, Z @ Z.T, atol=1e-9 * sizes[-1])


def test_diagnostics_say_what_the_draws_support(tmp_path: Path) -> None:
    run = sampled(*two_kinds_of_directions(30), 2.0, 20, tmp_path / "run")
    traces = [np.asarray(run.traces.losses(name)[:, :, :], np.float64) for name in ("train", "query")]
    found = run.diagnostics()
    assert found["kappa_support"] == pytest.approx(
        {f"{kappa:g}": support_by_hand(*traces, kappa) for kappa in CHOICES}, rel=1e-3
    )
    assert found["kappa"] == run.influence(kappa="auto").provenance["kappa"]
    shown = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["diagnose", str(run.directory)])
    each = ", ".join(f"{kappa}: {value:.2f}" for kappa, value in found["kappa_support"].items())
    told = f"{each} (0.95 or more is enough); --kappa auto reads at {found['kappa']:g}"
    assert told in " ".join(shown.stdout.split())
    few = sampled(*two_kinds_of_directions(30), 2.0, 4, tmp_path / "few")
    assert few.diagnostics()["kappa_support"] is None
    assert "support of κ" not in CliRunner().invoke(app, ["diagnose", str(few.directory)]).stdout


def test_auto_is_what_the_draws_support(tmp_path: Path) -> None:
    """Few draws of many directions are read as they are, and a κ is warned of; many draws of few are held."""
    noisy = sampled(*two_kinds_of_directions(300), 2.0, 10, tmp_path / "noisy")
    chosen = noisy.influence(kappa="auto")
    assert chosen.provenance["kappa"] == 0
    assert chosen.provenance["kappa_chosen"]
    np.testing.assert_allclose(chosen.values, noisy.influence().values, rtol=1e-6)
    assert chosen.scale == noisy.influence().scale
    with pytest.warns(EstimateWarning, match=r"hardly support kappa=10: noise leaves \d+% .* kappa='auto'"):
        warned = noisy.influence(kappa=10.0)
    traces = [np.asarray(noisy.traces.losses(name)[:, :, :], np.float64) for name in ("train", "query")]
    support = support_by_hand(*traces, 10.0)
    assert warned.provenance["kappa_support"] == pytest.approx(support, rel=1e-3)
    assert support < LITTLE_SUPPORT
    known = sampled(*two_kinds_of_directions(5), 2.0, 500, tmp_path / "known")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        held = known.influence(kappa="auto")
    assert held.provenance["kappa"] == 10
    assert held.provenance["kappa_support"] >= LEAST_SUPPORT
    np.testing.assert_array_equal(held.values, known.influence(kappa=10.0).values)
    assert held.scale is None
    shown = CliRunner().invoke(app, ["top", str(known.directory), "--kappa", "auto"])
    assert "read at κ = 10, which the draws support, with the training losses held" in shown.stdout
    shown = CliRunner().invoke(app, ["top", str(noisy.directory), "--kappa", "auto"])
    assert "read at κ = 0: the draws support no larger one, as it was sampled" in shown.stdout
    refused = CliRunner().invoke(app, ["top", str(known.directory), "--kappa", "much"])
    assert refused.exit_code == 2
    assert "neither a number nor auto" in refused.output


def test_from_the_command_line(tmp_path: Path) -> None:
    """The same scores by top, export and evaluate."""
    generator = torch.Generator().manual_seed(0)
    train, query = (torch.randn(count, 5, generator=generator) for count in (8, 3))
    run = sampled(train, query, 2.0, 50, tmp_path / "run")
    scores = run.influence(kappa=10.0, normalize=True)
    shown = CliRunner().invoke(app, ["top", str(run.directory), "-q", "1", "-k", "3", "--kappa", "10", "--json"])
    listed = json.loads(shown.stdout.strip().splitlines()[-1])["helpful"]
    assert json.loads(shown.stdout.strip().splitlines()[-1])["kappa"] == 10
    assert [one["index"] for one in listed] == [one.index for one in scores.top(1, 3).helpful]
    assert listed[0]["score"] == pytest.approx(scores.values[:, 1].min(), rel=1e-5)
    CliRunner().invoke(app, ["export", str(run.directory), str(tmp_path / "a.npy"), "--kappa", "10"])
    np.testing.assert_allclose(np.load(tmp_path / "a.npy"), scores.values, rtol=1e-6)
    for kappa, name in ((10, "a.csv"), (0, "b.csv"), (10, "a.parquet")):
        CliRunner().invoke(app, ["export", str(run.directory), str(tmp_path / name), "--kappa", str(kappa)])
        file = tmp_path / name
        frame = pandas.read_csv(file) if file.suffix == ".csv" else pandas.read_parquet(file)
        assert [*frame.columns] == ["train", "query", "score", "kappa"]
        assert (frame["kappa"] == kappa).all()
        assert len(frame) == scores.values.size
    assert repr(scores) == "Scores(bif −correlation at κ = 10, 8 train × 3 query, negative = helps)"
    assert repr(run.influence()) == "Scores(bif influence, 8 train × 3 query, negative = helps)"
    chosen = run.influence(kappa="auto")
    assert f"influence at κ = {chosen.provenance['kappa']:g}, 8 train" in repr(chosen)
    bank = Bank.create(
        tmp_path / "bank", random_subsets(8, 6), queries=3, fingerprints=run.manifest["fingerprints"], dtype="float32"
    )
    for subset in range(6):
        bank.store(subset, 0, {"loss": np.random.default_rng(subset).normal(size=3).astype(np.float32)})
    table = CliRunner().invoke(app, ["evaluate", str(tmp_path / "bank"), str(run.directory), "--kappa", "10", "--json"])
    rows = {row["method"]: row for row in json.loads(table.stdout)["methods"]}
    found = rows["BIF correlation, κ = 10"]["per_query"]
    assert found["value"] == pytest.approx(lds(bank, scores).value)
    table = CliRunner().invoke(
        app, ["evaluate", str(tmp_path / "bank"), str(run.directory), "--kappa", "auto", "--json"]
    )
    chosen = run.influence(kappa="auto").provenance["kappa"]
    assert f"BIF correlation, κ = {chosen:g} (auto)" in [row["method"] for row in json.loads(table.stdout)["methods"]]


def test_what_cannot_be_conditioned_is_refused(tmp_path: Path) -> None:
    train, query = torch.randn(4, 3), torch.randn(2, 3)
    run = sampled(train, query, 2.0, 10, tmp_path / "run")
    with pytest.raises(jostle.InputError, match="kappa: got standard errors within chains"):
        run.influence(kappa=10.0, standard_error=True, centering="within")
    with pytest.raises(jostle.InputError, match=r"kappa: got 10\.0 for the odd part"):
        run.influence(kappa=10.0, part="odd")
    wrong: Any
    for wrong in (-1.0, float("nan"), float("inf"), "10", "Auto", True):
        with pytest.raises(jostle.InputError, match="a positive number"):
            run.influence(kappa=wrong)
    wrong = "wihtin"
    with pytest.raises(jostle.InputError, match="'pooled' or 'within'"):
        run.influence(kappa=10.0, centering=wrong)
    still = np.ones((2, 5, 3))
    with pytest.raises(jostle.InputError, match="never moved"):
        Moves(still, np.arange(2))
    with pytest.raises(jostle.InputError, match="at most 4,096"):
        Moves(np.empty((1, MOST_MOVES + 1, MOST_MOVES + 1), np.float16), np.arange(1))

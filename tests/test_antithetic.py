"""Mirrored pairs of chains: what changes sign with the noise, and what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jostle
from jostle import estimate
from jostle.errors import ChainFailedWarning, ChainsFailedError
from reference import LinearGaussian

LOCALIZATION = 20.0


def run(problem: LinearGaussian, sampler: jostle.Sampler, **changes: Any) -> jostle.Run:
    settings: dict[str, Any] = {
        "posterior": jostle.Posterior(n_beta=problem.n_beta, localization=problem.localization), "chains": 8,
        "draws": 400, "burn_in": 1, "thin": 1, "batch_size": 1000, "antithetic": True, "progress": False,
    }  # fmt: skip
    return jostle.attribute(
        problem.model(), problem.data, problem.data, loss=jostle.losses.regression(noise_variance=0.25), sampler=sampler,
        observables={"weights": lambda model: model.weight[0]}, **(settings | changes),
    )  # fmt: skip


def problem(n_beta: float, off_minimum: float = 0.0) -> LinearGaussian:
    return LinearGaussian.random(
        samples=12, weights=3, n_beta=n_beta, localization=LOCALIZATION, off_minimum=off_minimum
    )


def parts_of(truth: LinearGaussian, covariance: np.ndarray) -> dict[str, np.ndarray]:
    g, HS = truth.sample_gradients(truth.mode), truth.sample_hessians @ covariance
    return {"odd": g @ covariance @ g.T, "even": 0.5 * np.einsum("iab,jba->ij", HS, HS)}


def deviations(scores: jostle.Scores, truth: np.ndarray) -> np.ndarray:
    assert scores.standard_error is not None
    return (scores.values + truth) / scores.standard_error


class Silent(jostle.BAOAB):
    """The rule without its noise: what minibatches alone do."""

    def step(self, weights: Any, mean_loss_gradient: Any, noise: Any, *others: Any, burning_in: bool) -> Any:
        return super().step(weights, mean_loss_gradient, 0 * noise, *others, burning_in=burning_in)


def test_weights_are_mirror_images_around_the_checkpoint() -> None:
    truth = problem(0.0, off_minimum=0.3)
    weights = np.asarray(run(truth, jostle.Gaussian(), draws=20).traces.observable("weights")[:]) - truth.center
    np.testing.assert_allclose(weights[::2], -weights[1::2], atol=1e-12)
    assert np.abs(weights[0] - weights[2]).min() > 0  # pairs differ


@pytest.mark.parametrize("batch_size", [1000, 5])
def test_pairs_have_the_same_minibatches_and_first_chains_are_as_ever(batch_size: int) -> None:
    truth, settings = problem(24.0), {"batch_size": batch_size, "draws": 20, "chains": 4}
    rule = jostle.BAOAB(step_size=0.005)
    mirrored, usual = (run(truth, rule, antithetic=chosen, **settings) for chosen in (True, False))
    names = ("query", "train")
    for name in names:
        a, b = (np.asarray(one.traces.losses(name)[:]) for one in (mirrored, usual))
        np.testing.assert_array_equal(a[0], b[0])
        np.testing.assert_array_equal(a[2], b[2])
    one_by_one = run(truth, rule, chains_at_once=1, **settings)
    np.testing.assert_allclose(
        np.asarray(one_by_one.traces.losses("train")[:]), np.asarray(mirrored.traces.losses("train")[:]), rtol=1e-9
    )
    weights = np.asarray(mirrored.traces.observable("weights")[:]) - truth.center
    middle = (weights[::2] + weights[1::2]) / 2
    if batch_size == 1000:  # the chain is linear, and w* its fixed point
        np.testing.assert_allclose(middle, 0, atol=1e-12)
    else:  # what is left is what the minibatches do, which are the same for both
        still = run(truth, Silent(step_size=0.005), **settings).traces.observable("weights")[:]
        np.testing.assert_allclose(middle, np.asarray(still)[::2] - truth.center, atol=1e-12)
        assert np.abs(middle).max() > 0.01


@pytest.mark.parametrize("n_beta", [0.0, 24.0])
def test_odd_is_the_first_order_and_even_the_second(n_beta: float) -> None:
    """Of quadratic losses, exactly: gᵢᵀΣgⱼ and ½·tr(HᵢΣHⱼΣ); together the covariance."""
    truth = problem(n_beta, off_minimum=0.3 if n_beta == 0 else 0.0)
    if n_beta:
        step = 1.0 / float(np.linalg.eigvalsh(truth.precision)[-1])
        result = run(truth, jostle.LeimkuhlerMatthews(step_size=step), draws=240, burn_in=20, thin=4)
        covariance = np.linalg.inv(truth.precision)
    else:
        result, covariance = run(truth, jostle.Gaussian()), np.eye(3) / LOCALIZATION
    exact = parts_of(truth, covariance)
    assert np.linalg.norm(exact["even"]) > 0.05 * np.linalg.norm(exact["odd"])
    for part in ("odd", "even"):
        z = deviations(result.influence(part=part, standard_error=True), exact[part])
        assert np.sqrt(np.mean(z**2)) < 2.0, part
        relative = np.linalg.norm(result.influence(part=part).values + exact[part]) / np.linalg.norm(exact[part])
        assert relative < (0.3 if n_beta else 0.15), (part, relative)
    z = deviations(result.influence(standard_error=True), exact["odd"] + exact["even"])
    assert np.sqrt(np.mean(z**2)) < 2.0
    # The parts' sum is the whole but for the product of their means' errors.
    both = sum(result.influence(part=part).values for part in ("odd", "even"))
    whole = result.influence().values
    assert np.linalg.norm(both - whole) < 0.01 * np.linalg.norm(whole)


def test_normalized_parts_are_correlations_of_parts() -> None:
    truth = problem(0.0, off_minimum=0.3)
    exact = parts_of(truth, np.eye(3) / LOCALIZATION)["odd"]
    scale = np.sqrt(np.diag(exact))
    scores = run(truth, jostle.Gaussian(), draws=200).influence(part="odd", normalize=True)
    np.testing.assert_allclose(scores.posterior_correlation, exact / np.outer(scale, scale), atol=0.15)
    assert scores.provenance["part"] == "odd"


@pytest.mark.parametrize("centering", ["pooled", "within"])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_pair_is_deleted_together(centering: estimate.Centering, normalize: bool) -> None:
    """Linear losses: the second chain of a pair adds nothing, and errors that forget it are too small by √2."""
    generator = np.random.default_rng(0)
    repetitions, pairs, draws = 40, 4, 40
    values, errors, naive = [], [], []
    mixing = np.array([[1.0, 0.5], [0.0, 1.0]])
    for _ in range(repetitions):
        first = generator.normal(size=(pairs, draws, 2)) @ mixing
        trace = np.stack([first, -first], 1).reshape(2 * pairs, draws, 2)
        options: dict[str, Any] = {
            "centering": centering, "normalize": normalize, "standard_error": True, "batch_length": 5
        }  # fmt: skip
        found = estimate.covariance(trace, trace, mirrored=True, **options)
        assert found.batches == pairs * draws // 5
        assert found.standard_error is not None
        values.append(found.values[0, 1])
        errors.append(found.standard_error[0, 1])
        wrong = estimate.covariance(trace, trace, **options).standard_error
        assert wrong is not None
        naive.append(wrong[0, 1])
    spread = np.std(values, ddof=1)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(spread, rel=0.25)
    assert np.mean(errors) == pytest.approx(np.sqrt(2) * np.mean(naive), rel=0.1)


def test_the_jackknife_over_pairs_is_the_one_written_out() -> None:
    generator = np.random.default_rng(1)
    trace = generator.normal(size=(4, 16, 3))
    for centering in ("pooled", "within"):
        found = estimate.covariance(
            trace, trace, mirrored=True, standard_error=True, batch_length=4, centering=centering
        )
        without = []
        for pair in (0, 2):
            for start in (0, 4, 8, 12):
                kept = np.ones((4, 16), bool)
                kept[pair : pair + 2, start : start + 4] = False
                chains = [trace[c][kept[c]] for c in range(4)]
                if centering == "pooled":
                    without.append(np.cov(np.concatenate(chains), rowvar=False))
                else:
                    total = sum((c - c.mean(0)).T @ (c - c.mean(0)) for c in chains)
                    without.append(total / (sum(len(c) for c in chains) - 4))
        d = 7 * (found.values - np.array(without))
        expected = np.sqrt(((d - d.mean(0)) ** 2).sum(0) / 8 / 7)
        assert found.standard_error is not None
        np.testing.assert_allclose(found.standard_error, expected, rtol=1e-9)


def test_diagnostics_count_a_pair_as_one_chain() -> None:
    truth = problem(0.0)
    found = run(truth, jostle.Gaussian(), draws=50).diagnostics()
    assert found["chains"] == 4
    assert found["effective_draws"] < 1.4 * 4 * 50
    assert any("pair as one chain" in remark for remark in found["remarks"])


class FailsInOneDirection(jostle.SGLD):
    """Leaves the finite numbers on one side of w* alone."""

    def step(
        self, weights: Any, mean_loss_gradient: Any, noise: Any, statistics: Any, potential: Any, *, burning_in: bool
    ) -> Any:
        moved, after = super().step(weights, mean_loss_gradient, noise, statistics, potential, burning_in=burning_in)
        far = (weights - potential.center).sum(1, keepdim=True) > 0.8
        return moved.masked_fill(far, float("nan")), after


def test_a_failed_chain_takes_its_mirror_image_along() -> None:
    truth = problem(1.0)
    with pytest.warns(ChainFailedWarning, match="and its mirror image are left out"):
        result = run(truth, FailsInOneDirection(step_size=0.05), draws=30, chains=6)
    healthy = result.healthy_chains
    assert 0 < len(healthy) < 6
    assert len(healthy) % 2 == 0
    assert not {chain ^ 1 for chain in result.failed_chains} & set(healthy.tolist())
    for part in (None, "odd", "even"):
        assert np.isfinite(result.influence(part=part).values).all()


@pytest.mark.parametrize("chains", [2, 4])
def test_the_one_that_failed_of_each_pair_is_named(chains: int, tmp_path: Path) -> None:
    class FailsAtOnce(jostle.SGLD):
        """The chains whose noise adds up to more than 0."""

        def step(self, weights: Any, gradient: Any, noise: Any, *others: Any, burning_in: bool) -> Any:
            moved, after = super().step(weights, gradient, noise, *others, burning_in=burning_in)
            up.append(bool(noise.sum() > 0))
            return moved.masked_fill(noise.sum(1, keepdim=True) > 0, float("nan")), after

    up: list[bool] = []
    with pytest.raises(ChainsFailedError) as caught:
        run(problem(1.0), FailsAtOnce(step_size=0.05), draws=1, chains=chains, chains_at_once=1, out=tmp_path)
    failed, others = (", ".join(str(chain) for chain in range(chains) if up[chain] == which) for which in (True, False))
    words = (
        f"chain {failed} failed, and chain {others} is left out with it as its mirror image"
        if chains == 2
        else f"chains {failed} failed, and chains {others} are left out with them as their mirror images"
    )
    assert str(caught.value).startswith(f"{words}, the first at step 1 (weights left the finite numbers)")
    with pytest.raises(ChainsFailedError, match=f"^{words}: this run has no scores$"):
        jostle.load(tmp_path).influence()


def test_what_cannot_be_mirrored() -> None:
    truth = problem(0.0)
    with pytest.raises(jostle.InputError, match="an even number"):
        run(truth, jostle.Gaussian(), chains=3)
    usual = run(truth, jostle.Gaussian(), antithetic=False, draws=5)
    with pytest.raises(jostle.InputError, match="antithetic=True"):
        usual.influence(part="odd")
    with pytest.raises(jostle.InputError, match="'odd' or 'even'"):
        run(truth, jostle.Gaussian(), draws=5).influence(part="first")  # pyright: ignore[reportArgumentType]

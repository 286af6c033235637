"""The same promises on a CUDA device: its noise is its own, the statistics are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import jostle
from jostle.evaluate import Trainer
from reference import LinearGaussian
from test_ground_truth import REGRESSION, z_scores

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def run(problem: LinearGaussian, step_size: float, **changes: Any) -> jostle.Run:
    settings: dict[str, Any] = {"chains": 64, "draws": 400, "burn_in": 100, "thin": 3, "batch_size": 10**6}
    return jostle.attribute(
        problem.model().cuda(), problem.data, problem.data, loss=REGRESSION,
        posterior=jostle.Posterior(n_beta=problem.n_beta, localization=problem.localization),
        sampler=jostle.SGLD(step_size=step_size), progress=False, **(settings | changes),
    )  # fmt: skip


def test_sgld_samples_its_finite_step_gaussian() -> None:
    problem = LinearGaussian.random(samples=24, weights=3, n_beta=24, localization=20)
    step_size = 1.2 / np.linalg.eigvalsh(problem.precision)[-1]
    scores = run(problem, step_size).influence(standard_error=True)
    truth = problem.loss_covariance(problem.sgld_covariance(step_size))
    assert np.abs(z_scores(scores, truth)).max() < 4


def test_chains_at_once_and_minibatches() -> None:
    problem = LinearGaussian.random(samples=24, weights=3, n_beta=24, localization=20)
    small = {"chains": 3, "draws": 20, "batch_size": 5}
    one, three = (run(problem, 1e-3, chains_at_once=count, **small) for count in (1, 3))
    np.testing.assert_allclose(one.traces.losses("train")[:], three.traces.losses("train")[:], rtol=1e-8)


def test_repeats_bit_for_bit() -> None:
    problem = LinearGaussian.random(samples=24, weights=3, n_beta=24, localization=20)
    first, second = (run(problem, 1e-3, chains=2, draws=20) for _ in range(2))
    np.testing.assert_array_equal(first.traces.losses("train")[:], second.traces.losses("train")[:])


def test_a_half_precision_model_keeps_a_float32_chain() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3)).cuda()
    X, y = torch.randn(40, 8), torch.arange(40) % 3
    settings: dict[str, Any] = {
        "posterior": jostle.Posterior(n_beta=30, localization=30), "sampler": jostle.SGLD(step_size=1e-2),
        "chains": 8, "draws": 200, "burn_in": 20, "thin": 5, "progress": False,
    }  # fmt: skip
    full = jostle.attribute(model, (X, y), (X, y), **settings).influence(normalize=True).values
    half = jostle.attribute(model.bfloat16(), (X.bfloat16(), y), (X.bfloat16(), y), **settings)
    assert half.traces.losses("train").dtype == np.float32
    # The same chain up to bfloat16 rounding of its losses.
    assert np.corrcoef(full.ravel(), half.influence(normalize=True).values.ravel())[0, 1] > 0.98


def test_recurrent_layers() -> None:
    """cuDNN has no backward pass for them in eval mode; sampling needs one."""

    class Recurrent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.out = torch.nn.LSTM(3, 4, batch_first=True), torch.nn.Linear(4, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.out(self.cells(inputs)[0][:, -1])

    torch.manual_seed(0)
    X, y = torch.randn(10, 5, 3), torch.arange(10) % 2
    run = jostle.attribute(Recurrent().cuda(), (X, y), (X, y), draws=3, progress=False)
    assert np.asarray(run.traces.losses("train")[:]).std(1).min() > 0


@pytest.mark.parametrize("keep", ["traces", "covariance"])
def test_language_model_with_ragged_sequences(keep: str) -> None:
    from test_posterior import Tied
    from test_traces import sequences

    class OnDevice(Tied):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
            states = self.attention(self.embed(input_ids)).cumsum(1)
            count = torch.arange(1, states.shape[1] + 1, device=states.device)
            return self.head(torch.tanh(states / count[None, :, None]))

    torch.manual_seed(0)
    run = jostle.attribute(
        OnDevice().cuda(), sequences(), sequences()[1:3], loss=jostle.losses.next_token(), draws=5, keep=keep,
        posterior=jostle.Posterior(n_beta=20, localization=100), sampler=jostle.SGLD(step_size=1e-3), progress=False,
    )  # fmt: skip
    scores = run.influence(normalize=True)
    # The queries are training sequences 1 and 2.
    np.testing.assert_allclose([scores.values[1, 0], scores.values[2, 1]], -1, rtol=1e-4)


def test_gradients_of_convolutions_are_taken_together(caplog: pytest.LogCaptureFixture) -> None:
    # Their products are rounded to TF32 unless one says otherwise; that alone is no reason to take them one by one.
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3), torch.nn.GELU(), torch.nn.Conv2d(32, 64, 3), torch.nn.GELU(), torch.nn.Flatten(),
        torch.nn.Linear(64 * 12 * 12, 10),
    ).cuda()  # fmt: skip
    images = torch.randn(40, 3, 16, 16), torch.randint(10, (40,))
    with caplog.at_level("INFO", logger="jostle"):
        jostle.attributors.gradient_similarity(model, images, images)
    assert "one by one" not in caplog.text


def test_first_order_of_rounded_gradients(caplog: pytest.LogCaptureFixture) -> None:
    """In half precision with single-precision sums, as on a CPU; and together, where TF32 is allowed, too."""
    from architectures import VOCABULARY, tiny
    from jostle.attributors import FirstOrder

    rows = np.random.default_rng(0).integers(3, VOCABULARY, (24, 12)).tolist()
    model, found = tiny("llama", "sdpa"), {}
    for device in ("cpu", "cuda"):
        found[device] = FirstOrder(
            model.to(device), rows[:16], rows[16:], loss=jostle.losses.next_token(), labels=0, rounded=True
        ).influence(kappa=100.0).values  # fmt: skip
    np.testing.assert_allclose(found["cuda"], found["cpu"], atol=3e-3 * np.abs(found["cpu"]).max())
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with caplog.at_level("INFO", logger="jostle"):
            jostle.attributors.gradient_similarity(model, rows[:16], rows[16:], loss=jostle.losses.next_token())
    finally:
        torch.set_float32_matmul_precision(before)
    assert "one by one" not in caplog.text


def test_a_recorded_fine_tuning_is_the_plain_one() -> None:
    from experiments.language_retraining import FineTuner

    from architectures import VOCABULARY, tiny
    from jostle.data.datasets import Data

    rows = np.random.default_rng(0).integers(3, VOCABULARY, (19, 12)).tolist()
    data = Data(rows, "train", device=torch.device("cuda"))
    recipe: dict[str, Any] = {"learning_rate": 3e-3, "batch_size": 4, "weight_decay": 0.01}
    pretrained = tiny("llama", "sdpa").cuda()
    recorded, plain = (FineTuner(pretrained, data, **recipe) for _ in range(2))
    plain._to_be_recorded = False

    def moved(tuner: FineTuner, indices: np.ndarray, seed: int) -> torch.Tensor:
        pairs = zip(tuner(indices, seed).parameters(), pretrained.parameters(), strict=True)
        return torch.cat([(after - before).detach().flatten() for after, before in pairs])

    for indices, seed in ((np.arange(19), 0), (np.arange(8), 1), (np.arange(19), 0)):  # of 19, the last 3 are a rest
        ours, theirs = moved(recorded, indices, seed), moved(plain, indices, seed)
        assert theirs.abs().mean() > 1e-4
        assert (ours - theirs).norm() < 0.02 * theirs.norm()
    assert recorded.graph is not None
    assert plain.graph is None


class Attention(torch.nn.Module):
    """Attention over the rows of an image, by whatever kernel torch chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.head = torch.nn.Linear(24, 3 * 32), torch.nn.Linear(32, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = images.transpose(1, 2).flatten(2)
        parts = self.project(rows).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.head(mixed.transpose(1, 2).flatten(2).mean(1))


def convolution() -> torch.nn.Module:
    layers = torch.nn.Conv2d(3, 5, 3), torch.nn.BatchNorm2d(5), torch.nn.Tanh(), torch.nn.Flatten()
    return torch.nn.Sequential(*layers, torch.nn.Linear(180, 4)).double()


@pytest.mark.parametrize(
    ("made", "optimizer", "tolerance"), [(convolution, torch.optim.AdamW, 1e-8), (Attention, torch.optim.SGD, 1e-4)]
)
def test_many_models_are_trained_at_once_as_one_by_one(
    made: Callable[[], torch.nn.Module], optimizer: Any, tolerance: float
) -> None:
    random = torch.Generator().manual_seed(0)
    X, y = torch.randn(60, 3, 8, 8, generator=random), torch.randint(4, (60,), generator=random)
    train = Trainer(
        lambda seed: made().cuda(), (X.to(next(made().parameters()).dtype), y),
        lambda parameters: optimizer(parameters, lr=0.01), epochs=4, batch_size=10, at_once=5,
    )  # fmt: skip
    jobs = [(np.random.default_rng(seed).choice(60, 30, replace=False), seed) for seed in range(5)]
    assert train.most_at_once(jobs)[0] == 5
    for one, job in zip(train.together(jobs), jobs, strict=True):
        for got, expected in zip(one.state_dict().values(), train(*job).state_dict().values(), strict=True):
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert torch.backends.cuda.mem_efficient_sdp_enabled()

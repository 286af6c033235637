"""The store opens elsewhere, holds ragged sequences, and notices damage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import xarray

import jostle
from test_posterior import Tied

LENGTHS = [5, 2, 7, 3]
PROMPT = [2, 0, 4, 0]


def sequences() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    out = []
    for length, prompt in zip(LENGTHS, PROMPT, strict=True):
        tokens = torch.randint(0, 11, (length,), generator=generator)
        labels = tokens.clone()
        labels[:prompt] = -100
        out.append({"input_ids": tokens, "labels": labels})
    return out


def language_run(out: Path | None = None, **changes: object) -> jostle.Run:
    torch.manual_seed(1)
    settings: dict[str, object] = {
        "loss": jostle.losses.next_token(), "posterior": jostle.Posterior(n_beta=20, localization=100),
        "sampler": jostle.SGLD(step_size=1e-3), "chains": 8, "draws": 30, "thin": 2, "out": out, "progress": False,
    }  # fmt: skip
    data = sequences()
    return jostle.attribute(Tied().double(), data, data[1:3], **(settings | changes))  # type: ignore[arg-type]


def test_opens_in_xarray(tmp_path: Path) -> None:
    torch.manual_seed(0)
    X, y = torch.randn(6, 3), torch.arange(6) % 2
    run = jostle.attribute(
        torch.nn.Linear(3, 2), (X, y), (X[:2], y[:2]), chains=2, draws=5, burn_in=3, thin=4,
        observables={"bias": lambda model: model.bias}, out=tmp_path / "run", progress=False,
    )  # fmt: skip
    data = xarray.open_zarr(tmp_path / "run" / "traces.zarr", group="train", consolidated=False)
    assert data.losses.dims == ("chain", "draw", "sample")
    assert dict(data.sizes) == {"chain": 2, "draw": 5, "sample": 6}
    np.testing.assert_array_equal(data.step, [3, 7, 11, 15, 19])
    np.testing.assert_array_equal(data.losses, run.traces.to_xarray("train").losses)
    bias = xarray.open_zarr(tmp_path / "run" / "traces.zarr", group="observables", consolidated=False).bias
    assert bias.dims == ("chain", "draw", "bias")


def test_ragged_tokens(tmp_path: Path) -> None:
    run = language_run(tmp_path / "run")
    columns = run.traces.columns("train")
    # The first token has nothing before it; a prompt's tokens are read but not scored.
    scored = [length - max(prompt, 1) for length, prompt in zip(LENGTHS, PROMPT, strict=True)]
    np.testing.assert_array_equal(columns.offsets, np.cumsum([0, *scored]))
    assert columns.positions is not None
    np.testing.assert_array_equal(columns.positions, np.concatenate([
        np.arange(max(prompt, 1), length) for length, prompt in zip(LENGTHS, PROMPT, strict=True)
    ]))  # fmt: skip
    padded = run.traces.to_xarray("train").losses
    assert padded.dims == ("chain", "draw", "sample", "token")
    assert padded.shape == (8, 30, 4, 7)
    np.testing.assert_array_equal(np.isfinite(padded).sum(("chain", "draw", "token")), 240 * np.array(scored))
    on_disk = xarray.open_zarr(tmp_path / "run" / "traces.zarr", group="train", consolidated=False)
    assert on_disk.losses.dims == ("chain", "draw", "token")
    np.testing.assert_array_equal(on_disk["sample"], np.repeat(np.arange(4), scored))
    # Losses at w*, token by token, from unpadded sequences.
    torch.manual_seed(1)
    model, loss = Tied().double(), jostle.losses.next_token()
    for index, sequence in enumerate(sequences()):
        alone = loss(model, {"input_ids": sequence["input_ids"][None]})[0].detach()
        center = run.traces.center_losses("train")[columns.of(index)]
        np.testing.assert_allclose(center, alone[max(PROMPT[index], 1) :], rtol=1e-12)


def test_token_blocks_add_up_to_sequence_scores() -> None:
    run = language_run()
    block = run.token_influence(train=2, query=0)
    assert block.values.shape == (3, 1)
    assert run.token_influence(train=0, query=1).values.shape == (3, 3)
    for train in range(4):
        for query in range(2):
            values = run.token_influence(train=train, query=query).values
            assert run.influence(reduction="sum").values[train, query] == pytest.approx(values.sum(), rel=1e-9)
            assert run.influence(reduction="sum").scale is None
            assert run.influence(reduction="mean").values[train, query] == pytest.approx(values.mean(), rel=1e-9)


def test_padding_that_is_seen_is_noticed() -> None:
    """Equal lengths at the start of the data set hide it from whoever looks only there."""

    class Leaky(Tied):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(input_ids) + input_ids.shape[1] / 10 * torch.arange(11)

    data = [{"input_ids": torch.arange(4)}] * 20 + [{"input_ids": torch.arange(9)}] * 3
    with pytest.raises(jostle.InputError, match=r"^loss on train: got .* with other neighbours"):
        jostle.attribute(Leaky(), data, data, loss=jostle.losses.next_token(), draws=2, progress=False)


def test_ragged_losses_without_a_mask_are_refused() -> None:
    def unmasked(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return jostle.losses.next_token()(model, batch)

    with pytest.raises(
        jostle.InputError, match=r"got \d and \d token losses for example \d in two batches.*token_mask"
    ):
        jostle.attribute(Tied(), sequences(), sequences(), loss=unmasked, draws=2, progress=False)


def test_half_precision_losses_are_recorded_as_float32() -> None:
    def half(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none").bfloat16()

    X, y = torch.randn(6, 3), torch.arange(6) % 2
    run = jostle.attribute(
        torch.nn.Linear(3, 2), (X, y), (X, y), loss=half, draws=3, progress=False,
        observables={"bias": lambda model: model.bias.bfloat16()},
    )  # fmt: skip
    assert run.traces.losses("train").dtype == run.traces.observable("bias").dtype == np.float32


def test_covariance_only_run_averages_tokens() -> None:
    np.testing.assert_allclose(
        language_run(keep="covariance").influence().values, language_run().influence().values, rtol=1e-8, atol=1e-15
    )


def test_token_scores_carry_errors_and_correlations() -> None:
    run = language_run()
    scores = run.token_influence(train=2, query=1, normalize=True, standard_error=True)
    assert np.abs(scores.values).max() <= 1
    # A sequence against itself: the correlation of a token with itself is 1, without error.
    np.testing.assert_allclose(np.diag(scores.values), -1, rtol=1e-9)
    assert scores.standard_error is not None
    assert np.diag(scores.standard_error).max() < 1e-6 < scores.standard_error.max()
    np.testing.assert_allclose(scores.posterior_correlation, -scores.values)


def test_a_damaged_chunk_is_noticed(tmp_path: Path) -> None:
    run = language_run(tmp_path / "run")
    chunk = next(path for path in (tmp_path / "run/traces.zarr/train/losses/c").rglob("*") if path.is_file())
    content = bytearray(chunk.read_bytes())
    content[40] ^= 1
    chunk.write_bytes(bytes(content))
    with pytest.raises(Exception, match=r"(?i)checksum"):
        run.influence()


def test_loaded_elsewhere(tmp_path: Path) -> None:
    run = language_run(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    again = jostle.load(tmp_path / "moved")
    np.testing.assert_array_equal(again.influence().values, language_run().influence().values)
    assert again.config["sampler"] == {"name": "SGLD", "step_size": 1e-3}
    assert again.config["posterior"]["localization"] == 100
    assert run.manifest["fingerprints"] == again.manifest["fingerprints"]


def test_scores_survive_saving(tmp_path: Path) -> None:
    scores = language_run().influence(standard_error=True)
    scores.save(tmp_path / "scores.safetensors")
    again = jostle.Scores.load(tmp_path / "scores.safetensors")
    np.testing.assert_array_equal(again.values, scores.values)
    np.testing.assert_array_equal(again.standard_error, scores.standard_error)
    assert (again.method, again.scale, again.normalized) == ("bif", 20 / 4, False)
    assert again.provenance == scores.provenance


def test_top_is_sorted_by_help() -> None:
    values = np.array([[0.3], [-0.5], [0.1], [-0.2], [0.0]])
    ranking = jostle.Scores(values=values, method="bif").top(query=0, k=3)
    assert [entry.index for entry in ranking.helpful] == [1, 3]
    assert [entry.index for entry in ranking.harmful] == [0, 2]
    assert ranking.to_dict()["helpful"][0] == {"index": 1, "score": -0.5}

"""The experiment on mislabelled images, on synthetic ones: it goes on where it stood, and its numbers are those of a loop."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments import mislabels
from experiments.cifar10_retraining import new_model
from torch import Tensor, nn

import jostle

SMALL = {"n_beta": 10.0, "localization": 1e4, "step_size": 1e-5, "chains": 1, "draws": 4, "batch_size": 4}
STILL = {"n_beta": 0.0, "sampler": "gaussian", "localization": 1e36, "chains": 1, "draws": 4, "batch_size": 4}
"""Draws too near w* for any loss to change: the self-influence of every example is 0."""
BIF = {"still": STILL, "small": SMALL}


class Small(nn.Module):
    """A network of ResNet-9's kinds of layers that takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 24, 2), nn.GELU(), nn.MaxPool2d(8), nn.Conv2d(24, 24, 3, bias=False), nn.BatchNorm2d(24),
            nn.GELU(), nn.Flatten(), nn.Linear(24, 10, bias=False),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def auroc(suspicion: np.ndarray, wrong: np.ndarray) -> float:
    pairs = [float(a > b) + 0.5 * float(a == b) for a in suspicion[wrong] for b in suspicion[~wrong]]
    return float(np.mean(pairs))


def test_the_experiment_finds_what_a_loop_finds_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    own, test_labels = generator.integers(10, size=40), generator.integers(10, size=6)
    images = {
        "train_images": generator.integers(256, size=(40, 32, 32, 3), dtype=np.uint8), "train_labels": own,
        "test_images": generator.integers(256, size=(6, 32, 32, 3), dtype=np.uint8), "test_labels": test_labels,
    }  # fmt: skip
    np.savez(tmp_path / "cifar.npz", **images)
    given = np.where(generator.random(40) < 0.4, (own + 1) % 10, own)
    np.savez(tmp_path / "labels.npz", clean_label=own, aggre_label=given)
    np.savez(tmp_path / "other.npz", clean_label=own[::-1], aggre_label=given)
    (tmp_path / "bif.json").write_text(json.dumps(BIF))

    def call(minutes: float, labels: str = "labels.npz") -> dict:
        settings = {"noise": "aggre", "epochs": 1, "train-batch": 16, "warm-up-steps": 1, "minutes": minutes}
        paths = {"data": "cifar.npz", "labels": labels, "work": "work", "record": "record.json", "bif": "bif.json"}
        options = [f"--{name}={value}" for name, value in {**settings, **paths}.items()]
        monkeypatch.setattr(sys, "argv", ["mislabels", *options, "--methods", "outputs", "gradients", "bif"])
        mislabels.main()
        return json.loads(Path("record.json").read_text())

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("experiments.cifar10_retraining.ResNet9", Small)
    with pytest.raises(SystemExit, match="in another order"):
        call(10, "other.npz")
    assert call(-1)["status"] == "out of time; the same command goes on"
    record = call(10)
    found = record["measured"]["aggre, seed 0"]
    assert record["status"] == "complete"
    failures = record["failures"]["aggre, seed 0"]
    assert list(failures) == ["BIF still", "BIF still, relative to the loss"]
    assert all("the same value for every example" in reason for reason in failures.values())
    assert list(found) == ["loss", "margin", "random", "GradSim", "BIF small", "BIF small, relative to the loss"]
    # 8 of the 40 are to warm up on; the others in the order of the seed, by hand.
    places = np.random.default_rng(0).permutation(40)[8:]
    wrong = given[places] != own[places]
    pixels = images["train_images"].transpose(0, 3, 1, 2).astype(np.float32) / 255
    pixels = (pixels - pixels.mean((0, 2, 3), keepdims=True)) / pixels.std((0, 2, 3), keepdims=True)
    inputs, labels = torch.from_numpy(pixels[places]), torch.from_numpy(given[places])
    model = new_model((inputs, labels), 0)
    model.load_state_dict(torch.load(tmp_path / "work" / "aggre__seed_0" / "model.pt", weights_only=True))
    losses = torch.nn.functional.cross_entropy(model.eval()(inputs), labels, reduction="none")
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    squares = [
        sum(part.square().sum() for part in torch.autograd.grad(loss, weights, retain_graph=True)) for loss in losses
    ]
    traces = np.asarray(jostle.load(tmp_path / "work" / "aggre__seed_0" / "runs" / "small").traces.losses("train"))
    assert found["loss"]["auroc"] == pytest.approx(auroc(losses.detach().numpy(), wrong))
    assert found["GradSim"]["auroc"] == pytest.approx(auroc(np.array(squares), wrong))
    assert found["BIF small"]["auroc"] == pytest.approx(auroc(traces[0].var(0), wrong))
    assert record["models"]["aggre, seed 0"]["wrong_labels"] == wrong.sum()
    assert (tmp_path / "record.png").stat().st_size > 10_000
    (tmp_path / "bif.json").write_text(json.dumps({"small": SMALL}))  # what failed would be tried again
    again = call(-1)  # there is nothing left to do
    assert (again["status"], again["measured"]) == ("complete", record["measured"])

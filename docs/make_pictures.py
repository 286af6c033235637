"""Make the pictures of `docs/diagnostics.md` and of sweeps in `docs/calibration.md`: ``python docs/make_pictures.py``.

It takes two minutes, and the extra ``plots``.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import jostle
from jostle.asking import requests
from jostle.sweep import AGREEMENT, draw
from jostle.sweep import sweep as sweep_cells

IMAGES = Path(__file__).parent / "images"
LOSS = jostle.losses.classification()


def trained() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """Return a classifier of three overlapping clouds at the minimum of its loss, and what it learned from."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % 3
    points = torch.randn(120, 5, generator=generator)
    points[torch.arange(120), labels] += 1.5
    model = nn.Linear(5, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = LOSS(model, (points, labels)).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return model, (points, labels)


def build() -> dict[str, Any]:
    """Return the task of the sweep: a small network on the same clouds."""
    _, (points, labels) = trained()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        LOSS(model, (points, labels)).mean().backward()
        optimizer.step()
    return {"model": model, "train": (points, labels), "query": (points[:20] + 0.1, labels[:20]), "loss": LOSS}


def sweep() -> None:
    """Draw a small grid: `jostle sweep OUT --task docs/make_pictures.py:build ...`."""
    request = requests.resolve({"task": f"{__file__}:build", "draws": 60, "thin": 2})
    axes = {"n_beta": [0, 30, 300, 3000], "localization": [10, 100, 1000], "step_size": [5e-3], "burn_in": [0]}
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "sweep"
        (picture,) = draw(sweep_cells(request, axes, out), out, of=AGREEMENT)
        shutil.copy(picture, IMAGES / "sweep.png")
    print(IMAGES / "sweep.png")


def main() -> None:
    """Sample once as one should and once as one should not; then a grid."""
    torch.set_num_threads(1)
    model, data = trained()
    queries = tuple(part[:30] for part in data)
    for name, settings in {
        "good": {"sampler": jostle.SGLD(step_size=1e-2), "burn_in": 400, "thin": 80},
        "bad": {"sampler": jostle.SGLD(step_size=1e-3), "burn_in": 0, "thin": 1},
    }.items():
        run = jostle.attribute(
            model,
            data,
            queries,
            loss=LOSS,
            posterior=jostle.Posterior(n_beta=120, localization=5),
            chains=4,
            draws=150,
            progress=False,
            **settings,
        )
        picture = IMAGES / f"diagnostics-{name}.png"
        found = run.diagnostics(plot=picture)
        print(f"{picture}: {found['verdict']['summary']}")
    sweep()


if __name__ == "__main__":
    main()

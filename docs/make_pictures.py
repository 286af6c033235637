"""Make the pictures of `docs/diagnostics.md`: ``python docs/make_pictures.py`` (a minute; the extra ``plots``)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import jostle

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


def main() -> None:
    """Sample once as one should and once as one should not."""
    torch.set_num_threads(1)
    model, data = trained()
    queries = tuple(part[:30] for part in data)
    for name, settings in {
        "good": {"sampler": jostle.SGLD(step_size=2e-2), "burn_in": 200, "thin": 40},
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


if __name__ == "__main__":
    main()

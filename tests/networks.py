"""A small network and its data, for tests and for the processes that they start: it imports nothing that these do not."""

from __future__ import annotations

import torch
from torch import Tensor


def network() -> tuple[torch.nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    x, weights, noise = (torch.randn(*shape, generator=random) for shape in ((50, 4), (4, 1), (50, 1)))
    y = x @ weights + 0.3 * noise
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    for parameter in model.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=random)
    return model, (x[:40], y[:40]), (x[40:], y[40:])

"""When memory runs out, batches become smaller, it is said once, and the numbers stay."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import jostle
import jostle.chains.chain
from jostle.models.in_place import InPlace


class Greedy(nn.Module):
    """A classifier for which a GPU would have room for so many examples, and no more."""

    def __init__(self, room: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.room = nn.Linear(4, 3).double(), room

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.layer(inputs)


@pytest.mark.parametrize("control_variates", [False, True])
def test_batches_become_smaller(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, control_variates: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 4, dtype=torch.float64, generator=generator)
    y = torch.arange(40) % 3

    def losses(model: Greedy) -> np.ndarray:
        settings: dict[str, Any] = {"chains": 2, "draws": 4, "thin": 2, "batch_size": 16, "chains_at_once": 1}
        run = jostle.attribute(
            model, (X, y), (X[:5], y[:5]), posterior=jostle.Posterior(n_beta=20, localization=10),
            sampler=jostle.SGLD(step_size=1e-2), observation_batch_size=13, control_variates=control_variates,
            progress=False, **settings,
        )  # fmt: skip
        return np.asarray(run.traces.losses("train")[:])

    expected = losses(Greedy(40))
    gradient = InPlace.mean_loss_gradient
    buffer: dict[int, Tensor] = {}

    def into_one_buffer(self: InPlace, *arguments: Any) -> Tensor:
        """As a CUDA graph has it: each gradient is written over the last one."""
        found = gradient(self, *arguments)
        return buffer.setdefault(id(self), torch.empty_like(found)).copy_(found)

    monkeypatch.setattr(InPlace, "mean_loss_gradient", into_one_buffer)
    assert not caplog.records
    model = Greedy(40)
    advance = jostle.chains.chain.Dynamics.advance

    def another_program_takes_memory(self: Any, group: Any, most: int = 1) -> None:
        if group.step == 3:
            model.room = 6
        advance(self, group)

    monkeypatch.setattr(jostle.chains.chain.Dynamics, "advance", another_program_takes_memory)
    with caplog.at_level(logging.WARNING, logger="jostle"):
        found = losses(model)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    said = [record.message for record in caplog.records if "out of memory" in record.message]
    # 16 examples go into room for 6 in four pieces, and 13 in batches of 4 after one of 7.
    assert [line.split(" from here")[0] for line in said] == [
        "out of memory: minibatches are gone through in 2 pieces",
        "out of memory: minibatches are gone through in 4 pieces",
        "out of memory: train is observed in batches of 7",
        "out of memory: train is observed in batches of 4",
    ]


def test_a_step_that_finds_no_room_is_made_again(caplog: pytest.LogCaptureFixture) -> None:
    """Without what is kept for speed, and with the same noise."""
    X, y = torch.randn(20, 4, dtype=torch.float64), torch.arange(20) % 3

    class Tight(jostle.RMSpropSGLD):
        steps = 0

        def step(self, *arguments: Any, **options: Any) -> Any:
            moved = super().step(*arguments, **options)
            type(self).steps += 1
            if type(self).steps in (9, 12):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 MiB.")
            return moved

    def losses(sampler: Any) -> np.ndarray:
        run = jostle.attribute(
            Greedy(40), (X, y), (X, y), posterior=jostle.Posterior(n_beta=20, localization=10), sampler=sampler,
            chains=2, draws=4, thin=2, batch_size=8, chains_at_once=1, antithetic=True, progress=False,
        )  # fmt: skip
        return np.asarray(run.traces.losses("train")[:])

    expected = losses(jostle.RMSpropSGLD(step_size=1e-2))
    with caplog.at_level(logging.WARNING, logger="jostle"):
        np.testing.assert_array_equal(losses(Tight(step_size=1e-2)), expected)
    assert Tight.steps == 2 * 6 + 2
    (said,) = (record.message for record in caplog.records)
    assert said == "out of memory: what is kept for speed alone is given up from here on"


def test_no_room_for_a_single_example_is_an_error() -> None:
    data = (torch.zeros(3, 4).double(), torch.zeros(3, dtype=torch.long))
    with pytest.raises(jostle.InputError, match="room on the device"):
        jostle.attribute(Greedy(0), data, data, progress=False)


def test_a_chain_that_was_tried_has_left_when_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    X, y = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 3
    start = jostle.chains.chain.Dynamics.start
    begun: list[StorageWeakRef] = []

    def watched(self: Any, chains: list[int]) -> Any:
        assert all(weights.expired() for weights in begun)  # a large model's chain has no room beside another
        group = start(self, chains)
        begun.append(StorageWeakRef(group.weights.untyped_storage()))
        return group

    monkeypatch.setattr(jostle.chains.chain.Dynamics, "start", watched)
    jostle.attribute(
        Greedy(40), (X, y), (X, y), sampler=jostle.SGLD(step_size=1e-4), chains=1, draws=2, batch_size=4,
        progress=False, dry_run=lambda lines: None,
    )  # fmt: skip
    assert len(begun) == 3  # for the plan, for the time a step takes, and to run

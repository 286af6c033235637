"""The derivative of a training: against central differences of whole trainings, in double precision."""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import jostle
from jostle.data.datasets import Data
from jostle.errors import InputError
from jostle.evaluate import Trainer
from jostle.losses import Loss
from jostle.runs import replaying
from jostle.runs.replaying import Check
from jostle.traces.tensor_files import read_metadata
from jostle.training import backwards, repeatable
from jostle.training.objective import Objective
from jostle.training.recorder import Recorder
from jostle.training.records import Recorded
from jostle.training.repeatable import Microbatch, Repeatable, Repetition, Timeline, random_state

TRAIN, QUERY, STEPS = 20, 5, 12
NUDGE = 1e-5


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


class Nudged:
    """A loss of which one example's, or one token's, counts a little more; the examples say which they are."""

    def __init__(self, loss: Any) -> None:
        self.loss, self.weights = loss, torch.ones(TRAIN)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        which, *batch = batch
        found = self.loss(model, batch if len(batch) > 1 else batch[0])
        return found * (self.weights[which] if self.weights.ndim == found.ndim else self.weights[which][:, None])


def examples(count: int, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return torch.arange(first, first + count), torch.randn(count, 5), torch.randint(0, 3, (count,))


def network(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 8, bias=False), *layers, nn.Tanh(), nn.Linear(8, 3))


def frozen() -> nn.Sequential:
    model = network()
    model[0].requires_grad_(False)
    return model


def plan(microbatches: int = 1) -> list[list[Microbatch]]:
    generator = np.random.default_rng(0)
    return [[Microbatch(generator.integers(0, TRAIN, 4), 1 / microbatches) for _ in range(microbatches)]
            for _ in range(STEPS)]  # fmt: skip


def in_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.AdamW([{"params": [first], "lr": 0.03}, {"params": others, "weight_decay": 0.3}], lr=0.01)


def falling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def sgd(**settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=0.1, **settings)


def adam(kind: Any = torch.optim.Adam, **settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: kind(parameters, lr=0.01, **settings)


CASES: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "sgd": (network, sgd(), {}),
    "momentum and coupled decay": (network, sgd(momentum=0.9, weight_decay=0.05), {}),
    "nesterov": (network, sgd(momentum=0.9, nesterov=True), {}),
    "dampening": (network, sgd(momentum=0.9, dampening=0.3), {}),
    "adam and coupled decay": (network, adam(weight_decay=0.1), {}),
    "adamw": (network, adam(torch.optim.AdamW, weight_decay=0.1), {}),
    "groups": (network, in_groups, {}),
    "rates by step": (network, adam(), {"schedule": falling}),
    "clipping": (network, sgd(momentum=0.9), {"clip_norm": 0.3}),
    "accumulation": (network, adam(), {"steps": plan(2)}),
    "frozen weights": (frozen, sgd(momentum=0.9), {}),
    "batch norm": (lambda: network(nn.BatchNorm1d(8)), sgd(momentum=0.9), {"steps": plan(2)}),
    "batch norm, plain mean": (lambda: network(nn.BatchNorm1d(8, momentum=None, affine=False)), adam(), {}),
    "dropout": (lambda: network(nn.Dropout(0.3)), adam(), {}),
}


def training_of(model: nn.Module, optimizer: Any, loss: Loss, data: Any, **settings: Any) -> Repeatable:
    given: dict[str, Any] = {"steps": plan(), "state": random_state()} | settings
    return Repeatable(model.train(), Data(data, "train"), Objective(loss, "sequences"), optimizer, **given)


def ends(training: Repeatable, query: Any) -> Tensor:
    """The queries' losses after the training."""
    repetition = Repetition(training)
    while repetition.number < len(repetition):
        repetition.step()
    with torch.no_grad():
        return training.objective.loss(repetition.model.eval(), Data(query, "query").whole())


@pytest.mark.parametrize("name", CASES)
def test_weights_of_examples(name: str) -> None:
    new_model, optimizer, settings = CASES[name]
    loss, train, query = Nudged(jostle.losses.classification()), examples(TRAIN), examples(QUERY)
    training = training_of(new_model(), optimizer, loss, train, **settings)
    found = jostle.replay(training, query, smoothing=0.0, check=0).effects
    truth = np.empty((TRAIN, QUERY))
    for example in range(TRAIN):
        sides = []
        for nudge in (NUDGE, -NUDGE):
            loss.weights = torch.ones(TRAIN)
            loss.weights[example] += nudge
            losses = ends(training, query)
            sides.append(losses / loss.weights[query[0]])  # the query's own loss is no training loss
        truth[example] = -((sides[0] - sides[1]) / (2 * NUDGE)).numpy()
    assert np.linalg.norm(found - truth) <= 1e-6 * np.linalg.norm(truth)


def test_a_training_is_repeated_to_the_bit_and_left_as_it_is() -> None:
    torch.set_default_dtype(torch.float32)
    data, query = examples(TRAIN)[1:], examples(QUERY)[1:]
    trainer = Trainer(
        lambda seed: network(nn.Dropout(0.2), nn.BatchNorm1d(8)), data, adam(torch.optim.AdamW), epochs=3, batch_size=6, clip_norm=1.0,
        schedule=lambda optimizer, steps: falling(optimizer),
    )  # fmt: skip
    expected = trainer(np.arange(TRAIN), 3).state_dict()
    training = trainer.repeatable(3)
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    state = torch.get_rng_state()
    repetition = Repetition(training)
    timeline = Timeline(repetition)
    timeline.go()
    assert all(torch.equal(value, expected[name]) for name, value in repetition.model.state_dict().items())
    jostle.replay(training, query)
    assert all(torch.equal(value, before[name]) for name, value in training.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any("forward" in module.__dict__ for module in training.model.modules())


def test_states_that_are_made_again_give_identical_numbers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, train, query = network(nn.BatchNorm1d(8), nn.Dropout(0.3)), examples(TRAIN)[1:], examples(QUERY)[1:]
    training = training_of(model, adam(), jostle.losses.classification(), train)
    kept = jostle.replay(training, query, check=0)
    size = repeatable._bytes_of(Repetition(training))
    for room, apart, words in (
        ((1, 0), 4, "every 4th of 12 is kept"),
        ((1, 1), 4, "every 4th of 12 is kept"),
        ((8 * size, 12 * size), 1, "all 12 are kept, "),
        ((8 * size, 9 * size), 4, "GB in memory of cpu"),
        ((7 * size, 9 * size), 4, "GB in the machine's memory"),
    ):
        monkeypatch.setattr(repeatable, "free_room", lambda device, room=room: room)
        caplog.clear()
        with caplog.at_level("INFO", "jostle"):
            again = jostle.replay(training, query, check=0)
        assert words in caplog.text
        assert ("and 2e-09 GB are free" in caplog.text) == (room[0] == 1)
        assert (kept.provenance["states_apart"], again.provenance["states_apart"]) == (1, apart)
        np.testing.assert_array_equal(again.effects, kept.effects)


def test_states_hold_only_what_is_trained() -> None:
    sizes = []
    for make in (network, frozen):
        model = make()
        _, inputs, labels = examples(TRAIN)
        repetition = Repetition(training_of(model, adam(), jostle.losses.classification(), (inputs, labels)))
        repetition.step()
        sizes.append(sum(value.numel() for value in repetition.snapshot().weights))
    assert sizes[0] - sizes[1] == 40


def test_tokens_sum_to_sequences_and_are_derivatives_themselves() -> None:
    vocabulary, length = 7, 6
    rows = torch.randint(0, vocabulary, (TRAIN, length))
    rows[::3, -2:] = -1  # shorter ones

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(vocabulary, 4), nn.Linear(4, vocabulary)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(torch.tanh(self.embedding(tokens.clamp(min=0)).cumsum(1)))

    class NextToken:
        """Of each token but the first, by those before it; some are none."""

        def __init__(self) -> None:
            self.weights = torch.ones(TRAIN, length)

        def __call__(self, model: nn.Module, batch: Any) -> Tensor:
            which, tokens = batch
            logits = model(tokens[:, :-1])
            losses = nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:].clamp(min=0), reduction="none")
            return nn.functional.pad(losses, (1, 0)) * self.weights[which]

        def token_mask(self, batch: Any) -> Tensor:
            mask = batch[1] >= 0
            mask[:, 0] = False
            return mask

    query = torch.arange(QUERY), torch.randint(0, vocabulary, (QUERY, length))
    for alike in ("sequences", "tokens"):
        loss = NextToken()
        training = training_of(Model(), adam(), loss, (torch.arange(TRAIN), rows))
        training = dataclasses.replace(training, objective=Objective(loss, alike))
        found = jostle.replay(training, query, tokens=True, smoothing=0.0, check=0)
        assert found.tokens is not None
        np.testing.assert_allclose([one.sum(0) for one in found.tokens], found.effects, atol=1e-12)
        for example, token in ((0, 1), (0, 3), (1, 5), (7, 2)):
            sides = []
            for nudge in (NUDGE, -NUDGE):
                loss.weights = torch.ones(TRAIN, length)
                loss.weights[example, token] += nudge
                losses = ends(training, query) / loss.weights[query[0]]
                sides.append(losses[:, 1:].mean(1))
            truth = -((sides[0] - sides[1]) / (2 * NUDGE)).numpy()
            assert np.linalg.norm(found.tokens[example][token] - truth) <= 1e-6 * np.linalg.norm(truth)
        assert not found.tokens[0][-2:].any()  # no tokens


def test_predictions_are_held_against_trainings() -> None:
    train, query = examples(TRAIN)[1:], examples(QUERY)[1:]
    training = training_of(network(), sgd(momentum=0.9), jostle.losses.classification(), train)
    found = jostle.replay(training, query, share=0.1)
    check = found.check
    assert check is not None
    assert check.left_out == 2
    assert check.real.shape == check.predicted.shape == (20, QUERY)
    generator = np.random.default_rng(0)
    weights = np.ones(TRAIN)
    weights[generator.permutation(TRAIN)[:2]] = 0
    ended = []
    for given in (None, weights):
        repetition = Repetition(training, given)
        repetition.go()
        with torch.no_grad():
            ended.append(training.objective.loss(repetition.model.eval(), query))
    np.testing.assert_allclose(check.real[0], ended[1] - ended[0], atol=1e-12)
    np.testing.assert_allclose(check.predicted[0], found.effects[weights == 0].sum(0), atol=1e-12)
    (correlation, error), (slope, own) = check.correlation, check.slope
    assert (
        abs(correlation - np.corrcoef(*(np.ravel(one - one.mean(0)) for one in (check.real, check.predicted)))[0, 1])
        < 1e-9
    )
    assert correlation > 0.9 > error > 0.001
    assert abs(slope - 1) < 0.3 + 3 * own
    assert "20 trainings without 2 random examples: correlation 0.9" in repr(found)
    assert jostle.replay(training, query, check=0).check is None


def test_a_check_of_few_trainings_has_an_error() -> None:
    random = np.random.default_rng(0)
    real = random.standard_normal((3, 4))
    check = Check(real, real + 0.1 * random.standard_normal(real.shape), 1)
    assert all(0 < error < 1 for _, error in (check.correlation, check.slope))
    assert str(check).startswith("3 trainings without 1 random example: correlation 0.9")


def test_the_scale_of_the_loss_changes_no_rank() -> None:
    train, query = examples(TRAIN)[1:], examples(QUERY)[1:]
    model, plain = network(), jostle.losses.classification()

    def effects(scale: float) -> np.ndarray:
        def loss(model: nn.Module, batch: Any) -> Tensor:
            return scale * plain(model, batch)

        training = training_of(model, adam(eps=1e-30), loss, train)
        return jostle.replay(training, query, check=0).effects / scale

    np.testing.assert_allclose(effects(100.0), effects(1.0), rtol=1e-6, atol=1e-12)


def test_what_is_not_known_is_refused() -> None:
    train, query, loss = examples(TRAIN)[1:], examples(QUERY)[1:], jostle.losses.classification()
    for optimizer, match in (
        (torch.optim.Adagrad, "got a Adagrad"), (adam(amsgrad=True), "got amsgrad=True"),
    ):  # fmt: skip
        with pytest.raises(jostle.InputError, match=match):
            jostle.replay(training_of(network(), optimizer, loss, train), query)
    with pytest.raises(jostle.InputError, match="smoothing"):
        jostle.replay(training_of(network(), sgd(), loss, train), query, smoothing=-1.0)
    with pytest.raises(jostle.InputError, match="check: got 1"):
        jostle.replay(training_of(network(), sgd(), loss, train), query, check=1)
    with pytest.raises(jostle.InputError, match=r"share: got 1\.0"):
        jostle.replay(training_of(network(), sgd(), loss, train), query, share=1.0)
    with pytest.raises(jostle.InputError, match="expected a loss of tokens"):
        jostle.replay(training_of(network(), sgd(), loss, train), query, tokens=True)


def test_queries_that_have_no_room_together_give_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training, query = small_training()
    whole = jostle.replay(training, query, check=0)
    real = backwards.vmap

    def narrow(function: Any, chunk_size: int | None = None) -> Any:
        if chunk_size is not None and chunk_size > 2:
            raise torch.OutOfMemoryError("no room")
        return real(function, chunk_size=chunk_size)

    monkeypatch.setattr(backwards, "vmap", narrow)
    with caplog.at_level("INFO", "jostle"):
        parts = jostle.replay(training, query, check=0)
    assert caplog.text.count("have no room") == 2  # of five, three and two
    np.testing.assert_allclose(parts.effects, whole.effects, rtol=1e-12)


def test_the_mean_over_seeds() -> None:
    data, query = examples(TRAIN)[1:], examples(QUERY)[1:]
    trainer = Trainer(lambda seed: network(), data, adam(), epochs=2, batch_size=5)
    each = [jostle.replay(trainer.repeatable(seed), query, check=3) for seed in range(3)]
    mean = jostle.replay([trainer.repeatable(seed) for seed in range(3)], query, check=3)
    np.testing.assert_array_equal(mean.effects, np.mean([one.effects for one in each], 0))
    assert mean.errors is not None
    np.testing.assert_allclose(mean.errors, np.std([one.effects for one in each], 0, ddof=1) / 3**0.5)
    np.testing.assert_array_equal(mean.scores.standard_error, mean.errors)
    assert mean.check is not None
    assert mean.check.real.shape == (9, QUERY)
    other = Trainer(lambda seed: network(), examples(TRAIN)[1:], adam(), epochs=2, batch_size=5)
    with pytest.raises(InputError, match="trainings of different train"):
        jostle.replay([trainer.repeatable(0), other.repeatable(0)], query, check=0)
    with pytest.raises(InputError, match="a file for several trainings"):
        jostle.replay([trainer.repeatable(0)], query, out="a.safetensors")
    with pytest.raises(InputError, match="training: got none"):
        jostle.replay([], query)


# --- files ---


def small_training() -> tuple[Repeatable, Any]:
    """One that has all that is written down: statistics, momenta, dropout, tokens."""
    torch.manual_seed(0)
    model, train, query = network(nn.BatchNorm1d(8), nn.Dropout(0.3)), examples(TRAIN)[1:], examples(QUERY)[1:]
    return training_of(model, adam(), jostle.losses.classification(), train), query


def test_killed_twenty_times_it_comes_to_identical_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any moment, while it writes, too; each time it goes on from what was written."""
    training, query = small_training()
    whole = jostle.replay(training, query, check=3)
    out, begun = tmp_path / "effects.safetensors", tmp_path / "effects.safetensors.unfinished"
    monkeypatch.setattr(replaying, "SAVED_EVERY", 0.0)
    monkeypatch.setattr(replaying, "SAVING", 1e9)
    random, reached, steps = np.random.default_rng(0), [], []
    write = replaying.write_tensors
    for kill in range(21):
        after, within = int(random.integers(1, 3)), bool(random.integers(2))

        def writing(path: Path, tensors: Any, about: Any, after: int = after, within: bool = within) -> None:
            steps.append(about["step"])
            if len(steps) == after and within:  # half of a file, under a name that is nobody else's
                (path.parent / f".{path.name}.abcd.partial").write_bytes(b"half")
                os.kill(os.getpid(), signal.SIGKILL)
            write(path, tensors, about)
            if len(steps) == after:
                os.kill(os.getpid(), signal.SIGKILL)

        steps.clear()
        if (child := os.fork()) == 0:
            torch.set_num_threads(1)
            if kill < 20:
                replaying.write_tensors = writing
            try:
                jostle.replay(training, query, check=3, out=out)
            finally:
                os._exit(7)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == (signal.SIGKILL if kill < 20 and not out.exists() else 0)
        if out.exists():
            break
        reached.append(read_metadata(begun)["step"] if begun.exists() else STEPS)
        if reached[-1] <= 1 and kill < 19:  # and once more from the start, so that there are twenty
            begun.unlink()
    assert len(reached) == 20
    assert len(set(reached)) > 5
    assert not begun.exists()
    np.testing.assert_array_equal(jostle.Scores.load(out).values, -whole.effects)
    assert str(whole.check) == jostle.Scores.load(out).provenance["check"]


def test_what_was_begun_for_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (training, query), out = small_training(), tmp_path / "effects.safetensors"
    monkeypatch.setattr(replaying, "SAVED_EVERY", 0.0)

    def stopped(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as inside:
        inside.setattr(replaying, "_checked", stopped)
        with pytest.raises(KeyboardInterrupt):
            jostle.replay(training, query, out=out)
    begun = out.with_name(out.name + ".unfinished")
    assert begun.exists()
    other = query[0] + 1e-9, query[1]
    half = dataclasses.replace(training, steps=training.steps[: STEPS // 2])
    changed = copy.deepcopy(training.model)
    with torch.no_grad():
        next(changed.parameters())[0, 0] += 1e-12
    for what, given in (
        ("query", (training, other, {})),
        ("steps", (half, query, {})),
        ("weights", (dataclasses.replace(training, model=changed), query, {})),
        ("smoothing", (training, query, {"smoothing": 0.2})),
        ("share", (training, query, {"share": 0.3})),
        ("optimizer", (dataclasses.replace(training, clip_norm=1.0), query, {})),
    ):
        with pytest.raises(InputError, match=f"begun with other.*{what}"):
            jostle.replay(*given[:2], out=out, **given[2])
    torch.manual_seed(7)  # of dropout, which nothing repeats
    with pytest.raises(InputError, match="weights at its end that are not those of before"):
        jostle.replay(dataclasses.replace(training, state=None), query, out=out)
    begun.write_bytes(begun.read_bytes()[:-3])
    with pytest.raises(InputError, match="damaged"):
        jostle.replay(training, query, out=out)
    begun.unlink()
    jostle.replay(training, query, out=out, check=0)
    with pytest.raises(InputError, match="which is there"):
        jostle.replay(training, query, out=out)
    with pytest.raises(InputError, match="ending in"):
        jostle.replay(training, query, out=tmp_path / "effects")


# --- recorded trainings ---


def test_a_recorded_training_is_held_against_its_record(caplog: pytest.LogCaptureFixture) -> None:
    torch.set_default_dtype(torch.float32)
    train, query = examples(60)[1:], examples(QUERY)[1:]
    model, generator = network(nn.Dropout(0.1)), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def losses(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    recorder = Recorder(model, optimizer, loss=losses, data=train)
    for _ in range(STEPS):
        losses(model, recorder.batch(generator.integers(0, 60, 8))).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    training = recorder.finish()
    whole = jostle.replay(training, query, check=0)
    assert whole.provenance["repeated"] == f"{STEPS} steps repeated: equal to the bit"
    name = "0.weight"

    def ended(by: float) -> Recorded:
        sums = [*training.sums[:-1], training.sums[-1] + by] if training.sums is not None else None
        return dataclasses.replace(training, end={**training.end, name: training.end[name] + by}, sums=sums)

    near = jostle.replay(ended(1e-6), query, check=0)
    assert f"step {STEPS - 1} of {STEPS} is the first that differs" in near.provenance["repeated"]
    np.testing.assert_array_equal(near.effects, whole.effects)
    with pytest.raises(InputError, match=rf"one that does not repeat: step {STEPS - 1} of {STEPS}.*leaving out 1 %"):
        jostle.replay(ended(0.1), query, check=0)

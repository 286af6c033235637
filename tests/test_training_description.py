"""What is said of a training is what the training did: its reach, its decay, its second moments, its rates."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from jostle import Training, losses
from jostle.data.datasets import Data
from jostle.errors import EstimateWarning, InputError
from jostle.models.functional import FunctionalModel, token_mask
from jostle.models.weights import MovingWeights
from jostle.training import ParameterGroup, compare_second_moments, estimate_second_moments, require_similar_moments
from jostle.training.schedules import Point, rebuild

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from transformers import optimization  # noqa: E402

PAGE = Path(__file__).parents[1] / "docs/training.md"

STEPS, SIZE = 1000, 6
# In pairs of one length each, so that the extra gradient, which has both signs in each, is at right angles to them.
GRADIENT = torch.tensor([0.1, 0.1, 1.0, 1.0, 10.0, 10.0], dtype=torch.float64)
EXTRA = 1e-4 * GRADIENT * torch.tensor([1.0, -1.0] * 3, dtype=torch.float64)


def flat_model() -> nn.Module:
    random = torch.Generator().manual_seed(0)
    start = {
        name: 0.01 * torch.randn(SIZE, generator=random, dtype=torch.float64) for name in ("one", "other", "still")
    }
    return nn.ParameterDict({name: nn.Parameter(value) for name, value in start.items()})


def train_flat(make: Any, *, max_norm: float | None, extra: bool) -> tuple[nn.Module, Any, list[list[float]]]:
    """Train where the loss is flat but for noise that turns its sign in each step, with an extra gradient or without.

    The rates rise and fall to 0, so that no momentum is left at the end. Return the rates of both groups as well.
    """
    model = flat_model()
    weights = [model.get_parameter(name) for name in ("one", "other")]
    optimizer, rates = make(*weights), []
    first = [group["lr"] for group in optimizer.param_groups]
    for step in range(STEPS):
        share = min((step + 1) / 100, (STEPS - step) / (STEPS - 100))
        rates.append([rate * share for rate in first])
        for group, rate in zip(optimizer.param_groups, rates[-1], strict=True):
            group["lr"] = rate
        for weight in weights:
            weight.grad = (-1) ** step * GRADIENT + (EXTRA if extra else 0.0)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(weights, max_norm)
        optimizer.step()
    return model, optimizer, rates


def two_groups(one: Tensor, other: Tensor, rate: float, decay: float) -> list[dict[str, Any]]:
    return [
        {"params": [other], "lr": rate, "weight_decay": decay},
        {"params": [one], "lr": rate / 3, "weight_decay": 0.1},
    ]


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda a, b: torch.optim.SGD(two_groups(a, b, 2e-3, 0.8)),
    "momentum": lambda a, b: torch.optim.SGD(two_groups(a, b, 4e-4, 0.8), momentum=0.9),
    "dampening": lambda a, b: torch.optim.SGD(two_groups(a, b, 1e-3, 0.8), momentum=0.8, dampening=0.5),
    "nesterov": lambda a, b: torch.optim.SGD(two_groups(a, b, 4e-4, 0.8), momentum=0.9, nesterov=True),
    "dampening alone": lambda a, b: torch.optim.SGD(two_groups(a, b, 2e-3, 0.8), dampening=0.5),
    "adam": lambda a, b: torch.optim.Adam(two_groups(a, b, 2e-3, 0.05)),
    "adamw": lambda a, b: torch.optim.AdamW(two_groups(a, b, 2e-3, 0.8)),
    "adamw, large eps": lambda a, b: torch.optim.AdamW(two_groups(a, b, 2e-3, 0.8), eps=1.0),
}


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_end_of_a_training_moves_by_its_reach(name: str, clipped: bool) -> None:
    max_norm = 5.0 if clipped else None
    clip_factor = 5.0 / float(torch.cat([GRADIENT, GRADIENT]).norm()) if clipped else 1.0
    model, optimizer, rates = train_flat(OPTIMIZERS[name], max_norm=max_norm, extra=False)
    moved, _, _ = train_flat(OPTIMIZERS[name], max_norm=max_norm, extra=True)
    training = Training.from_optimizer(optimizer, model, rates=rates, batch_size=1, clip_factor=clip_factor)
    moving = MovingWeights(model, ["one", "other"])
    diagonals = training.diagonals(moving)
    reach, held = diagonals.reach, diagonals.hold * diagonals.reach
    # Decay lets go of what was learnt: gradient descent on a curvature of `hold` comes to (1 − exp(−hold·reach)) / hold.
    expected = reach * -torch.expm1(-held) / held
    response = torch.cat([model.get_parameter(n) - moved.get_parameter(n) for n in ("one", "other")]).detach()
    ratios = response / EXTRA.repeat(2) / expected
    assert (ratios - 1).abs().max() < 0.01
    assert held.max() > 0.4  # so that what decay does is seen
    assert reach.max() / reach.min() > (9 if "adam" in name else 2)
    with pytest.raises(InputError, match="1 parameters that training never moved: 'still'"):
        training.diagonals(MovingWeights(model, "*"))


@pytest.mark.parametrize(
    "settings",
    [{"momentum": 0.9}, {"momentum": 0.8, "dampening": 0.5}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.0}],
)
def test_momentum_builds_up(settings: dict[str, Any]) -> None:
    """In a short training without a warm-up, steps have not got their momentum yet."""
    ends = []
    for pull in (1.0, 2.0):
        model = flat_model()
        weight = model.get_parameter("one")
        start = weight.detach().clone()
        optimizer = torch.optim.SGD([weight], lr=0.1, **settings)
        rates = [0.1, 0.05, 0.1, 0.02, 0.1, 0.1]
        for rate in rates:
            optimizer.param_groups[0]["lr"] = rate
            weight.grad = torch.full_like(weight, pull)
            optimizer.step()
        ends.append((start - weight.detach())[0])
        training = Training.from_optimizer(optimizer, model, rates=rates)
    reach = training.diagonals(MovingWeights(model, ["one"])).reach[0]
    assert float(ends[1] - ends[0]) == pytest.approx(float(reach), rel=1e-9)
    if settings["momentum"]:
        assert training.momentum_factor < 0.9


@pytest.mark.parametrize("amsgrad", [False, True])
def test_second_moments_are_those_that_the_last_step_divided_by(amsgrad: bool) -> None:
    model, random = flat_model(), torch.Generator().manual_seed(0)
    one = model.get_parameter("one")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0, amsgrad=amsgrad, betas=(0.9, 0.5))
    before = one.detach().clone()
    for step in range(8):
        one.grad = 10.0**-step * torch.randn(SIZE, generator=random, dtype=torch.float64)
        before.copy_(one.detach())
        optimizer.step()
    moments = Training.from_optimizer(optimizer, model, total_rate=1.0, batch_size=1).second_moments
    assert moments is not None
    mean = optimizer.state[one]["exp_avg"] / (1 - 0.9**8)
    torch.testing.assert_close((before - one).detach(), 0.1 * mean / (moments["one"].sqrt() + 1e-8))
    assert moments["other"].shape == ()
    assert not moments["other"].any()


def test_weights_without_a_gradient_have_no_reach() -> None:
    moments = {"one": torch.zeros(()), "other": torch.tensor([0.0, 1.0] * 3)}
    training = Training(optimizer="adamw", total_rate=2.0, batch_size=1, second_moments=moments)
    assert training.diagonals(MovingWeights(flat_model(), ["one", "other"])).reach.tolist() == pytest.approx(
        [0.0] * SIZE + [0.0, 2.0] * 3
    )


# Second moments, estimated.


class Slopes(nn.Module):
    """Its loss on an example is the example's product with the weights: its gradient is the example."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def product(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0])


@pytest.mark.parametrize(("optimizer", "part"), [("adamw", False), ("adamw", True), ("adam", False)])
def test_estimated_second_moments_have_the_mean_that_is_known(optimizer: str, part: bool) -> None:
    count, width, size, batches = 20, 50, 8, 1500
    examples = torch.randn(count, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.3
    model, c, decay = Slopes(width), 0.5, 0.2
    training = Training(
        optimizer=optimizer, total_rate=1.0, weight_decay=decay, batch_size=size, clip_factor=c,
        total=1000 if part else None,
    )  # fmt: skip
    moving = MovingWeights(model, "all")
    functional = FunctionalModel(model, moving)
    found = estimate_second_moments(functional, product, Data((examples,), "train"), training, batches=batches)
    mean, variance = examples.mean(0), examples.var(0, correction=0) / size
    if not part:  # no example is twice in a batch
        variance *= (count - size) / (count - 1)
    center = c * mean + (decay * moving.center if optimizer == "adam" else 0.0)
    variance *= c**2
    errors = (2 * variance**2 + 4 * center**2 * variance).sqrt() / math.sqrt(batches)
    deviations = (found - center**2 - variance) / errors
    # Both batches of an epoch together vary less than two of their own.
    assert (0.7 if part else 0.3) < deviations.square().mean() < 1.4


def language_model(**settings: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        vocab_size=61, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=40, max_position_embeddings=32, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | {"tie_word_embeddings": True} | settings))


def texts(count: int, lengths: Sequence[int] = (12,)) -> list[dict[str, Tensor]]:
    """Random tokens, some much more frequent than others."""
    random = torch.Generator().manual_seed(0)
    frequencies = 1 / torch.arange(1, 59).float()
    rows = [torch.multinomial(frequencies, lengths[i % len(lengths)], True, generator=random) + 3 for i in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


@pytest.mark.parametrize("count_alike", ["tokens", "sequences"])
def test_a_whole_batch_is_estimated_by_its_own_gradient(count_alike: Any) -> None:
    model, loss = language_model().double().eval(), losses.next_token()
    data = Data([row["input_ids"].tolist() for row in texts(7, (3, 9))], "train")
    training = Training(optimizer="adamw", total_rate=1.0, batch_size=7, count_alike=count_alike)
    functional = FunctionalModel(model, MovingWeights(model, "all"))
    found = estimate_second_moments(functional, loss, data, training)
    batch = data.whole()
    values, scored = loss(model, batch), token_mask(loss, batch)
    assert scored is not None
    means = [row[real].mean() for row, real in zip(values, scored, strict=True)]
    mean = values[scored].mean() if count_alike == "tokens" else torch.stack(means).mean()
    gradients = torch.autograd.grad(mean, list(model.parameters()))
    exact = torch.cat([gradient.reshape(-1) for gradient in gradients]).square()
    # Cross-entropy is float32 in part, whatever the model is.
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-9)
    in_parts = estimate_second_moments(functional, loss, data, training, at_once=3)
    torch.testing.assert_close(in_parts, exact, rtol=1e-4, atol=1e-9)


# Checkpoints of the Trainer.

FIRST_RATE, MAX_NORM, TEXTS = 1e-2, 0.5, 60


@dataclass
class Seen:
    """What a training did, written down as it went."""

    folder: Path
    model: Any
    rates: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    live: dict[int, Training] = field(default_factory=dict)

    def checkpoint(self, steps: int) -> Path:
        return self.folder / f"checkpoint-{steps}"

    def total_rate(self, steps: int) -> float:
        return sum(rates[0] for rates in self.rates[:steps])

    def clip_factor(self, steps: int) -> float:
        factors = np.minimum(1, MAX_NORM / np.array(self.norms[:steps]))
        return float(np.average(factors, weights=[rates[0] for rates in self.rates[:steps]]))


def train_by_trainer(folder: Path, model: Any, **settings: Any) -> Seen:
    """Train by the Hugging Face Trainer, two times four examples a step."""
    seen = Seen(folder, model)

    class Watch(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *given: Any, **now: Any) -> None:
            seen.rates.append([group["lr"] for group in now["optimizer"].param_groups])

        def on_save(self, args: Any, state: Any, *given: Any, **now: Any) -> None:
            steps = state.global_step
            seen.live[steps] = Training.from_optimizer(
                now["optimizer"], now["model"], total_rate=seen.total_rate(steps), batch_size=8
            )

    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=FIRST_RATE,
        report_to="none", use_cpu=True, disable_tqdm=True, max_grad_norm=MAX_NORM, seed=1,
        **{"weight_decay": 0.1, "warmup_steps": 5, "max_steps": 30, "logging_steps": 2, "save_steps": 20} | settings,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=texts(TEXTS), callbacks=[Watch()])
    clip = trainer.accelerator.clip_grad_norm_

    def watched(*given: Any, **named: Any) -> Any:
        norm = clip(*given, **named)
        seen.norms.append(float(norm))
        return norm

    trainer.accelerator.clip_grad_norm_ = watched
    trainer.train()
    for steps in seen.live:
        poison(seen.checkpoint(steps) / "training_args.bin", folder / "executed")
    return seen


class Poison:
    """A pickle that leaves a file behind when it is opened."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def poison(path: Path, trace: Path) -> None:
    torch.save({"state": {}, "param_groups": [Poison(trace)]}, path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return train_by_trainer(tmp_path_factory.mktemp("llama"), language_model())


def read(path: Path, model: Any = None, **settings: Any) -> Training:
    return Training.from_checkpoint(path, model, **{"examples": TEXTS, "max_grad_norm": MAX_NORM} | settings)


def same_moments(one: Training, other: Training) -> bool:
    given, live = one.second_moments, other.second_moments
    assert given is not None
    assert live is not None
    return given.keys() == live.keys() and all(torch.equal(given[name], live[name]) for name in given)


@pytest.mark.parametrize("steps", [20, 30])
def test_a_checkpoint_says_what_the_live_optimizer_does(llama: Seen, steps: int) -> None:
    training = read(llama.checkpoint(steps))
    decayed, others = training.groups
    assert same_moments(training, llama.live[steps])
    assert training.second_moments is not None
    assert "lm_head.weight" not in training.second_moments  # tied, and named once
    assert {tuple(group.parameters) for group in training.groups} == {
        tuple(group.parameters) for group in llama.live[steps].groups
    }
    assert (decayed.weight_decay, others.weight_decay) == (0.1, 0.0)
    assert "model.embed_tokens.weight" in decayed.parameters
    assert {name.split(".")[-2] for name in others.parameters} == {
        "input_layernorm", "post_attention_layernorm", "norm",
    }  # fmt: skip
    assert decayed.total_rate == others.total_rate == pytest.approx(llama.total_rate(steps), rel=1e-6)
    assert (training.optimizer, training.batch_size) == ("adamw", 8)
    truth = llama.clip_factor(steps)
    assert truth < 0.7
    assert training.clip_factor == pytest.approx(truth, rel=0.05)
    # AdamW's ε is the same, and so are the diagonals but for the clipping, which an optimizer does not know.
    moving = MovingWeights(llama.model, "all")
    own, live = (
        training.diagonals(moving),
        replace(llama.live[steps], clip_factor=training.clip_factor).diagonals(moving),
    )
    torch.testing.assert_close(own.reach, live.reach, rtol=1e-5, atol=0)
    torch.testing.assert_close(own.hold, live.hold)
    assert not (llama.folder / "executed").exists()


def test_an_optimizer_of_two_rates_has_a_sum_for_each(llama: Seen, tmp_path: Path) -> None:
    checkpoint = copied(llama.checkpoint(20), tmp_path)
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    for key in ("lr", "initial_lr"):
        saved["param_groups"][1][key] /= 4
    torch.save(saved, checkpoint / "optimizer.pt")
    one, other = (group.total_rate for group in read(checkpoint).groups)
    assert one == pytest.approx(llama.total_rate(20))
    assert other == pytest.approx(llama.total_rate(20) / 4)
    with pytest.raises(InputError, match=re.escape("1 numbers for 2 groups with rates 0.01, 0.0025")):
        read(checkpoint, total_rate=0.1)
    assert [group.total_rate for group in read(checkpoint, total_rate=[0.1, 0.2]).groups] == [0.1, 0.2]


def test_an_adapter_is_read_with_its_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    language_model().save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    seen = train_by_trainer(tmp_path / "out", adapted, max_steps=6, save_steps=6, logging_steps=1)
    checkpoint = seen.checkpoint(6)
    training = read(checkpoint)
    names = [name for group in training.groups for name in group.parameters]
    assert len(names) == 8
    assert all("lora_" in name for name in names)
    assert same_moments(training, seen.live[6])
    assert training.clip_factor == pytest.approx(seen.clip_factor(6), rel=1e-6)
    with pytest.raises(InputError, match="merged weights have no second moments"):
        read(checkpoint, adapted.merge_and_unload())


@pytest.mark.parametrize("optimizer", ["adamw_torch", "sgd"])
def test_layer_norms_by_any_name_are_not_decayed(tmp_path: Path, optimizer: str) -> None:
    config = transformers.GPT2Config(vocab_size=61, n_embd=24, n_layer=2, n_head=2, n_positions=32)
    seen = train_by_trainer(
        tmp_path, transformers.GPT2LMHeadModel(config), max_steps=4, save_steps=4, logging_steps=1, optim=optimizer,
        lr_scheduler_type="cosine", warmup_steps=1,
    )  # fmt: skip
    training = read(seen.checkpoint(4))
    by_decay = {group.weight_decay: set(group.parameters) for group in training.groups}
    assert by_decay == {group.weight_decay: set(group.parameters) for group in seen.live[4].groups}
    assert "transformer.h.0.ln_1.weight" in by_decay[0.0]
    assert [group.total_rate for group in training.groups] == pytest.approx([seen.total_rate(4)] * 2)
    assert training.optimizer == optimizer.partition("_")[0]
    if training.optimizer == "sgd":
        assert (training.second_moments, training.batch_size) == (None, None)
    else:
        assert same_moments(training, seen.live[4])


DECAYED = {
    "now": lambda name: "norm" not in name,
    "4.46": lambda name: "layernorm" not in name,
    "oldest": lambda name: True,
}
"""Which weights of a Llama model Trainers of the last years decay."""


@pytest.mark.parametrize("version", DECAYED)
def test_groups_of_older_trainers_are_made_again(llama: Seen, tmp_path: Path, version: str) -> None:
    model = language_model(tie_word_embeddings=False)
    split = [[], []]
    for name, value in model.named_parameters():
        split[not DECAYED[version](name)].append((name, value))
    decays = zip(split, (0.1, 0.0), strict=True)
    groups = [{"params": [value for _, value in group], "weight_decay": decay} for group, decay in decays]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for value in model.parameters():
        value.grad = torch.randn_like(value)
    optimizer.step()
    checkpoint = copied(llama.checkpoint(20), tmp_path)
    torch.save(optimizer.state_dict(), checkpoint / "optimizer.pt")
    training = read(checkpoint, model, total_rate=1.0)
    assert [list(group.parameters) for group in training.groups] == [[n for n, _ in group] for group in split if group]
    assert training.second_moments is not None
    for name, value in model.named_parameters():
        assert value.grad is not None
        torch.testing.assert_close(training.second_moments[name], value.grad.square(), rtol=1e-3, atol=0)


SCHEDULES = {
    "linear": optimization.get_linear_schedule_with_warmup,
    "cosine": optimization.get_cosine_schedule_with_warmup,
    "constant": lambda optimizer, warm_up, total: optimization.get_constant_schedule_with_warmup(optimizer, warm_up),
}


@pytest.mark.parametrize("lag", [1, 0])
@pytest.mark.parametrize("warm_up", [0, 60, 640])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_rebuilt_from_few_rates(name: str, warm_up: int, lag: int) -> None:
    rates = rates_of(lambda optimizer: SCHEDULES[name](optimizer, warm_up, 1000), 1001)
    for steps in (600, 1000):
        logged = [Point(step, rates[step - lag]) for step in range(100, steps + 1, 100)]
        rebuilt = rebuild(logged, Point(steps, rates[steps]), 1000)
        assert rebuilt is not None
        if rebuilt.determined:
            assert (rebuilt.least + rebuilt.most) / 2 == pytest.approx(sum(rates[:steps]), rel=0.01)
        else:  # a constant rate tells nothing of a warm-up that ended before the first line
            assert (name, warm_up) in (("constant", 0), ("constant", 60))
            assert rebuilt.least <= sum(rates[:steps]) <= rebuilt.most


def test_other_schedules_are_not_taken_for_known_ones() -> None:
    rates = rates_of(lambda optimizer: optimization.get_polynomial_decay_schedule_with_warmup(optimizer, 10, 1000, power=2), 1001)  # fmt: skip
    logged = [Point(step, rates[step - 1]) for step in (250, 500, 750, 1000)]
    assert rebuild(logged, Point(1000, rates[1000]), 1000) is None


def rates_of(make: Any, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, rates = make(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


# Second moments, compared.


@pytest.fixture(scope="module")
def moments(llama: Seen) -> Any:
    """Those of a checkpoint, and those that are estimated there."""
    training = read(llama.checkpoint(30))
    model = copy.deepcopy(llama.model).eval()
    moving = MovingWeights(model, "all")
    data = Data([row["input_ids"].tolist() for row in texts(TEXTS)], "train")
    estimated = estimate_second_moments(FunctionalModel(model, moving), losses.next_token(), data, training)
    return SimpleNamespace(given=training.flat_second_moments(moving), estimated=estimated, moving=moving)


def test_second_moments_of_the_checkpoint_are_recognised(moments: Any) -> None:
    rows = compare_second_moments(moments.given, moments.estimated, moments.moving)
    require_similar_moments(rows)
    whole = rows[-1]
    assert 0.6 < whole.ratio < 1.7
    assert whole.rank_correlation > 0.8
    assert [row.name for row in rows[:-1]] == list(moments.moving.names)
    twice = compare_second_moments(4 * moments.given, moments.given, moments.moving)
    assert all(row.ratio == pytest.approx(2.0) and row.rank_correlation == pytest.approx(1.0) for row in twice)


def test_second_moments_of_something_else_are_refused(moments: Any) -> None:
    def compared(given: Tensor) -> list[Any]:
        return compare_second_moments(given, moments.estimated, moments.moving)

    for factor in (10_000, 1 / 100):
        with pytest.raises(InputError, match=r"roots .* times as large"):
            require_similar_moments(compared(moments.given * factor))
    with pytest.warns(EstimateWarning, match="remember steps when gradients were others"):
        require_similar_moments(compared(moments.given * 100))
    order = torch.randperm(len(moments.given), generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match=r"rank correlation of -?0.0"):
        require_similar_moments(compared(moments.given[order]))
    # Each tensor in the place of the next one of its shape, as where names are read in another order: embeddings stay,
    # and so does much of the order of all weights together.
    moving, exchanged = moments.moving, moments.given.clone()
    for shape in set(moving.shapes):
        alike = [name for name, own in zip(moving.names, moving.shapes, strict=True) if own == shape]
        for name, other in zip(alike, alike[1:] + alike[:1], strict=True):
            exchanged[moving.slices[name]] = moments.given[moving.slices[other]]
    rows = compared(exchanged)
    assert rows[-1].ratio == pytest.approx(compared(moments.given)[-1].ratio)
    assert np.median([row.rank_correlation for row in rows[:-1]]) < 0.35
    with pytest.raises(InputError, match=r"\(0\.[123]\d within tensors\)"):
        require_similar_moments([*rows[:-1], compared(moments.given)[-1]])
    # The largest tensors' are the smallest, and within each nothing is amiss.
    turned = moments.given.clone()
    for place in moving.slices.values():
        turned[place] /= turned[place].mean() ** 2
    turned *= (moments.given.sqrt().mean() / turned.sqrt().mean()) ** 2
    with pytest.raises(InputError, match=r"rank correlation of -?0\.[0-4]\d \(0\.[789]\d within tensors\)"):
        require_similar_moments(compared(turned))


# What cannot be used.


def copied(checkpoint: Path, folder: Path) -> Path:
    return Path(shutil.copytree(checkpoint, folder / checkpoint.name))


def test_a_state_that_runs_code_is_refused_and_does_not_run(llama: Seen, tmp_path: Path) -> None:
    checkpoint, trace = copied(llama.checkpoint(20), tmp_path), tmp_path / "executed"
    for write in (poison, lambda path, trace: path.write_bytes(pickle.dumps(Poison(trace), 2))):
        write(checkpoint / "optimizer.pt", trace)
        with pytest.raises(InputError, match=r"no plain state .* nothing in it was executed"):
            read(checkpoint)
        assert not trace.exists()
    poison(checkpoint / "optimizer.pt", trace)
    torch.load(checkpoint / "optimizer.pt", weights_only=False)
    assert trace.exists()  # as it would have, had anything opened it


def test_checkpoints_that_do_not_say_enough(llama: Seen, tmp_path: Path) -> None:
    checkpoint = copied(llama.checkpoint(20), tmp_path)
    log = json.loads((checkpoint / "trainer_state.json").read_text())

    def logged(lines: Iterable[Any]) -> Path:
        (checkpoint / "trainer_state.json").write_text(json.dumps(log | {"log_history": list(lines)}))
        return checkpoint

    lines = log["log_history"]
    with pytest.raises(InputError, match=r"batch_size: got 4 examples on each device.*; or examples"):
        read(checkpoint, examples=None)
    with pytest.raises(InputError, match="8 steps in an epoch of 1000 examples: it could be 128 to 140"):
        read(checkpoint, examples=1000)
    assert read(checkpoint, examples=None, batch_size=8).batch_size == 8
    with pytest.raises(InputError, match=r"0 logged learning rates.*pass total_rate"):
        read(logged([]))
    with pytest.raises(InputError, match=r"gradient norms.*pass clip_factor"):
        read(logged([]), total_rate=0.1)
    assert read(logged([]), total_rate=0.1, max_grad_norm=0).clip_factor == 1.0
    assert read(logged([]), total_rate=0.1, clip_factor=0.6).clip_factor == 0.6
    with pytest.raises(InputError, match="learning rates that no constant, linear or cosine schedule gives"):
        read(logged({**line, "learning_rate": line["learning_rate"] ** 2} for line in lines))
    with pytest.warns(EstimateWarning, match="estimated from 2 log lines of 20 steps"):
        assert read(logged(lines[-2:])).groups[0].total_rate == pytest.approx(llama.total_rate(20))
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    for group in saved["param_groups"]:
        group["lr"] = group["initial_lr"]
    torch.save(saved, checkpoint / "optimizer.pt")
    with pytest.raises(
        InputError, match=r"1 learning rates that do not determine the warm-up \(the sum is 0\.095 to 0\.2\)"
    ):
        read(logged([lines[-1] | {"learning_rate": FIRST_RATE}]))
    (checkpoint / "trainer_state.json").write_text("{")
    with pytest.raises(InputError, match="no log that can be read"):
        read(checkpoint)


def test_other_states_are_refused(llama: Seen, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"without optimizer.pt.*checkpoint-30"):
        read(llama.folder)
    checkpoint = copied(llama.checkpoint(20), tmp_path)
    with pytest.raises(
        InputError, match="the state of 20 parameters, in groups of 15 and 5, expected that of the model's 29"
    ):
        read(checkpoint, language_model(num_hidden_layers=3))
    with pytest.raises(InputError, match="each of its parameter's shape"):
        read(checkpoint, language_model(intermediate_size=44))
    torch.save({"model": 1}, checkpoint / "optimizer.pt")
    with pytest.raises(InputError, match="something else than an optimizer's state"):
        read(checkpoint)
    (checkpoint / "optimizer.pt").unlink()
    (checkpoint / "global_step20").mkdir()
    with pytest.raises(InputError, match=r"in shards \(global_step20\).*second moments are then estimated"):
        read(checkpoint)


def stepped(make: Any) -> dict[str, Any]:
    weight = nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.ones(4, 4)
    optimizer = make([weight])
    optimizer.step()
    return optimizer.state_dict()


_PACKED = {"state1": torch.zeros(16, dtype=torch.uint8), "state2": torch.zeros(16, dtype=torch.uint8)}
OTHERS: dict[str, Any] = {
    "Adafactor": lambda: stepped(transformers.Adafactor),
    "Adafactor of torch": lambda: stepped(torch.optim.Adafactor),
    "Muon": lambda: stepped(torch.optim.Muon),
    "RMSprop": lambda: stepped(torch.optim.RMSprop),
    "an 8-bit optimizer": lambda: {
        "state": {0: {"step": 1, "qmap1": torch.zeros(256), **_PACKED}},
        "param_groups": [{"params": [0], "lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}],
    },
    "Lion": lambda: {
        "state": {0: {"exp_avg": torch.zeros(4, 4)}},
        "param_groups": [{"params": [0], "lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0}],
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_are_refused_by_name(llama: Seen, tmp_path: Path, name: str) -> None:
    checkpoint = copied(llama.checkpoint(20), tmp_path)
    torch.save(OTHERS[name](), checkpoint / "optimizer.pt")
    with pytest.raises(InputError, match=f"optimizer: got {name.partition(' of ')[0]}, expected SGD, Adam or AdamW"):
        read(checkpoint, flat_model())


def test_live_optimizers_that_cannot_be_used() -> None:
    model = flat_model()
    with pytest.raises(InputError, match="got Adagrad, expected SGD"):
        Training.from_optimizer(torch.optim.Adagrad(model.parameters()), model, total_rate=1.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="an optimizer of other parameters: 3 of its 3 are not the model's"):
        Training.from_optimizer(sgd, copy.deepcopy(model), total_rate=1.0)
    nothing: tuple[dict[str, Any], ...] = ({"total_rate": 0.0}, {"rates": [0.0] * 5}, {"rates": [math.nan]})
    for given in nothing:
        with pytest.raises(InputError, match="total_rate"):
            Training.from_optimizer(sgd, model, **given)
    with pytest.raises(InputError, match="neither it nor rates"):
        Training.from_optimizer(sgd, model)
    still = [{"params": [model.get_parameter("one")]}, {"params": [model.get_parameter("other")], "lr": 0.0}]
    training = Training.from_optimizer(torch.optim.SGD(still, lr=0.1), model, total_rate=[1.0, 0.0])
    assert [group.parameters for group in training.groups] == [("one",)]
    different = [{"params": [model.get_parameter("one")]}, {"params": [model.get_parameter("other")], "momentum": 0.5}]
    with pytest.raises(InputError, match=re.escape("groups of different momentum: 0, 0.5")):
        Training.from_optimizer(torch.optim.SGD(different, lr=0.1), model, total_rate=1.0)


ADAMW: dict[str, Any] = {"optimizer": "adamw", "total_rate": 1.0, "batch_size": 8}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": "lion"}, "optimizer: got 'lion'.*the closest is 'adamw'"),
        ({"total_rate": 0.0}, "total_rate: got 0.0"),
        ({"total_rate": None}, "total_rate: got None"),
        ({"batch_size": None}, "batch_size: got None"),
        ({"batch_size": True}, "batch_size: got True"),
        ({"weight_decay": -0.1}, "weight_decay: got -0.1"),
        ({"optimizer": "sgd", "momentum": 1.0}, "momentum: got 1.0"),
        ({"clip_factor": 1.2}, "clip_factor: got 1.2"),
        ({"count_alike": "words"}, "count_alike: got 'words'"),
        ({"times_seen": [1, -1]}, "times_seen"),
        ({"groups": [ParameterGroup(parameters=["one"], total_rate=1.0)] * 2}, "'one' in two of them"),
    ],
)
def test_numbers_that_cannot_be(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Training(**ADAMW | settings)


def test_names_are_the_models() -> None:
    model = language_model()
    for name, said in (("lm_head.weight", "another name as well"), ("head", "which the model has not")):
        with pytest.raises(InputError, match=said):
            Training(**ADAMW, groups=[ParameterGroup(parameters=[name], total_rate=1.0)]).check(model)
    wrong = {"model.norm.weight": torch.ones(3)}
    with pytest.raises(InputError, match=re.escape("got shape (3,), expected (24,), the parameter's")):
        Training(**ADAMW, second_moments=wrong).check(model)
    with pytest.raises(InputError, match="expected those of the optimizer, or an estimate"):
        Training(**ADAMW).diagonals(MovingWeights(model, "all"))


def test_shares_of_the_loss() -> None:
    counts = [1, 3, 4]
    assert Training(**ADAMW).shares(counts).tolist() == [1 / 8, 3 / 8, 4 / 8]
    alike = Training(**ADAMW, count_alike="sequences")
    assert alike.shares(counts) == pytest.approx([1 / 3] * 3)
    assert replace(alike, total=30).shares(counts) == pytest.approx([1 / 30] * 3)
    assert Training(**ADAMW, times_seen=[2, 0, 1]).shares(counts) == pytest.approx([2 / 6, 0, 4 / 6])
    with pytest.raises(InputError, match="7 tokens, for examples that are 8 of them"):
        Training(**ADAMW, total=7).shares(counts)
    with pytest.raises(InputError, match="2 numbers, expected 3"):
        Training(**ADAMW, times_seen=[1, 1]).shares(counts)


def test_the_page_runs_as_it_stands(llama: Seen, capsys: Any) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    for block in blocks:
        here = block.replace("out/checkpoint-1500", str(llama.checkpoint(30))).replace("12_000", str(TEXTS))
        exec(here, names)
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in said] == ["Trained by AdamW"] * 2 + ["Trained by SGD"]
    for line in (said[0], said[2]):
        assert line in PAGE.read_text()

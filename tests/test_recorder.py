"""Trainings that are recorded: repeated to the bit, refused by name, and kept in files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import jostle
from jostle.data.datasets import Data
from jostle.models.functional import sample_means
from jostle.training import Recorded, Recorder, load_record, repeat_check
from jostle.training.backwards import Backwards
from jostle.training.recorder import cut_to
from jostle.training.records import TrainerLoss
from jostle.training.repeatable import Repetition
from jostle.training.trainer_callback import RecordingCallback

WORDS, TEXTS, NUDGE = 40, 34, 1e-5


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def network() -> nn.Sequential:
    model = nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)
    )
    model[4].weight.requires_grad_(False)
    return model


def examples(count: int = 30) -> TensorDataset:
    return TensorDataset(torch.randn(count, 5), torch.randint(0, 3, (count,)))


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [value for value in model.parameters() if value.ndim > 1]
    others = [value for value in model.parameters() if value.ndim < 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.3}, {"params": others, "lr": 0.03}], lr=0.01)


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (1 + step) / 5))


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Any,
    *,
    epochs: int = 4,
    accumulate: int = 2,
    clip_norm: float | None = 0.5,
    between: Callable[[int], None] = lambda step: None,
) -> None:
    """As people write them: steps go over the ends of epochs, and there is an evaluation now and then."""
    schedule, number = warm_up(optimizer), 0
    model.train()
    for _ in range(epochs):
        for batch in batches:
            number += 1
            (F.cross_entropy(model(batch[0]), batch[1]) / accumulate).backward()
            if number % accumulate:
                continue
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            between(number)
        torch.rand(3)  # what an evaluation draws


def recorded(model: nn.Module | None = None, **settings: Any) -> tuple[Recorded, nn.Module]:
    model = network() if model is None else model
    optimizer = in_groups(model)
    recorder = Recorder(model, optimizer, loss=losses)
    loop(model, optimizer, recorder.watch(DataLoader(examples(), batch_size=6, shuffle=True)), **settings)
    return recorder.finish(), model


def assert_repeated(training: Recorded, model: nn.Module) -> None:
    """To the bit, all that there is; against the model itself."""
    repetition = Repetition(training)
    repetition.go()
    for name, value in model.state_dict().items():
        assert torch.equal(repetition.model.state_dict()[name], value), name
    assert training.compare(repetition).equal
    assert str(repeat_check(training)) == f"{len(training.steps)} steps repeated: equal to the bit"


def test_a_loop_is_repeated_to_the_bit() -> None:
    training, model = recorded()
    assert [len(step) for step in training.steps] == [2] * 10
    assert training.clip_norm == 0.5  # seen
    assert (
        training.optimizer([value for value in training.model.parameters() if value.requires_grad]).param_groups[0][
            "fused"
        ]
        is None
    )
    assert_repeated(training, model)


def test_recording_changes_nothing() -> None:
    training, model = recorded()
    torch.manual_seed(0)
    plain = network()
    loop(plain, in_groups(plain), DataLoader(examples(), batch_size=6, shuffle=True))
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
    before = torch.get_rng_state()
    repeat_check(training)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["one cycle", "workers", "sgd", "sum", "number", "without a loader", "bfloat16"])
def test_other_loops_are_repeated_to_the_bit(name: str) -> None:
    model, data = network(), examples()
    optimizer: Any = (
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True) if name == "sgd" else in_groups(model)
    )
    settings: dict[str, Any] = {"sum": {"accumulate": "sum"}, "number": {"accumulate": 0.3}}.get(name, {})
    if name == "without a loader":
        settings["data"] = data.tensors
    recorder = Recorder(model, optimizer, loss=losses, clip_norm=None, **settings)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=8) if name == "one cycle" else None
    if name == "without a loader":
        loader: Any = (recorder.batch(torch.randperm(30)[:7]) for _ in range(8))
    else:
        loader = recorder.watch(DataLoader(data, batch_size=4, shuffle=True, num_workers=2 * (name == "workers")))
    model.train()
    for number, batch in enumerate(loader):
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "bfloat16"):
            loss = F.cross_entropy(model(batch[0]), batch[1])
        (loss * {"sum": 1.0, "number": 0.3}.get(name, 1.0)).backward()
        if number % 2 or name not in ("sum", "number"):
            optimizer.step()
            optimizer.zero_grad()
            if cycle is not None:
                cycle.step()
    training = recorder.finish()
    assert len(training.steps) == (4 if name in ("sum", "number") else 8)
    assert_repeated(training, model)


def by_autocast(model: nn.Module, loss: Any) -> Recorded:
    """One step of SGD in mixed precision."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(model, optimizer, loss=loss, clip_norm=None)
    for batch in recorder.watch(DataLoader(examples(), batch_size=10)):
        with torch.autocast("cpu", torch.bfloat16):
            F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        break
    return recorder.finish()


def test_the_derivative_of_mixed_precision_is_in_full() -> None:
    """One step from w0 to w1: an effect is rate/B·g(w1)ᵀgᵢ(w0), with gradients in full precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    training, query = by_autocast(model, losses), examples()[20:24]
    found = jostle.replay(training, query, check=0).effects[:10]

    def gradients(batch: Any, model: nn.Module) -> Tensor:
        rows = [torch.autograd.grad(losses(model, batch)[row], [*model.parameters()]) for row in range(len(batch[0]))]
        return torch.stack([torch.cat([one.flatten() for one in row]) for row in rows])

    # `model` itself has come to w1.
    expected = 0.01 * gradients(training.data.batch(np.arange(10)), training.model) @ gradients(query, model).T
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))


def test_with_dropout_the_derivative_keeps_the_precision_that_masks_belong_to() -> None:
    seen: list[bool] = []

    def watched(model: nn.Module, batch: Any) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return losses(model, batch)

    for dropout in (0.2, 0.0):
        training = by_autocast(nn.Sequential(nn.Linear(5, 16), nn.Dropout(dropout), nn.Linear(16, 3)), watched)
        repetition = Repetition(training)
        repetition.go()
        seen.clear()
        Backwards(repetition).of_queries([examples()[:3]])
        assert seen
        assert all(seen) == any(seen) == (dropout > 0)


def test_a_loop_that_divides_by_all_tokens_of_a_step() -> None:
    rows = torch.randint(0, 7, (24, 6))
    lengths = torch.randint(2, 7, (24,))
    data = [
        {"input_ids": row[:length].tolist(), "labels": row[:length].tolist()}
        for row, length in zip(rows, lengths, strict=True)
    ]
    collate = jostle.data.datasets.collate_samples
    config = transformers.LlamaConfig(
        vocab_size=7,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss = TrainerLoss()
    recorder = Recorder(model, optimizer, loss=loss, count_alike="tokens", accumulate="tokens")
    parts: list[Any] = []
    for batch in recorder.watch(DataLoader(data, batch_size=4, collate_fn=collate, shuffle=True)):
        parts.append(batch)
        if len(parts) == 3:
            total = sum(int(loss.token_mask(part).sum()) for part in parts)
            for part in parts:
                (loss(model, part).sum() / total).backward()
            optimizer.step()
            optimizer.zero_grad()
            parts.clear()
    training = recorder.finish()
    for step in training.steps:
        np.testing.assert_allclose(sum(part.share for part in step), 1, rtol=1e-12)
    assert_repeated(training, model)


def texts() -> list[dict[str, list[int]]]:
    random = np.random.default_rng(0)
    return [{"input_ids": random.integers(2, WORDS, random.integers(4, 12)).tolist()} for _ in range(TEXTS)]


def tokenizer() -> Any:
    words = {word: number for number, word in enumerate(["<pad>", "<unk>", *(f"w{i}" for i in range(WORDS - 2))])}
    model: Any = tokenizers.models.WordLevel(words, unk_token="<unk>")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), pad_token="<pad>", unk_token="<unk>", mask_token="<unk>"
    )


def language_model(name: str) -> Any:
    if name.startswith("llama"):
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, attention_dropout=0.1,
        ))  # fmt: skip
        target = ["q_proj", "v_proj"]
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0,
        ))  # fmt: skip
        target = ["c_attn"]
    if "LoRA" not in name:
        return model
    lora = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=target, fan_in_fan_out="llama" not in name
    )
    return peft.get_peft_model(model, lora)


def train(
    model: Any,
    folder: Path,
    recording: transformers.TrainerCallback,
    *,
    collate: Any = None,
    data: Any = None,
    **settings: Any,
) -> None:
    given: dict[str, Any] = {
        "max_steps": 20, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0,
        "lr_scheduler_type": "linear", "warmup_steps": 3, "learning_rate": 1e-2, "weight_decay": 0.1, "report_to": [],
        "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "logging_steps": 5,
    } | settings  # fmt: skip
    collate = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False) if collate is None else collate
    arguments = transformers.TrainingArguments(output_dir=str(folder), **given)
    rows: Any = texts() if data is None else data
    transformers.Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows, data_collator=collate, callbacks=[recording]
    ).train()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt2", {}),
        ("llama", {}),
        ("llama with LoRA", {}),
        ("gpt2 with LoRA", {}),
        ("llama", {"bf16": True}),
        ("llama", {"dataloader_num_workers": 2}),
        ("llama", {"eval_strategy": "steps", "eval_steps": 3, "gradient_checkpointing": True}),
        ("gpt2", {"optim": "sgd", "gradient_accumulation_steps": 3, "max_grad_norm": 0.0}),
    ],
)
def test_a_hugging_face_training_is_repeated_to_the_bit(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model, recording = language_model(name), RecordingCallback()
    train(model, tmp_path, recording, **settings)
    training = recording.training
    assert len(training.steps) == 20
    rates = {group["lr"] for group in Repetition(training).optimizer.param_groups}
    assert rates == {0.0}  # the warm-up's first
    # 34 texts are 9 batches: the last step of an epoch has fewer, and each divides by all tokens of its step.
    accumulated = settings.get("gradient_accumulation_steps", 2)
    assert [len(step) for step in training.steps[:5]] == ([2, 2, 2, 2, 1] if accumulated == 2 else [3] * 5)
    assert_repeated(training, model)


def test_the_record_of_a_trainer_leaves_it_as_it_is(tmp_path: Path) -> None:
    ends = []
    for recording in (RecordingCallback(), transformers.TrainerCallback()):
        torch.manual_seed(0)
        model = language_model("gpt2")
        train(model, tmp_path, recording)
        ends.append(model.state_dict())
        assert not model._forward_pre_hooks
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@pytest.mark.parametrize("name", ["gpt2", "gpt2 with LoRA"])
def test_derivatives_of_a_hugging_face_training(name: str, tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)  # GPT-2 is in it throughout; Llama takes norms in float32 in any case
    model, recording = language_model(name).double(), RecordingCallback()
    train(model, tmp_path, recording, max_steps=8, adam_epsilon=1e-4)
    training = recording.training
    # transformers scores in float32 whatever the model is in, and the repetition in float64: equal to float32 alone.
    check = repeat_check(training)
    assert 0 < check.largest < 1e-4
    query = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)(texts()[:3])
    asked = {name: value for name, value in query.items()}
    training = dataclasses.replace(training, sums=None)
    found = jostle.replay(training, asked, smoothing=0.0, check=0).effects
    for example in (3, 20):
        sides = []
        for nudge in (NUDGE, -NUDGE):
            weights = np.ones(TEXTS)
            weights[example] += nudge
            repetition = Repetition(training, weights)
            repetition.go()
            loss, batch = training.objective.loss, Data(asked, "query").whole()
            with torch.no_grad():
                sides.append(sample_means(loss(repetition.model.eval(), batch), loss, batch))
        truth = -((sides[0] - sides[1]) / (2 * NUDGE)).numpy()
        assert np.abs(truth).max() > 1e-4
        assert np.linalg.norm(found[example] - truth) <= 1e-5 * np.linalg.norm(truth)


def test_derivatives_of_a_loop_whose_steps_go_over_the_ends_of_epochs() -> None:
    torch.set_default_dtype(torch.float64)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    recorder = Recorder(model, optimizer, loss=losses)
    loop(model, optimizer, recorder.watch(DataLoader(examples(), batch_size=6, shuffle=True)))
    training = recorder.finish()
    assert_repeated(training, model)
    # Random numbers were drawn between the two batches of such a step, beside those of dropout.
    query = examples(4).tensors
    found = jostle.replay(training, query, smoothing=0.0, check=0).effects
    for example in range(0, 30, 7):
        sides = []
        for nudge in (NUDGE, -NUDGE):
            weights = np.ones(30)
            weights[example] += nudge
            repetition = Repetition(training, weights)
            repetition.go()
            with torch.no_grad():
                sides.append(losses(repetition.model.eval(), query))
        truth = -((sides[0] - sides[1]) / (2 * NUDGE)).numpy()
        assert np.linalg.norm(found[example] - truth) <= 1e-5 * np.linalg.norm(truth)


def noisy(rows: list[Any]) -> Any:
    inputs, labels = torch.utils.data.default_collate(rows)
    return inputs + 0.01 * torch.randn_like(inputs), labels


def test_a_collate_function_that_draws_is_refused_at_the_first_step(tmp_path: Path) -> None:
    model = network()
    optimizer = in_groups(model)
    recorder = Recorder(model, optimizer, loss=losses)
    calls = []

    def late(rows: list[Any]) -> Any:
        calls.append(len(rows))
        return noisy(rows) if len(calls) > 4 else torch.utils.data.default_collate(rows)

    loop(model, optimizer, recorder.watch(DataLoader(examples(), batch_size=6, shuffle=True, collate_fn=late)))
    training = recorder.finish()
    with pytest.raises(
        jostle.InputError,
        match=r"step 0: got a batch \w+ of examples \[.*\], expected the batch \w+ that the training saw",
    ):
        repeat_check(training)  # the first batches come out noisy now
    calls.clear()
    with pytest.raises(jostle.InputError, match="step 2: got a batch"):
        repeat_check(training)

    recording = RecordingCallback()
    masked = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=True, mlm_probability=0.5)
    train(language_model("gpt2"), tmp_path, recording, collate=masked, max_steps=3)
    with pytest.raises(jostle.InputError, match="step 0: got a batch"):
        jostle.replay(recording.training, texts()[:2])


def test_what_differs_is_named() -> None:
    def disturb(step: int) -> None:
        if step == 12:
            with torch.no_grad():
                model[0].weight[0, 0] += 1e-3

    model = network()
    training, _ = recorded(model, between=disturb)
    found = repeat_check(training)
    assert (found.step, found.equal) == (6, False)
    assert "step 6 of 10 is the first that differs, and" in str(found)
    assert "weights or gradients that were changed between steps" in str(found)
    model = network()
    optimizer = in_groups(model)
    recorder = Recorder(model, optimizer, loss=losses)
    loop(model, optimizer, recorder.watch(DataLoader(examples(), batch_size=6)))
    with torch.no_grad():
        model[0].weight *= 0.9
    found = repeat_check(recorder.finish())
    assert (found.step, found.name) == (None, "0.weight")
    assert "weights were changed after the last step" in str(found)
    wrong = dataclasses.replace(training, clip_norm=None)
    assert repeat_check(wrong).step is not None


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([0.7, 0.9999992, 0.9999991], 1.0),
        ([3.0017, 2.9, 2.7], None),
        ([0.4999998, 0.3], 0.5),
        ([0.499, 0.3], None),
        ([0.1249998, 0.1249997, 0.1], 0.125),
        ([1.2345, 1.2345], None),
        ([], None),
        ([0.0], None),
    ],
)
def test_clipping_is_seen(lengths: list[float], expected: float | None) -> None:
    assert cut_to(np.array(lengths)) == expected


def test_save_and_load(tmp_path: Path) -> None:
    training, model = recorded()
    training.save(tmp_path / "record")
    other = network()
    with torch.no_grad():
        other[4].weight.copy_(model[4].weight)  # frozen: it is not in the record
    data = training.data.whole()
    again = load_record(tmp_path / "record", model=other, data=TensorDataset(*data), loss=losses)
    assert_repeated(again, model)
    query = examples(4).tensors
    np.testing.assert_array_equal(
        jostle.replay(again, query, check=0).effects, jostle.replay(training, query, check=0).effects
    )
    assert not [
        path for path in (tmp_path / "record").iterdir() if path.suffix not in (".json", ".npz", ".safetensors")
    ]


def test_save_and_load_a_trainers(tmp_path: Path) -> None:
    model, recording = language_model("llama with LoRA"), RecordingCallback()
    train(model, tmp_path, recording, max_steps=4, bf16=True)
    recording.training.save(tmp_path / "record")
    collate = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    assert_repeated(load_record(tmp_path / "record", model=model, data=texts(), collate=collate), model)
    names = {path.name: path.stat().st_size for path in (tmp_path / "record").iterdir()}
    assert names["start.safetensors"] < 20_000  # the adapter alone
    with pytest.raises(
        jostle.InputError, match=r"data: got others \(\w{16}\), expected the training examples.* \(\w{16}\)"
    ):
        load_record(tmp_path / "record", model=model, data=texts()[::-1], collate=collate)
    with torch.no_grad():
        model.get_base_model().lm_head.weight[0, 0] += 1
    with pytest.raises(
        jostle.InputError, match=r"model: got others \(\w{16}\), expected the frozen weights of the training \(\w{16}\)"
    ):
        load_record(tmp_path / "record", model=model, data=texts(), collate=collate)


def test_a_record_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    training, model = recorded()
    place, data = tmp_path / "record", training.data.whole()

    def load(match: str, **given: Any) -> None:
        settings: dict[str, Any] = {"model": model, "data": data, "loss": losses} | given
        with pytest.raises(jostle.InputError, match=match):
            load_record(place, **settings)

    for name, match in (
        ("start.safetensors", "start.safetensors was cut short: 100 of"),
        ("steps.npz", "steps.npz was cut short"),
    ):
        training.save(place)
        (place / name).write_bytes((place / name).read_bytes()[:100])
        load(match)
    training.save(place)
    content = bytearray((place / "end.safetensors").read_bytes())
    content[-1] ^= 1
    (place / "end.safetensors").write_bytes(content)
    load("end.safetensors does not have its checksum")
    (place / "end.safetensors").unlink()
    load("which has no end.safetensors")
    training.save(place)
    load("loss: got none, expected the loss of the training: a function of your own", loss=None)
    load("model: got one whose trained weights", model=nn.Linear(5, 3))
    load("data: got others", data=examples().tensors)
    (place / "record.json").write_text((place / "record.json").read_text()[:50])
    load("whose record.json cannot be read")
    (place / "record.json").write_text(json.dumps({"format": 99, "files": {}}))
    load("of format 99")
    (place / "record.json").unlink()
    load("it was never finished")


class Adafactor(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})


def test_bad_input() -> None:
    def refused(match: str, model: Any = None, optimizer: Any = None, **given: Any) -> None:
        model = network() if model is None else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
        with pytest.raises(jostle.InputError, match=match):
            Recorder(model, optimizer, **({"loss": losses} | given))

    model = network()
    refused("optimizer: got a Adafactor, expected torch.optim.SGD, Adam or AdamW", model, Adafactor(model.parameters()))
    refused("got amsgrad=True", model, torch.optim.Adam(model.parameters(), amsgrad=True))
    refused(
        "optimizer: got one without 5.bias, which requires a gradient",
        model,
        torch.optim.SGD([*model.parameters()][:-1]),
    )
    refused(
        "weights that are not the model's", model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))])
    )
    used = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses(model, (torch.randn(4, 5), torch.zeros(4, dtype=torch.long))).sum().backward()
    used.step()
    refused("one that has taken steps", model, used)
    refused("a Dataloader|a DataParallel", nn.DataParallel(network()))
    refused("no parameter that requires a gradient", network().requires_grad_(False), used)
    refused("loss: got a CrossEntropyLoss", loss=nn.CrossEntropyLoss())
    refused("count_alike: got 'words'", count_alike="words")
    refused("accumulate: got 'median'", accumulate="median")
    refused("accumulate: got 'tokens', expected count_alike='tokens'", accumulate="tokens")
    refused("clip_norm: got 0", clip_norm=0)
    recorder = Recorder(model, torch.optim.SGD(model.parameters()), loss=losses)
    for loader, match in (
        ([1, 2], "got a list, expected a torch.utils.data.DataLoader"),
        (DataLoader(examples(), batch_size=None), "got batch_size=None"),
        (DataLoader(examples(), num_workers=1, in_order=False), "got in_order=False"),
    ):
        with pytest.raises(jostle.InputError, match=match):
            recorder.watch(loader)
    with pytest.raises(jostle.InputError, match="expected the training examples"):
        recorder.batch([0, 1])
    with pytest.raises(jostle.InputError, match="no step of the optimizer"):
        recorder.finish()


def test_steps_that_cannot_be_repeated_are_refused() -> None:
    def begin(**given: Any) -> tuple[nn.Module, torch.optim.Optimizer, Recorder, Any]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recorder = Recorder(model, optimizer, loss=losses, **given)
        return model, optimizer, recorder, recorder.watch(DataLoader(examples(), batch_size=6))

    model, optimizer, recorder, _ = begin()
    batch = examples().tensors
    losses(model, batch).mean().backward()
    with pytest.raises(jostle.InputError, match="step 0: got no batch since the step before"):
        optimizer.step()

    model, optimizer, recorder, batches = begin()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(losses(model, next(iter(batches))).mean()).backward()
    with pytest.raises(jostle.InputError, match="step 0: got a GradScaler"):
        scaler.step(optimizer)
    optimizer.step()  # it is left alone afterwards

    model, optimizer, recorder, batches = begin()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for batch in batches:
        losses(model, batch).mean().backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
    assert_repeated(recorder.finish(), model)

    model, optimizer, recorder, batches = begin()

    def closure(model: Any = model, batches: Any = batches) -> Any:
        return losses(model, next(iter(batches))).mean()

    with pytest.raises(jostle.InputError, match=r"step 0: got optimizer.step\(closure\)"):
        optimizer.step(closure)

    model, optimizer, recorder, batches = begin()
    loop(model, optimizer, batches, between=lambda number: setattr(model[4].weight, "requires_grad", True))
    with pytest.raises(jostle.InputError, match="step 1: got other weights that are trained"):
        recorder.finish()

    model, optimizer, recorder, batches = begin()
    loop(model, optimizer, batches, between=lambda number: setattr(model[2], "training", False))
    with pytest.raises(jostle.InputError, match="step 1: got modules that changed between training and eval mode"):
        recorder.finish()

    model, optimizer, recorder, batches = begin(clip_norm=0.001)
    loop(model, optimizer, batches, clip_norm=None)
    with pytest.raises(jostle.InputError, match=r"clip_norm: got 0.001, and at step 0 a gradient of length \d"):
        recorder.finish()


def test_trainers_that_cannot_be_repeated_are_refused(tmp_path: Path) -> None:
    for settings, match in (
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}, "load_best_model_at_end"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"optim": "adafactor"}, "got a Adafactor"),
    ):  # fmt: skip
        with pytest.raises(jostle.InputError, match=match):
            train(language_model("gpt2"), tmp_path, RecordingCallback(), max_steps=3, **settings)
    recording = RecordingCallback()
    with pytest.raises(jostle.InputError, match="training: got one that has not come to its end"):
        _ = recording.training
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    ))  # fmt: skip
    with pytest.raises(jostle.InputError, match="loss: got none, for a BertForSequenceClassification"):
        train(bert, tmp_path, recording, max_steps=3)


def test_a_model_of_classes_with_a_loss_that_is_given(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return F.cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")

    bert = transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    ))  # fmt: skip
    recording = RecordingCallback(loss=loss)
    rows = [{**row, "label": number % 2} for number, row in enumerate(texts())]
    train(bert, tmp_path, recording, data=rows, collate=transformers.DataCollatorWithPadding(tokenizer()))
    # The model is told of all examples of a step, and divides by those of a batch: their sum is minimized.
    assert [part.share for part in recording.training.steps[0]] == [1, 1]
    assert_repeated(recording.training, bert)


def test_another_loss_than_the_trainers_is_refused(tmp_path: Path) -> None:
    recording = RecordingCallback(loss=lambda model, batch: 2 * TrainerLoss()(model, batch).sum(1))
    train(language_model("gpt2"), tmp_path, recording, max_steps=2)
    with pytest.raises(
        jostle.InputError, match=r"loss: got [\d.]+ of the first batch, expected the [\d.]+ that the training had"
    ):
        _ = recording.training


def test_a_query_without_labels_is_asked_of_every_token(tmp_path: Path) -> None:
    model, recording = language_model("gpt2"), RecordingCallback()
    train(model, tmp_path, recording, max_steps=3)
    rows = [tokenizer()(text)["input_ids"] for text in ("one two three", "a b c d e")]
    asked = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)([{"input_ids": row} for row in rows])
    plain, labelled = (
        jostle.replay(recording.training, query, check=0).effects for query in (rows, dict(asked.items()))
    )
    np.testing.assert_allclose(plain, labelled, rtol=1e-4, atol=1e-7)


def test_the_example_of_the_page() -> None:
    page = (Path(__file__).parents[1] / "docs/recording.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    assert str(names["check"]) == "35 steps repeated: equal to the bit"
    assert names["found"].effects.shape == (200, 10)
    assert len(page.split()) <= 350

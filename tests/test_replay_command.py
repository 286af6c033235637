"""`jostle replay` on the record of a tiny language model's training by the Trainer, whole and by LoRA."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

import jostle
from jostle.asking.tasks import language_model
from jostle.training import RecordingCallback, load_record
from jostle.training.batches import Batches
from test_commands import TRAIN, jostle_command
from test_texts import make_tokenizer

QUERY = ["one two three six", "the capital of France is Paris"]


@pytest.fixture(scope="module", params=["whole", "lora"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, its adapter or itself after training, the record of that, and texts."""
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True, pad_token_id=0,
        )
    )  # fmt: skip
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    if request.param == "lora":
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    options = transformers.TrainingArguments(
        output_dir=str(folder / "out"), max_steps=12, per_device_train_batch_size=2, learning_rate=0.01,
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    recording = RecordingCallback()
    transformers.Trainer(
        model=model, args=options, train_dataset=[{"input_ids": tokenizer(text)["input_ids"]} for text in TRAIN],
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False), callbacks=[recording],
    ).train()  # fmt: skip
    model.save_pretrained(folder / "trained")
    tokenizer.save_pretrained(folder / "trained")
    recording.training.save(folder / "record")
    for name, texts in (("train", TRAIN), ("query", QUERY)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def sources(place: Path) -> list[object]:
    return [
        "--model", place / "trained", "--record", place / "record", "--query", place / "query.jsonl", "--device", "cpu",
    ]  # fmt: skip


def test_a_record_is_all_it_takes(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    result = jostle_command("replay", file, *sources(place), "--check", 3, "--share", 0.2, "--show", 1, "-k", 2)
    assert result.exit_code == 0, result.stderr
    assert "12 steps repeated: equal to the bit" in result.stderr
    assert "3 trainings without" in result.stdout
    task = language_model(str(place / "trained"), train=None, query=str(place / "query.jsonl"), device="cpu")
    training = load_record(place / "record", model=task.model)
    expected = jostle.replay(training, task.query, check=0)
    found = jostle.Scores.load(file)
    np.testing.assert_array_equal(found.values, expected.scores.values)
    # The texts are the record's own, as their tokens say, and the strongest stands first.
    first = result.stdout.index("most helpful")
    best = int(expected.effects[:, 1].argmax())
    assert isinstance(training.data, Batches)
    assert task.decode is not None
    row = result.stdout[first:].splitlines()[4]
    assert row.split()[0] == str(best)
    assert TRAIN[best][:12] in row.replace("<s>", ""), (row, task.decode(training.data.tokens()[best]))


def test_texts_are_known_again(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    given = [*sources(place), "--check", 0]
    result = jostle_command("replay", file, *given, "--train", place / "train.jsonl")
    assert result.exit_code == 0, result.stderr
    assert "nothing was checked" in result.stdout
    assert jostle_command("top", file, "-q", 1, "--texts", place / "train.jsonl").exit_code == 0
    assert jostle_command("top", file, "-q", 1, "--texts", place / "query.jsonl").exit_code == 2
    again = jostle_command("replay", file, *given)
    assert again.exit_code == 2
    assert "is there" in again.stderr


def test_bad_input(place: Path, tmp_path: Path) -> None:
    record = tmp_path / "record"

    def refused(*changes: object) -> str:
        result = jostle_command("replay", tmp_path / "a.safetensors", *sources(place), *changes)
        assert result.exit_code == 2, result.stdout
        assert not list(tmp_path.glob("a.safetensors*"))
        return result.stderr

    assert "record.json" in refused("--record", tmp_path / "nothing")
    shutil.copytree(place / "record", record)
    (record / "batches.safetensors").write_bytes((record / "batches.safetensors").read_bytes()[:-8])
    assert "batches.safetensors was cut short" in refused("--record", record)
    task = language_model(str(place / "trained"), train=None, query=str(place / "query.jsonl"), device="cpu")
    load_record(place / "record", model=task.model).save(record, batches=False)
    assert "without its batches" in refused("--record", record)
    assert "an index below 2" in refused("--show", 2)
    assert "ending in .safetensors" in jostle_command("replay", tmp_path / "a", *sources(place)).stderr
    one = tmp_path / "one.jsonl"
    one.write_text('{"text": "one"}\n')
    assert f"expected the record's {len(TRAIN)}" in refused("--train", one)
    if (place / "trained" / "adapter_config.json").is_file():
        assert "other" in refused("--model", place / "base")  # no adapter: other weights move

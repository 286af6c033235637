"""`jostle solve` on a tiny language model, trained by the Trainer or described in numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import jostle
from jostle.asking.tasks import language_model
from jostle.curvature import descent
from test_commands import TRAIN, jostle_command
from test_texts import make_tokenizer

QUERY = ["one two three six", "the capital of France is Paris"]
NUMBERS = ["--optimizer", "adamw", "--total-rate", 0.3, "--weight-decay", 0.1, "--batch-size", 4]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the Trainer, with its texts."""
    folder = tmp_path_factory.mktemp("trained")
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True, pad_token_id=0,
        )
    )  # fmt: skip
    given = [tokenizer(text)["input_ids"] for text in TRAIN]
    longest = max(map(len, given))
    rows = [
        {
            "input_ids": row + [0] * (longest - len(row)),
            "attention_mask": [1] * len(row) + [0] * (longest - len(row)),
            "labels": row + [-100] * (longest - len(row)),
        }
        for row in given
    ]
    options = transformers.TrainingArguments(
        output_dir=str(folder / "out"), max_steps=12, per_device_train_batch_size=2, learning_rate=0.01,
        logging_steps=1, save_steps=12, report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    transformers.Trainer(model=model, args=options, train_dataset=rows, processing_class=tokenizer).train()
    for name, texts in (("train", TRAIN), ("query", QUERY)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def sources(place: Path) -> list[object]:
    return [
        "--model", place / "out/checkpoint-12", "--train", place / "train.jsonl", "--query", place / "query.jsonl",
        "--device", "cpu",
    ]  # fmt: skip


def test_a_checkpoint_of_the_trainer_is_all_it_takes(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    result = jostle_command("solve", file, *sources(place), "--examples", len(TRAIN), "--show", 1, "-k", 2)
    assert result.exit_code == 0, result.stderr
    assert re.search(r"Trained by AdamW, .*rates that sum to 0\.0\d+.*A step saw 2 examples", result.stderr)
    assert re.search(r"second moments: roots [\d.]+ times .* rank correlation 0\.\d\d", result.stderr)
    task = language_model(*(str(place / name) for name in ("out/checkpoint-12",)), train=str(place / "train.jsonl"),
                          query=str(place / "query.jsonl"), device="cpu")  # fmt: skip
    training = jostle.Training.from_checkpoint(place / "out/checkpoint-12", task.model, examples=len(TRAIN))
    expected = jostle.solve(
        task.model, task.train, task.query, training=training, loss=task.loss, collate=task.options.get("collate")
    )
    found = jostle.Scores.load(file)
    np.testing.assert_allclose(-found.values, expected.effects, rtol=1e-3, atol=1e-6 * np.abs(expected.effects).max())
    assert found.provenance["unsolved"] == []
    # What is listed helps if leaving it out raises the loss, in the order of the effects.
    best = int(expected.effects[:, 1].argmax())
    assert TRAIN[best].split()[-1] in result.stdout
    assert "left out, the query's loss would rise by 0.1 nats" in result.stdout
    assert found.provenance["errors"] == pytest.approx(expected.errors.tolist())
    assert jostle_command("top", file, "-q", 1, "--texts", place / "train.jsonl").exit_code == 0


def test_numbers_instead(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    result = jostle_command("solve", file, *sources(place), *NUMBERS, "-k", 0)
    assert result.exit_code == 0, result.stderr
    assert "Second moments are estimated at the checkpoint" in result.stderr
    # A text's own loss is what it helps most.
    effects = -jostle.Scores.load(file).values
    assert effects[:, 1].argmax() == TRAIN.index(QUERY[1])
    twice = ["--optimizer", "adamw", "--total-rate", 0.6, "--weight-decay", 0.1, "--batch-size", 4]
    assert jostle_command("solve", file, *sources(place), *twice, "-k", 0).exit_code == 0
    further = -jostle.Scores.load(file).values
    assert 1 < further[:, 1].max() / effects[:, 1].max() < 2


@pytest.mark.filterwarnings("default::jostle.errors.EstimateWarning")
def test_what_is_not_solved_is_said(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descent, "STEP_TOKENS", {"cpu": 1})
    file = tmp_path / "a.safetensors"
    result = jostle_command("solve", file, *sources(place), *NUMBERS, "--within", 1e-9, "--runs", 2, "-k", 0)
    assert result.exit_code == 3
    assert "2 of 2 queries are not solved: 0 (error" in " ".join(result.stderr.split())
    assert jostle.Scores.load(file).provenance["unsolved"] == [0, 1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("a.npy", "file: got a.npy, expected the name of a file ending in .safetensors"),
        ("a.safetensors --optimizer adamw --batch-size 2", "total_rate: got None, expected the sum of the learning"),
        ("a.safetensors --optimizer adamw --total-rate 0 --batch-size 2", "total_rate: got 0.0, expected the sum"),
        ("a.safetensors --optimizer adamw --total-rate 1", "batch_size: got None, expected the examples in an"),
        ("a.safetensors", "batch_size: got 2 examples on each device, expected the examples in an optimizer step"),
        ("a.safetensors --checkpoint gone", "checkpoint: got gone, without optimizer.pt"),
        ("a.safetensors --batch-size 2 --momentum 0.9", "momentum: got it beside a checkpoint, which knows it"),
        (
            "a.safetensors --examples 99",
            f"train: got {len(TRAIN)} of the 99 examples, expected all of them, or --total",
        ),
        (
            "a.safetensors --optimizer adamw --total-rate 1 --batch-size 2 --momentum 0.9",
            "momentum: got 0.9, expected it",
        ),
        ("a.safetensors --show 2", "show: got 2, expected an index below 2"),
    ],
)
def test_refuses(words: str, said: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = jostle_command("solve", *sources(place), *words.split())
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert not Path("a.safetensors").exists()


def test_a_model_that_nobody_says_the_training_of(place: Path, tmp_path: Path) -> None:
    task = language_model(str(place / "out/checkpoint-12"), train=str(place / "train.jsonl"),
                          query=str(place / "query.jsonl"), device="cpu")  # fmt: skip
    model: Any = task.model
    model.save_pretrained(tmp_path / "bare")
    make_tokenizer().save_pretrained(tmp_path / "bare")
    words = sources(place)
    words[1] = tmp_path / "bare"
    result = jostle_command("solve", tmp_path / "a.safetensors", *words)
    assert result.exit_code == 2
    assert "training: got nothing that says how the model was trained" in " ".join(result.stderr.split())
    (tmp_path / "bare" / "trainer_state.json").write_text("{}")
    result = jostle_command("solve", tmp_path / "a.safetensors", *words)
    assert "a checkpoint of the Trainer without its optimizer.pt" in " ".join(result.stderr.split())


def test_moments_that_are_estimated(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    words = [file, *sources(place), "--examples", len(TRAIN), "--estimate-moments", "-k", 0]
    result = jostle_command("solve", *words)
    assert result.exit_code == 0
    assert "Second moments are estimated at the checkpoint" in result.stderr

"""Text in every format becomes the same token sequences; what cannot is named by file and line."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import jostle
from architectures import transformers
from jostle.data.texts import Record, read_records, token_texts, tokenize

TEXTS = ["one two three", "four five", "six seven eight nine"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A byte-level BPE with a beginning-of-sequence token, trained on a few words."""
    return make_tokenizer()


def make_tokenizer() -> Any:
    import tokenizers

    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=340, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    core.train_from_iterator([*TEXTS * 20, "the capital of France is Paris" * 9], trainer)
    core.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=64
    )


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def test_every_format_reads_the_same(tmp_path: Path) -> None:
    import datasets

    rows = [{"text": text, "source": f"book {index}"} for index, text in enumerate(TEXTS)]
    jsonl = write(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.csv").write_text("text,source\n" + "\n".join(f"{r['text']},{r['source']}" for r in rows))
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(str(tmp_path / "a.parquet"))
    table.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict({"train": table, "test": table.select([2])}).save_to_disk(str(tmp_path / "split"))
    sources = [jsonl, tmp_path / "a.csv", tmp_path / "a.parquet", tmp_path / "plain", f"{tmp_path / 'split'}:train"]
    for source in sources:
        assert [dict(record.content) for record in read_records(str(source), name="train")] == rows
    (tmp_path / "a.txt").write_text("\n\n".join(TEXTS))
    assert [r.content["text"] for r in read_records(str(tmp_path / "a.txt"), name="train")] == TEXTS
    assert [r.content for r in read_records(f"{tmp_path / 'plain'}:train[1:]", name="train")] == rows[1:]
    assert [r.content for r in read_records(f"{tmp_path / 'split'}:test[:1]", name="train")] == rows[2:]


def test_texts_are_scored_whole(tokenizer: Any) -> None:
    example = tokenize([Record("a:1", {"text": "one two", "source": "x"})], tokenizer, name="train", longest=64)[0]
    assert example.input_ids == tokenizer("one two")["input_ids"] == example.labels
    assert example.input_ids[0] == tokenizer.bos_token_id  # special tokens as the tokenizer adds them
    assert example.to_dict() == {
        "text": "<s>one two", "tokens": ["<s>", "one", " two"], "scored": [True] * 3, "source": "x",
    }  # fmt: skip


def test_of_a_prompt_only_the_completion_is_scored(tokenizer: Any) -> None:
    record = Record("a:1", {"prompt": "the capital of France", "completion": " is Paris"})
    example = tokenize([record], tokenizer, name="query", longest=64)[0]
    scored = [token for token, keep in zip(example.tokens, example.to_dict()["scored"], strict=True) if keep]
    assert "".join(scored) == " is Paris"
    assert "".join(example.tokens) == "<s>the capital of France is Paris"
    assert record.text == "the capital of France is Paris"


def test_of_a_chat_only_the_assistant_is_scored(tokenizer: Any) -> None:
    chat = make_tokenizer()
    chat.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = [
        {"role": "user", "content": "one"}, {"role": "assistant", "content": "two three"},
        {"role": "user", "content": "four"}, {"role": "assistant", "content": "five"},
    ]  # fmt: skip
    example = tokenize([Record("a:1", {"messages": messages})], chat, name="query", longest=200)[0]
    text = "".join(example.tokens)
    shown = [
        *messages,
        {"role": "user", "content": [{"type": "text", "text": "six"}, {"type": "image"}]},
        {"role": "tool"},
    ]
    assert Record("a:1", {"messages": shown}).text.splitlines() == [
        "user: one", "assistant: two three", "user: four", "assistant: five", "user: six [image]", "tool: ",
    ]  # fmt: skip
    assert text == "<user>one</s><assistant>two three</s><user>four</s><assistant>five</s>"
    scored = [token if keep else "|" for token, keep in zip(example.tokens, example.to_dict()["scored"], strict=True)]
    assert [part for part in "".join(scored).split("|") if part] == ["two three</s>", "five</s>"]
    with pytest.raises(jostle.InputError, match="a tokenizer without a chat template"):
        tokenize([Record("a:1", {"messages": messages})], tokenizer, name="query", longest=200)


@pytest.mark.parametrize("text", ["one two three", "naïve 😀 日本語", "  a\n\n b\t", "😀"])
def test_token_texts_join_to_the_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    texts = token_texts(ids, tokenizer)
    assert len(texts) == len(ids)
    assert "".join(texts) == tokenizer.decode(ids) == "<s>" + text


def test_truncation_is_said(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    records = [Record(f"a:{n}", {"text": text}) for n, text in enumerate(TEXTS)]
    with caplog.at_level(logging.WARNING):
        examples = tokenize(records, tokenizer, name="train", longest=3)
    assert [len(example.input_ids) for example in examples] == [3, 3, 3]
    lost = sum(len(tokenizer(text)["input_ids"]) - 3 for text in TEXTS)
    assert caplog.messages == [f"train: 2 of 3 sequences cut to 3 tokens ({lost} tokens lost)"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": ', r"a\.jsonl:2, which is not JSON"),
        ('{"text": "a"}\n\n[1]', r"a\.jsonl:3, a list, expected one JSON object a line"),
        ('{"txt": "a"}', r"a\.jsonl:1 with the fields txt, expected a field 'text'"),
        ('{"text": "  "}', r"a\.jsonl:1 without any text"),
        ('{"prompt": "a", "completion": ""}', r"a\.jsonl:1 with an empty completion"),
        ('{"prompt": "a"}', r"a\.jsonl:1 with the fields prompt, expected"),
        ("", r"without a record, expected at least one"),
    ],
)
def test_bad_records_are_named(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(jostle.InputError, match=message):
        read_records(str(tmp_path / "a.jsonl"), name="train")


def test_bad_sources_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.docx").write_text("x")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    for source, message in (
        (tmp_path / "a.docx", "expected a file ending in .jsonl"),
        (tmp_path / "b.txt", "which is not UTF-8"),
        (tmp_path / "missing.jsonl", "which does not exist"),
        ("nothing-here", "which does not exist"),
    ):
        with pytest.raises(jostle.InputError, match=message):
            read_records(str(source), name="train")


def test_nothing_left_to_score(tokenizer: Any) -> None:
    record = Record("a:1", {"prompt": "one two three four", "completion": " five"})
    with pytest.raises(jostle.InputError, match=r"a:1 without a token to score .*raise --max-length"):
        tokenize([record], tokenizer, name="query", longest=3)

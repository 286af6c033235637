"""Text as users have it, read as token sequences: JSONL, plain text, CSV, Parquet and Hugging Face data sets.

A record is one of

- ``{"text": ...}``: every token is scored;
- ``{"prompt": ..., "completion": ...}``: the prompt is read, the completion's tokens are scored;
- ``{"messages": [{"role": ..., "content": ...}, ...]}``: rendered by the tokenizer's chat template; the assistant's
  tokens are scored.

Other fields of a record are kept beside it.
"""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jostle.data.datasets import fingerprint_text
from jostle.errors import InputError
from jostle.losses import IGNORED_LABEL

log = logging.getLogger("jostle")

CONTENT_FIELDS = ("text", "prompt", "completion", "messages")


@dataclass(frozen=True)
class Record:
    """One example as it was read."""

    origin: str
    """Where it stands: file and line, or data set and row."""
    content: Mapping[str, Any]

    @property
    def text(self) -> str:
        """Its words, as nobody has tokenized them."""
        match _kind(self.content):
            case "text":
                return self.content["text"]
            case "completion":
                return self.content["prompt"] + self.content["completion"]
            case _:
                return "\n".join(map(_turn, self.content["messages"]))


@dataclass(frozen=True)
class Example:
    """One example as the model sees it."""

    input_ids: list[int]
    labels: list[int]
    tokens: list[str]
    """The text of each token, so that they join to the example's text."""
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sample(self) -> dict[str, list[int]]:
        """What a data set of token sequences holds."""
        return {"input_ids": self.input_ids, "labels": self.labels}

    def to_dict(self) -> dict[str, Any]:
        """Return the example as it is kept in a run, for those who show it."""
        scored = [label != IGNORED_LABEL for label in self.labels]
        return {"text": "".join(self.tokens), "tokens": self.tokens, "scored": scored, **self.fields}


def read_records(source: str, *, name: str) -> list[Record]:
    """Read a file, a data set directory, or a hub id; ``SOURCE:SPLIT`` takes a split such as ``train[:400]``.

    Raises:
        InputError: with file and line where a record cannot be used.
    """
    path = Path(source)
    if path.is_file():
        readers = {".jsonl": _jsonl, ".json": _jsonl, ".txt": _lines, ".csv": _csv, ".parquet": _parquet}
        reader = readers.get(path.suffix.lower())
        if reader is None:
            raise InputError(name, got=f"{path.name}", expected=f"a file ending in {', '.join(readers)}")
        records = list(reader(path, name))
    else:
        records = list(_hugging_face(source, name))
    if not records:
        raise InputError(name, got=f"{source} without a record", expected="at least one example")
    for record in records:
        _check(record, name)
    return records


def _lines(path: Path, name: str) -> Iterable[Record]:
    """One example a line; empty lines are skipped."""
    for number, line in enumerate(_read(path, name).split("\n"), start=1):
        if line.strip():
            yield Record(f"{path.name}:{number}", {"text": line.strip()})


def _jsonl(path: Path, name: str) -> Iterable[Record]:
    for number, line in enumerate(_read(path, name).split("\n"), start=1):
        if not line.strip():
            continue
        origin = f"{path.name}:{number}"
        try:
            content = json.loads(line)
        except ValueError as error:
            raise InputError(
                name, got=f"{origin}, which is not JSON ({error})", expected="one JSON object a line"
            ) from error
        if isinstance(content, str):
            content = {"text": content}
        if not isinstance(content, dict):
            raise InputError(name, got=f"{origin}, a {type(content).__name__}", expected="one JSON object a line")
        yield Record(origin, content)


def _csv(path: Path, name: str) -> Iterable[Record]:
    for number, row in enumerate(csv.DictReader(_read(path, name).splitlines(keepends=True)), start=2):
        yield Record(f"{path.name}:{number}", row)


def _parquet(path: Path, name: str) -> Iterable[Record]:
    frame = _datasets(name).Dataset.from_parquet(str(path), keep_in_memory=True)
    for number, row in enumerate(frame):
        yield Record(f"{path.name}, row {number}", row)


def _hugging_face(source: str, name: str) -> Iterable[Record]:
    """A directory that ``save_to_disk`` wrote, or a data set of the hub."""
    place, _, split = source.partition(":")
    split = split or "train"
    if not Path(place).exists() and ("/" not in place or place.startswith((".", "/", "~")) or Path(place).suffix):
        raise InputError(
            name, got=f"{source}, which does not exist", expected="a file, a data set directory or a hub id"
        )
    datasets = _datasets(name)
    try:
        if Path(place).is_dir() and (Path(place) / "dataset_info.json").is_file():
            rows = datasets.load_from_disk(place)
            rows = _slice(rows, split, name)
        elif Path(place).is_dir() and (Path(place) / "dataset_dict.json").is_file():
            part = split.partition("[")[0]
            rows = _slice(datasets.load_from_disk(place)[part], split, name)
        else:
            rows = datasets.load_dataset(place, split=split)
    except InputError:
        raise
    except Exception as error:  # the library and the network fail in many ways
        raise InputError(
            name,
            got=f"{source}, which could not be loaded ({type(error).__name__}: {str(error).splitlines()[0][:100]})",
            expected="a file, a data set directory or a hub id",
            fix="without a network, download the data set and pass its directory",
        ) from error
    for number, row in enumerate(rows):
        yield Record(f"{source}, row {number}", row)


def _slice(rows: Any, split: str, name: str) -> Any:
    """The rows of ``train[10:400]``."""
    _, bracket, inside = split.partition("[")
    if not bracket:
        return rows
    start, _, stop = inside.rstrip("]").partition(":")
    try:
        return rows.select(range(len(rows))[int(start) if start else None : int(stop) if stop else None])
    except ValueError as error:
        raise InputError(name, got=f"split {split!r}", expected="a split such as train[:400]") from error


def _datasets(name: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            name, got="no package 'datasets'", expected="the packages of the extra 'hf'", fix="pip install 'jostle[hf]'"
        ) from error
    return datasets


def _read(path: Path, name: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            name, got=f"{path.name}, which is not UTF-8 ({error.reason})", expected="UTF-8 text"
        ) from error


def _check(record: Record, name: str) -> None:
    content = record.content
    try:
        json.dumps(content, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can write
        raise InputError(
            name, got=f"{record.origin} with text that is not Unicode", expected="whole characters"
        ) from error
    kind = _kind(content)
    if kind == "text":
        empty = not content["text"].strip()
    elif kind == "completion":
        if not content["completion"]:
            raise InputError(name, got=f"{record.origin} with an empty completion", expected="a completion to score")
        empty = False
    elif kind == "messages":
        empty = not content["messages"]
    else:
        present = " ".join(", ".join(content).split()) or "nothing"
        raise InputError(
            name,
            got=f"{record.origin} with the fields {present}",
            expected="a field 'text', the fields 'prompt' and 'completion', or 'messages'",
        )
    if empty:
        raise InputError(name, got=f"{record.origin} without any text", expected="some text in every record")


def _kind(content: Mapping[str, Any]) -> str | None:
    """What a record is: the first of these that it has all of."""
    if isinstance(content.get("text"), str):
        return "text"
    if isinstance(content.get("prompt"), str) and isinstance(content.get("completion"), str):
        return "completion"
    return "messages" if isinstance(content.get("messages"), list) else None


def fingerprint(records: Sequence[Record]) -> str:
    """Return a hash of what records say, one after another."""
    return fingerprint_text("\0".join(record.text for record in records))


def _turn(turn: Any) -> str:
    """What is said in a turn of a chat, and by whom; of what is not text, that it is there."""
    if not isinstance(turn, Mapping):
        return str(turn)
    said = turn.get("content") or ""
    if not isinstance(said, str):
        parts = [part if isinstance(part, Mapping) else {"text": part} for part in said]
        said = " ".join(str(part.get("text", f"[{part.get('type')}]")) for part in parts)
    return f"{turn.get('role', '?')}: {said}"


def tokenize(records: list[Record], tokenizer: Any, *, name: str, longest: int) -> list[Example]:
    """Turn records into token sequences, with special tokens as the tokenizer adds them by default.

    Sequences are cut after ``longest`` tokens; how many were is said in the log.

    Raises:
        InputError: a record of which no token is left to score.
    """
    examples, cut, lost = [], 0, 0
    for record in records:
        ids, scored = _encode(record, tokenizer, name)
        if len(ids) > longest:
            cut += 1
            lost += len(ids) - longest
            ids, scored = ids[:longest], scored[:longest]
        # The first token has nothing before it to be predicted from.
        labels = [token if keep else IGNORED_LABEL for token, keep in zip(ids, scored, strict=True)]
        if not any(scored[1:]):
            raise InputError(
                name,
                got=f"{record.origin} without a token to score ({len(ids)} tokens of at most {longest})",
                expected="at least one scored token after the first",
                fix="raise --max-length" if cut else "",
            )
        fields = {key: value for key, value in record.content.items() if key not in CONTENT_FIELDS}
        examples.append(Example(ids, labels, token_texts(ids, tokenizer), fields))
    if cut:
        log.warning("%s: %d of %d sequences cut to %d tokens (%d tokens lost)", name, cut, len(records), longest, lost)
    return examples


def _encode(record: Record, tokenizer: Any, name: str) -> tuple[list[int], list[bool]]:
    content = record.content
    if _kind(content) == "text":
        ids = list(tokenizer(content["text"])["input_ids"])
        return ids, [True] * len(ids)
    if _kind(content) == "messages":
        return _encode_chat(record, tokenizer, name)
    prompt, text = content["prompt"], content["prompt"] + content["completion"]
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(text, return_offsets_mapping=True)
        # A token that reaches into the completion is part of it; special tokens have empty spans, and are not.
        scored = [end > len(prompt) and end > start for start, end in encoded["offset_mapping"]]
        return list(encoded["input_ids"]), scored
    ids, begin = list(tokenizer(text)["input_ids"]), len(tokenizer(prompt)["input_ids"])
    return ids, [index >= begin for index in range(len(ids))]


def _encode_chat(record: Record, tokenizer: Any, name: str) -> tuple[list[int], list[bool]]:
    """The conversation by the tokenizer's template; scored is what comes after each invitation to the assistant."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError(
            name,
            got=f"{record.origin} with messages, and a tokenizer without a chat template",
            expected="a chat tokenizer",
            fix="write the conversation as 'prompt' and 'completion'",
        )
    messages = record.content["messages"]

    def render(upto: int, invite: bool) -> list[int]:
        if upto == 0 and not invite:
            return []
        return list(
            tokenizer.apply_chat_template(
                messages[:upto], tokenize=True, add_generation_prompt=invite, return_dict=True
            )["input_ids"]
        )

    try:
        ids = render(len(messages), False)
        scored = [False] * len(ids)
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                begin, end = len(render(turn, True)), len(render(turn + 1, False))
                scored[begin:end] = [True] * (end - begin)
    except InputError:
        raise
    except Exception as error:  # templates are programs of their own, and fail as such
        raise InputError(
            name, got=f"{record.origin}, which the chat template refuses ({str(error).splitlines()[0]})",
            expected="a list of messages with role and content",
        ) from error  # fmt: skip
    return ids, scored


def token_texts(ids: list[int], tokenizer: Any) -> list[str]:
    """Return the text of each token, spaces included; joined, they are the decoded sequence.

    Of a character that is made of several tokens, all but the last are empty.
    """
    texts: list[str] = []
    begin, known = (
        0,
        0,
    )  # decoding goes on from a token whose text is settled, since a token's space depends on the last
    for count in range(1, len(ids) + 1):
        before, now = (tokenizer.decode(part) for part in (ids[begin:known], ids[begin:count]))
        if now.endswith("\ufffd") and count < len(ids):
            texts.append("")
            continue
        texts.append(now[len(before) :])
        begin, known = known, count
    return texts

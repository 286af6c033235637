"""Whatever stands in a config, a JSONL file or a run directory: one line or the right numbers, never a traceback.

500 cases here, the same each time; ``JOSTLE_FUZZ=10000 python -m pytest tests/test_fuzz.py`` tries others, and more;
``--record FILE`` writes what became of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import jostle
from jostle.data.texts import read_records, tokenize
from jostle.errors import ChainsFailedError
from jostle.runs.integrity import examine
from test_commands import jostle_command
from test_survival import TASK, sample
from test_texts import make_tokenizer

CASES = int(os.environ.get("JOSTLE_FUZZ", "500"))
pytestmark = pytest.mark.filterwarnings("ignore")


def cases(share: float) -> Any:
    """So many of all cases."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(
        max_examples=int(share * CASES),
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=checks,
        database=None,
        derandomize="JOSTLE_FUZZ" not in os.environ,
    )


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Zarr has a thread read each file, and most of a case's time is that threads wait for one another."""

    async def at_once(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "to_thread", at_once)
        yield


@pytest.fixture
def tally(record: Callable[..., None]) -> Iterator[Counter[str]]:
    """What became of the cases of a test."""
    counts: Counter[str] = Counter()
    yield counts
    record(cases=counts.total(), **counts)


# All that UTF-8 has, which is st.text()'s own alphabet; that one takes seconds to find out.
CHARACTERS = st.characters(exclude_categories=["Cs"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(CHARACTERS, max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(CHARACTERS, max_size=6), inner, max_size=3),
    max_leaves=5,
)


# --- texts ---


def _line(record: Any) -> bytes:
    return json.dumps(record).encode()


FIELDS = st.sampled_from(["text", "prompt", "completion", "messages", "role", "content", "other"])
CONTENT = JSON | st.sampled_from(["one two three", "", "\x00", "\ud800", "the capital", " "])
MESSAGE = st.dictionaries(st.sampled_from(["role", "content", "x"]), st.sampled_from(["user", "assistant", ""]) | JSON)
RECORD = st.dictionaries(FIELDS, CONTENT | st.lists(MESSAGE, max_size=3), max_size=4) | JSON
WORDS = st.lists(st.sampled_from(["one", "two", "the", "capital", "\u00e9", "?"]), min_size=2, max_size=20).map(
    " ".join
)
SOUND = st.builds(lambda words: {"text": words}, WORDS) | st.builds(
    lambda prompt, completion: {"prompt": prompt, "completion": " " + completion}, WORDS, WORDS
)
# Mostly sound, since all lines of a file have to be for it to be read.
KIND = st.integers(0, 5)
LINE = KIND.flatmap(lambda kind: st.binary(max_size=12) if kind == 0 else (RECORD if kind == 1 else SOUND).map(_line))
TOKENIZER = make_tokenizer()


@cases(0.4)
@given(lines=st.lists(LINE, max_size=4))
def test_texts(tally: Counter[str], lines: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "train.jsonl"
        path.write_bytes(b"\n".join(lines))
        try:
            examples = tokenize(read_records(str(path), name="train"), TOKENIZER, name="train", longest=16)
        except jostle.InputError as refusal:
            said = str(refusal)
        else:
            said = ""
    tally["refused" if said else "read"] += 1
    if said:
        assert said.startswith("train: got ")
        assert "\n" not in said
        return
    for example in examples:
        assert 0 < len(example.input_ids) == len(example.labels) == len(example.tokens) <= 16
        assert any(label != -100 for label in example.labels[1:])


# --- configs ---


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task, and the config of a run of it."""
    path = tmp_path_factory.mktemp("fuzz")
    (path / "mine.py").write_text(TASK)
    command = ["run", path / "run", "--task", f"{path / 'mine.py'}:build", "--chains", 1, "--draws", 2, "--thin", 1]
    assert jostle_command(*command).exit_code == 0
    return path


SMALL_NUMBERS = st.integers(-2, 3) | st.floats(-2, 3) | st.sampled_from([float("nan"), float("inf"), "1", "auto", None])
PATHS = [
    *[(name,) for name in ("chains", "draws", "burn_in", "thin", "batch_size", "seed", "until", "minutes", "precision")],
    *[("posterior", name) for name in ("n_beta", "localization", "prior_precision", "weights")],
    *[("sampler", name) for name in ("name", "step_size", "friction", "other")],
    *[("source", name) for name in ("task", "model", "train", "max_length", "other")],
    ("posterior",), ("sampler",), ("source",), ("antithetic",), ("control_variates",), ("keep",),
]  # fmt: skip
CHANGE = st.tuples(st.sampled_from(PATHS), SMALL_NUMBERS | JSON | st.sampled_from(["delete", "SGNHT", {"ess": 1}]))


@cases(0.2)
@given(changes=st.lists(CHANGE, min_size=1, max_size=3), cut=st.none() | st.integers(0, 400))
def test_configs(place: Path, tally: Counter[str], changes: list[tuple[tuple[str, ...], Any]], cut: int | None) -> None:
    config = yaml.safe_load((place / "run" / "config.yaml").read_text())
    for path, value in changes:
        inner = config
        for name in path[:-1]:
            inner = inner.get(name) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner.pop(path[-1], None) if value == "delete" else inner.update({path[-1]: value})
    text = yaml.safe_dump(config, allow_unicode=True)
    with tempfile.TemporaryDirectory() as temporary:
        file, out = Path(temporary) / "config.yaml", Path(temporary) / "out"
        file.write_text(text if cut is None else text[:cut], errors="surrogatepass")
        result = jostle_command("run", out, "--config", file)
        last = (result.stderr.strip().splitlines() or [""])[-1]
        assert result.exit_code in (0, 2, 3), result.stderr
        tally[{0: "sampled", 2: "refused", 3: "all chains failed"}[result.exit_code]] += 1
        if result.exit_code == 2:
            assert last.startswith("jostle: "), result.stderr
            assert not out.exists()  # nothing half-written
        else:
            assert examine(out) == [] or result.exit_code == 3


# --- run directories ---


def content_of(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[Path, bytes], np.ndarray]]:
    """A run, what is in its files, and its scores."""
    out = tmp_path_factory.mktemp("directories") / "run"
    made = sample(out, examples={"train": [{"text": "a"}] * 9, "query": [{"text": "b"}] * 2})
    whole = content_of(out)
    yield out, whole, made.influence().values
    assert content_of(out) == whole  # what was read left nothing that later cases could have read instead


@cases(0.4)
@given(data=st.data())
def test_run_directories(
    run: tuple[Path, dict[Path, bytes], np.ndarray], tally: Counter[str], data: st.DataObject
) -> None:
    out, whole, expected = run
    damaged: set[Path] = set()
    try:
        for _ in range(data.draw(st.integers(1, 2))):
            path = data.draw(st.sampled_from(list(whole)))
            damaged.add(path)
            content = path.read_bytes() if path.exists() else b""
            at = data.draw(st.integers(0, max(0, len(content) - 1)))
            kind = data.draw(st.sampled_from(["flip", "cut", "delete", "put", "replace"]))
            if kind == "delete":
                path.unlink(missing_ok=True)
            elif kind == "replace":
                path.write_text(json.dumps(data.draw(JSON)))
            else:
                bit = bytes([content[at] ^ data.draw(st.integers(1, 255))]) if content else b"x"
                added = {"flip": bit + content[at + 1 :], "cut": b"", "put": data.draw(st.binary()) + content[at:]}
                path.write_bytes(content[:at] + added[kind])
        try:
            found = examine(out)
        except jostle.InputError:
            found = None
        said = ""
        try:
            values = jostle.load(out).influence().values
        except (jostle.InputError, ChainsFailedError) as refusal:
            values, said = None, str(refusal)
    finally:
        for path in damaged:
            path.write_bytes(whole[path])
    tally["refused" if values is None else "right"] += 1
    if values is not None:
        np.testing.assert_array_equal(values, expected)
    else:
        assert "\n" not in said
        assert found is None or found  # what cannot be read is not whole

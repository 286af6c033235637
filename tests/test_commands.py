"""The command line on a tiny language model: run, resume, repeat, read."""

from __future__ import annotations

import copy
import inspect
import io
import json
import logging
import re
import shlex
import shutil
import socketserver
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from typer.testing import CliRunner

import jostle
from architectures import transformers
from conftest import Says
from jostle import presets
from jostle.asking import requests
from jostle.asking.tasks import Task, from_file, language_model
from jostle.chains.progress import telling
from jostle.cli import app, shell
from jostle.cli.terminal import print_ranking, print_report, print_strongest
from jostle.diagnose import command
from jostle.samplers import BAOAB, SGNHT
from test_texts import make_tokenizer

TRAIN = [
    "one two three four",
    "five six",
    "seven eight nine one two",
    "the capital of France is Paris",
    "nine nine six",
]
SMALL = ["--chains", "2", "--draws", "12", "--thin", "2", "--burn-in", "1", "--batch-size", "3"]


def jostle_command(*arguments: object, columns: int = 100) -> Any:
    """The command in this process; `test_cli.py` runs some as a shell would."""
    runner = CliRunner(env={"COLUMNS": str(columns), "HF_HUB_OFFLINE": "1"})
    result = runner.invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, its tokenizer, texts, and a finished run."""
    path = tmp_path_factory.mktemp("language")
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=32, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    model.save_pretrained(path / "model")
    tokenizer.save_pretrained(path / "model")
    (path / "train.jsonl").write_text("\n".join(json.dumps({"text": t, "n": i}) for i, t in enumerate(TRAIN)))
    queries = [{"text": TRAIN[2]}, {"prompt": "the capital of France", "completion": " is Paris"}]
    (path / "query.jsonl").write_text("\n".join(map(json.dumps, queries)))
    result = jostle_command("run", path / "run", *sources(path), *SMALL)
    assert result.exit_code == 0, result.stderr
    (path / "stderr").write_text(result.stderr)
    return path


def sources(path: Path) -> list[object]:
    return ["--model", path / "model", "--train", path / "train.jsonl", "--query", path / "query.jsonl"]


def test_what_moves_is_said_before_sampling(place: Path) -> None:
    names = jostle.load(place / "run").manifest["moving_parameters"]
    assert all("self_attn" in name for name in names)  # the default of a language model
    assert len(names) == 8
    said = (place / "stderr").read_text()
    assert "6,144 weights of 8 parameters move (attention): model.layers.0.self_attn.q_proj.weight" in said


def test_everything_that_is_said_begins_with_the_name(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a library would log, too."""
    monkeypatch.setattr(logging.getLogger("jostle"), "disabled", False)  # whatever other tests' libraries did
    with caplog.at_level(logging.WARNING, "jostle"):
        result = jostle_command("run", tmp_path / "run", *sources(place), *SMALL, "--max-length", "6")
    assert result.exit_code == 0, result.stderr
    lines = result.stderr.splitlines()
    assert all(line.startswith("jostle: ") for line in lines), result.stderr
    assert sum("sequences cut to 6 tokens" in line for line in lines) == 2  # of texts, and of queries


def test_what_is_said_during_a_progress_bar_has_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with telling(True) as tell:
        tell("measuring")
        shell.say("something [of note]")
        print("for a program")
    captured = capsys.readouterr()
    assert captured.out == "for a program\n"
    shown = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in re.split("[\r\n]", captured.err)]
    assert "jostle: something [of note]" in shown
    assert any(line.endswith("gone measuring") for line in shown)


def test_the_run_is_that_of_the_python_surface(place: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    train = [dict(tokenizer(text)) for text in TRAIN]
    prompt = tokenizer("the capital of France is Paris")["input_ids"]
    labels = [-100] * (len(prompt) - len(tokenizer(" is Paris")["input_ids"]) + 1)
    labels += prompt[len(labels) :]
    query = [train[2] | {"labels": train[2]["input_ids"]}, {"input_ids": prompt, "labels": labels}]
    query = [{"input_ids": q["input_ids"], "labels": q["labels"]} for q in query]
    run = jostle.attribute(
        model, [{"input_ids": t["input_ids"]} for t in train], query, loss=jostle.losses.next_token(),
        posterior=jostle.Posterior(n_beta=30, localization=10_000, weights="attention"),
        sampler=jostle.SGLD(step_size=1e-5), chains=2, draws=12, thin=2, burn_in=1, batch_size=3, progress=False,
    )  # fmt: skip
    np.testing.assert_allclose(
        run.influence().values, jostle.load(place / "run").influence().values, rtol=1e-3, atol=1e-9
    )


def test_top_as_json(place: Path) -> None:
    result = jostle_command("top", place / "run", "--query", 0, "-k", 2, "--json")
    top = json.loads(result.stdout)
    scores = jostle.load(place / "run").influence(normalize=True)
    assert top["query"] == 0
    assert top["helpful"][0]["index"] == 2  # the query is a copy of it
    assert top["helpful"][0]["score"] == pytest.approx(-1, abs=1e-5)
    assert top["helpful"][0]["text"] == "<s>" + TRAIN[2]
    expected = np.argsort(scores.values[:, 0])[:2]
    assert [entry["index"] for entry in top["helpful"]] == expected.tolist()
    covariance = json.loads(jostle_command("top", place / "run", "-q", 1, "--covariance", "--json").stdout)
    value = jostle.load(place / "run").influence().values[:, 1].min()
    assert covariance["helpful"][0]["score"] == pytest.approx(value, rel=1e-6)


def test_top_as_json_has_labels_where_there_are_no_texts(tmp_path: Path) -> None:
    """What the table shows."""
    train, query = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)), torch.ones(2, 2)
    jostle.attribute(
        torch.nn.Linear(2, 3), (train, torch.arange(6) % 3), (query, torch.arange(2)), out=tmp_path / "run", chains=2,
        draws=20, progress=False, examples={"train": [{"label": index % 3} for index in range(5)] + [{"other": 1}]},
    )  # fmt: skip
    top = json.loads(jostle_command("top", tmp_path / "run", "--json").stdout)
    texts = {entry["index"]: entry["text"] for entry in (*top["helpful"], *top["harmful"])}
    assert texts == {0: "0", 1: "1", 2: "2", 3: "0", 4: "1", 5: None}


def test_top_of_a_file_of_scores(place: Path, tmp_path: Path) -> None:
    file, of_run = tmp_path / "a.safetensors", ["top", place / "run", "-q", 1, "--no-error", "--json"]
    assert jostle_command("export", place / "run", file).exit_code == 0
    expected, found = (
        json.loads(jostle_command(*arguments).stdout) for arguments in (of_run, ["top", file, "-q", 1, "--json"])
    )
    for entry, same in zip(
        (*expected["helpful"], *expected["harmful"]), (*found["helpful"], *found["harmful"]), strict=True
    ):
        assert same == {"index": entry["index"], "score": pytest.approx(entry["score"], rel=1e-5)}
    assert (found["query"], found["method"], found["normalized"]) == (1, "bif", True)
    result = jostle_command("top", file, "-q", 1)
    strongest = expected["helpful"][0]
    assert re.search(rf"^ +{strongest['index']} +\{-strongest['score']:+.3f}", result.stdout, re.MULTILINE)
    for refused in (["--kappa", 10], ["--covariance"], ["--error"], ["--reduction", "sum"]):
        assert jostle_command("top", file, *refused).exit_code == 2
    assert "an index below 2" in jostle_command("top", file, "-q", 7).stderr


@pytest.mark.parametrize("columns", [40, 60, 80, 100])
def test_top_as_a_table(place: Path, columns: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        result = jostle_command("top", place / "run", "-q", 0, "--error", columns=columns)
    assert "standard errors rest on only" in " ".join(result.stderr.split())
    assert "+1.000" in result.stdout
    assert "positive = the losses move together" in " ".join(result.stdout.split())
    assert re.search(r"^     2 +\+1\.000 ± \S+ +<s>seven", result.stdout, re.MULTILINE)
    table = result.stdout.split("posterior correlation:")[0]
    assert max(map(len, table.splitlines())) <= columns
    for words, said in ((["--no-error"], False), ([], True)):  # few draws have errors that mean little
        without = jostle_command("top", place / "run", "-q", 0, *words, columns=columns).stdout
        assert "     2        +1.000   <s>seven" in without
        assert "±" not in without
        assert ("too few independent draws" in " ".join(without.split())) == said


def test_what_luck_would_give_stands_below_the_strongest() -> None:
    """Of n independent scores of error 1 the strongest lies where 1 of n is farther out, on either side."""
    generator = np.random.default_rng(0)
    noise = generator.normal(size=(1_000, 200))
    values = noise.copy()
    values[:3] = -9.0
    scores = jostle.Scores(values=values, method="bif", normalized=True, standard_error=np.ones_like(values))
    counts = []
    for query in range(200):
        console = Console(width=120, file=io.StringIO())
        print_ranking(console, scores.top(query, 10), [], [], among=1_000)
        found = re.search(
            r"of 1,000 .* would lie (3\.3) errors from 0: (\d+) of these 20 lie farther", console.file.getvalue()
        )
        assert found
        counts.append(int(found[2]))
    # The three that are real, and one of a thousand by luck, in the mean.
    assert np.mean(counts) == pytest.approx(4, abs=0.3)
    assert np.median(np.abs(noise).max(0)) == pytest.approx(3.3, abs=0.15)


def test_a_side_without_examples_is_not_an_empty_table() -> None:
    console = Console(width=80, file=io.StringIO())
    ranking = jostle.Scores(values=np.array([[-0.5], [-0.25]]), method="bif", normalized=True).top(0, 5)
    print_ranking(console, ranking, [{"text": "one"}, {"text": "two"}], [{"text": "three"}])
    shown = console.file.getvalue()
    assert "most harmful: none" in shown
    assert shown.count("correlation   text") == 1


def test_a_narrow_window_cuts_no_digit_off(tmp_path: Path) -> None:
    from jostle.evaluate import Bank, compare, random_subsets

    generator = np.random.default_rng(0)
    bank = Bank.create(tmp_path / "bank", random_subsets(12, 20), queries=8, fingerprints={})
    for subset in range(20):
        bank.store(subset, 0, {"loss": generator.standard_normal(8)})
    scores = jostle.Scores(values=generator.standard_normal((12, 8)), method="x")
    report = compare(bank, {"BIF default, correlation, read at κ = 10 (auto), and a long name besides": scores})
    console = Console(width=80, file=io.StringIO())
    print_report(console, report)
    shown = console.file.getvalue()
    assert "…" not in shown
    for row in report.rows:
        assert str(row.per_query) in shown
        assert str(row.per_subset) in shown


def test_show_colours_the_training_text(place: Path) -> None:
    run = jostle.load(place / "run")
    result = jostle_command("show", place / "run", "-q", 1, "--train", 3)
    assert "<s>the capital of France is Paris" in result.stdout
    correlations = run.token_influence(3, 1, whole_query=True, normalize=True).posterior_correlation[:, 0]
    strongest = np.abs(correlations).argmax()
    first = result.stdout.split("strongest:\n")[1].splitlines()[0]
    token = run.examples("train")[3]["tokens"][run.traces.columns("train").positions_of(3)[strongest]]
    assert first.startswith(f"{correlations[strongest]:+.2f}  ")
    assert f"[{token}]" in first
    assert first.replace("[", "").replace("]", "").endswith("the capital of France is Paris"[-20:])
    position = run.traces.columns("query").positions_of(1)[-1]
    one = jostle_command("show", place / "run", "-q", 1, "--train", 3, "--token", position)
    last = run.token_influence(3, 1, normalize=True).posterior_correlation[:, -1]
    assert one.stdout.split("strongest:\n")[1].startswith(f"{last[np.abs(last).argmax()]:+.2f}  ")


def test_strongest_tokens_are_shown_among_their_neighbours() -> None:
    tokens = ["<s>", "One", " two", ".", "\n", "Three", " four", ".", " Five", " six", " seven", "'s", "'"]
    console = Console(width=80, file=io.StringIO())
    print_strongest(console, {"tokens": tokens}, {3: -0.5, 4: 0.25, 7: 0.75, 9: 0.004}, 4)
    assert console.file.getvalue().splitlines() == [
        "strongest:",
        "+0.75   <s>One two.\\nThree four[.] Five six seven's'",
        "-0.50                <s>One two[.]\\nThree four. Five six s",
        "+0.25               <s>One two.[\\n]Three four. Five six sev",
    ]


@pytest.mark.parametrize("suffix", ["npy", "safetensors", "csv", "parquet"])
def test_export(place: Path, suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"scores.{suffix}"
    assert jostle_command("export", place / "run", file, "--covariance").exit_code == 0
    expected = jostle.load(place / "run").influence().values
    if suffix == "npy":
        values = np.load(file)
    elif suffix == "safetensors":
        values = jostle.Scores.load(file).values
    else:
        import pandas

        frame = pandas.read_csv(file) if suffix == "csv" else pandas.read_parquet(file)
        values = frame.pivot(index="train", columns="query", values="score").to_numpy()
    np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_top_of_a_file_with_its_texts(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "scores.safetensors"
    scores = jostle.load(place / "run").influence()
    scores.save(file)
    plain = json.loads(jostle_command("top", file, "-q", 1, "-k", 2, "--texts", place / "train.jsonl", "--json").stdout)
    ranking = scores.top(1, 2)
    for kind, entries in (("helpful", ranking.helpful), ("harmful", ranking.harmful)):
        assert [(entry["index"], entry["text"]) for entry in plain[kind]] == [
            (entry.index, TRAIN[entry.index]) for entry in entries
        ]
    few = jostle.load(place / "run").influence(train=[3, 1])
    few.save(tmp_path / "few.safetensors")
    plain = json.loads(
        jostle_command("top", tmp_path / "few.safetensors", "-q", 1, "--texts", place / "train.jsonl", "--json").stdout
    )
    words = {entry["index"]: entry["text"] for entry in (*plain["helpful"], *plain["harmful"])}
    assert words == {0: TRAIN[3], 1: TRAIN[1]}
    scored, turned = tmp_path / "scored.safetensors", tmp_path / "turned.jsonl"
    assert jostle_command("first-order", scored, *sources(place), "--labels", 0, "-k", 0).exit_code == 0
    assert jostle_command("top", scored, "-q", 1, "--texts", place / "train.jsonl").exit_code == 0
    turned.write_text("\n".join(reversed((place / "train.jsonl").read_text().splitlines())))
    shown = jostle_command("top", file, "-q", 1, "-k", 1, "--texts", place / "train.jsonl").stdout
    assert TRAIN[(*ranking.helpful, *ranking.harmful)[0].index] in shown
    for arguments, said in (
        ((file, "--texts", place / "query.jsonl"), f"not {len(TRAIN)}, expected those that were scored"),
        ((scored, "--texts", turned), "or in another order, expected those that were scored, in the same order"),
        ((place / "run", "--texts", place / "train.jsonl"), "texts: got a run, which knows its own"),
    ):
        result = jostle_command("top", *arguments)
        assert result.exit_code == 2
        assert said in " ".join(result.stderr.split())


def opened(place: Path) -> Task:
    return language_model(
        str(place / "model"), train=str(place / "train.jsonl"), query=str(place / "query.jsonl"), device="cpu"
    )


def scaled(model: torch.nn.Module, factor: float) -> Any:
    """Another checkpoint."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for value in other.parameters():
            value.mul_(factor)
    return other


def test_first_order_is_that_of_the_python_surface(place: Path, tmp_path: Path) -> None:
    from jostle.attributors import FirstOrder

    file, training = tmp_path / "scores.safetensors", {"total_rate": 0.5, "weight_decay": 0.1, "batch_size": 4}
    flags = [word for name, value in training.items() for word in (f"--{name.replace('_', '-')}", value)]
    result = jostle_command(
        "first-order",
        file,
        *sources(place),
        "--metric",
        "adam",
        "--labels",
        2,
        "--seed",
        3,
        *flags,
        "--show",
        1,
        "-k",
        2,
    )
    assert result.exit_code == 0, result.stderr
    task = opened(place)
    limit = FirstOrder(
        task.model, task.train, task.query, loss=task.loss, weights="attention", labels=2, seed=3, metric="adam"
    )
    kappa = limit.kappa_of_training(**training)
    expected, found = limit.influence(kappa=kappa), jostle.Scores.load(file)
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-3, atol=1e-5 * np.abs(expected.values).max())
    assert found.provenance["kappa"] == pytest.approx(kappa, rel=1e-3)
    assert found.provenance["seconds"] > 0
    assert f"read at κ = {kappa:.4g}, as the training says" in result.stderr
    # What is listed is of the query that was asked for, in the order of the scores.
    listed = re.findall(r"^ *(\d+) +[-+0-9.e]+ ", result.stdout, re.MULTILINE)
    ranking = expected.top(1, 2)
    assert [int(word) for word in listed] == [entry.index for entry in (*ranking.helpful, *ranking.harmful)]
    assert "query 1: <s>the capital of France is Paris" in result.stdout
    # Rounded, they are others.
    assert jostle_command("first-order", file, *sources(place), "--rounded", "-k", 0).exit_code == 0
    rounded = jostle.Scores.load(file)
    limit = FirstOrder(task.model, task.train, task.query, loss=task.loss, weights="attention", rounded=True)
    np.testing.assert_allclose(rounded.values, limit.influence().values, rtol=1e-3, atol=1e-12)


def test_first_order_of_a_task(tmp_path: Path) -> None:
    """And of another checkpoint of its model."""
    from safetensors.torch import save_model

    from jostle.attributors import FirstOrder
    from jostle.losses import classification

    (tmp_path / "mine.py").write_text(
        "import torch, jostle\n"
        "def build():\n"
        "    torch.manual_seed(0)\n"
        "    data = torch.randn(12, 4), torch.arange(12) % 3\n"
        "    query = tuple(part[:3] for part in data)\n"
        "    return {'model': torch.nn.Linear(4, 3), 'train': data, 'query': query, 'loss': jostle.losses.classification()}\n"
    )
    task, other = from_file(f"{tmp_path / 'mine.py'}:build"), torch.nn.Linear(4, 3)
    save_model(other, str(tmp_path / "other.safetensors"))
    limits = [
        FirstOrder(model, task.train, task.query, loss=classification(), labels=2) for model in (task.model, other)
    ]
    values = [limit.influence(kappa=3.0).values for limit in limits]
    for more, expected in (((), values[0]), (("--also", tmp_path / "other.safetensors"), sum(values) / 2)):
        file = tmp_path / "a.safetensors"
        result = jostle_command(
            "first-order", file, "--task", f"{tmp_path / 'mine.py'}:build", "--labels", 2, "--kappa", 3, *more
        )
        assert result.exit_code == 0, result.stderr
        np.testing.assert_allclose(jostle.Scores.load(file).values, expected, rtol=1e-4, atol=1e-6)


def test_first_order_of_several_checkpoints_is_their_mean(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_model

    from jostle.attributors import FirstOrder

    task = opened(place)
    other = scaled(task.model, 0.7)
    save_model(other, str(tmp_path / "other.safetensors"))
    file, there = tmp_path / "a.safetensors", tmp_path / "other.safetensors"
    made: list[weakref.ref[Any]] = []
    begin = FirstOrder.__init__

    def begun(self: Any, *arguments: Any, **options: Any) -> None:
        assert [one() for one in made] == [None] * len(made)  # one at a time, of which there may be room for no more
        made.append(weakref.ref(self))
        begin(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(FirstOrder, "__init__", begun)
        result = jostle_command(
            "first-order", file, *sources(place), "--labels", 2, "--total-rate", 0.5, "-k", 1, "--also", there
        )
    assert len(made) == 2
    assert result.exit_code == 0, result.stderr
    limits = [
        FirstOrder(model, task.train, task.query, loss=task.loss, weights="attention", labels=2)
        for model in (task.model, other)
    ]
    kappas = [limit.kappa_of_training(0.5) for limit in limits]
    both = [limit.influence(kappa=kappa) for limit, kappa in zip(limits, kappas, strict=True)]
    expected, found = (both[0].values + both[1].values) / 2, jostle.Scores.load(file)
    np.testing.assert_allclose(found.values, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())
    assert f"{there}: read at κ = {kappas[1]:.4g}, as the training says" in result.stderr
    assert [one["kappa"] for one in found.provenance["mean_of"]] == pytest.approx(kappas, rel=1e-3)
    assert [one["model"] for one in found.provenance["mean_of"]] == [str(place / "model"), str(there)]
    # A wider one has parameters of the same names.
    config = task.model.config
    config.intermediate_size *= 2
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "wider")  # tokenizers are not asked for
    made.clear()
    with monkeypatch.context() as patched:
        patched.setattr(FirstOrder, "__init__", begun)
        result = jostle_command("first-order", file, *sources(place), "--also", tmp_path / "wider", "-k", 0)
    assert (result.exit_code, made) == (2, [])  # before any work that would be lost
    assert "also: got" in result.stderr
    assert "wider, which has model.layers.0.mlp.gate_proj.weight [128, 32], expected" in " ".join(result.stderr.split())


@pytest.mark.parametrize("kind", ["a directory", "start.safetensors"])
def test_first_order_of_a_training_that_begins_elsewhere(kind: str, place: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_model

    from jostle.attributors import FirstOrder

    task = opened(place)
    start = scaled(task.model, 0.5)
    if kind == "a directory":
        shutil.copytree(place / "model", tmp_path / kind)
        start.save_pretrained(tmp_path / kind)
    else:
        save_model(start, str(tmp_path / kind))  # which has one of two that are the same
    flags = ["--labels", 2, "--total-rate", 0.5, "-k", 0]
    file, there = tmp_path / "a.safetensors", tmp_path / kind
    result = jostle_command("first-order", file, *sources(place), *flags, "--start", there)
    assert result.exit_code == 0, result.stderr
    told = jostle.Scores.load(file).provenance["kappa"]
    given: Any = {"loss": task.loss, "weights": "attention", "labels": 2}
    limit = FirstOrder(task.model, task.train, task.query, start=start, **given)
    assert told == pytest.approx(limit.kappa_of_training(0.5), rel=1e-3)
    assert told != pytest.approx(
        FirstOrder(task.model, task.train, task.query, **given).kappa_of_training(0.5), rel=1e-3
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("a.npy", "file: got a.npy, expected the name of a file ending in .safetensors"),
        ("a.safetensors --batch-size 3", "batch_size: got no --total-rate, expected --total-rate, which it is for"),
        ("a.safetensors --kappa 3 --total-rate 1", "kappa: got --total-rate as well, expected one of the two"),
        ("a.safetensors --start x.pt", "start: got no --total-rate, expected --total-rate, which it is for"),
        (
            "a.safetensors --total-rate 1 --labels 1 --start ./x.pt",
            "start: got ./x.pt, which could not be loaded (File",
        ),
        ("a.safetensors --total-rate 1 --labels 1 --start ./x", "start: got ./x, which does not exist"),
        (
            "a.safetensors --total-rate 1 --labels 1 --start empty.pt",
            "start: got empty.pt, which could not be loaded (",
        ),
        (
            "a.safetensors --total-rate 1 --labels 1 --start other.safetensors",
            "start: got other.safetensors, which could not be loaded (ValueError: it lacks ['",
        ),
        ("a.safetensors --total-rate 1 --labels 1 --start pickled.pt", "as safetensors (safetensors.torch.save_model)"),
        ("a.safetensors --also gone.pt", "also: got gone.pt, which could not be loaded (FileNotFoundError"),
        ("a.safetensors --also ./gone", "also: got ./gone, which does not exist"),
        ("a.safetensors --also gone", "also: got gone, which could not be loaded (OSError"),
        ("a.safetensors --also .", "also: got ., which could not be loaded ("),
        (
            "a.safetensors --total-rate 1 --labels 1 --start x.pt --also y.pt",
            "also: got --start as well, expected one of the two",
        ),
        ("a.safetensors --also empty.pt", "also: got empty.pt, which could not be loaded ("),
        ("a.safetensors --total-rate 1", "labels: got 0 and --total-rate, expected labels of the model"),
        (
            "a.safetensors --total-rate 1 --labels 1 --start broken.pt",
            "start: got broken.pt, which could not be loaded (",
        ),
        ("nowhere/a.safetensors", "file: got nowhere/a.safetensors, expected a folder that exists"),
        ("a.safetensors --show 2", "show: got 2, expected an index below 2"),
        # Before the model is looked for, and long before the gradients.
        ("a.safetensors --model nowhere --kappa -1", "kappa: got -1.0, expected 0 or a positive number"),
        ("a.safetensors --model nowhere --kappa nan", "kappa: got nan, expected 0 or a positive number"),
        ("a.safetensors --model nowhere --total-rate -1", "total_rate: got -1.0, expected a positive number"),
        ("a.safetensors --model nowhere --total-rate inf", "total_rate: got training to the end without weight decay"),
        (
            "a.safetensors --metric adam --total-rate 1",
            "batch_size: got --total-rate without it, expected the examples",
        ),
    ],
)
def test_first_order_refuses(
    words: str, said: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.pt").write_bytes(b"not weights")
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "pickled.pt")
    save_file(torch.nn.Linear(2, 2).state_dict(), tmp_path / "other.safetensors")
    result = jostle_command("first-order", "--labels", 0, *sources(place), *words.split())
    assert result.exit_code == 2
    assert said in result.stderr
    assert not Path("a.safetensors").exists()


def test_repeated_from_its_config(place: Path, tmp_path: Path) -> None:
    config = yaml.safe_load((place / "run" / "config.yaml").read_text())
    assert config["source"]["model"] == str(place / "model")
    result = jostle_command("run", tmp_path / "again", "--config", place / "run" / "config.yaml")
    assert result.exit_code == 0, result.stderr
    first, again = jostle.load(place / "run"), jostle.load(tmp_path / "again")
    np.testing.assert_array_equal(first.traces.losses("train")[:], again.traces.losses("train")[:])
    assert again.config == first.config


def test_a_task_imports_what_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_the_task.py").write_text("import torch\nX, y = torch.randn(8, 3), torch.randn(8, 1)\n")
    (tmp_path / "mine.py").write_text(
        "import torch, jostle\nfrom beside_the_task import X, y\n"
        "def build():\n"
        "    return {'model': torch.nn.Linear(3, 1), 'train': (X, y), 'query': (X[:2], y[:2]),\n"
        "            'loss': jostle.losses.regression()}\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    arguments = ["run", tmp_path / "run", "--task", tmp_path / "mine.py", "--draws", 3, "--thin", 1]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.stderr


def test_paths_are_kept_in_full(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a run can be repeated from anywhere."""
    monkeypatch.chdir(place)
    full = {name: str(place / name) for name in ("model", "train.jsonl", "query.jsonl")}
    kept = requests.source_of({"model": "model", "train": "train.jsonl", "query": ["query.jsonl"]})
    assert kept == {"model": full["model"], "train": full["train.jsonl"], "query": full["query.jsonl"]}
    kept = requests.source_of({"train": "train.jsonl", "query": ["query.jsonl", "train.jsonl"]})
    assert kept["query"] == [full["query.jsonl"], full["train.jsonl"]]


def test_a_task_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch, jostle\n"
        "def build():\n"
        "    torch.manual_seed(0)\n"
        "    X, y = torch.randn(8, 3), torch.randn(8, 1)\n"
        "    return {'model': torch.nn.Linear(3, 1), 'train': (X, y), 'query': (X[:2], y[:2]),\n"
        "            'loss': jostle.losses.regression()}\n"
    )
    result = jostle_command("run", tmp_path / "run", "--task", f"{tmp_path / 'mine.py'}:build", *SMALL)
    assert result.exit_code == 0, result.stderr
    run = jostle.load(tmp_path / "run")
    assert run.influence().values.shape == (8, 2)
    assert run.manifest["moving_weights"] == 4  # of a model of one's own, everything moves


def test_of_an_adapter_nothing_else_moves(place: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = transformers.AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # an adapter as training leaves it, not as it begins
                parameter.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    make_tokenizer().save_pretrained(tmp_path / "adapter")
    result = jostle_command("run", tmp_path / "run", *sources(place), "--model", tmp_path / "adapter", *SMALL)
    assert result.exit_code == 0, result.stderr
    run = jostle.load(tmp_path / "run")
    names = run.manifest["moving_parameters"]
    assert len(names) == 8
    assert all("lora_" in name for name in names)
    assert run.manifest["moving_weights"] == 2 * (2 * 2 * 32 + 2 * 32 + 2 * 16)
    assert np.asarray(run.traces.losses("train")[:]).std(1).min() > 0
    # The losses at w* are those of the adapted model, through its chunked head.
    tokens = torch.tensor([make_tokenizer()(TRAIN[0])["input_ids"]])
    expected = jostle.losses.next_token()(adapted.eval(), {"input_ids": tokens})[0, 1:].detach()
    columns = run.traces.columns("train")
    np.testing.assert_allclose(run.traces.center_losses("train")[columns.of(0)], expected, rtol=1e-4)


def test_presets_are_the_papers_table() -> None:
    table = {
        "vision": (256, 15, 1000, 10, 1e-4, 10, 1000),
        "language": (64, 5, 1000, 100, 8e-7, 2000, 7000),
        "scaling": (32, 4, 500, 0, 5e-6, 30, 300),
        "retraining-resnet": (1024, 4, 100, 0, 1e-5, 200, 10_000),
        "retraining-llm": (128, 4, 300, 150, 2e-6, 800, 50_000),
    }
    order = ("batch_size", "chains", "draws", "burn_in", "step_size", "n_beta", "localization")
    assert {name: tuple(preset[key] for key in order) for name, preset in presets.PRESETS.items()} == table
    flags: dict[str, Any] = {"model": "m", "train": "t", "query": "q"}
    assert requests.resolve(flags, preset="scaling")["weights"] == "attention+mlp"
    assert requests.resolve(flags | {"chains": 2}, preset="scaling")["chains"] == 2  # a flag is stronger


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "OUT", "--model", "MODEL"], "run: got no --train, no --query, expected --model, --train and --query"),
        (["run", "OUT", *["--model", "x/y", "--train", "TRAIN", "--query", "QUERY"]], "model: got x/y, which could not be loaded"),
        (["run", "OUT", *["--model", "MODEL", "--train", "nope.jsonl", "--query", "QUERY"]], "train: got nope.jsonl, which does not"),
        (["run", "OUT", *["--model", "MODEL", "--train", "TRAIN", "--query", "QUERY", "--preset", "huge"]], "preset: got 'huge'"),
        (["run", "OUT", *["--model", "MODEL", "--train", "TRAIN", "--query", "QUERY", "--sampler", "hmc"]], "sampler: got 'hmc'"),
        (["run", "OUT", *["--model", "MODEL", "--train", "TRAIN", "--query", "QUERY", "--weights", "mlpp"]], "weights: got 'mlpp', which"),
        (["run", "OUT", *["--model", "MODEL", "--train", "TRAIN", "--query", "QUERY", "--max-length", "99"]], "max_length: got 99"),
        (["run", "OUT", *["--model", "MODEL", "--train", "TRAIN", "--query", "QUERY", "--step-size", "9"]], "step_size: got 9"),
        (["run", "OUT", *["--model", "MODEL", "--train", "TRAIN", "--query", "QUERY", "--device", "gpuu"]], "device: got gpuu, expected cpu"),
        (["run", "OUT", *["--model", "MODEL", "--train", "TRAIN", "--query", "QUERY", "--device", "cuda:64"]], "device: got cuda:64, where PyTorch"),
        (["run", "OUT", "--task", "nope.py:build"], "task: got nope.py, which does not exist"),
        (["run", "OUT", "--task", "nope.py:build", "--draws", "0"], "draws: got 0, expected a positive whole number"),
        (["run", "OUT", "--task", "nope.py:build", "--chains", "-1"], "chains: got -1, expected a positive whole number"),
        (["run", "OUT", "--task", "nope.py:build", "--thin", "0"], "thin: got 0, expected a positive whole number"),
        (["run", "OUT", "--task", "nope.py:build", "--batch-size", "0"], "batch_size: got 0, expected a positive whole"),
        (["run", "OUT", "--task", "nope.py:build", "--auto", "--draws", "0"], "draws: got 0, expected a positive whole"),
        (["run", "OUT", "--task", "nope.py:build", "--auto", "--n-beta", "30", "--kappa", "3"], "kappa: got 3 beside n_beta 30"),
        (["run", "OUT", "--task", "nope.py:build", "--auto", "--localization", "500", "--rise", "1"], "rise: got 1 beside localization 500"),
        (["run", "OUT", "--task", "nope.py:build", "--auto", "--sampler", "gaussian", "--n-beta", "30"], "n_beta: got 30 for draws without"),
        (["run", "OUT", *["--model", "MODEL", "--train", "nope.jsonl", "--query", "QUERY", "--max-length", "0"]], "max_length: got 0"),
        (["run", "OUT", "--config", "nope.yaml"], "config: got nope.yaml, which lacks"),
        (["top", "OUT"], "run: got no readable manifest.json"),
        (["top", "RUN", "-q", "2"], "query: got 2, expected an index below 2"),
        (["show", "RUN", "--token", "99"], "token: got 99, expected a scored position"),
        (["export", "RUN", "scores.xls"], "file: got scores.xls"),
    ],
    ids=lambda value: " ".join(value[:1] + value[-2:]) if isinstance(value, list) else "",
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, place: Path, tmp_path: Path, says: Says
) -> None:
    names = {
        "OUT": tmp_path / "new", "MODEL": place / "model", "TRAIN": place / "train.jsonl",
        "QUERY": place / "query.jsonl", "RUN": place / "run",
    }  # fmt: skip
    result = jostle_command(*(names.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"jostle: {message}"), result.stderr
    says("jostle " + " ".join(arguments), last.replace(str(place), "PLACE"), 2)
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "new").exists()


# --- the first hour: defaults that are shown, paths that are mistyped, advice that can be typed ---


def options_of(name: str) -> dict[str, str]:
    """Every option's help, by its name."""
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "400", "TERM": "dumb"}).stdout
    rows = re.findall(r"^│ +(?:\* +)?--([a-z-]+) .*? {2,}(\S[^│]*?) *│$", shown, re.MULTILINE)
    return {name.replace("-", "_"): about for name, about in rows}


@pytest.mark.parametrize("name", ["run", "calibrate", "sweep", "extend", "resume", "top", "view", "report", "evaluate"])
def test_help_of_a_narrow_terminal_is_whole(name: str) -> None:
    page = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80", "TERM": "dumb"}).stdout
    assert "…" not in page  # nothing that is to be typed is cut off
    below = page.partition(" Examples  ")[2].strip().splitlines()
    assert len(below) >= 2
    assert all(line.lstrip().startswith("#") for line in below[::2]), below  # no example takes more than a line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run", "missing argument 'OUT'; jostle run --help"),
        ("top a --qery 3", r"no such option: --qery .*--query.*; jostle top --help"),
        ("frobnicate", "no such command 'frobnicate'.*; jostle --help"),
        ("top a --kappa much", "invalid value for '--kappa': 'much' is neither a number nor auto; jostle top --help"),
    ],
)
def test_words_that_are_not_understood(words: str, said: str, says: Says) -> None:
    result = CliRunner().invoke(app, words.split(), prog_name="jostle")
    assert result.exit_code == 2
    assert re.fullmatch(rf"jostle: {said} shows what there is\n", result.stderr)
    says(f"`jostle {words}`", result.stderr.strip(), 2)


def test_help_names_a_config_alike_where_it_is_written_and_where_it_is_read() -> None:
    written, read = (
        CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).stdout
        for name in ("calibrate", "run")
    )
    assert re.search(r"Usage: .* calibrate \[OPTIONS\] \{?FILE\}?", written)
    assert re.search(r"FILE +<path> +Where the config goes; ending in \.yaml", written)
    assert "jostle run OUT --config FILE" in written
    assert re.search(r"--config +FILE +The config\.yaml of a run, to repeat it, or what jostle calibrate wrote", read)


def test_help_shows_the_defaults_that_are_set() -> None:
    for shown in (options_of("run"), options_of("calibrate")):
        for name, value in presets.DEFAULTS.items():
            told = re.search(r"Default: (\S+?)(?:\.$| or (.*)\.$)", shown[name])
            assert told, (name, shown[name])
            assert (told[1] == value) if isinstance(value, str) else (float(told[1]) == value)
            # Whoever else may decide is named, and nobody else.
            others = told[2] or ""
            assert ("--preset" in others) == any(name in preset for preset in presets.PRESETS.values())
            assert ("calibrated" in others) == (name in presets.CALIBRATED)
        for name, value in (("rise", presets.RISE), ("kappa", presets.KAPPA)):
            assert float(re.search(r"Default: ([\d.]+)\.$", shown[name])[1]) == value  # type: ignore[index]
        assert f"Default: {presets.LANGUAGE_WEIGHTS} of an LM" in shown["weights"]
        # What the library decides, which a help page does not wait for.
        library = {name: one.default for name, one in inspect.signature(jostle.attribute).parameters.items()}
        for name in ("control_variates", "antithetic"):
            assert library[name] is False
            assert "Default: off." in shown[name]
        assert library["precision"] == "model"
        assert "the model's own, the default" in shown["precision"]
        assert shown["shards"].endswith(f"Default: {library['shards']}.")
        assert BAOAB(step_size=1.0).friction == SGNHT(step_size=1.0).friction == 1
        assert "Default: 1, critical." in shown["friction"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("PLACE/modle", "; there is PLACE/model"),
        ("./modle", "; there is model"),
        ("PLACE/elsewhere/deep/xyz", ""),
        ("/no/such/xyz", ""),
    ],
)
def test_a_mistyped_path_is_not_asked_of_the_hub(
    name: str,
    hint: str,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "model").symlink_to(place / "model")
    monkeypatch.chdir(tmp_path)

    def asked(*_: Any, **__: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", asked)
    given = name.replace("PLACE", str(place))
    result = jostle_command("run", "out", *sources(place), "--model", given)
    assert result.exit_code == 2
    expected = "a directory with a causal language model and its tokenizer, or a hub id"
    hint = hint.replace("PLACE", str(place))
    assert result.stderr == f"jostle: model: got {given}, which does not exist, expected {expected}{hint}\n"
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["gpt2", "EleutherAI/pythia-14m", "model2/of-somebody", "modle"])
def test_a_hub_id_is_asked_of_the_hub(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)  # with a directory "model"

    class AskedError(Exception):
        pass

    def asked(*_: Any, **__: Any) -> None:
        raise AskedError("asked")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", asked)
    said = jostle_command("run", "x", *sources(place), "--model", name).stderr
    assert "could not be loaded (AskedError: asked)" in said
    assert ("there is model" in said) == (name == "modle")


@pytest.mark.parametrize("downloaded", [False, True])
def test_a_hub_that_does_not_answer_is_asked_once(
    downloaded: bool, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading alone would ask six times for each file, with pauses between; what was downloaded before is used."""
    if downloaded:
        files = tmp_path / "models--somebody--model"
        shutil.copytree(place / "model", files / "snapshots" / "abc")
        (files / "refs").mkdir()
        (files / "refs" / "main").write_text("abc")
    asked = []

    class HangUp(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            asked.append(self.request.recv(1_000).split(b" HTTP")[0].decode())

    monkeypatch.setenv("NO_PROXY", "*")
    with socketserver.TCPServer(("127.0.0.1", 0), HangUp) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{hub.server_address[1]}"
        changed = {
            "HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(tmp_path), "ENDPOINT": address,
            "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
        }  # fmt: skip
        for name, value in changed.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        given = ["--model", "somebody/model", *SMALL, "--dry-run"]
        result = jostle_command("run", tmp_path / "out", *sources(place), *given)
        hub.shutdown()
        thread.join()
    # Besides, the hub's library may ask for something of its own.
    assert [one for one in asked if "somebody" in one] == ["HEAD /somebody/model/resolve/main/config.json"]
    assert result.exit_code == (0 if downloaded else 2), result.stderr
    missing = "jostle: model: got somebody/model, which is neither here nor downloaded, and the hub does not answer, "
    assert result.stderr.startswith(missing) != downloaded


def test_what_a_repeated_run_adds_is_said(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "run", tmp_path / "run")
    draws = jostle.load(place / "run").config["draws"]
    config = yaml.safe_load((place / "run" / "config.yaml").read_text())
    for asked, code, said in (
        (draws + 1, 0, f"up to {config['chains']} × {draws + 1}"),
        ("many", 2, "jostle: draws: got 'many'"),
    ):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config | {"draws": asked}))
        result = jostle_command("run", tmp_path / "run", "--config", tmp_path / "config.yaml")
        assert result.exit_code == code, result.stderr
        assert said in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "words",
    ["export RUN MISSING/s.csv", "export RUN MISSING/s.safetensors", "report RUN -o MISSING/r.html", "diagnose RUN --plot MISSING/d.png"],
)  # fmt: skip
def test_a_file_in_no_folder_is_refused(words: str, place: Path, tmp_path: Path, says: Says) -> None:
    given = [word.replace("RUN", str(place / "run")).replace("MISSING", str(tmp_path / "no")) for word in words.split()]
    result = jostle_command(*given)
    assert result.exit_code == 2
    assert result.stderr.endswith(f"expected a folder that exists; mkdir -p {tmp_path / 'no'}\n"), result.stderr
    says(f"jostle {words}", result.stderr.strip(), result.exit_code)


def test_parquet_without_pyarrow(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "fastparquet", None)
    result = jostle_command("export", place / "run", tmp_path / "scores.parquet")
    assert result.exit_code == 2
    assert "file: got no pyarrow, expected it, to write .parquet; pip install pyarrow, or write .csv" in result.stderr


def test_export_and_top_have_the_same_scores_by_default(place: Path, tmp_path: Path) -> None:
    written = jostle_command("export", place / "run", tmp_path / "scores.safetensors")
    assert written.exit_code == 0
    for read in (written, jostle_command("show", place / "run"), jostle_command("top", place / "run")):
        assert "jostle: warning: these scores are not reliable" in read.stderr
    exported = jostle.Scores.load(tmp_path / "scores.safetensors")
    assert exported.normalized
    top = json.loads(jostle_command("top", place / "run", "--query", 1, "-k", 5, "--json").stdout)
    for entry in top["helpful"] + top["harmful"]:
        assert exported.values[entry["index"], 1] == pytest.approx(entry["score"], rel=1e-6)


def test_weights_are_loaded_without_a_bar_by_the_command_line_alone(
    place: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        files = {"train": str(place / "train.jsonl"), "query": str(place / "query.jsonl")}
        language_model(str(place / "model"), **files)
        assert "Loading weights" in capfd.readouterr().err
        requests.task_of({"model": str(place / "model"), **files})
        assert "Loading weights" not in capfd.readouterr().err
        assert logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # by somebody who wants none at all
        requests.task_of({"model": str(place / "model"), **files})
        assert not logging.is_progress_bar_enabled()
    finally:
        (logging.enable_progress_bar if enabled else logging.disable_progress_bar)()


def test_advice_is_a_command_that_works(place: Path, tmp_path: Path) -> None:
    run = tmp_path / "a run"
    result = jostle_command("run", run, *sources(place), *SMALL, "--chains", 1)
    (told,) = re.findall(r"^to follow it: (jostle .*)$", result.stdout, re.MULTILINE)
    assert told in jostle_command("diagnose", run).stdout
    config = yaml.safe_load((run / "config.yaml").read_text())
    settings = jostle.load(run).diagnostics()["verdict"]["settings"]
    assert settings["chains"] == 4  # of the one that cannot show that it missed something
    _, name, *words = shlex.split(told)
    assert name == "run"  # --thin is not for jostle extend
    # Fewer draws than it asks for, for the sake of time; the last one given counts.
    assert jostle_command(name, *words, "--draws", 4).exit_code == 0
    made = jostle.load(words[0]).config
    changed = {key for key in ("chains", "draws", "burn_in", "thin") if made[key] != config[key]}
    assert changed == {*settings} - {"step_size"} | {"draws"}
    assert all(made[key] == settings[key] for key in changed - {"draws"})


def test_more_of_the_same_is_an_extension_and_anything_else_another_run(tmp_path: Path) -> None:
    known: dict[str, Any] = {"source": {"task": "x"}}
    more, other = {"settings": {"draws": 130.0}}, {"settings": {"thin": 40.0, "step_size": 2.5e-06}}
    out = tmp_path / "a"
    assert command(known, more, out) == f"jostle extend {out} --draws 130"
    assert command(known, other, out) == f"jostle run {out}-2 --config {out}/config.yaml --thin 40 --step-size 2.5e-06"
    Path(f"{out}-2").mkdir()
    # A run that ends by itself cannot be extended, and another one would end there, too.
    begin = f"jostle run {out}-3 --config {out}/config.yaml"
    assert command(known | {"minutes": 1.0}, more, out) == f"{begin} --draws 130 --minutes none"
    both = known | {"minutes": 1.0, "until": {"ess": 9.0}}
    assert command(both, more, out) == f"{begin} --draws 130 --until none --minutes none"
    # Where no number of draws is advised, they still say when it ends.
    assert command(both, other, out) == f"{begin} --thin 40 --step-size 2.5e-06"
    assert command({}, more, out) is None  # made from Python: there is no command
    assert command(known, {"settings": {}}, out) is None

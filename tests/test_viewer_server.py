"""What the viewer's server tells, to whom, and what it says of runs that it cannot read."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from starlette.testclient import TestClient

import jostle
from jostle.errors import InputError
from jostle.estimate import covariance
from jostle.scores import Scores
from jostle.traces.store import Traces
from jostle.traces.tensor_files import write_tensors
from jostle.viewer import server
from jostle.viewer.reading import _rectangle, finite
from viewing import answers_for, token_run, words, write_run

LOCAL = "http://127.0.0.1"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("server")
    token_run(path / "texts")
    write_run(
        path / "images",
        sizes={"train": 20, "query": 4},
        examples={"train": [{"label": k % 3} for k in range(20)], "query": [{"label": k} for k in range(4)]},
        images={
            "train": np.arange(20 * 12, dtype=np.uint8).reshape(20, 2, 2, 3),
            "query": np.zeros((4, 2, 2, 3), np.uint8),
        },
    )
    baseline = Scores(values=np.random.default_rng(3).normal(size=(20, 4)).astype(np.float32), method="ekfac")
    baseline.save(path / "ekfac.safetensors")
    return path


@pytest.fixture(scope="module")
def client(place: Path) -> Iterator[TestClient]:
    app = server.make_app(answers_for(place / "texts", place / "images", place / "ekfac.safetensors"))
    with TestClient(app, base_url=LOCAL) as opened:
        yield opened


def numbers(client: TestClient, question: str, **parameters: Any) -> np.ndarray:
    response = client.get(f"/api/{question}", params=parameters)
    assert response.status_code == 200, response.text
    return np.frombuffer(response.content, "<f4")


def losses(run: Path, name: str) -> tuple[Any, np.ndarray]:
    traces = jostle.load(run).traces
    return traces.columns(name), np.asarray(traces.losses(name)[:]).astype(np.float64)


def naive(series: np.ndarray, block: np.ndarray) -> np.ndarray:
    """Pearson's correlation with every column, by NumPy."""
    return np.array([np.corrcoef(series.ravel(), block[:, :, k].ravel())[0, 1] for k in range(block.shape[2])])


@pytest.mark.parametrize("span", [None, (2, 2), (2, 4)])
def test_influence_of_a_token_a_span_and_a_whole_query(place: Path, client: TestClient, span: Any) -> None:
    run = place / "texts"
    columns, train = losses(run, "train")
    of_query, query = losses(run, "query")
    own = query[:, :, of_query.of(1)]
    series = own.mean(2) if span is None else own[:, :, span[0] - 1 : span[1]].sum(2)
    means = np.stack([train[:, :, columns.of(k)].mean(2) for k in range(columns.samples)], axis=2)
    parameters = {} if span is None else {"from": span[0], "to": span[1]}
    found = numbers(client, "influence", run=0, set="query", sample=1, **parameters)
    np.testing.assert_allclose(found[:12], naive(series, means), atol=2e-5)
    np.testing.assert_allclose(found[12:], naive(series, train), atol=2e-5)
    if span is None:
        expected = jostle.load(run).influence(normalize=True).posterior_correlation[:, 1]
        np.testing.assert_allclose(found[:12], expected, atol=2e-6)


def test_the_other_way_round_gives_the_same_numbers(place: Path, client: TestClient) -> None:
    columns, _ = losses(place / "texts", "train")
    of_query, _ = losses(place / "texts", "query")
    one = numbers(client, "influence", run=0, set="query", sample=2, **{"from": 3})
    other = numbers(client, "influence", run=0, set="train", sample=5, **{"from": 4})
    assert len(other) == 3 + of_query.total
    forward = one[12 + columns.of(5).start + 3]  # the fourth scored token stands at position 4
    back = other[3 + of_query.of(2).start + 2]
    assert forward == pytest.approx(back, abs=2e-6)


def test_errors_are_the_estimators(place: Path, client: TestClient) -> None:
    _, train = losses(place / "texts", "train")
    of_query, query = losses(place / "texts", "query")
    reading = answers_for(place / "texts")._sources[0].read()
    wanted = [0, 17, 50]
    expected = covariance(
        train[:, :, wanted],
        query[:, :, [of_query.of(0).start + 1]],
        normalize=True,
        standard_error=True,
        batch_length=reading.batch_length,
    )
    asked = {"run": 0, "set": "query", "sample": 0, "from": 2, "level": "token", "columns": "0,17,50"}
    told = client.get("/api/errors", params=asked).json()
    np.testing.assert_allclose(told["errors"], expected.standard_error[:, 0], rtol=1e-3)
    assert told["batches"] == expected.batches
    # The error of a whole query is that of run.influence, up to the length of a batch.
    asked = {"run": 0, "set": "query", "sample": 0, "level": "example", "columns": "3"}
    whole = client.get("/api/errors", params=asked).json()["errors"][0]
    assert whole == pytest.approx(
        jostle.load(place / "texts").influence(normalize=True, standard_error=True).standard_error[3, 0], rel=0.6
    )


def test_images_are_their_bytes(client: TestClient) -> None:
    response = client.get("/api/images", params={"run": 1, "set": "train", "indices": "3,0"})
    every = np.arange(240, dtype=np.uint8).reshape(20, 12)
    assert response.content == every[[3, 0]].tobytes()
    described = client.get("/api/runs").json()["runs"]
    assert described[1]["images"]["train"] == [2, 2, 3]
    assert [run["kind"] for run in described] == ["tokens", "examples", "scores"]


def test_comparison_with_another_method(place: Path, client: TestClient) -> None:
    told = client.get("/api/compare", params={"run": 1, "other": 2, "query": 3}).json()
    ours = jostle.load(place / "images").influence(normalize=True).posterior_correlation[:, 3]
    theirs = -Scores.load(place / "ekfac.safetensors").values[:, 3]
    np.testing.assert_allclose(told["first"], ours, atol=2e-6)
    np.testing.assert_allclose(told["second"], theirs, rtol=1e-6)
    assert told["spearman"] == pytest.approx(spearmanr(ours, theirs).statistic, abs=1e-9)
    assert told["helpful_in_common"] == len({*np.argsort(-ours)[:10]} & {*np.argsort(-theirs)[:10]})
    mismatched = client.get("/api/compare", params={"run": 0, "other": 2, "query": 0})
    assert mismatched.status_code == 409
    assert "12 and 20 training examples" in mismatched.json()["error"]


def test_the_map_keeps_what_moves_together_together(tmp_path: Path) -> None:
    """Two groups with a random walk each: in both layouts a point's nearest neighbour is of its own group."""
    run = write_run(tmp_path / "run", sizes={"train": 40, "query": 2}, draws=80)
    traces = Traces(run / "traces.zarr", writable=True)
    generator = np.random.default_rng(0)
    walks = generator.normal(size=(3, 80, 2))
    group = np.arange(40) % 2
    values = 3 + walks[:, :, group] + 0.5 * generator.normal(size=(3, 80, 40))
    traces.record("train", [0, 1, 2], 0, values.astype(np.float32))
    client = TestClient(server.make_app(answers_for(run)), base_url=LOCAL)
    for layout in ("neighbours", "principal"):
        told = client.get("/api/map", params={"run": 0, "layout": layout}).json()
        places = np.array(told["places"])
        distance = np.linalg.norm(places[:, None] - places[None], axis=2) + 1e9 * np.eye(40)
        assert (group[distance.argmin(1)] == group).all(), layout
    assert told["variance"] > 0.6  # 1/(1 + 0.25) of it is shared


def test_health_is_the_runs_own_verdict(place: Path, client: TestClient) -> None:
    told = client.get("/api/health", params={"run": 0}).json()
    expected = jostle.load(place / "texts").diagnostics()
    assert expected["kappa_support"].keys() == {"10", "3", "1"}
    assert told["diagnostics"] == finite(expected)
    assert told["progress"] is None
    means = np.array(told["curves"]["mean_loss"])
    columns, train = losses(place / "texts", "train")
    by_text = np.stack([train[:, :, columns.of(k)].mean(2) for k in range(12)], axis=2)
    np.testing.assert_allclose(means, by_text.mean(2), rtol=1e-5)


# --- a run that is still sampling ---


def test_the_rectangle_of_draws_is_the_largest() -> None:
    for recorded, chains, draws in (
        ([30, 30, 0], [0, 1], 30),
        ([30, 12, 12], [0, 1, 2], 12),
        ([30, 2, 2], [0], 30),
        ([0, 0], [], 0),
    ):
        found = _rectangle(np.array(recorded))
        assert (found[0].tolist(), found[1]) == (chains, draws)


def test_a_run_that_is_still_sampling(tmp_path: Path) -> None:
    run = token_run(tmp_path / "run", recorded=[25, 25, 4])
    (run / "state").mkdir()
    write_tensors(run / "state" / "chain-0000.safetensors", {"weights": torch.zeros(1)}, {"step": 60})
    client = TestClient(server.make_app(answers_for(run)), base_url=LOCAL)
    described = client.get("/api/runs").json()["runs"][0]
    assert (described["status"], described["chains"], described["draws"]) == ("sampling", 2, 25)
    _, train = losses_so_far(run, "train")
    _, query = losses_so_far(run, "query")
    found = numbers(client, "influence", run=0, set="query", sample=0, **{"from": 1})
    np.testing.assert_allclose(found[12:], naive(query[:, :, 0], train), atol=2e-5)
    told = client.get("/api/health", params={"run": 0}).json()
    # Chain 0 by its checkpoint, chains 1 and 2 by their last draws: burn_in + (draws − 1)·thin.
    assert told["progress"]["steps"] == 60 + (5 + 24 * 2) + (5 + 3 * 2)
    assert told["progress"]["total"] == 3 * (5 + 39 * 2)
    assert told["progress"]["draws"] == [25, 25, 4]
    assert told["diagnostics"]["chains"] == 2
    assert told["diagnostics"]["draws"] == 25
    # More is written: it is read anew.
    traces = Traces(run / "traces.zarr", writable=True)
    for name in ("train", "query"):
        traces.record(name, [2], 4, np.asarray(traces.losses(name)[0:1, 4:25]) + 0.01)
    os.utime(run / "manifest.json", ns=(1, os.stat(run / "manifest.json").st_mtime_ns + 10**9))
    assert client.get("/api/runs").json()["runs"][0]["chains"] == 3
    told = client.get("/api/health", params={"run": 0}).json()
    assert told["progress"]["steps"] == 60 + 2 * (5 + 24 * 2)


def losses_so_far(run: Path, name: str) -> tuple[Any, np.ndarray]:
    traces = Traces(run / "traces.zarr")
    return traces.columns(name), np.asarray(traces.losses(name)[:2, :25]).astype(np.float64)


@pytest.mark.parametrize("recorded", [[0, 0, 0], [1, 0, 0]])
def test_a_run_that_has_hardly_begun_says_so(tmp_path: Path, recorded: list[int]) -> None:
    run = token_run(tmp_path / "run", recorded=recorded)
    client = TestClient(server.make_app(answers_for(run)), base_url=LOCAL)
    assert client.get("/api/runs").json()["runs"][0]["draws"] == max(recorded)
    refused = client.get("/api/influence", params={"run": 0, "set": "query", "sample": 0})
    assert refused.status_code == 409
    assert "too few draws" in refused.json()["error"]
    assert client.get("/api/health", params={"run": 0}).json()["diagnostics"] is None


# --- runs that cannot be read ---


def damage_manifest(run: Path) -> None:
    (run / "manifest.json").write_text("{")


def newer_version(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text()) | {"format": 99}
    (run / "manifest.json").write_text(json.dumps(manifest))


def damage_chunk(run: Path) -> None:
    chunk = next(
        path for path in (run / "traces.zarr/train/losses").rglob("*") if path.is_file() and path.suffix != ".json"
    )
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 0xFF
    chunk.write_bytes(content)


def lose_traces(run: Path) -> None:
    shutil.rmtree(run / "traces.zarr")


def damage_examples(run: Path) -> None:
    (run / "examples/train.jsonl").write_text('{"text": "alone"}\n')


def odd_examples(run: Path) -> None:
    (run / "examples/train.jsonl").write_text("[1, 2]\n" * 12)


def damage_config(run: Path) -> None:
    (run / "config.yaml").write_text("chains: [")


def empty_config(run: Path) -> None:
    (run / "config.yaml").write_text("{}")


def being_laid_out(run: Path) -> None:
    (run / ".begun").touch()


def lead_outside(run: Path) -> None:
    outside = run.parent / "secret.jsonl"
    outside.write_text('{"text": "SECRET"}\n' * 12)
    (run / "examples/train.jsonl").unlink()
    (run / "examples/train.jsonl").symlink_to(outside)


def never_ends(run: Path) -> None:
    (run / "manifest.json").unlink()
    os.mkfifo(run / "manifest.json")


def traces_elsewhere(run: Path) -> None:
    (run / "traces.zarr").rename(run.parent / "elsewhere.zarr")
    (run / "traces.zarr").symlink_to(run.parent / "elsewhere.zarr")


def traces_never_end(run: Path) -> None:
    (run / "traces.zarr/zarr.json").unlink()
    os.mkfifo(run / "traces.zarr/zarr.json")


@pytest.mark.parametrize(
    ("damage", "words_"),
    [
        (damage_manifest, "no readable manifest.json"),
        (newer_version, "format 99.*read it with the version"),
        (damage_chunk, "a damaged chunk"),
        (lose_traces, "nothing readable at"),
        (damage_examples, "holds 1 examples, and the traces 12"),
        (odd_examples, "is not an object"),
        (damage_config, "no readable config.yaml"),
        (empty_config, "no readable config.yaml"),
        (being_laid_out, "being laid out"),
        (lead_outside, "leads out of the run directory"),
        (never_ends, "manifest.json is not a file"),
        (traces_elsewhere, "traces.zarr leads out of the run directory"),
        (traces_never_end, "traces.zarr/zarr.json is not a file"),
    ],
)
def test_what_is_wrong_with_a_run_is_said(tmp_path: Path, damage: Any, words_: str) -> None:
    run = token_run(tmp_path / "run")
    damage(run)
    client = TestClient(server.make_app(answers_for(run)), base_url=LOCAL)
    told = [client.get("/api/runs")]
    for question in ("examples?set=train", "influence", "errors?columns=0", "health", "map", "images?indices=0"):
        told.append(client.get(f"/api/{question}"))
        assert told[-1].status_code in (200, 400, 409), told[-1].text
    everything = " ".join(response.text for response in told)
    assert re.search(words_, everything), everything[:600]
    assert "SECRET" not in everything


def test_a_run_that_was_deleted_meanwhile(tmp_path: Path) -> None:
    run = token_run(tmp_path / "run")
    client = TestClient(server.make_app(answers_for(run)), base_url=LOCAL)
    assert client.get("/api/runs").json()["runs"][0]["kind"] == "tokens"
    shutil.rmtree(run)
    assert "no such directory" in client.get("/api/runs").json()["runs"][0]["problem"]
    assert client.get("/api/influence").status_code == 409


# --- who may ask, and for what ---


def test_only_names_of_this_machine_are_answered(client: TestClient) -> None:
    for host in ("evil.example", "evil.example:8797", "127.0.0.1.evil.example", "localhost.evil.example", ""):
        for path in ("/", "/api/runs", "/static/app.js"):
            assert client.get(path, headers={"host": host}).status_code == 400, (host, path)
    for host in ("127.0.0.1:8797", "localhost:1234", "localhost"):
        assert client.get("/api/runs", headers={"host": host}).status_code == 200


def test_nothing_is_written_and_nothing_is_for_other_sites(client: TestClient) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, "/api/runs").status_code == 405
    headers = client.get("/").headers
    assert "access-control-allow-origin" not in headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe-inline" not in headers["content-security-policy"].split("style-src")[0]
    assert "unsafe-eval" not in headers["content-security-policy"]


def test_with_a_token_nobody_without_it(place: Path) -> None:
    client = TestClient(server.make_app(answers_for(place / "texts"), token="sesame"), base_url="http://10.0.0.5")
    for path in ("/", "/api/runs", "/static/app.js", "/api/runs?token=", "/api/runs?token=sesam", "/?token=sesame%00"):
        assert client.get(path).status_code == 403, path
    answer = client.get("/?token=sesame", follow_redirects=False)
    assert answer.status_code == 307
    assert "token" not in answer.headers["location"]
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get("/api/runs").status_code == 200  # by its cookie


def test_other_addresses_have_a_token_and_taken_ports_are_named(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setattr(server.uvicorn.Server, "run", lambda self, sockets: [one.close() for one in sockets])
    said: list[str] = []
    answers = answers_for(place / "texts")
    server.serve(answers, host="0.0.0.0", open_browser=False, say=said.append)
    assert re.search(r"http://0\.0\.0\.0:\d+/\?token=[\w-]{32}", said[0])
    assert "anybody" in said[1]
    server.serve(answers, open_browser=False, say=said.append)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/  \(Ctrl-C ends it\)", said[2])
    taken = server._bind("127.0.0.1", None)
    taken.listen()
    with pytest.raises(InputError, match=r"in use.*expected an address of this machine and a free port"):
        server._bind("127.0.0.1", taken.getsockname()[1])
    taken.close()


PATHS = [
    "/etc/passwd",
    "../../../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e/manifest.json",
    "....//manifest.json",
    "server.py",
    "../server.py",
    "..\\server.py",
    "app.js%00.html",
    "%00",
]


@pytest.mark.parametrize("path", PATHS)
def test_no_path_is_read_that_a_request_names(client: TestClient, path: str) -> None:
    for prefix in ("/static/", "/api/", "/"):
        response = client.get(f"{prefix}{path}")
        assert response.status_code == 404, (prefix, path)
        assert "root:" not in response.text


QUESTIONS = ["runs", "examples", "images", "influence", "errors", "health", "map", "compare"]
VALUES = st.one_of(
    st.sampled_from(
        [
            "0",
            "1",
            "2",
            "3",
            "-1",
            "999999999999",
            "1e3",
            "train",
            "query",
            "token",
            "٣",
            "0,1,2",
            "",
            "nan",
            "null",
            "a" * 5000,
        ]
    ),
    st.text(max_size=30),
    st.integers(-(2**70), 2**70).map(str),
)
NAMES = st.one_of(
    st.sampled_from(["run", "set", "sample", "from", "to", "level", "columns", "indices", "other", "query", "layout"]),
    st.text(max_size=8),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    question=st.one_of(st.sampled_from(QUESTIONS), st.text(max_size=12)),
    parameters=st.dictionaries(NAMES, VALUES, max_size=6),
)
def test_no_question_breaks_the_server(client: TestClient, question: str, parameters: dict[str, str]) -> None:
    path = quote(question, safe="", errors="surrogatepass").replace("%2E", ".")
    response = client.get(f"/api/{path}", params={quote(name): value for name, value in parameters.items()})
    assert response.status_code in (200, 400, 404, 409), response.text
    if response.status_code in (400, 409):
        assert response.json()["error"]


def test_texts_of_any_kind_are_json(tmp_path: Path) -> None:
    shown = words([9] * 12, 0)
    shown[0] |= {
        "text": "</script><script>alert(1)</script>",
        "nan": float("nan"),
        "deep": {"a": [1, None, {"b": float("inf")}]},
    }
    run = token_run(tmp_path / "run")
    (run / "examples/train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in shown))
    client = TestClient(server.make_app(answers_for(run)), base_url=LOCAL)
    # Lengths differ from run to run; what matters is that it is plain JSON.
    response = client.get("/api/examples", params={"set": "train"})
    assert response.headers["content-type"] == "application/json"
    assert response.json()["examples"][0]["fields"]["deep"] == {"a": [1, None, {"b": None}]}


# --- runs of other kinds ---


@pytest.mark.parametrize("keep", ["traces", "covariance"])
def test_runs_without_tokens_or_texts(tmp_path: Path, keep: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(8, 3, generator=generator), torch.arange(8) % 2
    run = jostle.attribute(
        torch.nn.Linear(3, 2), (inputs, labels), (inputs[:3], labels[:3]), sampler=jostle.SGLD(step_size=1e-2),
        posterior=jostle.Posterior(n_beta=8, localization=10), chains=2, draws=20, out=tmp_path / "run", progress=False,
        keep=keep,
    )  # fmt: skip
    client = TestClient(server.make_app(answers_for(run.directory)), base_url=LOCAL)
    expected = run.influence(normalize=True).posterior_correlation
    np.testing.assert_allclose(numbers(client, "influence", set="query", sample=1), expected[:, 1], atol=2e-6)
    np.testing.assert_allclose(numbers(client, "influence", set="train", sample=5), expected[5], atol=2e-6)
    assert len(client.get("/api/examples", params={"set": "train"}).json()["examples"]) == 8
    told = client.get("/api/health").json()["diagnostics"]["verdict"]
    assert told == run.diagnostics()["verdict"]
    errors = client.get("/api/errors", params={"set": "query", "columns": "2"}).json()["errors"]
    assert (errors is None) == (keep == "covariance")
    assert client.get("/api/map").status_code == (409 if keep == "covariance" else 200)


def test_observables_stand_for_queries(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(8, 3, generator=generator), torch.arange(8) % 2
    run = jostle.attribute(
        torch.nn.Linear(3, 2), (inputs, labels), observables={"bias": lambda model: model.bias}, chains=2, draws=20,
        sampler=jostle.SGLD(step_size=1e-2), posterior=jostle.Posterior(n_beta=8, localization=10),
        out=tmp_path / "run", progress=False,
    )  # fmt: skip
    client = TestClient(server.make_app(answers_for(run.directory)), base_url=LOCAL)
    shown = client.get("/api/examples", params={"set": "query"}).json()["examples"]
    assert [one["fields"]["label"] for one in shown] == ["bias[0]", "bias[1]"]
    expected = run.influence(normalize=True, on="bias").posterior_correlation
    np.testing.assert_allclose(numbers(client, "influence", set="query", sample=1), expected[:, 1], atol=2e-6)


def test_a_failed_chain_is_left_out_and_named(tmp_path: Path) -> None:
    run = token_run(tmp_path / "run")
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["failed_chains"] = [{"chain": 1, "step": 33, "reason": "a loss left the finite numbers"}]
    (run / "manifest.json").write_text(json.dumps(manifest))
    Traces(run / "traces.zarr", writable=True).record(
        "train", [1], 14, np.full((1, 26, losses(run, "train")[0].total), np.nan, np.float32)
    )
    client = TestClient(server.make_app(answers_for(run)), base_url=LOCAL)
    found = numbers(client, "influence", set="query", sample=0)
    expected = jostle.load(run).influence(normalize=True).posterior_correlation[:, 0]
    np.testing.assert_allclose(found[:12], expected, atol=2e-6)
    told = client.get("/api/health").json()
    assert told["diagnostics"]["failed_chains"][0]["chain"] == 1
    assert told["curves"]["chains"] == [0, 2]
    assert told["curves"]["mean_loss"][1][20] is None


def test_errors_of_few_batches_are_no_warning_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a warning is shown is known to all threads together: questions that hide it undo each other's hiding."""
    answers = answers_for(token_run(tmp_path / "run", recorded=[20, 20, 0]))
    answers.warm()
    with monkeypatch.context() as patch:
        patch.setattr("warnings.catch_warnings", lambda *_, **__: pytest.fail("hidden for all threads"))
        found = answers.errors({"sample": "1", "columns": "0,1", "level": "token"})
    assert found["batches"] == 2
    assert all(error > 0 for error in found["errors"])

"""What the viewer writes: reports and figures from the command line, and images that a run keeps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import jostle
from jostle.cli import app
from jostle.errors import InputError
from jostle.runs.examples import images_of
from jostle.scores import Scores
from jostle.viewer.sources import RunSource
from viewing import token_run, write_run


def command(*arguments: object) -> Any:
    result = CliRunner(env={"COLUMNS": "120"}).invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files")
    token_run(path / "texts")
    pixels = np.random.default_rng(0).integers(0, 256, size=(30, 4, 4, 1), dtype=np.uint8)
    write_run(
        path / "images",
        sizes={"train": 30, "query": 3},
        examples={"train": [{"label": k % 4} for k in range(30)], "query": [{"label": k} for k in range(3)]},
        images={"train": pixels, "query": pixels[:3]},
    )
    write_run(path / "plain", sizes={"train": 6, "query": 2})
    other = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
    Scores(values=other, method="gradsim").save(path / "scores.safetensors")
    return path


def test_a_report_holds_what_it_should_and_loads_nothing(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    result = command("report", place / "texts", "-o", file, "-q", 1, "-k", 2)
    assert result.exit_code == 0, result.stderr
    assert "opens without a network" in result.stdout
    page = file.read_text()
    assert not re.findall(r"(?:src|href)=[\"'](?!#)(?!data:)[^\"']+", page)
    data = json.loads(re.search(r'id="jostle-answers">(.*?)</script>', page, re.DOTALL).group(1))
    shown = [example["index"] for example in data["answers"]["examples?run=0&set=train"]["examples"]]
    scores = jostle.load(place / "texts").influence(normalize=True).posterior_correlation[:, 1]
    order = np.argsort(-scores)
    assert shown == sorted({*order[:2].tolist(), *order[-2:].tolist()})
    assert [one["index"] for one in data["answers"]["examples?run=0&set=query"]["examples"]] == [1]


def test_a_report_goes_where_the_shell_is_unless_told(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command("report", place / "texts", "-q", 1, "-k", 2)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("report.html: ")
    assert "jostle-answers" in (tmp_path / "report.html").read_text()


@pytest.mark.filterwarnings("ignore::jostle.errors.EstimateWarning")  # these draws support what they support
@pytest.mark.parametrize("kappa", [10.0, 3.0, "auto"])
@pytest.mark.parametrize("name", ["texts", "images"])
def test_read_at_a_larger_n_beta(place: Path, tmp_path: Path, name: str, kappa: Any) -> None:
    """The viewer has the numbers of `Run.influence` and `Run.token_influence`, and says where it reads."""
    run = jostle.load(place / name)
    reading = RunSource(place / name, jostle.Run, kappa).read()
    scores = run.influence(normalize=True, kappa=kappa)
    assert reading.kappa == scores.provenance["kappa"]
    examples, tokens = reading.correlations("query", 1, None)
    np.testing.assert_allclose(examples, scores.posterior_correlation[:, 1], atol=2e-5)
    if name == "texts":
        one = run.token_influence(4, 1, whole_query=True, normalize=True, kappa=kappa).posterior_correlation[:, 0]
        np.testing.assert_allclose(tokens[reading.columns("train").of(4)], one, atol=2e-5)
        position = reading.columns("query").positions_of(1)[2]
        _, tokens = reading.correlations("query", 1, (position, position))
        one = run.token_influence(4, 1, normalize=True, kappa=kappa).posterior_correlation[:, 2]
        np.testing.assert_allclose(tokens[reading.columns("train").of(4)], one, atol=2e-5)
    assert (reading.errors("query", 1, None, [0], tokens=False) is None) == bool(reading.kappa)
    file = tmp_path / "report.html"
    assert command("report", place / name, "-o", file, "-q", 1, "-k", 2, "--kappa", kappa).exit_code == 0
    data = json.loads(re.search(r'id="jostle-answers">(.*?)</script>', file.read_text(), re.DOTALL).group(1))
    assert data["answers"]["runs?"]["runs"][0]["kappa"] == data["answers"]["health?run=0"]["kappa"] == reading.kappa


def test_a_report_of_images_and_another_method(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    assert command("report", place / "images", place / "scores.safetensors", "-o", file, "-k", 3).exit_code == 0
    data = json.loads(re.search(r'id="jostle-answers">(.*?)</script>', file.read_text(), re.DOTALL).group(1))
    assert {"compare?other=1&query=0&run=0", "health?run=0", "map?run=0"} <= set(data["answers"])
    assert len(data["images"]["0 query"]) == 3


@pytest.mark.parametrize(
    ("run", "name", "begins", "more"),
    [
        ("texts", "pair.png", b"\x89PNG", ["-q", 1, "--train", 3, "--token", 2]),
        ("texts", "top.svg", b"<?xml", ["-k", 2]),
        ("images", "grid.pdf", b"%PDF", ["-q", 2, "-k", 4]),
        ("images", "some.png", b"\x89PNG", ["--train", 3, "--train", 4]),
    ],
)
def test_figures_for_a_paper(place: Path, tmp_path: Path, run: str, name: str, begins: bytes, more: list[Any]) -> None:
    result = command("report", place / run, "-o", tmp_path / name, *more)
    assert result.exit_code == 0, result.stderr
    content = (tmp_path / name).read_bytes()
    assert content.startswith(begins)
    assert len(content) > 3000


@pytest.mark.filterwarnings("ignore::jostle.errors.EstimateWarning")
@pytest.mark.parametrize("kappa", [0, 3, "auto"])
@pytest.mark.parametrize("run", ["texts", "images"])
def test_a_figure_says_at_which_kappa_it_was_read(place: Path, tmp_path: Path, run: str, kappa: Any) -> None:
    result = command("report", place / run, "-o", tmp_path / "at.svg", "-q", 1, "-k", 2, "--kappa", kappa)
    assert result.exit_code == 0, result.stderr
    at = jostle.load(place / run).influence(normalize=True, kappa=kappa).provenance.get("kappa", 0.0)
    drawn = "\n".join(re.findall(r"<!-- (.*?) -->", (tmp_path / "at.svg").read_text()))
    assert re.findall(r"posterior correlation at κ = ([\d.]+)", drawn) == ([f"{at:g}"] if at else [])
    assert (f"at.svg: read at κ = {at:g}" in result.stdout) == (kappa != 0)


@pytest.mark.parametrize("run", ["texts", "images"])
def test_a_figure_has_the_verdict_and_nothing_on_the_wrong_side(place: Path, tmp_path: Path, run: str) -> None:
    result = command("report", place / run, "-o", tmp_path / "all.svg", "-k", 30)
    assert result.exit_code == 0, result.stderr
    drawn = re.findall(r"<!-- (.*?) -->", (tmp_path / "all.svg").read_text())
    summary = jostle.load(place / run).diagnostics()["verdict"]["summary"]
    (verdict,) = [words for words in drawn if words[:20] == summary[:20]]
    assert summary.startswith(verdict.removesuffix(" …"))
    correlations = jostle.load(place / run).influence(normalize=True).posterior_correlation[:, 0]
    shown = [float(number.replace("−", "-")) for number in re.findall(r":  ([+−]\d\.\d\d)", "\n".join(drawn))]
    helpful = np.sort(correlations[correlations >= 0.005])[::-1]
    harmful = np.sort(correlations[correlations <= -0.005]) if run == "images" else []
    assert 0 < len(helpful) < len(correlations)
    np.testing.assert_allclose(shown, [*helpful, *harmful], atol=0.0051)


def test_tokens_in_a_figure_have_the_colours_of_their_numbers(place: Path, tmp_path: Path) -> None:
    """The boxes of an SVG, against white mixed with blue or orange by hand."""
    command("report", place / "texts", "-o", tmp_path / "pair.svg", "-q", 1, "--train", 3, "--token", 2)
    values = jostle.load(place / "texts").token_influence(3, 1, normalize=True).posterior_correlation[:, 1]
    every = np.concatenate(
        [
            jostle.load(place / "texts").token_influence(k, 1, normalize=True).posterior_correlation[:, 1]
            for k in range(12)
        ]
    )
    reach = np.quantile(np.abs(every), 0.995, method="lower")  # as on the page
    expected = []
    for value in values:
        target = np.array((31, 119, 180) if value > 0 else (217, 95, 2))
        expected.append(255 - (255 - target) * 0.62 * min(1, abs(value) / reach))
    found = [
        [int(colour[k : k + 2], 16) for k in (0, 2, 4)]
        for colour in re.findall(
            r'<g id="patch_\d+">\s*<path[^>]*style="fill: #([0-9a-f]{6})"', (tmp_path / "pair.svg").read_text()
        )
    ]
    np.testing.assert_allclose(found[-len(expected) :], expected, atol=1.5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["view", "nowhere"], "nowhere, which is no directory"),
        (["view", "nowhere.safetensors"], "which does not exist"),
        (["view", "scores.safetensors"], "scores alone, expected a run of the same examples beside them"),
        (["report", "texts", "-o", "x.html", "-q", 9], "an index from 0 to 2"),
        (["report", "texts", "-o", "x.gif"], "a name ending in .html"),
        (
            ["report", "texts", "x.html"],
            "run: got x.html, which is no directory, expected a run directory, or a file of",
        ),
        (["report", "texts", "x.html"], "; what is to be written goes behind -o: -o x.html"),
        (["report", "texts", "scores.safetensors", "-o", "x.png"], "x.png, a figure, of 2, expected one run"),
        (["report", "texts", "-o", "x.png", "--token", 99], "positions of tokens that have a loss"),
        (["report", "images", "-o", "x.png", "--token", 0], "token: got 0, expected none: these queries have one loss"),
        (["report", "plain", "-o", "x.png"], "a run without texts or images"),
        (["report", "scores.safetensors", "-o", "x.html"], "a run of the same examples beside them"),
        (["report", "texts", "scores.safetensors", "-o", "x.html"], "scores of 30 training examples for 3 queries"),
        (["report", "scores.safetensors", "-o", "x.png"], "a run of the same examples beside them"),
        (["view", "texts", "--port", 0], ""),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_line(
    place: Path, tmp_path: Path, arguments: list[Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [place / part if part in ("texts", "images", "plain", "scores.safetensors") else part for part in arguments]
    result = command(*given)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert not list(tmp_path.iterdir())


def test_a_run_keeps_the_images_it_is_given(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.rand(6, 3, 4, 5, generator=generator)
    labels = torch.arange(6) % 2
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(60, 2))
    shown = [{"image": picture, "label": int(label)} for picture, label in zip(pictures, labels, strict=True)]
    run = jostle.attribute(
        model, (pictures, labels), (pictures[:2], labels[:2]), posterior=jostle.Posterior(n_beta=6, localization=10),
        sampler=jostle.SGLD(step_size=1e-2), chains=2, draws=12, out=tmp_path / "run", progress=False,
        examples={"train": shown, "query": shown[:2]},
    )  # fmt: skip
    expected = (pictures.permute(0, 2, 3, 1) * 255).round().to(torch.uint8).numpy()
    np.testing.assert_array_equal(run.images("train"), expected)
    assert run.examples("train")[1] == {"label": 1}


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (np.array([[0.0, 1.0], [0.5, 0.25]]), [[0, 255], [128, 64]]),
        (np.array([[0, 255], [7, 128]]), [[0, 255], [7, 128]]),
        (np.array([[-1.0, 1.0], [0.0, 3.0]]), [[0, 128], [64, 255]]),  # standardized: stretched
    ],
)
def test_pixels_mean_what_they_usually_do(image: np.ndarray, expected: list[list[int]]) -> None:
    kept = images_of("train", [{"image": image}])
    assert kept is not None
    np.testing.assert_allclose(kept[0, :, :, 0].astype(int), expected, atol=1)


def test_images_of_many_shapes_are_refused() -> None:
    with pytest.raises(InputError, match=r"images of train of shape \(4, 4\) and \(5, 4\)"):
        images_of("train", [{"image": np.zeros((4, 4))}, {"image": np.zeros((5, 4))}])
    assert images_of("train", [{"image": np.zeros((4, 4))}, {"label": 1}]) is None

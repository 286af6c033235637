"""The scaling analysis on shapes that take no time: it goes on where it stood, and extrapolates as by hand."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import pytest
from benchmarks.language import Shape
from experiments import scaling

from test_texts import TEXTS, make_tokenizer

SHAPES = {"tiny": Shape(2, 32, 2, 340), "wide": Shape(2, 48, 2, 340)}


def test_shapes_are_measured_once_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    texts = [{"text": f"{text} {number}"} for number in range(8) for text in TEXTS]
    (tmp_path / "pile.jsonl").write_text("\n".join(map(json.dumps, texts)))
    monkeypatch.setattr(scaling, "SHAPES", SHAPES)
    monkeypatch.setattr(scaling, "WHOLE_WIDTH", 32)  # of the wider one, a block

    def call(*options: str) -> dict:
        paths = ["--pile", "pile.jsonl", "--tokenizer", "tokenizer", "--record", "record.json", "--quick"]
        monkeypatch.setattr(sys, "argv", ["scaling", *paths, *options])
        scaling.main()
        return json.loads(Path("record.json").read_text()) if Path("record.json").is_file() else {}

    monkeypatch.chdir(tmp_path)
    gc.freeze()  # kronfluence collects garbage at every turn, and all that is imported is gone through each time
    request.addfinalizer(gc.unfreeze)
    assert call("--minutes", "0") == {}  # nothing is begun that would not be finished
    rows = call("--shapes", "tiny", "--methods", "BIF")["shapes"]
    assert list(rows["tiny"]) == ["parameters", "flops_a_draw", "BIF"]
    record = call("--shapes", "wide")
    assert record["shapes"]["tiny"]["BIF"] == rows["tiny"]["BIF"]
    assert record["settings"]["random_weights"]
    found = {name: row["BIF"] for name, row in record["shapes"].items()}
    assert [one["draws_timed"] for one in found.values()] == [[2, 3, 4]] * 2
    assert 0 < found["tiny"]["seconds"][0] < found["tiny"]["seconds"][1] < found["tiny"]["seconds"][2]
    assert found["tiny"]["execution"]["compiled"] is False
    assert found["tiny"]["state_gb_a_chain"] == pytest.approx(4e-9 * 2 * (12 * 32**2 + 9 * 32))
    fit = record["shapes"]["wide"]["EK-FAC"]
    assert fit["extrapolated_from_blocks"] == 1
    assert fit["stages"]["16"].keys() == {"covariance", "eigendecomposition", "lambda", "scores"}
    assert fit["stages"]["8"].keys() == {"covariance", "lambda"}
    # Both blocks of the wide one are as the first: all of its factors are twice as many bytes.
    sides = 48**2 * (9 + 1 + 16 + 1) + 2 * 49**2 + 49**2 + 193**2
    assert fit["disk_gb"] == pytest.approx(2 * 4e-9 * (2 * sides + 12 * 48**2 + 9 * 48), rel=0.05)

    assert (tmp_path / "record.png").stat().st_size > 10_000
    record["shapes"]["tiny"]["BIF"] = {"failed": "OutOfMemoryError: for a test"}
    Path("record.json").write_text(json.dumps(record | {"matmul_peak_tflops": 1e-3}))
    rest = ("--methods", "BIF")
    assert call(*rest) == record | {"matmul_peak_tflops": 1e-3}  # there is nothing left to measure
    assert call("--again", *rest)["shapes"]["tiny"]["BIF"]["seconds_a_draw"] > 0
    monkeypatch.setattr(sys, "argv", ["scaling", "--draw", "--record", "record.json", "--figure", "alone.png"])
    scaling.main()
    assert (tmp_path / "alone.png").stat().st_size > 10_000
    monkeypatch.setattr(scaling, "TOKENS", 10)
    with pytest.raises(SystemExit, match="other settings"):
        call()


def test_extrapolations_are_those_of_a_straight_line() -> None:
    timed = scaling.bif_result([10, 20, 40], [1.0 + 0.5 * draws for draws in (10, 20, 40)])
    assert timed["seconds_2000_draws"] == pytest.approx(1000)
    assert (timed["farthest_from_linear"], timed["extrapolated_from_draws"]) == (pytest.approx(0, abs=1e-12), 40)
    complete = scaling.bif_result([500, 1000, 2000], [5.0, 10.0, 21.0])
    assert (complete["seconds_2000_draws"], complete["extrapolated_from_draws"]) == (21.0, None)
    assert complete["farthest_from_linear"] > 0.01

    def stages(blocks: int, size: int) -> dict[str, float]:
        """3 s to begin with, 0.01 s an example for the passes, and for each block what it takes itself."""
        return {
            "covariance": 0.01 * size + blocks * 0.02 * size, "eigendecomposition": 7.0 * blocks,
            "lambda": 3 + 0.01 * size + blocks * 0.04 * size, "scores": 5 + 2.0 * blocks,
        }  # fmt: skip

    measured = {size: stages(12, size) for size in (100, 400)}
    whole = scaling.ekfac_result(measured, None, 12)
    assert whole["fit_seconds"] == pytest.approx({"100": 161.0, "400": 383.0})
    assert whole["seconds_a_fit_example"] == pytest.approx(0.74)
    assert whole["extrapolated_fit_seconds_1000000_examples"] == pytest.approx(87 + 740_000)
    # From one block of 12; its passes are known from a layer that takes next to nothing itself.
    measured = {size: stages(1, size) for size in (100, 400)}
    part = scaling.ekfac_result(measured, {size: stages(0, size) for size in (100, 400)}, 12)
    assert part["extrapolated_from_blocks"] == 1
    assert part["eigendecomposition_seconds"] == 84
    assert part["fit_seconds"] == pytest.approx(whole["fit_seconds"])
    assert part["extrapolated_fit_seconds_1000000_examples"] == pytest.approx(87 + 740_000)
    assert part["score_seconds"] == pytest.approx(29)

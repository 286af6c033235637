"""The paper's scaling analysis: time, memory and disk of the BIF and of EK-FAC, against the size of the model.

    python -m experiments.scaling --pile train.jsonl.xz --tokenizer DIR [--shapes 14m 410m ...] [--minutes M]
    python -m experiments.scaling --draw                     # the figure alone, from the record

400 sequences of the Pile × 18 prompt–completion queries, cut to 150 tokens; attention and MLP weights move; C 4, T 500,
m 32, ε 5e-6, nβ 30, γ 300. Pythia's shapes with *random* weights: cost does not depend on their values.

BIF: one run a shape, in which every draw is timed. The slope over three numbers of draws is the time of a draw (how far
from linear they are is in the record); where these are fewer than the paper's 2,000, that many are extrapolated, and
marked so. Chains are taken one after another, and the model is compiled where 2,000 draws would be worth it.

EK-FAC: kronfluence in bfloat16, with its iterative sum of Λ. Stages are timed apart, on two sizes of the fit set: the
eigendecomposition and the scores do not depend on that size, the rest is linear in it, and the paper's million examples
are extrapolated. Where all blocks would take too long, or find no room, one block is fitted, and the others are taken
to cost as much; passes through the model are counted once (one small layer is fitted to know them), and memory is that
of one block. Both are the least that all blocks could take.

Whatever is in the record is not measured again; what has no time left is not begun, and left to the next call.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import json
import lzma
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.clock import Clock, EnoughDrawsError
from benchmarks.environment import write_record
from benchmarks.language import SHAPES, Shape, pythia
from benchmarks.run import matmul_peak

import jostle
from experiments.retraining import Budget
from jostle.attributors import ekfac
from jostle.chains.execution import WORTH_COMPILING
from jostle.diagnose.plots import CHAIN_COLOURS
from jostle.presets import PRESETS

RECORD = Path(__file__).parent / "records" / "scaling.json"
METHODS = ("BIF", "EK-FAC")
SEQUENCES, TOKENS, QUICK_SEQUENCES = 400, 150, 16
PRESET = PRESETS["scaling"]
DRAWS = PRESET["chains"] * PRESET["draws"]
FIT_SIZES, FIT_BATCH = (100, 400), 20
"""A batch of 20 has all queries in it, so that kronfluence goes through the training set once."""
PAPERS_FIT = 1_000_000
WHOLE_WIDTH = 1024
"""Wider models than this are fitted by EK-FAC in one block: eigenvectors of all take minutes, and twice the disk."""
FIRST_BLOCK = "layers.0.attention+mlp"
SMALL_LAYER = "*.layers.0.attention.dense.*"
STAGES = {
    "covariance": "fit_covariance_matrices", "eigendecomposition": "perform_eigendecomposition",
    "lambda": "fit_lambda_matrices", "scores": "compute_pairwise_scores",
}  # fmt: skip
"""Of EK-FAC, and what kronfluence calls them."""

QUERIES = [
    ("The capital of France is", " Paris."),
    ("Water boils at a temperature of", " one hundred degrees Celsius."),
    ("The opposite of hot is", " cold."),
    ("Two plus three equals", " five."),
    ("The author of Hamlet was", " William Shakespeare."),
    ("def add(a, b):\n    return", " a + b"),
    ("for i in range(10):\n    print(", "i)"),
    ("The quick brown fox jumps over the lazy", " dog."),
    ("She opened the door and saw", " that the room was empty."),
    ("In 1969 the first humans landed on the", " moon."),
    ("The largest planet of the solar system is", " Jupiter."),
    ("My favourite fruit is the", " apple, because it is sweet."),
    ("\\begin{equation} E =", " mc^2 \\end{equation}"),
    ("SELECT name FROM users WHERE", " id = 1;"),
    ("The patient was treated with", " antibiotics for ten days."),
    ("The court held that the defendant", " was liable for the damage."),
    ("Le chat est assis sur", " la table."),
    ("<html><body><h1>Hello", "</h1></body></html>"),
]

Rows = list[dict[str, list[int]]]


def sequences(pile: Path, tokenizer: Any, count: int) -> Rows:
    opened: Any = lzma.open if pile.suffix == ".xz" else open
    found = []
    with opened(pile, "rt", encoding="utf-8") as lines:
        for line in lines:
            tokens = tokenizer(json.loads(line)["text"])["input_ids"][:TOKENS]
            if len(tokens) >= 2:
                found.append({"input_ids": tokens})
            if len(found) == count:
                return found
    return found


def queries(tokenizer: Any) -> Rows:
    """Prompt and completion; the completion's tokens are what is scored."""
    out = []
    for prompt, completion in QUERIES:
        before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, completion))
        out.append({"input_ids": before + after, "labels": [-100] * len(before) + after})
    return out


def draws_timed(shape: Shape, quick: bool) -> list[int]:
    """Three numbers of draws: all 2,000 of the smallest model, few of those that take seconds for one."""
    if quick:
        return [2, 3, 4]
    for width, counts in ((128, (500, 1000, DRAWS)), (1024, (10, 20, 40)), (2560, (5, 10, 20))):
        if shape.width <= width:
            return list(counts)
    return [3, 6, 12]


def flops_a_draw(shape: Shape, train: Rows, query: Rows) -> float:
    """A forward pass of every sequence, and forward and backward of a minibatch; no padding."""
    length = np.mean([len(row["input_ids"]) for row in train])
    observed = sum(len(row["input_ids"]) for row in (*train, *query))
    return shape.token_flops * float(observed + 3 * PRESET["batch_size"] * length)


def time_bif(model: Any, shape: Shape, train: Rows, query: Rows, quick: bool, compile: bool) -> dict[str, Any]:
    """Seconds of a draw, from one run in which each is timed."""
    counts = draws_timed(shape, quick)
    # The thread that writes traces may still be at it when a run ends in the middle.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        run = Path(directory) / "run"
        clock = Clock(run, end=counts[-1] + 1)
        with contextlib.suppress(EnoughDrawsError):
            jostle.attribute(
                model, train, query, loss=jostle.losses.next_token(), observables={"clock": clock},
                posterior=jostle.Posterior(**{key: PRESET[key] for key in ("n_beta", "localization", "weights")}),
                sampler=jostle.SGLD(step_size=PRESET["step_size"]), chains=1, draws=counts[-1] + 1, thin=1,
                batch_size=PRESET["batch_size"], compile=compile, checkpoint_seconds=1e9, progress=False, out=run,
            )  # fmt: skip
        manifest = json.loads((run / "manifest.json").read_text())
    scored = sum(len(row["input_ids"]) - 1 for row in train)
    scored += sum(label >= 0 for row in query for label in row["labels"][1:])
    return bif_result(counts, [clock.seconds(draws) for draws in counts]) | {
        "execution": manifest["execution"],
        "trace_gb_2000_draws": 4e-9 * scored * DRAWS,  # losses are float32
        "state_gb_a_chain": 4e-9 * manifest["moving_weights"],
    }


def bif_result(counts: Sequence[int], seconds: Sequence[float]) -> dict[str, Any]:
    """The time of a draw, and of 2,000: as measured where so many were timed, extrapolated otherwise."""
    slope, start = np.polyfit(counts, seconds, 1)
    away = np.abs(np.polyval([slope, start], counts) - seconds).max() / max(seconds)
    whole = counts[-1] >= DRAWS
    return {
        "draws_timed": list(counts), "seconds": list(seconds), "seconds_a_draw": slope, "farthest_from_linear": away,
        "seconds_2000_draws": seconds[-1] if whole else slope * DRAWS,
        "extrapolated_from_draws": None if whole else counts[-1],
    }  # fmt: skip


@contextlib.contextmanager
def timing_kronfluence() -> Iterator[dict[str, float]]:
    """Seconds of each of kronfluence's stages: what Jostle does around them does not count."""
    analyzer: Any = importlib.import_module("kronfluence.analyzer").Analyzer
    taken: dict[str, float] = {}

    def timed(stage: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = method(*arguments, **options)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            taken[stage] = time.perf_counter() - started
            return result

        return call

    own = {name: getattr(analyzer, name) for name in STAGES.values()}
    try:
        for stage, name in STAGES.items():
            setattr(analyzer, name, timed(stage, own[name]))
        yield taken
    finally:
        for name, method in own.items():
            setattr(analyzer, name, method)


def time_stages(
    model: Any, train: Rows, query: Rows, fit_size: int, weights: str, directory: Path | None = None, *,
    fit_data: Rows | None = None,
) -> dict[str, float]:  # fmt: skip
    """Fit, on the first of the training data unless there is other, and score; what the directory has is taken."""
    low: dict[str, Any] = {"use_iterative_lambda_aggregation": True}
    scoring: dict[str, Any] = {}
    if torch.cuda.is_available():
        kinds = ("per_sample_gradient", "activation_covariance", "gradient_covariance", "lambda")
        low |= {f"{kind}_dtype": torch.bfloat16 for kind in kinds}
        scoring = {f"{kind}_dtype": torch.bfloat16 for kind in ("per_sample_gradient", "precondition", "score")}
    with timing_kronfluence() as taken:
        ekfac(
            model, train, query, fit_data=(fit_data or train)[:fit_size], loss=jostle.losses.next_token(),
            weights=weights, batch_size=FIT_BATCH, directory=directory, factor_arguments=low, score_arguments=scoring,
        )  # fmt: skip
    return taken


def time_ekfac(model: Any, shape: Shape, train: Rows, query: Rows, quick: bool) -> dict[str, Any]:
    """Fit and score apart, on two sizes of the fit set; of wide models one block."""
    fewer, more = (QUICK_SEQUENCES // 2, QUICK_SEQUENCES) if quick else FIT_SIZES
    whole = shape.width <= WHOLE_WIDTH
    weights = PRESET["weights"] if whole else FIRST_BLOCK
    scratch = Path(tempfile.mkdtemp())
    try:
        time_stages(model, train[:FIT_BATCH], query, FIT_BATCH, SMALL_LAYER)  # it loads kernels
        passes = {
            size: time_stages(model, train, query, size, SMALL_LAYER) for size in (() if whole else (fewer, more))
        }
        measured = {more: time_stages(model, train, query, more, weights, scratch / "more")}
        disk = sum(path.stat().st_size for path in scratch.rglob("*.safetensors")) / 1e9
        # Eigenvectors take as long whatever they were fitted on: the second fit has the first one's.
        for path in (scratch / "more").rglob("*eigen*.safetensors"):
            place = scratch / "fewer" / path.relative_to(scratch / "more")
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)
        shutil.rmtree(scratch / "more")
        # Nor do scores depend on it: a few are enough.
        few = time_stages(model, train[:FIT_BATCH], query[:1], fewer, weights, scratch / "fewer", fit_data=train)
        measured[fewer] = {stage: few[stage] for stage in ("covariance", "lambda")}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    result = ekfac_result(measured, passes or None, shape.layers)
    return result | {"disk_gb": disk * (1 if whole else shape.layers)}


def ekfac_result(
    measured: Mapping[int, Mapping[str, float]], passes: Mapping[int, Mapping[str, float]] | None, blocks: int
) -> dict[str, Any]:
    """Seconds of fit and scores for all blocks, and of a fit on a million examples.

    Args:
        measured: of each stage, by the size of the fit set; eigendecomposition and scores for the largest.
        passes: the same of one small layer, where one block was fitted and not all: about what passes through the
            model take, which is the same however many blocks are fitted.
        blocks: how many there are.
    """
    fewer, more = sorted(measured)

    def all_blocks(size: int, stage: str) -> float:
        seconds = measured[size][stage]
        if passes is None or stage == "eigendecomposition":
            return seconds if passes is None else blocks * seconds
        alone = passes[size][stage]
        return alone + blocks * max(0.0, seconds - alone)

    eigendecomposition = all_blocks(more, "eigendecomposition")
    passing = {size: all_blocks(size, "covariance") + all_blocks(size, "lambda") for size in (fewer, more)}
    slope = (passing[more] - passing[fewer]) / (more - fewer)
    once = passing[more] - slope * more + eigendecomposition
    return {
        "stages": {str(size): dict(stages) for size, stages in measured.items()},
        "stages_of_one_small_layer": passes and {str(size): dict(stages) for size, stages in passes.items()},
        "extrapolated_from_blocks": None if passes is None else 1,
        "eigendecomposition_seconds": eigendecomposition,
        "fit_seconds": {str(size): seconds + eigendecomposition for size, seconds in passing.items()},
        "score_seconds": all_blocks(more, "scores"),
        "seconds_a_fit_example": slope,
        f"extrapolated_fit_seconds_{PAPERS_FIT}_examples": once + slope * PAPERS_FIT,
    }


def expected_seconds(name: str, method: str, rows: Mapping[str, Any]) -> tuple[float, float]:
    """About how long it takes on an H200, corrected by how long the last shape took."""
    shape = SHAPES[name]
    weights = 12 * shape.layers * shape.width**2
    if method == "BIF":
        draws = draws_timed(shape, False)[-1] + 15
        guess = 30 + 5e-9 * weights + (75 if worth_compiling(shape) else 0) + draws * (0.01 + 2.5 * shape.flops / 8e14)
    else:
        blocks = shape.layers if shape.width <= WHOLE_WIDTH else 1
        eigenvectors = sum(0.05 + 1.3e-11 * (side * shape.width) ** 3 for side in (4, 4, 3, 1, 1, 1, 1, 1))
        fitted, scored = sum(FIT_SIZES), SEQUENCES + len(QUERIES)
        # Both ways through the model for covariances, Λ and scores; gradients into the eigenbasis, for Λ.
        passes = (2 * (fitted + max(FIT_SIZES)) + 2 * scored) * TOKENS * 4 * weights
        rotations = fitted * 108 * blocks * shape.width**3
        written = 3 * 2 * 104 * blocks * shape.width**2  # two sets of factors, bfloat16
        guess = 30 + 6e-9 * weights + blocks * eigenvectors + (passes + rotations) / 3e14 + written / 5e8
    done = [row[method] for row in rows.values() if method in row and "failed" not in row[method]]
    paces = [found["wall_seconds"] / found["guessed_seconds"] for found in done]
    return guess, guess * max(0.5, paces[-1] if paces else 1.0)


def worth_compiling(shape: Shape) -> bool:
    """As `attribute` would decide of 2,000 draws; uncompiled, a draw takes 2.5 times its floor."""
    return DRAWS * 2.5 * shape.flops / 8e14 > WORTH_COMPILING


def measure(arguments: argparse.Namespace, record: dict[str, Any], train: Rows, query: Rows) -> bool:
    """Every method on every shape, as far as the time goes; the record is written after each. Whether there was any."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    budget = Budget(arguments.minutes) if arguments.minutes is not None else None
    if device == "cuda":
        record["matmul_peak_tflops"] = matmul_peak() / 1e12
    rows, any_new = record["shapes"], False
    for name in arguments.shapes:
        shape, model = SHAPES[name], None
        row = rows.get(name, {})
        for method in arguments.methods:
            if method in row and not (arguments.again and "failed" in row[method]):
                continue
            guess, expected = expected_seconds(name, method, rows)
            if budget and budget.seconds_left < expected:
                left = max(0.0, budget.seconds_left)
                print(f"{name} {method}: about {expected:.0f} s, {left:.0f} s left; for the next call", flush=True)
                continue
            started = time.perf_counter()
            result: dict[str, Any]
            if model is None:
                model = pythia(shape, device, torch.bfloat16 if device == "cuda" else torch.float32)
                row |= {"parameters": sum(value.numel() for value in model.parameters()),
                        "flops_a_draw": flops_a_draw(shape, train, query)}  # fmt: skip
            release()
            try:
                if method == "BIF":
                    compile = device == "cuda" and worth_compiling(shape)
                    result = time_bif(model, shape, train, query, arguments.quick, compile)
                else:
                    result = time_ekfac(model, shape, train, query, arguments.quick)
            except Exception as error:  # what does not run is a result
                traceback.print_exc()
                reason = str(error).splitlines()[0] if str(error) else ""
                result = {"failed": f"{type(error).__name__}: {reason[:300]}"}
            if device == "cuda":
                # `ekfac` analyses a copy, which kronfluence would not need.
                copied = sum(value.nbytes for value in model.parameters()) if method == "EK-FAC" else 0
                result["peak_memory_gb"] = (torch.cuda.max_memory_allocated() - copied) / 1e9
            result |= {"wall_seconds": time.perf_counter() - started, "guessed_seconds": guess}
            row[method], rows[name], any_new = result, row, True
            write_record(arguments.record, record)
            print(name, method, json.dumps(result, default=float), flush=True)
        del model
        release()
    return any_new


def release() -> None:
    """Give back all memory, and what was compiled: for another shape it would be compiled anew as one of any size."""
    gc.collect()
    if torch.cuda.is_available():
        torch.compiler.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def draw(path: Path, record: Mapping[str, Any]) -> None:
    """The paper's figure: time and peak memory against the number of parameters; what is extrapolated is hollow."""
    from matplotlib.figure import Figure

    rows = sorted((row for row in record["shapes"].values() if "parameters" in row), key=lambda row: row["parameters"])
    figure = Figure(figsize=(12, 5.6), layout="constrained")
    times, memory = figure.subplots(1, 2)

    def curve(panel: Any, label: str, colour: str, style: str, points: list[tuple[float, float, bool]]) -> None:
        if not points:
            return
        across, up, hollow = zip(*points, strict=True)
        panel.plot(across, up, color=colour, linestyle=style, label=label)
        for x, y, empty in zip(across, up, hollow, strict=True):
            panel.plot(x, y, "o", color=colour, markerfacecolor="white" if empty else colour)

    def points(method: str, value: Callable[[dict[str, Any]], float | None], hollow: str | None) -> list[Any]:
        done = [(row["parameters"], row[method]) for row in rows if "failed" not in row.get(method, {"failed": ""})]
        return [(size, value(found), hollow is None or found.get(hollow) is not None)
                for size, found in done if value(found) is not None]  # fmt: skip

    bif, rival = CHAIN_COLOURS[:2]
    fit = str(max(FIT_SIZES) if not record["settings"]["quick"] else QUICK_SEQUENCES)
    million = f"extrapolated_fit_seconds_{PAPERS_FIT}_examples"
    curve(times, "BIF, 2,000 draws", bif, "-",
          points("BIF", lambda found: found["seconds_2000_draws"], "extrapolated_from_draws"))  # fmt: skip
    curve(times, f"EK-FAC, fitted on {fit} examples", rival, "-",
          points("EK-FAC", lambda found: found["fit_seconds"][fit] + found["score_seconds"],
                 "extrapolated_from_blocks"))  # fmt: skip
    curve(times, "EK-FAC, fitted on a million", rival, ":",
          points("EK-FAC", lambda found: found[million] + found["score_seconds"] if million in found else None,
                 None))  # fmt: skip
    if peak := record.get("matmul_peak_tflops"):
        floor = [(row["parameters"], DRAWS * row["flops_a_draw"] / (1e12 * peak)) for row in rows]
        times.plot(*zip(*floor, strict=True), color="black", linewidth=0.8, linestyle="--",
                   label=f"floor of the BIF: its arithmetic at {peak:.0f} TFLOP/s")  # fmt: skip
    for method, colour in ((METHODS[0], bif), (METHODS[1], rival)):
        # Memory does not depend on the number of draws; with one block it is the least that all could take.
        peaks = points(method, lambda found: found.get("peak_memory_gb"), "extrapolated_from_blocks")
        curve(memory, method, colour, "-", peaks)
    times.set(ylabel="seconds", title="time")
    memory.set(ylabel="GB", title="peak GPU memory")
    for panel in (times, memory):
        panel.set(xlabel="parameters", xscale="log", yscale="log")
        panel.grid(alpha=0.3)
    figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    hardware = record.get("environment", {}).get("accelerator") or "CPU"
    figure.suptitle(
        f"Pythia shapes, random weights, {hardware}; hollow: extrapolated from fewer draws, one block, or a smaller fit"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of BIF and EK-FAC against model size.")
    parser.add_argument("--pile", type=Path, help="sequences of the Pile, as .jsonl or .jsonl.xz")
    parser.add_argument("--tokenizer", type=Path, help="Pythia's")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--minutes", type=float, help="begin nothing that will not be finished by then")
    parser.add_argument("--again", action="store_true", help="try again what failed")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--figure", type=Path, help="default: beside the record")
    parser.add_argument("--draw", action="store_true", help="only draw the figure of the record")
    parser.add_argument("--quick", action="store_true", help="a few draws and sequences, to see that it runs")
    arguments = parser.parse_args()
    record: dict[str, Any] = json.loads(arguments.record.read_text()) if arguments.record.is_file() else {}
    if not arguments.draw:
        if not arguments.pile or not arguments.tokenizer:
            parser.error("--pile and --tokenizer are needed to measure; --draw alone is not")
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
        train = sequences(arguments.pile, tokenizer, QUICK_SEQUENCES if arguments.quick else SEQUENCES)
        query = queries(tokenizer)
        settings = {
            "sequences": len(train), "queries": len(query), "tokens": TOKENS, **PRESET, "random_weights": True,
            "quick": arguments.quick, "extrapolated": "whatever has extrapolated in its name, or from how many draws "
            "or blocks it is under a name that begins with extrapolated_from",
        }  # fmt: skip
        if record and record["settings"] != settings:
            raise SystemExit(f"{arguments.record} has other settings: choose another --record")
        record = {"settings": settings, "shapes": {}, **{k: v for k, v in record.items() if k != "environment"}}
        if not measure(arguments, record, train, query):
            return
    elif not record:
        raise SystemExit(f"there is no record {arguments.record} to draw")
    draw(arguments.figure or arguments.record.with_suffix(".png"), json.loads(arguments.record.read_text()))


if __name__ == "__main__":
    main()

"""The paper's scaling analysis: time, memory and disk of the BIF and of EK-FAC, against the size of the model.

    python -m experiments.scaling --pile train.jsonl.xz --tokenizer DIR [--shapes 14m 410m ...] [--record FILE]

400 sequences of the Pile × 18 prompt–completion queries, cut to 150 tokens; attention and MLP weights move; C 4, T 500,
m 32, ε 5e-6, nβ 30, γ 300. Pythia's shapes with random weights: cost does not depend on their values.

BIF: three numbers of draws are timed, the slope is the time of a draw (and how far from linear the three are is in the
record), and 2,000 draws are extrapolated from it and marked so. EK-FAC: fit and scores apart, at several sizes of the
fit set; its scores do not depend on that size, its fit does.
"""

from __future__ import annotations

import argparse
import gc
import json
import lzma
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.environment import write_record
from benchmarks.language import SHAPES, pythia

import jostle
from jostle.attributors import ekfac
from jostle.presets import PRESETS

RECORD = Path(__file__).parent / "records" / "scaling.json"
SEQUENCES, TOKENS = 400, 150
WEIGHTS = "attention+mlp"
DRAWS = 2000
FIT_SIZES = (100, 400)

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


def sequences(pile: Path, tokenizer: Any, count: int) -> list[dict[str, list[int]]]:
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


def queries(tokenizer: Any) -> list[dict[str, list[int]]]:
    """Prompt and completion; the completion's tokens are what is scored."""
    out = []
    for prompt, completion in QUERIES:
        before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, completion))
        out.append({"input_ids": before + after, "labels": [-100] * len(before) + after})
    return out


def time_bif(model: Any, train: Any, query: Any, counts: list[int]) -> dict[str, Any]:
    preset = PRESETS["scaling"]
    taken, disk = [], 0
    for draws in counts:
        with tempfile.TemporaryDirectory() as directory:
            run = jostle.attribute(
                model, train, query, loss=jostle.losses.next_token(),
                posterior=jostle.Posterior(**{key: preset[key] for key in ("n_beta", "localization", "weights")}),
                sampler=jostle.SGLD(step_size=preset["step_size"]), chains=1, draws=draws, thin=1,
                batch_size=preset["batch_size"], compile=True, checkpoint_seconds=1e9, progress=False,
                out=f"{directory}/run",
            )  # fmt: skip
            taken.append(run.manifest["seconds"]["sampling"])
            disk = sum(path.stat().st_size for path in Path(directory, "run", "traces.zarr").rglob("*"))
    slope, start = np.polyfit(counts, taken, 1)
    away = np.abs(np.polyval([slope, start], counts) - taken).max() / max(taken)
    return {
        "draws_timed": counts, "seconds": taken, "seconds_a_draw": slope, "farthest_from_linear": away,
        "extrapolated_seconds_2000_draws": slope * DRAWS,
        "extrapolated_disk_gb_2000_draws": disk / counts[-1] * DRAWS / 1e9,
    }  # fmt: skip


def time_ekfac(model: Any, train: Any, query: Any, fit_size: int, batch_size: int) -> dict[str, Any]:
    """Fit and score in one call, then again from the stored factors: the difference is the fit."""
    factors, scoring = {}, {}
    if torch.cuda.is_available():  # half precision wherever it may be: what saves memory and time
        kinds = ("per_sample_gradient", "activation_covariance", "gradient_covariance", "lambda")
        factors = {f"{kind}_dtype": torch.bfloat16 for kind in kinds}
        scoring = {f"{kind}_dtype": torch.bfloat16 for kind in ("per_sample_gradient", "score")}
    directory = tempfile.mkdtemp()
    seconds = []
    try:
        for _ in range(2):
            started = time.perf_counter()
            ekfac(
                model, train, query, fit_data=train[:fit_size], loss=jostle.losses.next_token(), weights=WEIGHTS,
                batch_size=batch_size, directory=directory, factor_arguments=factors,
                score_arguments=scoring,
            )  # fmt: skip
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        disk = sum(path.stat().st_size for path in Path(directory).rglob("*")) / 1e9
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return {"fit_size": fit_size, "fit_seconds": seconds[0] - seconds[1], "score_seconds": seconds[1], "disk_gb": disk}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of BIF and EK-FAC against model size.")
    parser.add_argument("--pile", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--methods", nargs="+", default=["BIF", "EK-FAC"], choices=["BIF", "EK-FAC"])
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--quick", action="store_true", help="a tiny shape on this machine, to see that it runs")
    arguments = parser.parse_args()
    from transformers import AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    train = sequences(arguments.pile, tokenizer, 16 if arguments.quick else SEQUENCES)
    query = queries(tokenizer)
    record: dict[str, Any] = json.loads(arguments.record.read_text()) if arguments.record.is_file() else {}
    record = {"settings": {"sequences": len(train), "queries": len(query), "tokens": TOKENS, "weights": WEIGHTS,
                           "random_weights": True, "quick": arguments.quick},
              "shapes": record.get("shapes", {})}  # fmt: skip
    for name in ["14m"] if arguments.quick else arguments.shapes:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = pythia(SHAPES[name], device, dtype)
        row = record["shapes"].setdefault(name, {})
        row["parameters"] = sum(value.numel() for value in model.parameters())
        for method in arguments.methods:
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                if method == "BIF":
                    row[method] = time_bif(model, train, query, [2, 3, 4] if arguments.quick else [10, 20, 40])
                else:
                    sizes = (8,) if arguments.quick else FIT_SIZES
                    row[method] = {
                        f"fitted on {size}": time_ekfac(model, train, query, size, 4 if arguments.quick else 16)
                        for size in sizes
                    }
            except torch.cuda.OutOfMemoryError as error:
                row[method] = {"failed": str(error).splitlines()[0]}
            if device == "cuda":
                row[method]["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
            print(name, method, json.dumps(row[method], default=float), flush=True)
            write_record(arguments.record, record)


if __name__ == "__main__":
    main()

"""Does influence find the text that a query belongs to?

    python -m experiments.same_document --model stories15M --wikitext valid.txt --wikipedia articles.jsonl

Copies: 64 WikiText sequences as training set, 8 of them again as queries; the copy should come first (plumbing).

Halves: 64 Wikipedia articles, first halves as training set and second halves as queries, after a short fine-tuning on
the first halves. Mean reciprocal rank of the right half (± its standard error over queries), of the BIF at several
localizations (all of them shown), against BM25, token overlap and gradient similarity on the same weights.

Files may be compressed by xz. The record grows with each setting, and a later call goes on with those it lacks.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import lzma
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.environment import write_record
from torch import nn

import jostle
from jostle.attributors import bm25, gradient_similarity
from jostle.data.datasets import Data

RECORD = Path(__file__).parent / "records" / "same_document.json"
WEIGHTS = "attention"


def open_text(path: Path) -> Any:
    return lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else open(path, encoding="utf-8")


def reciprocal_ranks(scores: np.ndarray, right: np.ndarray) -> np.ndarray:
    """1/rank of the right row in each column, the largest score first; ties count against the method."""
    own = scores[right, np.arange(scores.shape[1])]
    return 1 / (scores >= own).sum(0)


def summary(scores: np.ndarray) -> dict[str, float]:
    ranks = reciprocal_ranks(scores, np.arange(scores.shape[1]))
    return {
        "mean_reciprocal_rank": float(ranks.mean()),
        "standard_error": float(ranks.std(ddof=1) / math.sqrt(len(ranks))),
        "first": float((ranks == 1).mean()),
    }


def overlap(train: list[list[int]], query: list[list[int]]) -> np.ndarray:
    """Share of distinct tokens in common (Jaccard)."""
    return np.array([[len(set(a) & set(b)) / len(set(a) | set(b)) for b in query] for a in train])


def fine_tune(model: nn.Module, sequences: list[Any], epochs: int) -> list[float]:
    """A few epochs of AdamW on whole sequences; returns the mean loss of each epoch."""
    data = Data(sequences, "train", device=next(model.parameters()).device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
    loss: Any = jostle.losses.next_token()
    generator = np.random.default_rng(0)
    means = []
    for _ in range(epochs):
        total = 0.0
        for chosen in np.array_split(generator.permutation(len(data)), max(1, len(data) // 16)):
            batch = data.batch(chosen)
            value = loss(model, batch)[loss.token_mask(batch)].mean()
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            total += value.item() * len(chosen)
        means.append(total / len(data))
    return means


def sample(
    model: nn.Module, train: Any, query: Any, *, n_beta: float, localization: float, seed: int, quick: bool
) -> Any:
    started = time.perf_counter()
    run = jostle.attribute(
        model, train, query, loss=jostle.losses.next_token(),
        posterior=jostle.Posterior(n_beta=n_beta, localization=localization, weights=WEIGHTS),
        sampler=jostle.SGLD(step_size=0.2 / localization), chains=4, draws=4 if quick else 100,
        burn_in=5 if quick else 50, thin=2 if quick else 10, batch_size=16, seed=seed, progress=False,
    )  # fmt: skip
    return run, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description="Does influence find the text that a query belongs to?")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--wikitext", type=Path, required=True)
    parser.add_argument("--wikipedia", type=Path, required=True)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--quick", action="store_true", help="a small version that shows only that it runs")
    arguments = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    count, length = (8, 24) if arguments.quick else (64, 96)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer: Any = AutoTokenizer.from_pretrained(arguments.model)
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(arguments.model, dtype=torch.float32).to(device)
    done = json.loads(arguments.record.read_text()).get("halves", {}) if arguments.record.is_file() else {}
    record: dict[str, Any] = {
        "model": arguments.model.name, "weights": WEIGHTS, "sampler": "SGLD, step 0.2/localization",
        "draws": "4 chains × 100, thin 10, burn-in 50, batch 16", "quick": arguments.quick,
    }  # fmt: skip

    lines = (line.strip() for line in open_text(arguments.wikitext))
    texts = list(itertools.islice((line for line in lines if len(line) > 400), count))
    sequences = [{"input_ids": tokenizer(text)["input_ids"][:length]} for text in texts]
    copies = list(range(0, count, count // 8))
    run, seconds = sample(
        model, sequences, [sequences[i] for i in copies], n_beta=30, localization=3e4, seed=0, quick=arguments.quick
    )
    ranks = reciprocal_ranks(run.influence(normalize=True).posterior_correlation, np.array(copies))
    record["copies"] = {"first": int((ranks == 1).sum()), "of": len(copies), "seconds": round(seconds, 1)}
    print("copies found first:", record["copies"], flush=True)

    halves: list[tuple[list[int], list[int]]] = []
    for line in open_text(arguments.wikipedia):
        tokens = tokenizer(json.loads(line)["text"][:4000], add_special_tokens=False)["input_ids"]
        if len(tokens) >= 2 * length:
            halves.append((tokens[:length], tokens[length : 2 * length]))
        if len(halves) == count:
            break
    begin = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    train = [{"input_ids": begin + first} for first, _ in halves]
    query = [{"input_ids": begin + second} for _, second in halves]
    firsts, seconds_ = [first for first, _ in halves], [second for _, second in halves]
    model = copy.deepcopy(model)
    record["fine_tuning_losses"] = fine_tune(model, train, 1 if arguments.quick else 10)
    print("fine-tuning:", record["fine_tuning_losses"], flush=True)

    table: dict[str, Any] = {
        "BM25": summary(-bm25(firsts, seconds_).values),
        "token overlap": summary(overlap(firsts, seconds_)),
    }
    for cosine in (False, True):
        scores = gradient_similarity(
            model, train, query, loss=jostle.losses.next_token(), weights=WEIGHTS, cosine=cosine
        )
        table[scores.method] = summary(-scores.values)
    for name, row in table.items():
        print(f"{name:60} {row['mean_reciprocal_rank']:.3f} ± {row['standard_error']:.3f}", flush=True)
    settings = [(30.0, 3e5), (30.0, 3e4), (30.0, 3e3), (0.0, 3e3), (30.0, 1e4), (0.0, 1e4)]
    for n_beta, localization in settings[: 2 if arguments.quick else None]:
        for seed in range(1 if arguments.quick else 2):
            key = f"n_beta {n_beta:g}, localization {localization:g}, seed {seed}"
            names = {kind: f"BIF {kind}, {key}" for kind in ("correlation", "covariance")}
            if not arguments.quick and all(name in done for name in names.values()):
                table |= {name: done[name] for name in names.values()}
                continue
            run, seconds = sample(
                model, train, query, n_beta=n_beta, localization=localization, seed=seed, quick=arguments.quick
            )
            about = run.diagnostics()
            shared = {
                "seconds": round(seconds, 1), "mean_loss": about["mean_loss"],
                "mean_loss_at_center": about["mean_loss_at_center"], "effective_draws": about["effective_draws"],
            }  # fmt: skip
            for kind, name in names.items():
                table[name] = summary(-run.influence(normalize=kind == "correlation").values) | shared
                row = table[name]
                print(
                    f"{name:60} {row['mean_reciprocal_rank']:.3f} ± {row['standard_error']:.3f}   loss "
                    f"{row['mean_loss']:.3f} ({row['mean_loss_at_center']:.3f} at w*), {seconds:.0f} s",
                    flush=True,
                )
            record["halves"] = table
            write_record(arguments.record, record)


if __name__ == "__main__":
    main()

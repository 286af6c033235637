"""What `jostle.solve` costs on a small language model, and on larger ones.

    python -m benchmarks.solving demo --record benchmarks/records/solving_cpu.json
    python -m benchmarks.solving smollm2 2.8b-lora --record benchmarks/records/solving.json     # on a GPU

"demo" is the model of `jostle demo`, with all 4,000 texts that it was trained on, and 8 of them as queries. The others:
256 texts of 256 random tokens and 16 queries; AdamW at 1e-4 for 64 steps of 8; two runs, the least that there may be.
Their weights are random, so what the numbers say is worth nothing, and how many steps a run takes is that of random
weights.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import jostle
from benchmarks.environment import environment, write_record
from benchmarks.language import SHAPES, pythia

TEXTS, QUERIES, TOKENS = 256, 16, 256
STEPS, RATE, BATCH = 64, 1e-4, 8


def smollm2() -> tuple[Any, Any]:
    """The shape of SmolLM2-135M with random weights, all of which move."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("cuda"):
        return LlamaForCausalLM(config).float(), "all"


def lora() -> tuple[Any, Any]:
    """The shape of Pythia-2.8B with random weights in bfloat16, of which LoRA of rank 16 in attention moves."""
    from peft import LoraConfig, get_peft_model

    base = pythia(SHAPES["2.8b"])
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=["query_key_value", "dense"]))
    generator = torch.Generator("cuda").manual_seed(0)
    for name, value in model.named_parameters():
        if "lora_B" in name:  # 0 at the start of a training, and so would the gradients of the other half be
            value.data.normal_(0, 0.01, generator=generator)
    return model, [name for name, value in model.named_parameters() if value.requires_grad]


def measure_demo() -> dict[str, Any]:
    """The demo's model, as `experiments/bilingual_model.py` trained it; of processor time."""
    from experiments.bilingual_model import BATCH_SIZE, EPOCHS, LEARNING_RATE, WARM_UP, WEIGHT_DECAY

    from jostle.demo import language

    (model, tokenizer), (texts, _) = language.load(), language.corpus(language.CORPUS_SEED)
    rows = [tokenizer(str(text))["input_ids"] for text in texts]
    steps = EPOCHS * -(-len(rows) // BATCH_SIZE)
    rates = [
        LEARNING_RATE * min(1, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2
        for step in range(steps)
    ]
    training = jostle.Training(
        optimizer="adamw", total_rate=sum(rates), weight_decay=WEIGHT_DECAY, batch_size=BATCH_SIZE, count_alike="tokens"
    )
    torch.set_num_threads(1)
    started, processor = time.perf_counter(), time.process_time()
    found = jostle.solve(model, rows, rows[:8], training=training, loss=jostle.losses.next_token())
    return {
        "seconds": time.perf_counter() - started, "processor_seconds": time.process_time() - processor,
        **about_solution(model, found),
    }  # fmt: skip


def about_solution(model: Any, found: jostle.Solution) -> dict[str, Any]:
    """What it took."""
    return {
        "weights": sum(value.numel() for value in model.parameters()),
        "error": float(np.median(found.errors / found.spreads)),
        **{key: found.provenance[key] for key in ("runs", "passes")},
    }


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {"smollm2": smollm2, "2.8b-lora": lora}


def measure(name: str) -> dict[str, Any]:
    """Solve once, as it comes; seconds, peak memory, and what it took."""
    model, weights = MODELS[name]()
    random = np.random.default_rng(0)
    rows = [random.integers(3, 40_000, TOKENS).tolist() for _ in range(TEXTS + QUERIES)]
    training = jostle.Training(
        optimizer="adamw", total_rate=STEPS * RATE, weight_decay=0.01, batch_size=BATCH, count_alike="sequences",
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    found = jostle.solve(
        model, rows[:TEXTS], rows[TEXTS:], training=training, loss=jostle.losses.next_token(), weights=weights, runs=2,
    )  # fmt: skip
    torch.cuda.synchronize()
    return {
        "seconds": time.perf_counter() - started,
        "gigabytes": torch.cuda.max_memory_allocated() / 1e9,
        **about_solution(model, found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=["demo", *MODELS])
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(format="  %(relativeCreated)d ms: %(message)s")
    logging.getLogger("jostle").setLevel(logging.INFO)
    about = {"texts": TEXTS, "queries": QUERIES, "tokens": TOKENS, "steps": STEPS, "batch_size": BATCH}
    found: dict[str, Any] = {}
    for name in arguments.models:
        found[name] = measure_demo() if name == "demo" else measure(name)
        print(name, found[name], flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if arguments.record is not None:
            write_record(arguments.record, {**about, "environment": environment(), "models": found})


if __name__ == "__main__":
    main()

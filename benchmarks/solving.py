"""What `jostle.solve` costs on larger language models.

    python -m benchmarks.solving smollm2 2.8b-lora --record benchmarks/records/solving.json     # on a GPU

256 texts of 256 random tokens and 16 queries; AdamW at 1e-4 for 64 steps of 8. Weights are random, so what the numbers
say is worth nothing, and how many steps they take is that of random weights.
"""

from __future__ import annotations

import argparse
import logging
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
        model, rows[:TEXTS], rows[TEXTS:], training=training, loss=jostle.losses.next_token(), weights=weights,
    )  # fmt: skip
    torch.cuda.synchronize()
    return {
        "seconds": time.perf_counter() - started,
        "gigabytes": torch.cuda.max_memory_allocated() / 1e9,
        "weights": sum(value.numel() for value in model.parameters()),
        "error": float(np.median(found.errors / found.spreads)),
        **{key: found.provenance[key] for key in ("runs", "passes")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=list(MODELS))
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(format="  %(relativeCreated)d ms: %(message)s")
    logging.getLogger("jostle").setLevel(logging.INFO)
    about = {"texts": TEXTS, "queries": QUERIES, "tokens": TOKENS, "steps": STEPS, "batch_size": BATCH}
    found: dict[str, Any] = {}
    for name in arguments.models:
        found[name] = measure(name)
        print(name, found[name], flush=True)
        torch.cuda.empty_cache()
        if arguments.record is not None:
            write_record(arguments.record, {**about, "environment": environment(), "models": found})


if __name__ == "__main__":
    main()

"""Peak memory of observing token losses, by batch size and vocabulary: `losses.next_token` against whole logits.

    python -m benchmarks.observation_memory [--tokens S]

A Llama of 2 layers and width 64 with random weights (cost does not depend on their values) and a vocabulary as large as
a language model's, so that logits are nearly all there is. Each case is a whole call of `attribute` with one chain and
two draws, in which nothing but ``observation_batch_size`` and the loss changes. Memory is what the call needs beyond
model and data: ``torch.cuda.max_memory_allocated`` on a GPU; on a CPU the peak resident size, each case in a process of
its own.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jostle
from benchmarks.environment import write_record

RECORD = Path(__file__).parent / "records" / "observation_memory.json"
BATCHES = (8, 32, 128)
VOCABULARIES = (50_304, 128_256)
CHUNK_BYTES = 128 << 20
ALLOWED_BYTES = 4 * CHUNK_BYTES
"""What chunked observing may take: logits of one chunk, their softmax, and as much again for everything else."""


class WholeLogits:
    """Next-token losses as they are usually written: all logits of a batch, in float32."""

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["input_ids"]
        logits = model(input_ids=tokens, use_cache=False).logits.float()
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return F.pad(losses.view(len(tokens), -1), (1, 0))

    def token_mask(self, batch: dict[str, Tensor]) -> Tensor:
        mask = torch.ones_like(batch["input_ids"], dtype=torch.bool)
        mask[:, 0] = False
        return mask


LOSSES: dict[str, Any] = {
    "next_token": jostle.losses.next_token(chunk_bytes=CHUNK_BYTES),
    "whole logits": WholeLogits(),
}


def build_model(vocabulary: int, tokens: int, device: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=tokens, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    ))  # fmt: skip
    return model.to(device)


def observe(model: nn.Module, sequences: Tensor, loss: Any, batch: int) -> jostle.Run:
    """Two draws of one chain, without gradients: observing is all that needs memory."""
    return jostle.attribute(
        model, {"input_ids": sequences}, {"input_ids": sequences[:1]}, loss=loss,
        posterior=jostle.Posterior(n_beta=0, localization=1e4, weights="attention"), chains=1, draws=2, thin=1,
        observation_batch_size=batch, progress=False,
    )  # fmt: skip


def peak_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(vocabulary: int, batch: int, name: str, tokens: int, device: str) -> dict[str, Any]:
    """Observe as many sequences as the largest batch holds, in batches of the given size."""
    generator = torch.Generator().manual_seed(0)
    small = torch.randint(0, 100, (2, 8), generator=generator).to(device)
    observe(build_model(100, 8, device), small, LOSSES[name], 2)  # loads what is loaded once
    model = build_model(vocabulary, tokens, device)
    sequences = torch.randint(0, vocabulary, (max(BATCHES), tokens), generator=generator).to(device)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before, started = peak_bytes(device), time.perf_counter()
    run = observe(model, sequences, LOSSES[name], batch)
    grown, seconds = peak_bytes(device) - before, time.perf_counter() - started
    mean = float(np.asarray(run.traces.losses("train")[:]).mean(dtype=np.float64))
    return {"peak_growth_bytes": grown, "seconds": round(seconds, 2), "mean_loss": mean}


def measure_apart(*case: Any) -> dict[str, Any]:
    """The same in a process of its own: a peak resident size never falls."""
    command = [sys.executable, "-m", "benchmarks.observation_memory", "--case", json.dumps(case)]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=Path(__file__).parents[1])
    return json.loads(output.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    suffix = "_cuda" if device == "cuda" else ""
    parser.add_argument("--tokens", type=int, default=256 if device == "cuda" else 32, help="length of a sequence")
    parser.add_argument("--record", type=Path, default=RECORD.with_stem(RECORD.stem + suffix))
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(*arguments.case)))
        return
    rows: list[dict[str, Any]] = []
    for vocabulary, batch in itertools.product(VOCABULARIES, BATCHES):
        row: dict[str, Any] = {
            "vocabulary": vocabulary, "batch": batch, "float32_logits_bytes": 4 * vocabulary * batch * arguments.tokens,
        }  # fmt: skip
        for name in LOSSES:
            run = measure if device == "cuda" else measure_apart
            row[name] = run(vocabulary, batch, name, arguments.tokens, device)
        np.testing.assert_allclose(row["next_token"]["mean_loss"], row["whole logits"]["mean_loss"], rtol=1e-5)
        rows.append(row)
        grown = {name: row[name]["peak_growth_bytes"] / 2**20 for name in LOSSES}
        print(
            f"vocabulary {vocabulary:7,}  batch {batch:4}  logits {row['float32_logits_bytes'] / 2**20:8,.0f} MiB  "
            + "  ".join(f"{name} {value:8,.0f} MiB" for name, value in grown.items()),
            flush=True,
        )
    record = {
        "workload": f"attribute, 1 chain × 2 draws, {max(BATCHES)} sequences × {arguments.tokens} tokens, 2-layer "
        "Llama of width 64 in float32, random weights",
        "memory": "torch.cuda.max_memory_allocated" if device == "cuda" else "peak resident size, own process",
        "chunk_bytes": CHUNK_BYTES,
        "allowed_bytes": ALLOWED_BYTES,
        "cases": rows,
    }
    assert all(row["next_token"]["peak_growth_bytes"] <= ALLOWED_BYTES for row in rows), record
    write_record(arguments.record, record)


if __name__ == "__main__":
    main()

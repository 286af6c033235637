"""The language model that learns sentence pairs in both orders, so that either language predicts the other."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from experiments.parallel_text import BEGIN, END, PAD, SPECIAL


def build_model(vocabulary: int, hidden: int, layers: int, longest: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, max_position_embeddings=longest + 3, tie_word_embeddings=True,
        pad_token_id=PAD, bos_token_id=None, eos_token_id=END, initializer_range=0.05,
    ))  # fmt: skip
    # Plain matmuls: sequences are short, and fused kernels run one after another under vmap.
    model.set_attn_implementation("eager")
    return model


def token_losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """−log p of each token after the first, 0 for padding."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.mT, tokens[:, 1:], ignore_index=PAD, reduction="none")


@torch.no_grad()
def loss_by_half(model: nn.Module, tokens: Tensor) -> dict[str, float]:
    """Mean loss of the words of first and of second sentences: how much a translation helps."""
    losses = torch.cat([token_losses(model, part) for part in tokens.split(256)])
    seen = ((tokens == BEGIN[0]) | (tokens == BEGIN[1])).cumsum(1)[:, 1:]
    is_word = tokens[:, 1:] >= len(SPECIAL)
    halves = {"first sentence": 1, "second sentence": 2}
    return {name: round(losses[is_word & (seen == half)].mean().item(), 3) for name, half in halves.items()}


def padded(samples: Sequence[Mapping[str, list[int]]], device: str) -> Tensor:
    """Padded on the right; attention is causal, so no mask is needed for it."""
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD).to(device)


def train_model(model: nn.Module, tokens: Tensor, held_out: Tensor, epochs: int, batch: int) -> dict[str, Any]:
    """AdamW with warm-up and cosine decay; TF32 matmuls while training."""
    steps, step, rate = epochs * (len(tokens) // batch), 0, 3e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    started = time.perf_counter()
    torch.set_float32_matmul_precision("high")
    for epoch in range(epochs):
        model.train()
        for chosen in torch.randperm(len(tokens), generator=generator).split(batch)[: len(tokens) // batch]:
            warmth, left = min(1, (step + 1) / 200), (1 + math.cos(math.pi * step / steps)) / 2
            optimizer.param_groups[0]["lr"] = rate * warmth * left
            part = tokens[chosen.to(tokens.device)]
            loss = token_losses(model, part).sum() / (part[:, 1:] != PAD).sum()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
        model.eval()
        seconds = time.perf_counter() - started
        print(f"epoch {epoch + 1}: held out {loss_by_half(model, held_out)}, {seconds:.0f} s", flush=True)
    torch.set_float32_matmul_precision("highest")
    return {
        "epochs": epochs, "seconds": round(time.perf_counter() - started, 1),
        "held_out_loss": loss_by_half(model, held_out), "trained_loss": loss_by_half(model, tokens[:1024]),
    }  # fmt: skip

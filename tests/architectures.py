"""Tiny random models of the architectures people use, by their Hugging Face names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

VOCABULARY, LAYERS, CONTEXT = 97, 3, 64
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": CONTEXT, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": CONTEXT,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-neox": ("GPTNeoXConfig", _SIZES),
    "llama": ("LlamaConfig", _GROUPED),
    "gpt2": ("GPT2Config", _GPT2),
    "qwen2": ("Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3Config", _GROUPED | {"head_dim": 8}),
    "gemma": ("GemmaConfig", _GROUPED | {"head_dim": 8}),
    "gemma2": ("Gemma2Config", _GROUPED | {"head_dim": 8, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3TextConfig", _GROUPED | {"head_dim": 8}),
    "mistral": ("MistralConfig", _GROUPED),
    "phi": ("PhiConfig", _SIZES),
    "phi3": ("Phi3Config", _GROUPED),
    "opt": ("OPTConfig", _SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "granite": ("GraniteConfig", _GROUPED | {"logits_scaling": 4.0}),
    "cohere": ("CohereConfig", _SIZES | {"logit_scale": 0.25}),
}


def tiny(name: str, attention: str = "eager") -> torch.nn.Module:
    """Return a random model of an architecture, in eval mode."""
    configuration, settings = CONFIGURATIONS[name]
    torch.manual_seed(0)
    config = getattr(transformers, configuration)(**settings)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()

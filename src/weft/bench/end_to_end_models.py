"""The models of `weft bench end_to_end` with random weights, as Hugging Face has them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from weft.bench.end_to_end_sizes import ModelSize

SEED = 0


def hf_config(size: ModelSize) -> Any:
    """Without dropout, which no two systems draw alike, and without a token that ends a text."""
    transformers: Any = import_module("transformers")
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if size.family == "llama":
        return transformers.LlamaConfig(
            vocab_size=size.vocabulary, hidden_size=size.width, intermediate_size=size.mlp,
            num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.kv_heads,
            max_position_embeddings=size.positions, tie_word_embeddings=False, **ends,
        )  # fmt: skip
    return transformers.GPT2Config(
        vocab_size=size.vocabulary, n_embd=size.width, n_inner=size.mlp, n_layer=size.layers, n_head=size.heads,
        n_positions=size.positions, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **ends,
    )  # fmt: skip


def hf_model(size: ModelSize) -> Any:
    """The whole model, the same weights on every rank."""
    transformers: Any = import_module("transformers")
    torch.manual_seed(SEED)
    kind = transformers.LlamaForCausalLM if size.family == "llama" else transformers.GPT2LMHeadModel
    return kind(hf_config(size))


def save_model(size: ModelSize, folder: Path) -> Path:
    """A folder with the model's safetensors, which Hugging Face and vLLM load."""
    transformers: Any = import_module("transformers")
    transformers.logging.disable_progress_bar()
    hf_model(size).save_pretrained(folder)
    return folder

"""Llama: pre-norm RMSNorm layers with causal grouped-query attention, rotary positions and SwiGLU."""

from __future__ import annotations

from typing import Any

from weft.packed.models.common import Unsupported, activation, linear
from weft.packed.spec import Attention, Embedding, Layer, Mlp, Norm, NormKind, NormOrder, Rotary, Transformer

# Types whose frequencies do not depend on the length of the input.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def checked_rope(kind: str) -> str:
    """The rope type, or an error that lists those that are supported."""
    if kind not in ROPE_TYPES:
        raise Unsupported(f"rope_type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    return kind


def describe_llama(model: Any) -> Transformer:
    """A `LlamaModel`; or a stage of one, whose `embed_tokens` or `norm` is None."""
    config, rope = model.config, model.rotary_emb
    checked_rope(rope.rope_type)
    rotary = Rotary(rope.inv_freq, rope.attention_scaling)
    embedding = None if model.embed_tokens is None else _embedding(model.embed_tokens)
    layers = tuple(_layer(config, layer, rotary) for layer in model.layers)
    return Transformer(embedding, layers, None if model.norm is None else _rms_norm(model.norm))


def _embedding(table: Any) -> Embedding:
    return Embedding((table.weight,), ("input_ids",), None, padding=table.padding_idx)


def _layer(config: Any, layer: Any, rotary: Rotary) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        Attention(
            linear(attention.q_proj, attention.k_proj, attention.v_proj), linear(attention.o_proj),
            config.num_attention_heads, config.num_key_value_heads, attention.head_dim, attention.scaling, right=0,
            rotary=rotary, dropout=config.attention_dropout,
        ),
        _rms_norm(layer.input_layernorm),
        Mlp(linear(mlp.gate_proj, mlp.up_proj), linear(mlp.down_proj), activation(config.hidden_act), gated=True),
        _rms_norm(layer.post_attention_layernorm),
        NormOrder.PRE,
    )  # fmt: skip


def _rms_norm(module: Any) -> Norm:
    if type(module).__name__ != "LlamaRMSNorm":
        raise Unsupported(f"expected a LlamaRMSNorm, got {type(module).__name__}")
    return Norm(module.weight, None, module.variance_epsilon, NormKind.RMS)

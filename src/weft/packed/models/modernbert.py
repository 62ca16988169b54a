"""ModernBERT: pre-norm layers, gated MLPs, rotary positions, and windows in most layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from weft.packed.models.common import activation, layer_norm, linear
from weft.packed.models.llama import checked_rope
from weft.packed.spec import Attention, Embedding, Layer, Mlp, NormOrder, Rotary, Transformer


def describe_modernbert(model: Any) -> Transformer:
    """A `ModernBertModel`."""
    config, e, rope = model.config, model.embeddings, model.rotary_emb
    table, padding = e.tok_embeddings.weight, e.tok_embeddings.padding_idx
    embedding = Embedding((table,), ("input_ids",), layer_norm(e.norm), config.embedding_dropout, padding)
    rotaries = {}
    for kind in set(config.layer_types):
        checked_rope(rope.rope_type[kind])
        frequencies, scaling = getattr(rope, f"{kind}_inv_freq"), getattr(rope, f"{kind}_attention_scaling")
        rotaries[kind] = Rotary(frequencies, scaling)
    layers = tuple(_layer(config, layer, rotaries[layer.attention_type]) for layer in model.layers)
    return Transformer(embedding, layers, layer_norm(model.final_norm))


def _layer(config: Any, layer: Any, rotary: Rotary) -> Layer:
    heads, width = config.num_attention_heads, layer.attn.head_dim
    window = config.sliding_window if layer.attention_type == "sliding_attention" else -1
    return Layer(
        Attention(
            linear(layer.attn.Wqkv), linear(layer.attn.Wo), heads, heads, width, width**-0.5, window, window, rotary,
            config.attention_dropout,
        ),
        None if type(layer.attn_norm) is nn.Identity else layer_norm(layer.attn_norm),
        Mlp(
            linear(layer.mlp.Wi), linear(layer.mlp.Wo), activation(config.hidden_activation), gated=True,
            dropout=config.mlp_dropout,
        ),
        layer_norm(layer.mlp_norm),
        NormOrder.PRE,
        attention_out_dropout=config.attention_dropout,
    )  # fmt: skip

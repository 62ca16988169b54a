"""GPT-2: pre-norm layers with causal attention; its linear weights are stored transposed."""

from __future__ import annotations

from typing import Any

from weft.packed.models.common import Unsupported, activation, layer_norm, require
from weft.packed.spec import Attention, Embedding, Layer, Mlp, NormOrder, Projection, Transformer


def describe_gpt2(model: Any) -> Transformer:
    """A `GPT2Model`."""
    config = model.config
    require(config, {"add_cross_attention": [False]})
    embedding = Embedding((model.wte.weight, model.wpe.weight), ("input_ids", "position_ids"), None, config.embd_pdrop)
    return Transformer(embedding, tuple(_layer(config, block) for block in model.h), layer_norm(model.ln_f))


def _layer(config: Any, block: Any) -> Layer:
    attention, mlp = block.attn, block.mlp
    return Layer(
        Attention(
            _conv1d(attention.c_attn), _conv1d(attention.c_proj), attention.num_heads, attention.num_heads,
            attention.head_dim, attention.scaling, right=0, dropout=config.attn_pdrop,
        ),
        layer_norm(block.ln_1),
        Mlp(_conv1d(mlp.c_fc), _conv1d(mlp.c_proj), activation(config.activation_function)),
        layer_norm(block.ln_2),
        NormOrder.PRE,
        attention_out_dropout=config.resid_pdrop,
        mlp_out_dropout=config.resid_pdrop,
    )  # fmt: skip


def _conv1d(module: Any) -> Projection:
    if type(module).__name__ != "Conv1D":
        raise Unsupported(f"expected transformers' Conv1D, got {type(module).__name__}; merge adapters first")
    return Projection((module.weight,), (module.bias,), transposed=True)

"""Llama: pre-norm RMSNorm layers with causal grouped-query attention, rotary positions and SwiGLU."""

from __future__ import annotations

from typing import Any

from torch import nn

from weft.errors import Unsupported
from weft.models.family import (
    Drops,
    Family,
    StageNames,
    activation_of,
    check_causal,
    check_rope,
    decoder_heads,
    linear,
    recomputes,
    table,
)
from weft.models.modules import is_of
from weft.models.options import Options
from weft.models.spec import Attention, Embedding, Layer, Mlp, Norm, NormKind, NormOrder, Rotary, Transformer


def describe_llama(model: Any) -> Transformer:
    """A `LlamaModel`; or a stage of one, whose `embed_tokens` or `norm` is None."""
    rope = model.rotary_emb
    check_rope(rope.rope_type)
    rotary = Rotary(rope.inv_freq, rope.attention_scaling)
    embedding = None if model.embed_tokens is None else _embedding(model.embed_tokens)
    parts = list(model.layers)[: model.config.num_hidden_layers]  # as the model itself counts them
    for part in parts:
        check_causal(model.config, part.self_attn)
    whole = [model] if isinstance(model, nn.Module) else parts
    drops = Drops(module for part in whole for module in part.modules())
    layers = tuple(_layer(layer, rotary, drops) for layer in parts)
    return Transformer(embedding, layers, None if model.norm is None else _rms_norm(model.norm))


def _embedding(module: Any) -> Embedding:
    words, padding = table(module)
    return Embedding((words,), ("input_ids",), None, padding=padding)


def _layer(layer: Any, rotary: Rotary, drops: Drops) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = linear(attention.q_proj, attention.k_proj, attention.v_proj)
    heads, kv_heads, _ = (w.shape[0] // attention.head_dim for w in qkv.weights)
    if heads != kv_heads * attention.num_key_value_groups:
        raise Unsupported(
            f"the attention has {heads} heads of queries and {kv_heads} of keys, but num_key_value_groups = "
            f"{attention.num_key_value_groups}"
        )
    return Layer(
        Attention(
            qkv, linear(attention.o_proj), heads, kv_heads, attention.head_dim, attention.scaling, right=0,
            rotary=rotary, dropout=drops.of_weights(attention, attention.attention_dropout),
        ),
        _rms_norm(layer.input_layernorm),
        Mlp(linear(mlp.gate_proj, mlp.up_proj), linear(mlp.down_proj), activation_of(mlp.act_fn), gated=True),
        _rms_norm(layer.post_attention_layernorm),
        NormOrder.PRE,
        recomputes=recomputes(layer),
    )  # fmt: skip


def _rms_norm(module: Any) -> Norm:
    if type(module).__name__ != "LlamaRMSNorm" or not is_of(type(module), type(module).__module__):
        raise Unsupported(f"expected a LlamaRMSNorm, got {type(module).__name__}")
    return Norm(module.weight, None, module.variance_epsilon, NormKind.RMS)


_OPTIONS = Options(
    followed={
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "hidden_act", "rms_norm_eps", "rope_parameters", "attention_bias", "attention_dropout",
        "mlp_bias",
    },
    idle={"pretraining_tp"},
)  # fmt: skip

LLAMA = Family(
    "LlamaModel", describe_llama, "BaseModelOutputWithPast", decoder_heads("Llama", "ForCausalLM"),
    has_cache=True, on_ranks=True,
    stages=StageNames("model", "embed_tokens", "layers", "norm", "lm_head", everywhere=("rotary_emb",)),
    options=_OPTIONS,
)  # fmt: skip

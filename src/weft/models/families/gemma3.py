"""Gemma 3's text model: Llama with norms of heads and norms after each block, whose weights start at zero, a scaled
embedding, and two kinds of layers, with their own rotary positions and windows. Causal, or as EmbeddingGemma has it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.errors import Unsupported
from weft.models.families.llama import (
    KIN_OPTIONS,
    STAGES,
    gated_mlp,
    heads_of,
    layers_of,
    limits,
    window_of_type,
)
from weft.models.family import (
    CAUSAL_LOSS,
    Drops,
    Family,
    Head,
    HeadKind,
    causal_head,
    check_causal,
    check_rope,
    linear,
    recomputes,
    rms_norm,
    table,
)
from weft.models.modules import is_of
from weft.models.options import Options
from weft.models.spec import (
    Attention,
    Embedding,
    Layer,
    Norm,
    NormOrder,
    Rotary,
    StoredScale,
    Transformer,
    VocabularyHead,
)


def describe_gemma3(model: Any) -> Transformer:
    """A `Gemma3TextModel`; or a stage of one, whose `embed_tokens` or `norm` is None."""
    config, rope = model.config, model.rotary_emb
    parts, first = layers_of(model)
    drops, layers = Drops(model.modules()), []
    rotaries: dict[str, Rotary] = {}
    for number, layer in enumerate(parts, first):
        kind = config.layer_types[number]
        if kind not in rotaries:
            check_rope(rope.rope_type[kind])
            rotaries[kind] = Rotary(getattr(rope, f"{kind}_inv_freq"), getattr(rope, f"{kind}_attention_scaling"))
        if not config.use_bidirectional_attention:
            check_causal(config, layer.self_attn)
        layers.append(_layer(layer, rotaries[kind], drops, _limits(config, number)))
    embedding = None if model.embed_tokens is None else _embedding(model.embed_tokens)
    return Transformer(embedding, tuple(layers), None if model.norm is None else _norm(model.norm))


def _limits(config: Any, number: int) -> tuple[int, int]:
    window, ahead = window_of_type(config, number), config.use_bidirectional_attention
    if window is not None and ahead:
        return window - 1, window - 1  # its config has made the window smaller already
    return limits(window, ahead=ahead)


def _embedding(module: Any) -> Embedding:
    if type(module).__name__ != "Gemma3TextScaledWordEmbedding" or not is_of(type(module), type(module).__module__):
        raise Unsupported(f"expected a Gemma3TextScaledWordEmbedding, got {type(module).__name__}")
    words, padding = table(module, kind=type(module))
    return Embedding((words,), ("input_ids",), None, padding=padding, scale=StoredScale(module.embed_scale))


def _layer(layer: Any, rotary: Rotary, drops: Drops, limits: tuple[int, int]) -> Layer:
    attention = layer.self_attn
    qkv, heads, kv_heads = heads_of(attention)
    return Layer(
        Attention(
            qkv, linear(attention.o_proj), heads, kv_heads, attention.head_dim, attention.scaling, *limits, rotary,
            drops.of_weights(attention, attention.attention_dropout), _norm(attention.q_norm), _norm(attention.k_norm),
        ),
        _norm(layer.input_layernorm),
        gated_mlp(layer.mlp),
        _norm(layer.pre_feedforward_layernorm),
        NormOrder.PRE,
        recomputes=recomputes(layer),
        attention_out_norm=_norm(layer.post_attention_layernorm),
        mlp_out_norm=_norm(layer.post_feedforward_layernorm),
    )  # fmt: skip


def _norm(module: Any) -> Norm:
    return rms_norm(module, "Gemma3RMSNorm", eps="eps", shift=1.0)


def _head(model: Any) -> VocabularyHead:
    """Of a `Gemma3ForCausalLM`."""
    return replace(causal_head(model), cap=model.config.final_logit_softcapping)


_OPTIONS = Options(
    followed=(KIN_OPTIONS - {"hidden_act"}) | {
        "head_dim", "attention_bias", "hidden_activation", "layer_types", "sliding_window",
        "use_bidirectional_attention", "query_pre_attn_scalar",
        "final_logit_softcapping",
    },
    idle={"attn_logit_softcapping"},  # which transformers does not apply here
)  # fmt: skip

GEMMA3 = Family(
    "Gemma3TextModel", describe_gemma3, "BaseModelOutputWithPast",
    {
        "Gemma3ForCausalLM": Head(HeadKind.NEXT_TOKEN, _head, CAUSAL_LOSS),
        "Gemma3TextForSequenceClassification": Head(HeadKind.LAST),
    },
    has_cache=True, on_ranks=True, stages=STAGES, options=_OPTIONS,
)  # fmt: skip

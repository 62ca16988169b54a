"""Llama: pre-norm RMSNorm layers with causal grouped-query attention, rotary positions and SwiGLU. And what its kin has
in common with it: windows, norms of heads and the direction of attention are all in which they differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.errors import Unsupported
from weft.models.family import (
    Drops,
    Family,
    StageNames,
    activation_of,
    check_rope,
    decoder_heads,
    linear,
    recomputes,
    rms_norm,
    table,
)
from weft.models.options import Options
from weft.models.spec import Attention, Embedding, Layer, Mlp, NormOrder, Projection, Rotary, Transformer

Window = Callable[[Any, int], int | None]  # of a config and a layer's number: how many keys a token sees, with its own


def describe_llama(model: Any) -> Transformer:
    """A `LlamaModel`."""
    return describe_kin(model, "LlamaRMSNorm")


def describe_kin(
    model: Any, norms: str, *, window: Window = lambda config, number: None, has_head_norms: bool = False,
    looks_ahead: bool | None = None,
) -> Transformer:  # fmt: skip
    """A model that is made like Llama; or a stage of one, whose `embed_tokens` or `norm` is None.

    norms         the class of its norms
    looks_ahead   whether tokens see later ones; None: as config.is_causal says
    """
    rope = model.rotary_emb
    check_rope(rope.rope_type)
    rotary = Rotary(rope.inv_freq, rope.attention_scaling)
    parts, first = layers_of(model)
    ahead = is_ahead(model.config, parts) if looks_ahead is None else looks_ahead
    drops = Drops(model.modules())
    layers = tuple(
        _layer(layer, rotary, drops, norms, limits(window(model.config, first + i), ahead=ahead), has_head_norms)
        for i, layer in enumerate(parts)
    )
    embedding = None if model.embed_tokens is None else _embedding(model.embed_tokens)
    return Transformer(embedding, layers, None if model.norm is None else rms_norm(model.norm, norms))


def layers_of(model: Any) -> tuple[list[Any], int]:
    """The layers of a decoder, as many as it counts itself, or those of a stage; and the number of the first."""
    return list(model.layers)[: model.config.num_hidden_layers], getattr(model, "first_layer", 0)


def is_ahead(config: Any, layers: list[Any]) -> bool:
    """Whether tokens see later ones: transformers goes by the config. Raises where a layer says otherwise."""
    if not getattr(config, "is_causal", True):
        return True
    if not all(layer.self_attn.is_causal for layer in layers):
        raise Unsupported(
            "an attention of the model has is_causal = False, expected True: it would see later tokens; set "
            "config.is_causal = False where that is wanted"
        )
    return False


def limits(window: int | None, *, ahead: bool) -> tuple[int, int]:
    """How many keys before and after its own a token sees, -1 for all. A window that looks ahead is wider by one, as
    transformers has it.

    >>> limits(4, ahead=False), limits(4, ahead=True), limits(None, ahead=True)
    ((3, 0), (4, 4), (-1, -1))
    """
    if window is None:
        return -1, -1 if ahead else 0
    return (window, window) if ahead else (window - 1, 0)


def window_of_type(config: Any, number: int) -> int | None:
    """Where config.layer_types says which layers have windows."""
    kind = config.layer_types[number]
    if kind not in ("full_attention", "sliding_attention"):
        raise Unsupported(f"config.layer_types has {kind!r}, expected full_attention or sliding_attention")
    window: int | None = config.sliding_window if kind == "sliding_attention" else None
    return window


def heads_of(attention: Any) -> tuple[Projection, int, int]:
    """The stacked q, k and v of an attention, its heads and its key/value heads."""
    qkv = linear(attention.q_proj, attention.k_proj, attention.v_proj)
    heads, kv_heads, _ = (w.shape[0] // attention.head_dim for w in qkv.weights)
    groups = getattr(attention, "num_key_value_groups", 1)
    if heads != kv_heads * groups:
        raise Unsupported(
            f"the attention has {heads} heads of queries and {kv_heads} of keys, but num_key_value_groups = {groups}"
        )
    return qkv, heads, kv_heads


def gated_mlp(mlp: Any) -> Mlp:
    """down(act(gate(x)) * up(x))."""
    return Mlp(linear(mlp.gate_proj, mlp.up_proj), linear(mlp.down_proj), activation_of(mlp.act_fn), gated=True)


def _embedding(module: Any) -> Embedding:
    words, padding = table(module)
    return Embedding((words,), ("input_ids",), None, padding=padding)


def _layer(
    layer: Any, rotary: Rotary, drops: Drops, norms: str, limits: tuple[int, int], has_head_norms: bool
) -> Layer:  # fmt: skip
    attention = layer.self_attn
    qkv, heads, kv_heads = heads_of(attention)
    by_head = [rms_norm(m, norms) for m in (attention.q_norm, attention.k_norm)] if has_head_norms else [None, None]
    return Layer(
        Attention(
            qkv, linear(attention.o_proj), heads, kv_heads, attention.head_dim, attention.scaling, *limits, rotary,
            drops.of_weights(attention, attention.attention_dropout), *by_head,
        ),
        rms_norm(layer.input_layernorm, norms),
        gated_mlp(layer.mlp),
        rms_norm(layer.post_attention_layernorm, norms),
        NormOrder.PRE,
        recomputes=recomputes(layer),
    )  # fmt: skip


STAGES = StageNames("model", "embed_tokens", "layers", "norm", "lm_head", everywhere=("rotary_emb",))

KIN_OPTIONS = frozenset({
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "hidden_act",
    "rms_norm_eps", "rope_parameters", "attention_dropout",
})  # fmt: skip
_OPTIONS = Options(followed=KIN_OPTIONS | {"head_dim", "attention_bias", "mlp_bias"}, idle={"pretraining_tp"})

LLAMA = Family(
    "LlamaModel", describe_llama, "BaseModelOutputWithPast", decoder_heads("Llama", "ForCausalLM"),
    has_cache=True, on_ranks=True, stages=STAGES, options=_OPTIONS,
)  # fmt: skip

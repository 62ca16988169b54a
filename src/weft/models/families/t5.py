"""T5's encoder: pre-norm RMSNorm layers whose scores get a bias by distance and are not scaled. It has no positions."""

from __future__ import annotations

from typing import Any

from weft.errors import Unsupported
from weft.models.family import (
    Drops,
    Family,
    Head,
    HeadKind,
    activation_of,
    check_bidirectional,
    linear,
    recomputes,
    rms_norm,
    table,
)
from weft.models.options import Options
from weft.models.spec import Attention, Embedding, Layer, Mlp, NormOrder, RelativeBias, Transformer

_NORM = "T5LayerNorm"


def describe_t5(model: Any) -> Transformer:
    """A `T5EncoderModel`."""
    stack, drops = model.encoder, Drops(model.modules())
    if stack.is_decoder or not len(stack.block):
        raise Unsupported("a T5 stack that is a decoder, or has no layers, is not supported; expected an encoder")
    words, padding = table(stack.embed_tokens)
    first = stack.block[0].layer[0].SelfAttention
    # The first layer's bias is for all of them.
    bias = None
    if first.has_relative_attention_bias:
        weight, _ = table(first.relative_attention_bias)
        bias = RelativeBias(weight, first.relative_attention_num_buckets, first.relative_attention_max_distance)
    dropout = drops.of(stack.dropout)
    layers = tuple(_layer(block, bias, drops) for block in stack.block)
    return Transformer(
        Embedding((words,), ("input_ids",), None, dropout, padding), layers, rms_norm(stack.final_layer_norm, _NORM),
        dropout,
    )  # fmt: skip


def _layer(block: Any, bias: RelativeBias | None, drops: Drops) -> Layer:
    if len(block.layer) != 2:
        raise Unsupported(f"a block of T5 has {len(block.layer)} parts, expected attention and an MLP")
    attending, forward = block.layer
    attention, dense = attending.SelfAttention, forward.DenseReluDense
    check_bidirectional(attention)
    gated = hasattr(dense, "wi_0")
    up = linear(dense.wi_0, dense.wi_1) if gated else linear(dense.wi)
    return Layer(
        Attention(
            linear(attention.q, attention.k, attention.v), linear(attention.o), attention.n_heads, attention.n_heads,
            attention.key_value_proj_dim, attention.scaling, bias=bias,
            dropout=drops.of_weights(attention, attention.dropout),
        ),
        rms_norm(attending.layer_norm, _NORM),
        Mlp(up, linear(dense.wo), activation_of(dense.act), gated, drops.of(dense.dropout)),
        rms_norm(forward.layer_norm, _NORM),
        NormOrder.PRE,
        attention_out_dropout=drops.of(attending.dropout),
        mlp_out_dropout=drops.of(forward.dropout),
        recomputes=recomputes(block),
    )  # fmt: skip


_OPTIONS = Options(
    followed={
        "d_model", "d_kv", "d_ff", "num_layers", "num_heads", "relative_attention_num_buckets",
        "relative_attention_max_distance", "dropout_rate", "layer_norm_epsilon", "feed_forward_proj",
        "classifier_dropout",
    },
    idle={"initializer_factor", "num_decoder_layers"},
    fixed={"is_decoder": (False,), "is_causal": (False,)},
)  # fmt: skip

T5 = Family(
    "T5EncoderModel", describe_t5, "BaseModelOutput",
    {"T5ForTokenClassification": Head(HeadKind.TOKENS)}, on_ranks=True, options=_OPTIONS,
)  # fmt: skip

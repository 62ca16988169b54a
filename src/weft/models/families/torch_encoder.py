"""torch.nn.TransformerEncoder: layers of either order, causal or bidirectional as each call says."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from weft.errors import Unsupported
from weft.models.family import Drops, activation_of, is_known_leaf, layer_norm, linear
from weft.models.modules import check_untouched
from weft.models.spec import Attention, Layer, Mlp, NormOrder, Projection, Transformer

_LEAVES = (nn.TransformerEncoderLayer, nn.MultiheadAttention, NonDynamicallyQuantizableLinear)


def describe_encoder(model: Any, right: int) -> Transformer:
    """The layers of a `TransformerEncoder`."""
    check_untouched(model, lambda kind: kind in _LEAVES or is_known_leaf(kind), called=[model])
    norm = None if model.norm is None else layer_norm(model.norm)
    drops = Drops(model.modules())
    return Transformer(None, tuple(_layer(layer, right, drops) for layer in model.layers), norm)


def _layer(layer: Any, right: int, drops: Drops) -> Layer:
    if type(layer) is not nn.TransformerEncoderLayer:
        raise Unsupported(f"expected torch.nn.TransformerEncoderLayer, got {type(layer).__name__}")
    attention = layer.self_attn
    if type(attention) is not nn.MultiheadAttention or type(attention.out_proj) is not NonDynamicallyQuantizableLinear:
        raise Unsupported(f"expected torch.nn.MultiheadAttention, got {type(attention).__name__}, or its out_proj")
    if attention.in_proj_weight is None or attention.bias_k is not None or attention.add_zero_attn:
        raise Unsupported("self_attn with kdim, vdim, add_bias_kv or add_zero_attn is not supported")
    width = attention.head_dim
    return Layer(
        Attention(
            Projection((attention.in_proj_weight,), (attention.in_proj_bias,)),
            Projection((attention.out_proj.weight,), (attention.out_proj.bias,)),
            attention.num_heads, attention.num_heads, width, width**-0.5, right=right,
            dropout=drops.of_weights(attention, attention.dropout),
        ),
        layer_norm(layer.norm1),
        Mlp(
            linear(layer.linear1), linear(layer.linear2), activation_of(layer.activation),
            dropout=drops.of(layer.dropout),
        ),
        layer_norm(layer.norm2),
        NormOrder.PRE if layer.norm_first else NormOrder.POST,
        attention_out_dropout=drops.of(layer.dropout1),
        mlp_out_dropout=drops.of(layer.dropout2),
    )  # fmt: skip

"""MPNet: BERT's layers, whose scores get a bias by distance; positions as RoBERTa counts them."""

from __future__ import annotations

from typing import Any

from weft.models.families.bert import bert_mlp, roberta_masked_head, roberta_positions
from weft.models.family import (
    Drops,
    Family,
    encoder_heads,
    layer_norm,
    linear,
    recomputes,
    table,
)
from weft.models.options import Options
from weft.models.spec import Attention, Embedding, Layer, NormOrder, RelativeBias, Transformer

_BUCKETS, _FARTHEST = 32, 128  # what transformers computes with, whatever the config says


def describe_mpnet(model: Any) -> Transformer:
    """An `MPNetModel`."""
    e, drops = model.embeddings, Drops(model.modules())
    words, places = table(e.word_embeddings), table(e.position_embeddings)
    embedding = Embedding(
        (words[0], places[0]), ("input_ids", "position_ids"), layer_norm(e.LayerNorm), drops.of(e.dropout), words[1],
        (places[1],),
    )  # fmt: skip
    bias = RelativeBias(table(model.encoder.relative_attention_bias)[0], _BUCKETS, _FARTHEST)
    return Transformer(embedding, tuple(_layer(layer, bias, drops) for layer in model.encoder.layer), None)


def _layer(layer: Any, bias: RelativeBias, drops: Drops) -> Layer:
    attention, outer = layer.attention.attn, layer.attention
    heads, width = attention.num_attention_heads, attention.attention_head_size
    return Layer(
        Attention(
            linear(attention.q, attention.k, attention.v), linear(attention.o), heads, heads, width, width**-0.5,
            dropout=drops.of_weights(attention.dropout, attention.dropout), bias=bias,
        ),
        layer_norm(outer.LayerNorm),
        bert_mlp(layer),
        layer_norm(layer.output.LayerNorm),
        NormOrder.POST,
        attention_out_dropout=drops.of(outer.dropout),
        mlp_out_dropout=drops.of(layer.output.dropout),
        recomputes=recomputes(layer),
    )  # fmt: skip


MPNET = Family(
    "MPNetModel", describe_mpnet, "BaseModelOutputWithPooling", encoder_heads("MPNet", roberta_masked_head),
    roberta_positions, on_ranks=True,
    options=Options(
        {
            "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
            "layer_norm_eps", "hidden_dropout_prob", "attention_probs_dropout_prob", "relative_attention_num_buckets",
        },
        idle=set(),
        fixed={"is_causal": (False,)},
    ),
)  # fmt: skip

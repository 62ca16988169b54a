"""BERT, RoBERTa and DistilBERT: embeddings, then post-norm layers with bidirectional attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.packed.batch import PackedBatch
from weft.packed.models.common import activation, layer_norm, linear, require
from weft.packed.spec import Attention, Embedding, Layer, Mlp, NormOrder, Transformer


def describe_bert(model: Any) -> Transformer:
    """A `BertModel` or `RobertaModel`."""
    config, e = model.config, model.embeddings
    require(config, {"is_decoder": [False], "add_cross_attention": [False], "position_embedding_type": ["absolute"]})
    tables = (e.word_embeddings.weight, e.token_type_embeddings.weight, e.position_embeddings.weight)
    names = ("input_ids", "token_type_ids", "position_ids")
    padding = e.word_embeddings.padding_idx
    embedding = Embedding(tables, names, layer_norm(e.LayerNorm), config.hidden_dropout_prob, padding)
    return Transformer(embedding, tuple(_bert_layer(config, layer) for layer in model.encoder.layer), None)


def _bert_layer(config: Any, layer: Any) -> Layer:
    attention, output = layer.attention.self, layer.attention.output
    heads = attention.num_attention_heads
    return Layer(
        Attention(
            linear(attention.query, attention.key, attention.value), linear(output.dense), heads, heads,
            attention.attention_head_size, attention.attention_head_size**-0.5,
            dropout=config.attention_probs_dropout_prob,
        ),
        layer_norm(output.LayerNorm),
        Mlp(linear(layer.intermediate.dense), linear(layer.output.dense), activation(config.hidden_act)),
        layer_norm(layer.output.LayerNorm),
        NormOrder.POST,
        attention_out_dropout=config.hidden_dropout_prob,
        mlp_out_dropout=config.hidden_dropout_prob,
    )  # fmt: skip


def describe_distilbert(model: Any) -> Transformer:
    """A `DistilBertModel`."""
    config, e = model.config, model.embeddings
    tables = (e.word_embeddings.weight, e.position_embeddings.weight)
    padding = e.word_embeddings.padding_idx
    embedding = Embedding(tables, ("input_ids", "position_ids"), layer_norm(e.LayerNorm), config.dropout, padding)
    return Transformer(embedding, tuple(_distilbert_layer(config, layer) for layer in model.transformer.layer), None)


def _distilbert_layer(config: Any, layer: Any) -> Layer:
    attention, ffn = layer.attention, layer.ffn
    width = config.dim // config.n_heads
    return Layer(
        Attention(
            linear(attention.q_lin, attention.k_lin, attention.v_lin), linear(attention.out_lin), config.n_heads,
            config.n_heads, width, width**-0.5, dropout=config.attention_dropout,
        ),
        layer_norm(layer.sa_layer_norm),
        Mlp(linear(ffn.lin1), linear(ffn.lin2), activation(config.activation)),
        layer_norm(layer.output_layer_norm),
        NormOrder.POST,
        mlp_out_dropout=config.dropout,  # and none after attention
    )  # fmt: skip


def columns(model: Any, batch: PackedBatch, padded_ids: Tensor | None) -> Tensor:
    """Positions as most models count them: the column in the padded tensor."""
    return batch.columns


def roberta_positions(model: Any, batch: PackedBatch, padded_ids: Tensor | None) -> Tensor:
    """RoBERTa counts the tokens that are not padding, from padding_idx + 1 on; padding tokens get padding_idx."""
    pad: int = model.embeddings.padding_idx
    if padded_ids is not None:  # tokens that the mask hides count too
        real = (padded_ids != pad).to(torch.int64)
        positions: Tensor = batch.gather(real.cumsum(1) * real + pad)
        return positions
    if batch.values.is_floating_point():  # embeddings: nobody knows which were padding tokens, so columns count
        return batch.columns + pad + 1
    real = (batch.values != pad).to(torch.int64)
    counted = torch.cat([real.new_zeros(1), real.cumsum(0)])
    before = counted[batch.cu_seqlens[:-1].long()].repeat_interleave(batch.lengths)
    positions = (counted[1:] - before) * real + pad
    return positions

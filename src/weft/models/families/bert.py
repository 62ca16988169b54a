"""BERT, RoBERTa and DistilBERT: embeddings, then post-norm layers with bidirectional attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import Unsupported
from weft.models.family import (
    Drops,
    Family,
    Tokens,
    activation_of,
    check_bidirectional,
    encoder_heads,
    layer_norm,
    linear,
    own_head,
    recomputes,
    table,
)
from weft.models.options import Options
from weft.models.spec import (
    Attention,
    Embedding,
    HeadTransform,
    Layer,
    Mlp,
    NormOrder,
    Transformer,
    VocabularyHead,
)


def describe_bert(model: Any) -> Transformer:
    """A `BertModel` or `RobertaModel`."""
    e, drops = model.embeddings, Drops(model.modules())
    words, types, places = (table(t) for t in (e.word_embeddings, e.token_type_embeddings, e.position_embeddings))
    embedding = Embedding(
        (words[0], types[0], places[0]), ("input_ids", "token_type_ids", "position_ids"), layer_norm(e.LayerNorm),
        drops.of(e.dropout), words[1], (types[1], places[1]),
    )  # fmt: skip
    return Transformer(embedding, tuple(_bert_layer(layer, drops) for layer in model.encoder.layer), None)


def _bert_layer(layer: Any, drops: Drops) -> Layer:
    attention, output = layer.attention.self, layer.attention.output
    heads = attention.num_attention_heads
    check_bidirectional(attention)
    return Layer(
        Attention(
            linear(attention.query, attention.key, attention.value), linear(output.dense), heads, heads,
            attention.attention_head_size, attention.scaling,
            dropout=drops.of_weights(attention, attention.dropout),
        ),
        layer_norm(output.LayerNorm),
        bert_mlp(layer),
        layer_norm(layer.output.LayerNorm),
        NormOrder.POST,
        attention_out_dropout=drops.of(output.dropout),
        mlp_out_dropout=drops.of(layer.output.dropout),
        recomputes=recomputes(layer),
    )  # fmt: skip


def bert_mlp(layer: Any) -> Mlp:
    """Of a layer with the parts `intermediate` and `output`."""
    inner, outer = layer.intermediate, layer.output
    return Mlp(linear(inner.dense), linear(outer.dense), activation_of(inner.intermediate_act_fn))


def describe_distilbert(model: Any) -> Transformer:
    """A `DistilBertModel`."""
    e, drops = model.embeddings, Drops(model.modules())
    words, places = table(e.word_embeddings), table(e.position_embeddings)
    embedding = Embedding(
        (words[0], places[0]), ("input_ids", "position_ids"), layer_norm(e.LayerNorm), drops.of(e.dropout), words[1],
        (places[1],),
    )  # fmt: skip
    return Transformer(embedding, tuple(_distilbert_layer(layer, drops) for layer in model.transformer.layer), None)


def _distilbert_layer(layer: Any, drops: Drops) -> Layer:
    attention, ffn = layer.attention, layer.ffn
    heads, width = attention.n_heads, attention.attention_head_size
    check_bidirectional(attention)
    return Layer(
        Attention(
            linear(attention.q_lin, attention.k_lin, attention.v_lin), linear(attention.out_lin), heads, heads, width,
            attention.scaling, dropout=drops.of_weights(attention, attention.dropout),
        ),
        layer_norm(layer.sa_layer_norm),
        Mlp(linear(ffn.lin1), linear(ffn.lin2), activation_of(ffn.activation)),
        layer_norm(layer.output_layer_norm),
        NormOrder.POST,
        mlp_out_dropout=drops.of(ffn.dropout),  # and none after attention
        recomputes=recomputes(layer),
    )  # fmt: skip


def buffered_positions(model: Any, batch: Tokens, padded_ids: Tensor | None) -> Tensor:
    """BERT looks its positions up in a buffer, which holds 0, 1, 2, ... until somebody writes to it."""
    return _looked_up(model.embeddings, "position_ids", batch.columns, beyond=batch.columns)


def buffered_types(model: Any, positions: Tensor) -> Tensor:
    """And the types of tokens by their positions, in one that holds zeros."""
    return _looked_up(model.embeddings, "token_type_ids", positions, beyond=torch.zeros_like(positions))


def _looked_up(embeddings: Any, name: str, index: Tensor, *, beyond: Tensor) -> Tensor:
    """What a buffer [1, positions] holds at each index; `beyond` where it is too short, or there is none."""
    buffer: Tensor | None = getattr(embeddings, name, None)
    if buffer is None or (index.numel() and int(index.max()) >= buffer.shape[-1]):
        return beyond
    if buffer.dim() != 2 or buffer.shape[0] != 1:
        raise Unsupported(f"the buffer {name} of the embeddings is {list(buffer.shape)}, expected [1, positions]")
    return buffer[0][index].to(torch.int64)


def roberta_positions(model: Any, batch: Tokens, padded_ids: Tensor | None) -> Tensor:
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


def bert_masked_head(model: Any) -> VocabularyHead:
    """Of a `BertForMaskedLM`."""
    predictions = own_head(model, model.cls).predictions
    t = predictions.transform
    transform = HeadTransform(linear(t.dense), activation_of(t.transform_act_fn), layer_norm(t.LayerNorm))
    return VocabularyHead(linear(predictions.decoder), transform)


def roberta_masked_head(model: Any) -> VocabularyHead:
    """Of a `RobertaForMaskedLM`, whose activation is always gelu."""
    head = own_head(model, model.lm_head)
    return VocabularyHead(
        linear(head.decoder), HeadTransform(linear(head.dense), "gelu", layer_norm(head.layer_norm))
    )  # fmt: skip


def distilbert_masked_head(model: Any) -> VocabularyHead:
    """Of a `DistilBertForMaskedLM`."""
    loss, plain = model.mlm_loss_fct, nn.CrossEntropyLoss()
    options = ("weight", "ignore_index", "reduction", "label_smoothing")
    if type(loss) is not type(plain) or any(getattr(loss, name) != getattr(plain, name) for name in options):
        raise Unsupported(f"mlm_loss_fct is {loss} with options of its own, expected a plain CrossEntropyLoss()")
    transform = HeadTransform(
        linear(model.vocab_transform), activation_of(model.activation), layer_norm(model.vocab_layer_norm)
    )
    return VocabularyHead(linear(model.vocab_projector), transform)


_POOLED = "BaseModelOutputWithPoolingAndCrossAttentions"
# Of a config class like BERT's. Its encoders can be told to be decoders.
BERT_OPTIONS = Options(
    followed={
        "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act", "type_vocab_size",
        "layer_norm_eps", "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout",
    },
    idle=set(),
    fixed={
        "is_decoder": (False,), "add_cross_attention": (False,), "is_causal": (False,),
        "position_embedding_type": ("absolute",),  # of older configs
    },
)  # fmt: skip
DISTILBERT_OPTIONS = Options(
    followed={
        "dim", "n_layers", "n_heads", "hidden_dim", "activation", "dropout", "attention_dropout", "qa_dropout",
        "seq_classif_dropout",
    },
    idle={"sinusoidal_pos_embds"},  # how a new model's table of positions is filled
    fixed={"is_causal": (False,)},
)  # fmt: skip

BERT = Family(
    "BertModel", describe_bert, _POOLED, encoder_heads("Bert", bert_masked_head), buffered_positions, buffered_types,
    on_ranks=True, options=BERT_OPTIONS,
)  # fmt: skip
ROBERTA = Family(
    "RobertaModel", describe_bert, _POOLED, encoder_heads("Roberta", roberta_masked_head), roberta_positions,
    buffered_types, on_ranks=True, options=BERT_OPTIONS,
)  # fmt: skip
XLM_ROBERTA = Family(
    "XLMRobertaModel", describe_bert, _POOLED, encoder_heads("XLMRoberta", roberta_masked_head), roberta_positions,
    buffered_types, on_ranks=True, options=BERT_OPTIONS,
)  # fmt: skip
CAMEMBERT = Family(
    "CamembertModel", describe_bert, _POOLED, encoder_heads("Camembert", roberta_masked_head), roberta_positions,
    buffered_types, on_ranks=True, options=BERT_OPTIONS,
)  # fmt: skip
DISTILBERT = Family(
    "DistilBertModel", describe_distilbert, "BaseModelOutput", encoder_heads("DistilBert", distilbert_masked_head),
    buffered_positions, on_ranks=True, options=DISTILBERT_OPTIONS,
)  # fmt: skip

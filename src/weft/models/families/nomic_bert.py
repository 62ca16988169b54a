"""NomicBERT: a post-norm encoder with rotary positions and gated MLPs."""

from __future__ import annotations

from typing import Any

from weft.models.families.llama import gated_mlp, heads_of, layers_of
from weft.models.family import (
    Drops,
    Family,
    activation_of,
    check_bidirectional,
    check_rope,
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
    NormOrder,
    Rotary,
    Transformer,
    VocabularyHead,
)


def describe_nomic_bert(model: Any) -> Transformer:
    """A `NomicBertModel`."""
    e, rope = model.embeddings, model.rotary_emb
    check_rope(rope.rope_type)
    rotary = Rotary(rope.inv_freq, rope.attention_scaling)
    parts, _ = layers_of(model)
    drops = Drops(model.modules())
    words, types = table(e.word_embeddings), table(e.token_type_embeddings)
    embedding = Embedding(
        (words[0], types[0]), ("input_ids", "token_type_ids"), layer_norm(e.LayerNorm), drops.of(e.dropout), words[1],
        (types[1],),
    )  # fmt: skip
    return Transformer(embedding, tuple(_layer(layer, rotary, drops) for layer in parts), None)


def _layer(layer: Any, rotary: Rotary, drops: Drops) -> Layer:
    attention = layer.self_attn
    check_bidirectional(attention)
    qkv, heads, kv_heads = heads_of(attention)
    return Layer(
        Attention(
            qkv, linear(attention.o_proj), heads, kv_heads, attention.head_dim, attention.scaling, rotary=rotary,
            dropout=drops.of_weights(attention, attention.attention_dropout),
        ),
        layer_norm(layer.post_attention_layernorm),
        gated_mlp(layer.mlp),
        layer_norm(layer.post_mlp_layernorm),
        NormOrder.POST,
        attention_out_dropout=drops.of(layer.post_attention_dropout),
        mlp_out_dropout=drops.of(layer.post_mlp_dropout),
        recomputes=recomputes(layer),
    )  # fmt: skip


def nomic_bert_masked_head(model: Any) -> VocabularyHead:
    """Of a `NomicBertForMaskedLM`."""
    predictions = own_head(model, model.cls).predictions
    t = predictions.transform
    transform = HeadTransform(linear(t.dense), activation_of(t.transform_act_fn), layer_norm(t.layer_norm))
    return VocabularyHead(linear(predictions.decoder), transform)


NOMIC_BERT = Family(
    "NomicBertModel", describe_nomic_bert, "BaseModelOutputWithPooling",
    encoder_heads("NomicBert", nomic_bert_masked_head, answers=False), on_ranks=True,
    options=Options(
        {
            "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "intermediate_size", "hidden_act",
            "type_vocab_size", "layer_norm_eps", "hidden_dropout_prob", "attention_probs_dropout_prob",
            "classifier_dropout", "rope_parameters",
        },
        idle=set(), fixed={"is_causal": (False,)},
    ),
)  # fmt: skip

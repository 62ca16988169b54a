"""ModernBERT: pre-norm layers, gated MLPs, rotary positions, and windows in most layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from weft.errors import Unsupported
from weft.models.family import (
    MASKED_LOSS,
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
    Mlp,
    NormOrder,
    Rotary,
    Transformer,
    VocabularyHead,
)


def describe_modernbert(model: Any) -> Transformer:
    """A `ModernBertModel`."""
    e, rope, drops = model.embeddings, model.rotary_emb, Drops(model.modules())
    words, padding = table(e.tok_embeddings)
    embedding = Embedding((words,), ("input_ids",), layer_norm(e.norm), drops.of(e.drop), padding)
    rotaries = {}
    for kind in {layer.attention_type for layer in model.layers}:
        check_rope(rope.rope_type[kind])
        frequencies, scaling = getattr(rope, f"{kind}_inv_freq"), getattr(rope, f"{kind}_attention_scaling")
        rotaries[kind] = Rotary(frequencies, scaling)
    layers = tuple(_layer(model.config, layer, rotaries[layer.attention_type], drops) for layer in model.layers)
    return Transformer(embedding, layers, layer_norm(model.final_norm))


def _layer(config: Any, layer: Any, rotary: Rotary, drops: Drops) -> Layer:
    attention, mlp, width = layer.attn, layer.mlp, layer.attn.head_dim
    check_bidirectional(attention)
    out = linear(attention.Wo)
    heads = out.weights[0].shape[1] // width
    window = config.sliding_window if layer.attention_type == "sliding_attention" else -1
    return Layer(
        Attention(
            linear(attention.Wqkv), out, heads, heads, width, width**-0.5, window, window, rotary,
            drops.of_weights(attention, attention.attention_dropout),
        ),
        None if type(layer.attn_norm) is nn.Identity else layer_norm(layer.attn_norm),
        Mlp(linear(mlp.Wi), linear(mlp.Wo), activation_of(mlp.act), gated=True, dropout=drops.of(mlp.drop)),
        layer_norm(layer.mlp_norm),
        NormOrder.PRE,
        attention_out_dropout=drops.of(attention.out_drop),
        recomputes=recomputes(layer),
    )  # fmt: skip


def modernbert_masked_head(model: Any) -> VocabularyHead:
    """Of a `ModernBertForMaskedLM`."""
    if model.sparse_prediction:
        raise Unsupported("config.sparse_prediction = True is not supported; expected False")
    head = own_head(model, model.head)
    transform = HeadTransform(linear(head.dense), activation_of(head.act), layer_norm(head.norm))
    return VocabularyHead(linear(model.decoder), transform)


_OPTIONS = Options(
    followed={
        "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_activation", "norm_eps",
        "norm_bias", "attention_bias", "mlp_bias", "attention_dropout", "mlp_dropout", "embedding_dropout",
        "layer_types", "rope_parameters", "local_attention", "decoder_bias", "classifier_pooling", "classifier_dropout",
        "classifier_bias", "classifier_activation",
    },
    idle={
        "cls_token_id", "sep_token_id", "initializer_cutoff_factor", "deterministic_flash_attn",
        "sparse_pred_ignore_index",
    },
    fixed={"sparse_prediction": (False,), "is_causal": (False,)},
)  # fmt: skip

MODERNBERT = Family(
    "ModernBertModel", describe_modernbert, "BaseModelOutput",
    encoder_heads("ModernBert", modernbert_masked_head, loss=MASKED_LOSS),
    on_ranks=True, options=_OPTIONS,
)  # fmt: skip

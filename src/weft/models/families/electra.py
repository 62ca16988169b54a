"""ELECTRA: BERT whose embeddings may be narrower than its layers, and are projected to their width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.models.families.bert import BERT_OPTIONS, buffered_positions, buffered_types, describe_bert
from weft.models.family import Family, activation_of, encoder_heads, layer_norm, linear, own_head
from weft.models.spec import HeadTransform, Transformer, VocabularyHead


def describe_electra(model: Any) -> Transformer:
    """An `ElectraModel`."""
    described = describe_bert(model)
    if not hasattr(model, "embeddings_project"):
        return described
    assert described.embedding is not None
    return replace(described, embedding=replace(described.embedding, projection=linear(model.embeddings_project)))


def electra_masked_head(model: Any) -> VocabularyHead:
    """Of an `ElectraForMaskedLM`, whose words are compared in the width of the embeddings."""
    p = own_head(model, model.generator_predictions)
    transform = HeadTransform(linear(p.dense), activation_of(p.activation), layer_norm(p.LayerNorm))
    return VocabularyHead(linear(model.generator_lm_head), transform)


_OPTIONS = replace(
    BERT_OPTIONS,
    followed=BERT_OPTIONS.followed | {"embedding_size"},
    # of ElectraForMultipleChoice, which is none of the classes here
    idle={"summary_activation", "summary_last_dropout", "summary_type", "summary_use_proj"},
)

ELECTRA = Family(
    "ElectraModel", describe_electra, "BaseModelOutputWithPastAndCrossAttentions",
    encoder_heads("Electra", electra_masked_head), buffered_positions, buffered_types, on_ranks=True,
    options=_OPTIONS,
)  # fmt: skip

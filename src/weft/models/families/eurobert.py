"""EuroBERT: an encoder that is made like Llama."""

from __future__ import annotations

from typing import Any

from weft.models.families.llama import KIN_OPTIONS, describe_kin
from weft.models.family import MASKED_LOSS, Family, causal_head, check_bidirectional, encoder_heads
from weft.models.options import Options
from weft.models.spec import Transformer


def describe_eurobert(model: Any) -> Transformer:
    """A `EuroBertModel`."""
    for layer in model.layers:
        check_bidirectional(layer.self_attn)
    return describe_kin(model, "EuroBertRMSNorm", looks_ahead=True)


EUROBERT = Family(
    "EuroBertModel", describe_eurobert, "BaseModelOutput",
    encoder_heads("EuroBert", causal_head, answers=False, loss=MASKED_LOSS),
    on_ranks=True,
    options=Options(
        KIN_OPTIONS | {"head_dim", "attention_bias", "mlp_bias", "classifier_pooling"},
        idle={"pretraining_tp", "mask_token_id"}, fixed={"is_causal": (False,)},
    ),
)  # fmt: skip

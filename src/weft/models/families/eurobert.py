"""EuroBERT: an encoder that is made like Llama."""

from __future__ import annotations

from typing import Any

from weft.models.families.llama import describe_kin
from weft.models.family import Family, Head, HeadKind, causal_head, encoder_heads
from weft.models.spec import Transformer


def describe_eurobert(model: Any) -> Transformer:
    """A `EuroBertModel`."""
    return describe_kin(model, "EuroBertRMSNorm", looks_ahead=True)


_HEADS = {k: v for k, v in encoder_heads("EuroBert").items() if not k.endswith("QuestionAnswering")}

EUROBERT = Family(
    "EuroBertModel", describe_eurobert, "BaseModelOutput",
    {**_HEADS, "EuroBertForMaskedLM": Head(HeadKind.TOKENS, causal_head)}, on_ranks=True,
)  # fmt: skip

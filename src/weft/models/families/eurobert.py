"""EuroBERT: an encoder that is made like Llama."""

from __future__ import annotations

from typing import Any

from weft.models.families.llama import describe_kin
from weft.models.family import Family, causal_head, encoder_heads
from weft.models.spec import Transformer


def describe_eurobert(model: Any) -> Transformer:
    """A `EuroBertModel`."""
    return describe_kin(model, "EuroBertRMSNorm", looks_ahead=True)


EUROBERT = Family(
    "EuroBertModel", describe_eurobert, "BaseModelOutput", encoder_heads("EuroBert", causal_head, answers=False),
    on_ranks=True,
)  # fmt: skip

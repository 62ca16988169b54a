"""Mistral: Llama with a window in every layer."""

from __future__ import annotations

from typing import Any

from weft.models.families.llama import KIN_OPTIONS, STAGES, describe_kin
from weft.models.family import Family, decoder_heads
from weft.models.options import Options
from weft.models.spec import Transformer


def describe_mistral(model: Any) -> Transformer:
    """A `MistralModel`."""
    return describe_kin(model, "MistralRMSNorm", window=lambda config, number: config.sliding_window)


MISTRAL = Family(
    "MistralModel", describe_mistral, "BaseModelOutputWithPast", decoder_heads("Mistral", "ForCausalLM"),
    has_cache=True, on_ranks=True, stages=STAGES,
    options=Options(KIN_OPTIONS | {"head_dim", "sliding_window"}, idle=set()),
)  # fmt: skip

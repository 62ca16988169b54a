"""Qwen2 and Qwen3: Llama with windows in some layers, and in Qwen3 with norms of the heads of queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.models.families.llama import KIN_OPTIONS, STAGES, describe_kin, window_of_type
from weft.models.family import Family, decoder_heads
from weft.models.options import Options
from weft.models.spec import Transformer


def describe_qwen2(model: Any) -> Transformer:
    """A `Qwen2Model`."""
    return describe_kin(model, "Qwen2RMSNorm", window=window_of_type)


def describe_qwen3(model: Any) -> Transformer:
    """A `Qwen3Model`."""
    return describe_kin(model, "Qwen3RMSNorm", window=window_of_type, has_head_norms=True)


_OPTIONS = Options(
    followed=KIN_OPTIONS | {"layer_types", "sliding_window"},
    idle={"use_sliding_window", "max_window_layers"},  # from which the config has made these two
)
_OPTIONS3 = replace(_OPTIONS, followed=_OPTIONS.followed | {"head_dim", "attention_bias"})

QWEN2 = Family(
    "Qwen2Model", describe_qwen2, "BaseModelOutputWithPast", decoder_heads("Qwen2", "ForCausalLM"),
    has_cache=True, on_ranks=True, stages=STAGES, options=_OPTIONS,
)  # fmt: skip
QWEN3 = Family(
    "Qwen3Model", describe_qwen3, "BaseModelOutputWithPast", decoder_heads("Qwen3", "ForCausalLM"),
    has_cache=True, on_ranks=True, stages=STAGES, options=_OPTIONS3,
)  # fmt: skip

"""Caches of keys and values: filled by a packed prefill, in the form that Hugging Face's own decoding goes on with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from weft.packed.batch import PackedBatch
from weft.packed.models.common import Unsupported


def goes_on(arguments: dict[str, Any]) -> bool:
    """Whether a call brings a cache that holds tokens already."""
    cache: Any = arguments.get("past_key_values")
    return hasattr(cache, "get_seq_length") and int(cache.get_seq_length()) > 0


def cache_to_fill(model: Any, arguments: dict[str, Any], batch: PackedBatch, is_differentiable: bool) -> Any:
    """The cache that a call must fill: the one given, or a new one where it asks for one; else None.

    A call that says nothing gets what the config says, but in training none, which nobody would read.
    """
    given, wanted = arguments.get("past_key_values"), arguments.get("use_cache")
    is_packed, several = isinstance(arguments.get("input_ids"), PackedBatch), batch.is_flattened
    if given is not None and not hasattr(given, "update"):
        raise Unsupported(f"past_key_values must be a cache of transformers, got {type(given).__name__}")
    if wanted is None and given is None:
        wanted = model.config.use_cache and not is_packed and not several and not is_differentiable
    if is_packed and (given is not None or wanted):
        raise Unsupported("use_cache: a cache is padded, so it needs padded input_ids and an attention_mask")
    if several and (given is not None or wanted):
        raise Unsupported("use_cache: a cache holds one text a row, but rows hold several here; pass them row by row")
    if given is not None or not wanted:
        return given
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def fill(cache: Any, batch: PackedBatch, keys_values: list[tuple[Tensor, Tensor]]) -> Any:
    """Adds the k and v [T, kv_heads, head_dim] of each layer, padded to [B, kv_heads, S, head_dim]; returns the cache.

    Padding gets zeros, which the mask hides in the calls that follow.
    """
    for layer, pair in enumerate(keys_values):
        k, v = (batch.with_values(t).to_padded().transpose(1, 2) for t in pair)
        cache.update(k, v, layer)
    return cache

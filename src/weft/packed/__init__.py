"""Transformers that never compute a padded token: packed batches, attention, and whole models."""

from weft.packed.attention import packed_attention
from weft.packed.batch import PackedBatch
from weft.packed.models import pack

__all__ = ["PackedBatch", "pack", "packed_attention"]

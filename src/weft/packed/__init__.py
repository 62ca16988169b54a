"""Transformers that never compute a padded token: packed batches, attention, and whole models.

batch        `PackedBatch`: tokens of many texts end to end; where one text ends and the next begins
api          `pack(model)`: which models, and torch's own encoder; `packed_attention`
huggingface  the base models of families, and models with a head: the same call, on packed tokens
inputs       a call's arguments, checked and packed; the forms of what it returns
engine       runs a described module, and notices when it has changed
"""

from weft.packed.api import pack, packed_attention
from weft.packed.batch import PackedBatch

__all__ = ["PackedBatch", "pack", "packed_attention"]

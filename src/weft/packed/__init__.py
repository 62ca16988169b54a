"""Transformers that never compute a padded token: packed batches, attention, and whole models.

batch        `PackedBatch`: tokens of many texts end to end; where one text ends and the next begins
attention    `packed_attention`, and flash-attn's varlen function
registry     `attn_implementation="weft"`: the same inside of any model of transformers
api          `pack(model)`: which models, and torch's own encoder
huggingface  the base models of families, and models with a head: the same call, on packed tokens
inputs       a call's arguments, checked and packed; the forms of what it returns
engine       runs a described module, and notices when it has changed
"""

from weft.packed.api import pack
from weft.packed.attention import flash_attn_varlen_func, packed_attention
from weft.packed.batch import PackedBatch
from weft.packed.registry import register_attention

__all__ = ["PackedBatch", "flash_attn_varlen_func", "pack", "packed_attention", "register_attention"]

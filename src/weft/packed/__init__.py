"""Transformers that never compute a padded token: packed batches, attention, and whole models.

batch        `PackedBatch`: tokens of many texts end to end
boundaries   where one text ends and the next begins, whatever says so
forms        the forms in which the texts of a call may come, and its outputs go
api          `pack(model)`: which models, and torch's own encoder; `packed_attention`, and flash-attn's varlen function
registry     `attn_implementation="weft"`: packed attention inside of any model of transformers
huggingface  the base models of families, and models with a head: the same call, on packed tokens
sentence_transformers  whole models of that library: the transformers inside are packed
inputs       a call's arguments, checked and packed; the forms of what it returns
stored       encoders read from their files, without transformers
engine       runs a described module, and notices when it has changed
"""

from weft.packed.api import flash_attn_varlen_func, pack, packed_attention
from weft.packed.batch import PackedBatch
from weft.packed.registry import register_attention

__all__ = ["PackedBatch", "flash_attn_varlen_func", "pack", "packed_attention", "register_attention"]

"""Tensor-parallel transformers with every promise on: `weft.parallelize`."""

from weft.parallel.api import parallelize
from weft.parallel.files.checkpoint import load_checkpoint, save_checkpoint
from weft.parallel.files.load import load_sharded
from weft.parallel.files.save import save_model

__all__ = ["load_checkpoint", "load_sharded", "parallelize", "save_checkpoint", "save_model"]

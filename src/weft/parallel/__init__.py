"""Transformers that the ranks of a mesh axis share, with every promise on: `weft.parallelize`.

api          `parallelize`: which models, and how they become parallel
cut          how each parameter is cut
rank_model   what one rank computes with, of parameters that are DTensors
engine       runs a parallelized module, in training and in inference
training     the differentiable layers on ranks, and the loss of logits whose columns ranks share
huggingface  the call of a model, as Hugging Face makes it; its cache
surface      parameters as DTensors; what else such a model can do: copies, saving, DDP, checkpointing
stages       a decoder in stages for `weft.Pipeline`
files/       checkpoints, and weights as Hugging Face stores them
"""

from weft.parallel.api import parallelize
from weft.parallel.files.checkpoint import load_checkpoint, save_checkpoint
from weft.parallel.files.load import load_sharded
from weft.parallel.files.save import save_model

__all__ = ["load_checkpoint", "load_sharded", "parallelize", "save_checkpoint", "save_model"]

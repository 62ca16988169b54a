"""`weft embed`: texts in, embeddings out."""

from weft.packed.embed.encoder import Encoder
from weft.packed.embed.job import Options, Progress, run

__all__ = ["Encoder", "Options", "Progress", "run"]

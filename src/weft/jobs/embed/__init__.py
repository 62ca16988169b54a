"""`weft embed`: texts in, embeddings out.

recipe     what a model's folder says of how a text becomes a vector
pooling    one vector of many, and the layers behind it
encoder    tokenizer, packed model and recipe together
readers    texts from files and pipes            writers   rows to files, with a journal
identity   what makes a model or an input this one and no other
job        all of it, in order, stoppable
"""

from weft.jobs.embed.encoder import Encoder
from weft.jobs.embed.job import EmbedOptions, Progress, run

__all__ = ["EmbedOptions", "Encoder", "Progress", "run"]

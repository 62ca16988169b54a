"""`weft embed`: texts in, embeddings out.

job      all of it in order: read, tokenize, embed, write; it can be stopped and goes on
readers  texts from files and pipes
recipe   what a model's folder says of how a text becomes a vector
identity what makes a model this one: hashes of its files
plain    BERT's tokenizer, without transformers
loading  tokenizer and model of a folder, checked
encoder  tokenizer, packed model, pooling and the layers behind it
modules  the same by sentence-transformers' own modules, for folders that hold more, or give no dense vector
scorer   texts and pairs of texts to scores
writers  rows to files, with a journal
"""

from weft.jobs.embed.encoder import Encoder
from weft.jobs.embed.job import EmbedOptions, Progress, run
from weft.jobs.embed.modules import ModuleEncoder, open_encoder
from weft.jobs.embed.recipe import kind_of
from weft.jobs.embed.scorer import Scorer, is_scorer

__all__ = [
    "EmbedOptions",
    "Encoder",
    "ModuleEncoder",
    "Progress",
    "Scorer",
    "is_scorer",
    "kind_of",
    "open_encoder",
    "run",
]

"""The families: one file for each kind of model, with all that weft knows of it. A new one joins `FAMILIES`.

bert            BERT, RoBERTa and DistilBERT
gpt2            GPT-2
llama           Llama
modernbert      ModernBERT
torch_encoder   torch.nn.TransformerEncoder, which is no Hugging Face model and so not in the list
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from weft.models.families.bert import BERT, DISTILBERT, ROBERTA
from weft.models.families.gpt2 import GPT2
from weft.models.families.llama import LLAMA
from weft.models.families.modernbert import MODERNBERT
from weft.models.family import Family

FAMILIES = (BERT, ROBERTA, DISTILBERT, MODERNBERT, GPT2, LLAMA)


def family_of(model: nn.Module, families: Iterable[Family] = FAMILIES) -> Family | None:
    """The one of the families that a Hugging Face model is of; None where it is of none."""
    kind = type(model)
    if not kind.__module__.startswith("transformers.models."):
        return None
    return next((family for family in families if kind.__name__ in family.classes), None)

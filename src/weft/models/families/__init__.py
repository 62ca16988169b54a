"""The families: one file for each kind of model, with all that weft knows of it. A new one joins `FAMILIES`.

bert            BERT, RoBERTa, XLM-RoBERTa, CamemBERT and DistilBERT
electra         ELECTRA
eurobert        EuroBERT
gemma3          Gemma 3, causal or bidirectional
gpt2            GPT-2
llama           Llama, and what its kin has in common with it
mistral         Mistral
modernbert      ModernBERT
mpnet           MPNet
nomic_bert      NomicBERT
qwen            Qwen2 and Qwen3
t5              T5's encoder
torch_encoder   torch.nn.TransformerEncoder, which is no Hugging Face model and so not in the list
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from weft.models.families.bert import BERT, CAMEMBERT, DISTILBERT, ROBERTA, XLM_ROBERTA
from weft.models.families.electra import ELECTRA
from weft.models.families.eurobert import EUROBERT
from weft.models.families.gemma3 import GEMMA3
from weft.models.families.gpt2 import GPT2
from weft.models.families.llama import LLAMA
from weft.models.families.mistral import MISTRAL
from weft.models.families.modernbert import MODERNBERT
from weft.models.families.mpnet import MPNET
from weft.models.families.nomic_bert import NOMIC_BERT
from weft.models.families.qwen import QWEN2, QWEN3
from weft.models.families.t5 import T5
from weft.models.family import Family

FAMILIES = (
    BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, DISTILBERT, ELECTRA, MPNET, MODERNBERT, NOMIC_BERT, EUROBERT, T5,
    GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3,
)  # fmt: skip


def family_of(model: nn.Module, families: Iterable[Family] = FAMILIES) -> Family | None:
    """The one of the families that a Hugging Face model is of; None where it is of none."""
    kind = type(model)
    if not kind.__module__.startswith("transformers.models."):
        return None
    return next((family for family in families if kind.__name__ in family.classes), None)

"""`pack(model)`: which models can be packed, and by what."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from weft._torch import own_modules, shallow_copy
from weft.packed.engine import AttentionDropout
from weft.packed.models.base import Family
from weft.packed.models.bert import columns, describe_bert, describe_distilbert, roberta_positions
from weft.packed.models.common import Unsupported
from weft.packed.models.gpt2 import describe_gpt2
from weft.packed.models.hf import pack_base, pack_head
from weft.packed.models.inputs import HeadKind
from weft.packed.models.llama import describe_llama
from weft.packed.models.modernbert import describe_modernbert
from weft.packed.models.torch_encoder import pack_encoder

_ENCODER_HEADS = {
    "ForMaskedLM": HeadKind.TOKENS,
    "ForTokenClassification": HeadKind.TOKENS,
    "ForSequenceClassification": HeadKind.FIRST,
    "ForQuestionAnswering": HeadKind.SPANS,
}
_POOLED = "BaseModelOutputWithPoolingAndCrossAttentions"


def _encoder_heads(name: str) -> dict[str, HeadKind]:
    return {f"{name}{head}": kind for head, kind in _ENCODER_HEADS.items()}


FAMILIES = (
    Family("BertModel", describe_bert, columns, _POOLED, _encoder_heads("Bert")),
    Family("RobertaModel", describe_bert, roberta_positions, _POOLED, _encoder_heads("Roberta")),
    Family("DistilBertModel", describe_distilbert, columns, "BaseModelOutput", _encoder_heads("DistilBert")),
    Family("ModernBertModel", describe_modernbert, columns, "BaseModelOutput", _encoder_heads("ModernBert")),
    Family(
        "GPT2Model", describe_gpt2, columns, "BaseModelOutputWithPastAndCrossAttentions",
        {"GPT2LMHeadModel": HeadKind.NEXT_TOKEN, "GPT2ForSequenceClassification": HeadKind.LAST,
         "GPT2ForTokenClassification": HeadKind.TOKENS, "GPT2ForQuestionAnswering": HeadKind.SPANS},
        has_cache=True,
    ),
    Family(
        "LlamaModel", describe_llama, columns, "BaseModelOutputWithPast",
        {"LlamaForCausalLM": HeadKind.NEXT_TOKEN, "LlamaForSequenceClassification": HeadKind.LAST,
         "LlamaForTokenClassification": HeadKind.TOKENS, "LlamaForQuestionAnswering": HeadKind.SPANS},
        has_cache=True,
    ),
)  # fmt: skip

ModelT = TypeVar("ModelT", bound=nn.Module)


def supported() -> list[str]:
    """The names of the classes that `pack` takes."""
    names = [name for family in FAMILIES for name in (family.base, *family.heads)]
    return [*names, "SentenceTransformer", "torch.nn.TransformerEncoder"]


def pack(model: ModelT, *, attention_dropout: str = "model") -> ModelT:
    """A twin of the model that never computes a padded token: same call, same parameters, same outputs.

    Takes Hugging Face's BERT (MiniLM is one), RoBERTa, DistilBERT, ModernBERT, GPT-2 and Llama, with the usual heads,
    a SentenceTransformer around one of these, and torch.nn.TransformerEncoder. Outputs at padding are zeros. The twin
    shares its parameters with the model; in inference it keeps a packed copy of them, which it renews when they
    change. It computes no attention weights; an argument that asks for them is an error. A decoder fills the cache of
    keys and values that `generate` goes on with.

    Training drops what the model drops, attention weights too; `attention_dropout="off"` trains without the latter.

    >>> import torch
    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2).eval()
    >>> src, padding = torch.randn(2, 5, 32), torch.tensor([[False] * 5, [False] * 2 + [True] * 3])
    >>> with torch.no_grad():
    ...     got = pack(encoder)(src, src_key_padding_mask=padding)
    ...     want = encoder(src, src_key_padding_mask=padding)
    >>> torch.allclose(got[~padding], want[~padding], atol=1e-5)
    True
    """
    dropout = AttentionDropout(attention_dropout)
    packed: Any
    if any("_weft" in name for name in getattr(model, "__dict__", ())):
        raise Unsupported(f"this {type(model).__name__} is packed or parallel already; use it as it is")
    if isinstance(model, nn.TransformerEncoder) and type(model) is nn.TransformerEncoder:
        packed = pack_encoder(model, dropout)
        return packed  # type: ignore[no-any-return]
    if type(model).__name__ == "SentenceTransformer":
        packed = _pack_sentence_transformer(model, dropout)
        return packed  # type: ignore[no-any-return]
    name = type(model).__name__
    if type(model).__module__.startswith("transformers.models."):
        for family in FAMILIES:
            if name == family.base:
                packed = pack_base(model, family, dropout)
                return packed  # type: ignore[no-any-return]
            if name in family.heads:
                packed = pack_head(model, family.heads[name], _base_name(model, family), family, dropout)
                return packed  # type: ignore[no-any-return]
    raise Unsupported(f"cannot pack a {type(model).__module__}.{name}; supported are {', '.join(supported())}")


def _base_name(model: Any, family: Family) -> str:
    for name, child in model.named_children():
        if type(child).__name__ == family.base:
            return str(name)
    raise Unsupported(f"{type(model).__name__} has no {family.base}; is it packed already, or changed?")


def _pack_sentence_transformer(model: Any, dropout: AttentionDropout) -> nn.Module:
    twin = shallow_copy(model)
    first = next(iter(own_modules(twin)))
    transformer: Any = shallow_copy(own_modules(twin)[first])
    held = "model" if "model" in own_modules(transformer) else "auto_model"
    if held not in own_modules(transformer):
        raise Unsupported(
            f"the first module of the SentenceTransformer is a {type(transformer).__name__}, no Transformer"
        )
    inner: Any = own_modules(transformer)[held]
    own_modules(transformer)[held] = pack(inner, attention_dropout=dropout.value)
    own_modules(twin)[first] = transformer
    return twin

"""What users call: `pack(model)`, for twins of Hugging Face's families and of torch's own encoder that compute no
padded token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from weft._torch import own_modules, shallow_copy
from weft.errors import Unsupported
from weft.models.families import FAMILIES, family_of
from weft.models.families.torch_encoder import describe_encoder
from weft.models.twin import Twin, twin_of
from weft.packed.batch import PackedBatch
from weft.packed.engine import AttentionDropout, PackedEngine
from weft.packed.huggingface import pack_base, pack_head
from weft.transformer.call import Inputs

ModelT = TypeVar("ModelT", bound=nn.Module)


def supported() -> list[str]:
    """The names of the classes that `pack` takes."""
    return [
        *(name for family in FAMILIES for name in family.classes),
        "SentenceTransformer",
        "torch.nn.TransformerEncoder",
    ]


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
    return cast("ModelT", _packed(model, AttentionDropout(attention_dropout)))


def _packed(model: nn.Module, dropout: AttentionDropout) -> nn.Module:
    name = type(model).__name__
    if any("_weft" in attribute for attribute in getattr(model, "__dict__", ())):
        raise Unsupported(f"this {name} is packed or parallel already; use it as it is")
    if type(model) is nn.TransformerEncoder:
        return pack_encoder(model, dropout)
    if name == "SentenceTransformer":
        return _pack_sentence_transformer(model, dropout)
    family = family_of(model)
    if family is None:
        raise Unsupported(f"cannot pack a {type(model).__module__}.{name}; supported are {', '.join(supported())}")
    return pack_base(model, family, dropout) if name == family.base else pack_head(model, family, dropout)


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
    own_modules(transformer)[held] = _packed(inner, dropout)
    own_modules(twin)[first] = transformer
    return twin


# torch.nn.TransformerEncoder --------------------------------------------------------------------------------


def pack_encoder(model: nn.TransformerEncoder, dropout: AttentionDropout) -> nn.Module:
    """The packed twin: zeros where `src_key_padding_mask` is True, whatever mask that is."""
    twin: Any = twin_of(model, PackedEncoder, {"_weft": dropout})
    twin.weft_engine(-1).model  # noqa: B018  # raises now if the model cannot be packed
    return twin  # type: ignore[no-any-return]


class PackedEncoder(Twin):
    """Mixed into `TransformerEncoder`. `_weft` says whether attention weights are dropped."""

    _weft: AttentionDropout

    def weft_engine(self, right: int) -> PackedEngine:
        """The engine for causal (right = 0) or bidirectional (-1) attention."""
        return self.weft_kept(
            f"_weft_engine{right}",
            lambda: PackedEngine(self._module(), lambda model: describe_encoder(model, right), self._weft),
        )

    def _module(self) -> nn.Module:
        module: Any = self
        return module  # type: ignore[no-any-return]

    def weft_forward(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Tensor:
        return self._forward(**arguments)

    def _forward(
        self, src: Tensor, mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:  # fmt: skip
        self.weft_check()
        if src.is_nested or src.dim() not in (2, 3):
            raise Unsupported("src must be a dense tensor of 2 or 3 dims, not a nested one; pad it and give a mask")
        engine = self.weft_engine(0 if _hides_later(mask, is_causal) else -1)
        described, batch_first = engine.model, _batch_first(self)
        single = src.dim() == 2
        padded = src[None] if single else (src if batch_first else src.transpose(0, 1))
        if mask is not None and mask.shape[0] != padded.shape[1]:
            raise ValueError(f"mask is {list(mask.shape)}, expected {[padded.shape[1]] * 2} for the length of src")
        batch = PackedBatch.from_padded(padded, _real(src_key_padding_mask, single=single))
        if padded.shape[2] != described.width:
            raise ValueError(f"src has {padded.shape[2]} features, the encoder {described.width}")
        inputs = Inputs(batch.cu_seqlens, batch.tokens, vectors=batch.values.contiguous(), model=described)
        out = batch.with_values(engine(inputs)).to_padded()
        return out[0] if single else (out if batch_first else out.transpose(0, 1))


def _batch_first(model: Any) -> bool:
    found = {bool(layer.self_attn.batch_first) for layer in model.layers}
    if len(found) > 1:
        raise Unsupported("some layers have batch_first, others do not; expected one of them")
    return found.pop()


def _real(padding: Tensor | None, *, single: bool) -> Tensor | None:
    """[B, S]: where there is a token. A boolean mask is True, an additive one -inf, where there is none."""
    if padding is None:
        return None
    if padding.dtype != torch.bool:
        hidden = padding == float("-inf")
        if not padding.is_floating_point() or not bool((hidden | (padding == 0)).all()):
            raise Unsupported("src_key_padding_mask must be boolean, or 0 and -inf: other numbers would be added")
        padding = hidden
    return ~(padding[None] if single else padding)


def _hides_later(mask: Tensor | None, is_causal: bool | None) -> bool:
    """Whether each token sees itself and those before it only; `is_causal` is but a hint about `mask`, as in torch."""
    if mask is None:
        if is_causal:
            raise ValueError("is_causal=True is a hint about the mask, and there is none; pass the causal mask, too")
        return False
    if mask.dim() == 2 and mask.shape[0] == mask.shape[1]:
        hidden = mask if mask.dtype == torch.bool else mask == float("-inf")
        is_plain = mask.dtype == torch.bool or bool((mask.masked_fill(hidden, 0) == 0).all())
        if is_plain and torch.equal(hidden, torch.ones_like(hidden).triu(1)):
            return True
        if is_plain and not bool(hidden.any()):
            if is_causal:  # torch believes the hint with gradients, and the mask without
                raise ValueError(
                    "is_causal=True is a hint about the mask, but this one hides nothing; expected a causal mask; "
                    "pass generate_square_subsequent_mask, or is_causal=False"
                )
            return False
    raise Unsupported("only a causal mask is supported; got another mask, expected generate_square_subsequent_mask")

"""What users call: `pack(model)`, for twins of Hugging Face's families and of torch's own encoder that compute no
padded token; `packed_attention`, attention over the texts of a `PackedBatch`, and the same with the signature of
flash-attn's varlen function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from weft.errors import Unsupported
from weft.kernels.attention import attention, dropout_seed
from weft.kernels.cpu_attention import Scoring
from weft.models.families import FAMILIES, family_of
from weft.models.families.torch_encoder import describe_encoder
from weft.models.twin import Twin, twin_of
from weft.packed.batch import PackedBatch
from weft.packed.boundaries import check_offsets
from weft.packed.engine import AttentionDropout, PackedEngine
from weft.packed.huggingface import pack_base, pack_head
from weft.packed.registry import register_attention
from weft.packed.sentence_transformers import MODELS, is_library_model, pack_library_model
from weft.transformer.call import Inputs


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PackedBatch,
    *,
    keys: PackedBatch | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    threads: int = 0,
) -> Tensor:
    """softmax(scale q k^T + bias) v inside each sequence: q [Tq, H, D], k and v [Tk, Hkv, D] -> [Tq, H, D].

    `batch` says which rows of q form a sequence, and `keys` the same of k and v (default: as q). H must be a multiple
    of Hkv; each key head serves H / Hkv query heads. Where lengths differ, the last query is level with the last key.

    `causal` hides later keys; `window` (left, right) shows `left` keys before and `right` after a query, -1 for all.
    `alibi_slopes` [H] subtracts slope * distance from scores; `relative_bias` [H, 2 R + 1] adds the entry of the
    distance key - query, from -R to R, and beyond these the outermost. `scale` is 1 / sqrt(D) by default.
    `dropout` drops weights with that probability; which ones is told by `seed`, an int64 tensor of one element, drawn
    from torch's generator unless given. A query that sees no key gives zeros. Differentiable in q, k, v and
    `relative_bias`.

    >>> batch = PackedBatch.from_list([torch.zeros(3), torch.zeros(2)])
    >>> q = torch.randn(5, 4, 16)
    >>> packed_attention(q, q[:, :2], q[:, :2], batch, causal=True).shape
    torch.Size([5, 4, 16])
    """
    left, right = _limits(causal, window)
    if scale is None:
        scale = float(max(q.shape[-1], 1)) ** -0.5
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes get no gradient; pass alibi_slopes.detach(), or learn a relative_bias instead")
    slopes = None if alibi_slopes is None else alibi_slopes.to(torch.float32).contiguous()
    bias = None if relative_bias is None else relative_bias.to(torch.float32).contiguous()
    cu_k = (keys or batch).cu_seqlens
    seed = dropout_seed() if dropout and seed is None else seed
    scoring = Scoring(scale, left, right, slopes, bias, dropout, seed)
    return attention(q, k, v, batch.cu_seqlens, cu_k, scoring, threads=threads)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """`packed_attention` as flash-attn's function of this name is called: change the import, and the code runs here.

    q [Tq, H, D], k and v [Tk, Hkv, D], offsets int32 [B + 1] -> [Tq, H, D]. `causal` is aligned at the bottom right:
    the last query is level with the last key. The longest lengths are only compared with the offsets, and results are
    always deterministic. `softcap`, attention weights, paged keys and slopes of each sequence are errors.

    >>> q, cu = torch.randn(5, 4, 16), torch.tensor([0, 3, 5], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, q, q, cu, cu, 3, 3, causal=True).shape
    torch.Size([5, 4, 16])
    """
    unsupported = {
        "softcap": softcap != 0.0,
        "return_attn_probs": return_attn_probs,
        "block_table": block_table is not None,
        "alibi_slopes of each sequence": alibi_slopes is not None and alibi_slopes.dim() != 1,
    }
    for name, asked in unsupported.items():
        if asked:
            raise Unsupported(f"flash_attn_varlen_func: {name} is not supported; leave it out")
    for t, offsets, longest, name in (
        (q, cu_seqlens_q, max_seqlen_q, "q"), (k, cu_seqlens_k, max_seqlen_k, "k"),
    ):  # fmt: skip
        check_offsets(offsets, t.shape[0], f"cu_seqlens_{name}")
        found = int(offsets.diff().max()) if offsets.numel() > 1 else 0
        if found > longest:
            raise ValueError(f"max_seqlen_{name} is {longest}, but cu_seqlens_{name} has a sequence of {found}")
    left, right = _limits(causal, window_size)
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes get no gradient; pass alibi_slopes.detach()")
    slopes = None if alibi_slopes is None else alibi_slopes.to(torch.float32).contiguous()
    scale = float(max(q.shape[-1], 1)) ** -0.5 if softmax_scale is None else softmax_scale
    scoring = Scoring(scale, left, right, slopes, None, dropout_p, dropout_seed() if dropout_p else None)
    return attention(q, k, v, cu_seqlens_q, cu_seqlens_k, scoring)


def _limits(causal: bool, window: tuple[int, int] | None) -> tuple[int, int]:
    left, right = (-1, -1) if window is None else window
    if left < -1 or right < -1:
        raise ValueError(f"window is (left, right), each a number of keys or -1 for all, got {window}")
    return left, 0 if causal else right


ModelT = TypeVar("ModelT", bound=nn.Module)


def supported() -> list[str]:
    """The names of the classes that `pack` takes."""
    return [
        *(name for family in FAMILIES for name in family.classes),
        *MODELS,
        "torch.nn.TransformerEncoder",
    ]


def pack(model: ModelT, *, attention_dropout: str = "model") -> ModelT:
    """A twin of the model that never computes a padded token: same call, same parameters, same outputs.

    Takes 17 families of Hugging Face's encoders and decoders (docs/models.md), with the usual heads,
    sentence-transformers' SentenceTransformer, CrossEncoder, SparseEncoder and MultiVectorEncoder around one of these,
    and torch.nn.TransformerEncoder. Outputs at padding are zeros. The twin
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
    if is_library_model(model):
        return pack_library_model(model, lambda inner: _packed(inner, dropout))
    family = family_of(model)
    if family is None:
        raise Unsupported(f"cannot pack a {type(model).__module__}.{name}; supported are {', '.join(supported())}")
    register_attention()
    return pack_base(model, family, dropout) if name == family.base else pack_head(model, family, dropout)


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

"""torch.nn.TransformerEncoder: the same call, on packed tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from weft.packed.batch import PackedBatch
from weft.packed.call import Inputs
from weft.packed.engine import AttentionDropout, Engine
from weft.packed.models.common import Drops, Unsupported, activation_of, is_known_leaf, layer_norm, linear
from weft.packed.models.twin import Twin, twin_of
from weft.packed.spec import Attention, Layer, Mlp, NormOrder, Projection, Transformer
from weft.packed.watch import check_untouched

_LEAVES = (nn.TransformerEncoderLayer, nn.MultiheadAttention, NonDynamicallyQuantizableLinear)


def pack_encoder(model: nn.TransformerEncoder, dropout: AttentionDropout) -> nn.Module:
    """The packed twin: zeros where `src_key_padding_mask` is True, whatever mask that is."""
    twin: Any = twin_of(model, PackedEncoder, {"_weft": dropout})
    twin.weft_engine(-1).model  # noqa: B018  # raises now if the model cannot be packed
    return twin  # type: ignore[no-any-return]


class PackedEncoder(Twin):
    """Mixed into `TransformerEncoder`. `_weft` says whether attention weights are dropped."""

    _weft: AttentionDropout

    def weft_engine(self, right: int) -> Engine:
        """The engine for causal (right = 0) or bidirectional (-1) attention."""
        return self.weft_kept(f"_weft_engine{right}", lambda: Engine(self._module(), _describing(right), self._weft))

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
            return False
    raise Unsupported("only a causal mask is supported; got another mask, expected generate_square_subsequent_mask")


def _describing(right: int) -> Any:
    return lambda model: describe(model, right)


def describe(model: Any, right: int) -> Transformer:
    """The layers of a `TransformerEncoder`."""
    check_untouched(model, lambda kind: kind in _LEAVES or is_known_leaf(kind))
    norm = None if model.norm is None else layer_norm(model.norm)
    drops = Drops(model.modules())
    return Transformer(None, tuple(_layer(layer, right, drops) for layer in model.layers), norm)


def _layer(layer: Any, right: int, drops: Drops) -> Layer:
    if type(layer) is not nn.TransformerEncoderLayer:
        raise Unsupported(f"expected torch.nn.TransformerEncoderLayer, got {type(layer).__name__}")
    attention = layer.self_attn
    if type(attention) is not nn.MultiheadAttention or type(attention.out_proj) is not NonDynamicallyQuantizableLinear:
        raise Unsupported(f"expected torch.nn.MultiheadAttention, got {type(attention).__name__}, or its out_proj")
    if attention.in_proj_weight is None or attention.bias_k is not None or attention.add_zero_attn:
        raise Unsupported("self_attn with kdim, vdim, add_bias_kv or add_zero_attn is not supported")
    width = attention.head_dim
    return Layer(
        Attention(
            Projection((attention.in_proj_weight,), (attention.in_proj_bias,)),
            Projection((attention.out_proj.weight,), (attention.out_proj.bias,)),
            attention.num_heads, attention.num_heads, width, width**-0.5, right=right,
            dropout=drops.of_weights(attention, attention.dropout),
        ),
        layer_norm(layer.norm1),
        Mlp(
            linear(layer.linear1), linear(layer.linear2), activation_of(layer.activation),
            dropout=drops.of(layer.dropout),
        ),
        layer_norm(layer.norm2),
        NormOrder.PRE if layer.norm_first else NormOrder.POST,
        attention_out_dropout=drops.of(layer.dropout1),
        mlp_out_dropout=drops.of(layer.dropout2),
    )  # fmt: skip

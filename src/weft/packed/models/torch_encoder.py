"""torch.nn.TransformerEncoder: the same call, on packed tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.packed.batch import PackedBatch
from weft.packed.call import Inputs
from weft.packed.engine import AttentionDropout, Engine
from weft.packed.models.common import Unsupported, layer_norm, linear
from weft.packed.models.hf import subclass
from weft.packed.spec import Attention, Layer, Mlp, NormOrder, Projection, Transformer


def pack_encoder(model: nn.TransformerEncoder, dropout: AttentionDropout) -> nn.Module:
    """The packed twin: zeros where `src_key_padding_mask` is True, whatever mask that is."""
    twin = subclass(model, PackedEncoder, _forward)
    twin.__dict__["_weft"] = dropout
    twin.weft_engine(-1)  # type: ignore[operator]  # raises now if the model cannot be packed
    return twin


class PackedEncoder:
    """Mixed into `TransformerEncoder`."""

    _weft: AttentionDropout

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_weft_engines"}

    def weft_engine(self, right: int) -> Engine:
        """The engine for causal (right = 0) or bidirectional (-1) attention."""
        engines = self.__dict__.setdefault("_weft_engines", {})
        if right not in engines or engines[right]._module is not self:
            engines[right] = Engine(self, lambda m: describe(m, right), self._weft)  # type: ignore[arg-type]
            engines[right].model  # noqa: B018
        engine: Engine = engines[right]
        return engine


def _forward(
    self: Any, src: Tensor, mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:  # fmt: skip
    causal = is_causal if is_causal is not None else mask is not None and _is_causal(mask)
    if mask is not None and not _is_causal(mask):
        raise Unsupported("only a causal mask is supported; got another mask, expected generate_square_subsequent_mask")
    batch_first = self.layers[0].self_attn.batch_first
    single = src.dim() == 2
    padded = src[None] if single else (src if batch_first else src.transpose(0, 1))
    real = None
    if src_key_padding_mask is not None:  # a boolean mask is True, an additive one -inf, where there is no token
        real = (src_key_padding_mask[None] if single else src_key_padding_mask) == 0
    batch = PackedBatch.from_padded(padded, real)
    inputs = Inputs(batch.cu_seqlens, batch.tokens, vectors=batch.values)
    out = batch.with_values(self.weft_engine(0 if causal else -1)(inputs)).to_padded()
    return out[0] if single else (out if batch_first else out.transpose(0, 1))


def _is_causal(mask: Tensor) -> bool:
    if mask.dim() != 2 or mask.shape[0] != mask.shape[1]:
        return False
    hidden = mask if mask.dtype == torch.bool else mask == float("-inf")
    plain = mask.dtype == torch.bool or bool((mask.masked_fill(hidden, 0) == 0).all())
    return plain and torch.equal(hidden, torch.ones_like(hidden).triu(1))


def describe(model: Any, right: int) -> Transformer:
    """The layers of a `TransformerEncoder`."""
    norm = None if model.norm is None else layer_norm(model.norm)
    return Transformer(None, tuple(_layer(layer, right) for layer in model.layers), norm)


def _layer(layer: Any, right: int) -> Layer:
    if type(layer) is not nn.TransformerEncoderLayer:
        raise Unsupported(f"expected torch.nn.TransformerEncoderLayer, got {type(layer).__name__}")
    attention = layer.self_attn
    if attention.in_proj_weight is None or attention.bias_k is not None or attention.add_zero_attn:
        raise Unsupported("self_attn with kdim, vdim, add_bias_kv or add_zero_attn is not supported")
    width = attention.head_dim
    return Layer(
        Attention(
            Projection((attention.in_proj_weight,), (attention.in_proj_bias,)),
            Projection((attention.out_proj.weight,), (attention.out_proj.bias,)),
            attention.num_heads, attention.num_heads, width, width**-0.5, right=right, dropout=attention.dropout,
        ),
        layer_norm(layer.norm1),
        Mlp(linear(layer.linear1), linear(layer.linear2), _activation(layer.activation), dropout=layer.dropout.p),
        layer_norm(layer.norm2),
        NormOrder.PRE if layer.norm_first else NormOrder.POST,
        attention_out_dropout=layer.dropout1.p,
        mlp_out_dropout=layer.dropout2.p,
    )  # fmt: skip


def _activation(function: Any) -> str:
    if function is F.relu or isinstance(function, nn.ReLU):
        return "relu"
    if function is F.silu or isinstance(function, nn.SiLU):
        return "silu"
    if isinstance(function, nn.GELU):
        return "gelu_tanh" if function.approximate == "tanh" else "gelu"
    if function is F.gelu:
        return "gelu"
    raise Unsupported(f"the activation {function} is not supported; supported are relu, gelu and silu of torch.nn")

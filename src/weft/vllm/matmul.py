"""vLLM's unquantised linears on the native matmul, with the weight packed when it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import current_platform

from weft.kernels import PackedWeight, linear

_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear:
    """What vLLM calls to multiply: x [..., K] -> x w^T + bias [..., N]. It packs on the first call unless told earlier.

    An embedding is loaded like a linear, and is one where the head is tied to it. To pack it before anybody multiplies
    with it would cost the memory of a second table for nothing.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._packed: PackedWeight | None = None

    @property
    def packed(self) -> PackedWeight:
        """The packed weight, [N, K]."""
        if self._packed is None:
            self._packed = PackedWeight.from_dense(self._layer.weight.detach())
            del self._layer
        return self._packed

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, self.packed, bias=bias)


Dispatch = Callable[[Any, bool], None]


def native_dispatch(original: Dispatch) -> Dispatch:
    """The replacement of vLLM's `dispatch_cpu_unquantized_gemm`, which it falls back to where weft is no better.

    A layer that was replaced has a `PackedLinear` as its `cpu_linear`; one that was not has `weft_left_alone`, a
    reason.
    """

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.weft_left_alone = reason = why_not(layer)
        if reason is not None:
            original(layer, remove_weight)
            return
        layer.cpu_linear = matmul = PackedLinear(layer)
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
            return
        _ = matmul.packed
        if remove_weight:
            layer.weight = Parameter(torch.empty(0, dtype=layer.weight.dtype), requires_grad=False)

    dispatch.is_weft = True  # type: ignore[attr-defined]
    return dispatch


def why_not(layer: Any) -> str | None:
    """Why a layer keeps vLLM's own matmul, or None."""
    weight, bias = layer.weight, getattr(layer, "bias", None)
    if weight.is_meta or weight.ndim != 2:
        return f"its weight has shape {list(weight.shape)}{' on meta' if weight.is_meta else ''}, expected [N, K]"
    if weight.dtype not in _DTYPES:
        return f"its weight is {_name(weight.dtype)}, expected float32 or bfloat16"
    if bias is not None and bias.dtype != weight.dtype:
        return f"its bias is {_name(bias.dtype)} and its weight {_name(weight.dtype)}, expected one type"
    if weight.dtype == torch.bfloat16 and _multiplies_bfloat16():
        return "this CPU multiplies bfloat16 by itself, which oneDNN uses and weft does not"
    if current_platform.is_zen_cpu():
        return "zentorch has matmuls of its own"
    return None


def _multiplies_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

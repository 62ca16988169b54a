"""vLLM's unquantised linears on the native matmul, with the weight packed when it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, functional
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import current_platform

from weft._torch import multiplies_bfloat16
from weft.kernels import PackedWeight, linear
from weft.kernels.freshness import Stamp

_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear:
    """What vLLM calls to multiply: x [..., K], weight [N, K] or freed -> x w^T + bias [..., N].

    Most weights are packed when they are loaded, and freed: then the packed copy is the weight, and whoever loads
    another makes another `PackedLinear`. A head keeps its weight, which may be the embedding's: there a stamp says in
    every call whether it was written to, and it is packed again. An embedding is loaded like a linear, but is packed
    when a head first multiplies with it: to pack it earlier would cost the memory of a second table for nothing.
    """

    def __init__(self) -> None:
        self._packed: PackedWeight | None = None
        self._stamp: Stamp | None = None

    def of(self, weight: Tensor) -> PackedWeight:
        """The packed form of `weight`, [N, K]; of one that was freed, what it was."""
        if weight.numel() == 0 and self._packed is not None:
            return self._packed
        if self._packed is None or self._stamp is None or not self._stamp.holds([weight]):
            self._stamp = Stamp.of([weight])  # before it is packed: a write in between must show
            self._packed = PackedWeight.from_dense(weight.detach())
        return self._packed

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if weight.numel() > 0 and torch.compiler.is_compiling():  # a compiled graph could not ask for its stamp
            return functional.linear(x, weight, bias)
        return linear(x, self.of(weight), bias=bias)


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
        layer.cpu_linear = matmul = PackedLinear()
        if looks_up_rows(layer):
            return
        matmul.of(layer.weight)
        if remove_weight:
            layer.weight = Parameter(torch.empty(0, dtype=layer.weight.dtype), requires_grad=False)

    return dispatch


def looks_up_rows(layer: Any) -> bool:
    """Whether it is an embedding, which multiplies only if a head is tied to it."""
    return isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)


def why_not(layer: Any) -> str | None:
    """Why a layer keeps vLLM's own matmul, or None."""
    weight, bias = layer.weight, getattr(layer, "bias", None)
    if weight.is_meta or weight.ndim != 2:
        return f"its weight has shape {list(weight.shape)}{' on meta' if weight.is_meta else ''}, expected [N, K]"
    if weight.dtype not in _DTYPES:
        return f"its weight is {_name(weight.dtype)}, expected float32 or bfloat16"
    if bias is not None and bias.dtype != weight.dtype:
        return f"its bias is {_name(bias.dtype)} and its weight {_name(weight.dtype)}, expected one type"
    if weight.dtype == torch.bfloat16 and multiplies_bfloat16():
        return "this CPU multiplies bfloat16 by itself, which oneDNN uses and weft does not"
    if current_platform.is_zen_cpu():
        return "zentorch has matmuls of its own"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

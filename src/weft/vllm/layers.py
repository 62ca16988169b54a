"""vLLM's unquantised linears on the native matmul, and its row-parallel linear with its all-reduce as one op.

Weights are packed when they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, functional
from vllm.distributed import get_tp_group, split_tensor_along_last_dim
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import current_platform

from weft._torch import multiplies_bfloat16
from weft.kernels import PackedWeight, linear
from weft.kernels.freshness import Stamp
from weft.transformer.host import fused_matmul_all_reduce
from weft.vllm.communicator import WindowCommunicator, lean_group

Dispatch = Callable[[Any, bool], None]

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


class WindowRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """`RowParallelLinear` whose matmul and all-reduce are one op, where both were replaced."""

    def weft_fused(self) -> bool:
        """Whether the matmul and the all-reduce are one op."""
        return self.reduce_results and self.tp_size > 1 and self.weft_reason() is None

    def weft_reason(self) -> str | None:
        """Why they are not, where there is an all-reduce."""
        if not isinstance(getattr(self, "cpu_linear", None), PackedLinear):
            return "its matmul is vLLM's"
        communicator = get_tp_group().device_communicator
        if not isinstance(communicator, WindowCommunicator):
            return "its communicator is another plugin's"
        return communicator.weft_left_alone

    def forward(self, input_: Tensor) -> Any:
        """As that of the class which it replaces."""
        if not self.weft_fused():
            return super().forward(input_)
        x = input_
        if not self.input_is_parallel:
            x = split_tensor_along_last_dim(input_, num_partitions=self.tp_size)[self.tp_rank].contiguous()
        bias = None if self.tp_rank > 0 or self.skip_bias_add else self.bias  # once, with the first rank's part
        weight = self.cpu_linear.of(self.weight)
        group = get_tp_group().unique_name
        rows = x.reshape(-1, x.shape[-1])
        if torch.compiler.is_compiling():
            y = matmul_all_reduce(rows, weight.data, bias, weight.n, weight.isa, group)
        else:
            y = fused_matmul_all_reduce(lean_group(group), rows, weight, bias=bias)
        y = y.view(*x.shape[:-1], weight.n)
        if not self.return_bias:
            return y
        return y, self.bias if self.skip_bias_add else None


@torch.library.custom_op("weft::window_matmul_all_reduce", mutates_args=())
def matmul_all_reduce(x: Tensor, packed: Tensor, bias: Tensor | None, n: int, isa: str, group: str) -> Tensor:
    """`fused_matmul_all_reduce` for compiled graphs."""
    return fused_matmul_all_reduce(lean_group(group), x, PackedWeight(packed, n, x.shape[1], isa), bias=bias)


@matmul_all_reduce.register_fake
def _(x, packed, bias, n, isa, group):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], n)

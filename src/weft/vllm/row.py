"""vLLM's row-parallel linear with its all-reduce as one op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tp_group, split_tensor_along_last_dim
from vllm.model_executor.layers.linear import RowParallelLinear

from weft.kernels import PackedWeight
from weft.vllm import fused
from weft.vllm.communicator import WindowCommunicator, lean_group
from weft.vllm.matmul import PackedLinear


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
            y = fused.matmul_all_reduce(lean_group(group), rows, weight, bias=bias)
        y = y.view(*x.shape[:-1], weight.n)
        if not self.return_bias:
            return y
        return y, self.bias if self.skip_bias_add else None


@torch.library.custom_op("weft::window_matmul_all_reduce", mutates_args=())
def matmul_all_reduce(x: Tensor, packed: Tensor, bias: Tensor | None, n: int, isa: str, group: str) -> Tensor:
    """`fused.matmul_all_reduce` for compiled graphs."""
    return fused.matmul_all_reduce(lean_group(group), x, PackedWeight(packed, n, x.shape[1], isa), bias=bias)


@matmul_all_reduce.register_fake
def _(x, packed, bias, n, isa, group):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], n)

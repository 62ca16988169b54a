"""What is put in place of vLLM's own: its unquantised linears on the native matmul, its row-parallel linear with its
all-reduce as one op. The log says what was replaced in a model and what was left alone, and why.

Weights are packed when they are loaded. Each replacement uses the narrowest hook that vLLM has, and is left out where
that is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional
from vllm.compilation import caching
from vllm.distributed import get_tp_group, split_tensor_along_last_dim
from vllm.logger import init_logger
from vllm.model_executor import custom_op
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform

from weft._torch import multiplies_bfloat16
from weft.kernels import PackedWeight, linear
from weft.kernels.dispatch import layout_on
from weft.kernels.freshness import Stamp
from weft.kernels.matmul import fused_matmul_all_reduce
from weft.vllm.communicator import WindowCommunicator, lean_group

logger = init_logger("vllm.plugins.weft")  # below "vllm", whose handlers and level it has

Dispatch = Callable[[Any, bool], None]

_DTYPES = (torch.float32, torch.bfloat16)
_ROW = "RowParallelLinear"
_NATIVE = "native matmul, weight packed"


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


# In place, and in the log ---------------------------------------------------------------------------------


def replace_all(*, timeout: float) -> None:
    """Replaces linears and collectives, once a process; `timeout` is the deadline of every wait."""
    if utils.dispatch_cpu_unquantized_gemm.__module__ == native_dispatch.__module__:
        return
    WindowCommunicator.timeout = timeout
    _replace_matmuls()
    _replace_communicator()
    _replace_row_parallel()
    _mark_compiled_graphs()
    _report_after_loading()


def _replace_matmuls() -> None:
    # The one function that chooses a matmul for an unquantised weight; its callers look it up when they need it.
    utils.dispatch_cpu_unquantized_gemm = native_dispatch(utils.dispatch_cpu_unquantized_gemm)


def _replace_communicator() -> None:
    name = f"{WindowCommunicator.__module__}.{WindowCommunicator.__qualname__}"
    type(current_platform).get_device_communicator_cls = classmethod(lambda cls: name)


def _replace_row_parallel() -> None:
    if _ROW in custom_op.op_registry_oot:
        other = custom_op.op_registry_oot[_ROW]
        logger.warning("weft: left alone every %s: %s has replaced it", _ROW, other.__module__)
        return
    RowParallelLinear.register_oot(WindowRowParallelLinear, name=_ROW)


def _mark_compiled_graphs() -> None:
    # vLLM keeps compiled graphs on disk, by a hash of its own settings. One with other ops inside must not be taken,
    # nor one that was made for another CPU: the layout of packed weights is a constant of the graph.
    factors = caching.aot_compile_hash_factors
    caching.aot_compile_hash_factors = lambda config: [*factors(config), _mark()]


def _mark() -> str:
    layout = layout_on("cpu", torch.float32)
    return f"weft {version('weft')}, layout {layout}, bfloat16 by the CPU {multiplies_bfloat16()}, {_windows()}"


def _windows() -> str:
    try:
        communicator = get_tp_group().device_communicator
    except AssertionError:  # there is no group yet: nothing is compiled for one
        return "no group"
    return "windows" if getattr(communicator, "lean", None) is not None else "no windows"


def _report_after_loading() -> None:
    load_model = BaseModelLoader.load_model

    def load_and_report(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        model = load_model(self, vllm_config, *args, **kwargs)
        if get_tp_group().rank_in_group == 0:  # the others would say the same
            _report(describe_model(model, adapters=vllm_config.lora_config is not None))
        return model

    BaseModelLoader.load_model = load_and_report


def _report(lines: list[str]) -> None:
    for line in lines:
        logger.info("weft: %s", line)
    if not any(line.startswith("replaced") for line in lines):
        logger.warning("weft: nothing was replaced in this model: it runs as without WEFT_VLLM=1")


def describe_model(model: nn.Module, *, adapters: bool = False) -> list[str]:
    """The lines of the log: `replaced 8 QKVParallelLinear: native matmul, weight packed`.

    `adapters` says that vLLM will put layers for adapters (LoRA) around them.
    """
    verdicts: Counter[tuple[str, str, str]] = Counter()
    for layer in model.modules():
        if isinstance(layer, LinearBase | VocabParallelEmbedding):
            verdicts[_verdict(layer, adapters)] += 1
        elif any(p.ndim > 1 for p in layer.parameters(recurse=False)):  # experts, torch's own linears, convolutions
            verdicts["left alone", type(layer).__name__, "it is not one of vLLM's linears"] += 1
    lines = [
        f"{action} {count} {kind}: {detail}" for (action, kind, detail), count in sorted(verdicts.items(), reverse=True)
    ]
    return [*lines, _of_group()]


def _verdict(layer: nn.Module, adapters: bool) -> tuple[str, str, str]:
    kind = _ROW if isinstance(layer, WindowRowParallelLinear) else type(layer).__name__
    if not isinstance(getattr(layer, "cpu_linear", None), PackedLinear):
        return "left alone", kind, getattr(layer, "weft_left_alone", None) or _unasked(layer)
    if looks_up_rows(layer):
        return "left alone", kind, "it looks up rows; packed when a head that is tied to it multiplies"
    if not isinstance(layer, WindowRowParallelLinear) or not layer.reduce_results or layer.tp_size == 1:
        return "replaced", kind, _NATIVE
    if not layer.weft_fused():
        return "replaced", kind, f"{_NATIVE}; its all-reduce is left alone: {layer.weft_reason()}"
    if adapters:
        return "replaced", kind, f"{_NATIVE}; adapters come between it and its all-reduce"
    return "replaced", kind, f"matmul_all_reduce through windows, {_NATIVE}"


def _unasked(layer: nn.Module) -> str:
    """Why vLLM did not ask for a matmul of this layer."""
    method = getattr(layer, "quant_method", None)
    if isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        return "vLLM does not pack it either"  # of multi-head latent attention it reads the weight itself
    return f"it is quantised ({type(method).__name__})"


def _of_group() -> str:
    group = get_tp_group()
    communicator = group.device_communicator
    if isinstance(communicator, WindowCommunicator) and communicator.lean is not None:
        return f"replaced collectives of {group.unique_name}: windows in place of gloo, {group.world_size} ranks"
    reason = getattr(communicator, "weft_left_alone", None) or "it has one rank"
    return f"left alone collectives of {group.unique_name}: {reason}"

"""Puts the replacements in place, and says in the log what was replaced in a model and what was left alone, and why.

Each replacement uses the narrowest hook that vLLM has, and is left out where that is missing.
"""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from vllm.compilation import caching
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor import custom_op
from vllm.model_executor.layers import linear, utils
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform

from weft._torch import multiplies_bfloat16
from weft.kernels.dispatch import layout_on
from weft.vllm.communicator import WindowCommunicator
from weft.vllm.layers import PackedLinear, WindowRowParallelLinear, looks_up_rows, native_dispatch

logger = init_logger("vllm.plugins.weft")  # below "vllm", whose handlers and level it has

_ROW = "RowParallelLinear"
_NATIVE = "native matmul, weight packed"


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
    linear.RowParallelLinear.register_oot(WindowRowParallelLinear, name=_ROW)


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

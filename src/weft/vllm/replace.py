"""Puts the replacements in place. Each uses the narrowest hook that vLLM has, and is left out where that is missing."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from vllm.compilation import caching
from vllm.distributed import get_tp_group
from vllm.model_executor import custom_op
from vllm.model_executor.layers import linear, utils
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform

from weft._torch import multiplies_bfloat16
from weft.kernels.dispatch import layout_on
from weft.vllm.communicator import WindowCommunicator
from weft.vllm.install import logger
from weft.vllm.matmul import native_dispatch
from weft.vllm.report import describe_model
from weft.vllm.row import WindowRowParallelLinear

_ROW = "RowParallelLinear"


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

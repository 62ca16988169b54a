"""Puts the replacements in place. Each uses the narrowest hook that vLLM has, and is left out where that is missing."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import vllm
from vllm.compilation import caching
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor import custom_op
from vllm.model_executor.layers import linear, utils
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform

from weft.vllm.communicator import WindowCommunicator
from weft.vllm.matmul import native_dispatch
from weft.vllm.report import describe_model
from weft.vllm.row import WindowRowParallelLinear

logger = init_logger("vllm.plugins.weft")  # below "vllm", whose handlers and level it has

MADE_FOR = "0.32"
_ROW = "RowParallelLinear"


def install(*, timeout: float) -> None:
    """Replaces linears and collectives of the CPU backend in this process; `timeout` is the deadline of every wait.

    Calling it again changes nothing. On another platform, or another release of vLLM, everything is left alone, and
    the log says so.
    """
    if (reason := _unfit()) is not None:
        logger.warning("weft: left alone everything: %s", reason)
        return
    if getattr(utils.dispatch_cpu_unquantized_gemm, "is_weft", False):
        return
    WindowCommunicator.timeout = timeout
    _replace_matmuls()
    _replace_communicator()
    _replace_row_parallel()
    _mark_compiled_graphs()
    _report_after_loading()


def _unfit() -> str | None:
    if not current_platform.is_cpu():
        return f"the platform is {current_platform.device_type}, expected cpu"
    if not vllm.__version__.startswith(MADE_FOR + "."):
        return f"vLLM is {vllm.__version__}, expected {MADE_FOR}; install the release that weft[vllm] names"
    return None


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
    # vLLM keeps compiled graphs on disk, by a hash of its own settings. One with other ops inside must not be taken.
    factors = caching.aot_compile_hash_factors
    caching.aot_compile_hash_factors = lambda config: [*factors(config), f"weft {version('weft')}"]


def _report_after_loading() -> None:
    load_model = BaseModelLoader.load_model

    def load_and_report(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = load_model(self, *args, **kwargs)
        if get_tp_group().rank_in_group == 0:  # the others would say the same
            for line in describe_model(model):
                logger.info("weft: %s", line)
        return model

    BaseModelLoader.load_model = load_and_report

"""Whether this process's vLLM can take the replacements. Asked before anything of vLLM's inside is imported.

vLLM moves its internals from one release to the next: with another one, an import would fail with a text that says
nothing of the cause. So all that needs them is in `replace`, and this file imports names that every release has.
"""

from __future__ import annotations

import importlib

import vllm
from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger("vllm.plugins.weft")  # below "vllm", whose handlers and level it has

MADE_FOR = "0.32"


def install(*, timeout: float) -> None:
    """Replaces linears and collectives of the CPU backend in this process; `timeout` is the deadline of every wait.

    Calling it again changes nothing. On another platform, with another release of vLLM, or without weft's native
    core, everything is left alone, and the log says so.
    """
    if (reason := _unfit()) is not None:
        logger.warning("weft: left alone everything: %s", reason)
        return
    from weft.vllm.replace import replace_all

    replace_all(timeout=timeout)


def _unfit() -> str | None:
    if not vllm.__version__.startswith(MADE_FOR + "."):
        return f"vLLM is {vllm.__version__}, expected {MADE_FOR}; install the release that weft[vllm] names"
    if not current_platform.is_cpu():
        return f"the platform is {current_platform.device_type}, expected cpu"
    try:
        importlib.import_module("weft._core")
    except ImportError as error:
        return f"weft's native core cannot be loaded ({error}); build weft for this Python and this machine"
    return None

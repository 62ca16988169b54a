"""vLLM's CPU backend with weft's matmuls and windows: a plugin that `WEFT_VLLM=1` turns on.

vLLM calls `register` in each of its processes, through the entry point `vllm.general_plugins`. It is the outermost
layer, like a command line: here, and nowhere below, the environment is read. Nothing of vLLM is imported, and nothing
replaced, unless the variable says so.

layers        linears on the native matmul, the row-parallel one with its all-reduce as one op; put in place, reported
communicator  collectives through windows in place of gloo

vLLM moves its internals from one release to the next: with another one, an import would fail with a text that says
nothing of the cause. So all that needs them is behind `install`, which uses names that every release has.
"""

from __future__ import annotations

import importlib
import os

__all__ = ["install", "register"]

SWITCH, TIMEOUT = "WEFT_VLLM", "WEFT_VLLM_TIMEOUT"
MADE_FOR = "0.32"


def register() -> None:
    """Replaces what can be replaced, once a process, if the environment says `WEFT_VLLM=1`."""
    switch = os.environ.get(SWITCH, "0")
    if switch not in ("0", "1", ""):
        raise ValueError(f"{SWITCH} is {switch!r}, expected 1 (on) or 0 (off)")
    if switch == "1":
        from weft.comm.deadline import VLLM

        install(timeout=_seconds(os.environ.get(TIMEOUT, str(VLLM.seconds))))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{TIMEOUT} is {text!r}, expected seconds above 0: how long a rank waits for another")
    return seconds


def install(*, timeout: float) -> None:
    """Replaces linears and collectives of the CPU backend in this process; `timeout` is the deadline of every wait.

    Calling it again changes nothing. On another platform, with another release of vLLM, or without weft's native
    core, everything is left alone, and the log says so.
    """
    from vllm.logger import init_logger

    if (reason := _unfit()) is not None:
        init_logger("vllm.plugins.weft").warning("weft: left alone everything: %s", reason)
        return
    from weft.vllm.layers import replace_all

    replace_all(timeout=timeout)


def _unfit() -> str | None:
    import vllm
    from vllm.platforms import current_platform

    if not vllm.__version__.startswith(MADE_FOR + "."):
        return f"vLLM is {vllm.__version__}, expected {MADE_FOR}; install the release that weft[vllm] names"
    if not current_platform.is_cpu():
        return f"the platform is {current_platform.device_type}, expected cpu"
    try:
        importlib.import_module("weft._core")
    except ImportError as error:
        return f"weft's native core cannot be loaded ({error}); build weft for this Python and this machine"
    return None

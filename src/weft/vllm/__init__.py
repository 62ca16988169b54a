"""vLLM's CPU backend with weft's matmuls and windows: a plugin that `WEFT_VLLM=1` turns on.

vLLM calls `register` in each of its processes, through the entry point `vllm.general_plugins`. It is the outermost
layer, like a command line: here, and nowhere below, the environment is read. Nothing of vLLM is imported, and nothing
replaced, unless the variable says so.

install       whether this vLLM can take the replacements
replace       puts them in place, and reports
layers        linears on the native matmul; the row-parallel one with its all-reduce as one op
communicator  collectives through windows in place of gloo
"""

from __future__ import annotations

import os

__all__ = ["register"]

SWITCH, TIMEOUT = "WEFT_VLLM", "WEFT_VLLM_TIMEOUT"


def register() -> None:
    """Replaces what can be replaced, once a process, if the environment says `WEFT_VLLM=1`."""
    switch = os.environ.get(SWITCH, "0")
    if switch not in ("0", "1", ""):
        raise ValueError(f"{SWITCH} is {switch!r}, expected 1 (on) or 0 (off)")
    if switch == "1":
        from weft.comm.deadline import VLLM
        from weft.vllm.install import install

        install(timeout=_seconds(os.environ.get(TIMEOUT, str(VLLM.seconds))))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{TIMEOUT} is {text!r}, expected seconds above 0: how long a rank waits for another")
    return seconds

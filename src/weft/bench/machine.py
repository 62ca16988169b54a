"""What a figure was measured on. No host names: reports are published."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path


def cpu_model(cpuinfo: str) -> str:
    """The model of the first CPU, from the text of `/proc/cpuinfo`; "unknown" where it does not say (as on
    Arm).

    >>> cpu_model("processor : 0\\nmodel name : Example CPU @ 2.0GHz\\n")
    'Example CPU @ 2.0GHz'
    """
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return "unknown"


def memory_gib(meminfo: str) -> float:
    """The memory of the machine in GiB, from the text of `/proc/meminfo`.

    >>> memory_gib("MemTotal:       16777216 kB\\nMemFree:  1 kB\\n")
    16.0
    """
    return int(meminfo.split("MemTotal:", 1)[1].split()[0]) / (1 << 20)


def describe() -> Mapping[str, object]:
    """CPU, cores, instruction set, memory, kernel and versions, as plain JSON values."""
    return {
        "cpu": cpu_model(Path("/proc/cpuinfo").read_text()),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": instruction_set(),
        "memory_gib": round(memory_gib(Path("/proc/meminfo").read_text()), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "weft": metadata.version("weft"),
    }


def instruction_set() -> str | None:
    """The instruction set that the native core runs here; None where the core is not built."""
    try:
        from weft import _core
    except ImportError:
        return None
    return _core.kernels().name

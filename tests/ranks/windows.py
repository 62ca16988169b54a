"""What the tests of windows have in common."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch.distributed as dist

from weft.comm import Window

LONG = 30.0
"""A deadline that only a hang reaches."""


def world() -> dist.ProcessGroup:
    return dist.group.WORLD


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "weft-window" in line]


def holds_nothing() -> bool:
    """Whether this process neither maps nor has open a window; not while an exception holds its frames."""
    gc.collect()
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return mappings() == [] and not any("weft-window" in link for link in links)


def all_meet(counters_window: Window, step: int) -> None:
    """A barrier of the host's ranks over counter 0 of each."""
    for peer in counters_window.ranks:
        counters_window.counters(peer).add(0)
    here = counters_window.counters(counters_window.rank)
    here.wait(0, step * len(counters_window.ranks), timeout=LONG, what=f"all ranks at step {step}")

"""What holds for every test with ranks: it leaves no process and no named shared memory behind."""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Iterator

import pytest


def _named_memory() -> set[str]:
    # Only names of ours: other programs of the machine come and go in there.
    return {name for name in os.listdir("/dev/shm") if "weft" in name}


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = _named_memory()
    yield
    assert mp.active_children() == []
    assert _named_memory() == before

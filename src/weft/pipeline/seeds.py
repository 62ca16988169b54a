"""Random numbers that do not depend on the schedule."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(seed: int, step: int, stage: int, microbatch: int) -> int:
    """The seed of one forward pass: the same for every schedule, and another one for each.

    >>> seed_of(0, 0, 1, 2) == seed_of(0, 0, 1, 2), seed_of(0, 0, 1, 2) == seed_of(0, 0, 2, 1)
    (True, False)
    """
    return zlib.crc32(f"{seed} {step} {stage} {microbatch}".encode()) + (seed << 32)


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Random numbers from `seed` in this block, and as before after it."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield

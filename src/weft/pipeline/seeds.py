"""Random numbers that do not depend on the schedule."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.errors import WeftError

# torch has one generator for all threads; nobody else may draw from it while a forward pass has seeded it.
_generator = threading.Lock()


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
    if not _generator.acquire(blocking=False):
        raise WeftError(
            "two pipelines with seed= run on two threads, but torch's random numbers come from one generator; expected "
            "one at a time; run them on one thread, or without seed="
        )
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            yield
    finally:
        _generator.release()


def check_seed(seed: int | None) -> None:
    """Raises unless seeds of forward passes can be made of it."""
    if seed is not None and not -(1 << 31) <= seed < 1 << 32:
        raise ValueError(f"seed is {seed}, expected None, or a number of 32 bits")


@dataclass(frozen=True)
class RandomState:
    """Where torch's generators are: the CPU's, and that of the device that a stage computes on."""

    cpu: Tensor
    device: torch.device
    own: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """As they are."""
        own = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return cls(torch.get_rng_state(), device, own)


@contextmanager
def replayed(state: RandomState | None) -> Iterator[None]:
    """Draws in this block what was drawn from `state` on; generators are as before after it."""
    if state is None:
        yield
        return
    with torch.random.fork_rng():
        torch.set_rng_state(state.cpu)
        if state.own is not None:
            torch.get_device_module(state.device).set_rng_state(state.own, state.device)
        yield

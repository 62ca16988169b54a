"""What each stage is given for each micro-batch: its part of the batch, and random numbers of its own.

A batch is cut along dim 0, or given as a list of micro-batches. Random numbers do not depend on the schedule.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.errors import WeftError
from weft.pipeline.transport.routes import Placing


@dataclass(frozen=True)
class StageInput:
    """What the user gives a stage for one micro-batch.

    args, kwargs: arguments of the module, apart from what comes over edges
    target:       for the loss, on the last stage
    scale:        what the loss is multiplied by before its gradient is taken
    seed:         of the random numbers of this stage and micro-batch; None leaves the generators alone
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None
    scale: float = 1.0
    seed: int | None = None


def stage_inputs(
    placing: Placing,
    stages: Sequence[int],
    batch: Any,
    targets: Any,
    keywords: Mapping[str, Any],
    *,
    scale: float,
    seed: int | None,
    step: int,
    training: bool,
) -> dict[tuple[int, int], StageInput]:
    """By stage of a rank and micro-batch; checked before anything starts."""
    count, last = placing.schedule.microbatches, placing.schedule.stages - 1
    heads = [stage for stage in stages if not placing.graph.into(stage)]
    if heads and batch is None and not keywords:
        raise ValueError(f"batch is None, expected one for stage {heads[0]}, which has no incoming edge")
    if last in stages and training and targets is None:
        raise ValueError("targets is None on a rank of the last stage, expected targets for loss_fn")
    whole = {f"batch[{i}]": x for i, x in enumerate(batch)} if isinstance(batch, tuple) else {"batch": batch}
    check_rows({**(whole if heads else {}), **({"targets": targets} if last in stages else {}), **keywords}, count)
    parts = split_arguments(batch if heads else None, count)
    goals = split_batch(targets if last in stages else None, count, "targets")
    words = split_keywords(keywords, count)
    return {
        (stage, i): StageInput(
            parts[i] if stage in heads and batch is not None else (),
            words[i],
            goals[i] if stage == last else None,
            scale / count,
            None if seed is None else seed_of(seed, step, stage, i),
        )
        for stage in stages
        for i in range(count)
    }


def split_batch(value: Any, count: int, what: str) -> list[Any]:
    """`count` micro-batches of a batch.

    value: a tensor, cut along dim 0 as evenly as it goes; or a list with one entry for each micro-batch, of any
           shapes; or None, which every micro-batch gets. A list is how micro-batches of different shapes are given.

    >>> [part.shape[0] for part in split_batch(torch.zeros(7, 2), 3, "batch")]
    [3, 2, 2]
    """
    if value is None:
        return [None] * count
    if isinstance(value, Tensor):
        if value.dim() == 0 or value.shape[0] < count:
            raise ValueError(
                f"{what} has shape {tuple(value.shape)}, expected at least {count} rows in dim 0, one for each "
                f"micro-batch; give a larger batch, or a list of {count} micro-batches"
            )
        return list(torch.tensor_split(value, count))
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != count:
            raise ValueError(
                f"{what} is a list of {len(value)}, expected one entry for each of the {count} micro-batches of the "
                f"schedule"
            )
        return list(value)
    raise ValueError(f"{what} is a {type(value).__name__}, expected a tensor or a list of {count} micro-batches")


def check_rows(cut: Mapping[str, Any], count: int) -> None:
    """Raises where tensors that are cut together would be cut in different places.

    >>> check_rows({"batch": torch.zeros(4, 2), "targets": torch.zeros(8)}, 2)
    """
    rows = {name: value.shape[0] for name, value in cut.items() if isinstance(value, Tensor) and value.dim() > 0}
    if len(set(rows.values())) > 1 and any(size % count for size in rows.values()):
        sizes = ", of ".join(f"{name} {'are ' if i == 0 else ''}{size}" for i, (name, size) in enumerate(rows.items()))
        raise ValueError(
            f"rows of {sizes}: cut into {count} micro-batches they would not belong together; expected equally many, "
            f"or multiples of {count}; give lists of micro-batches for anything else"
        )


def split_keywords(values: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """For each micro-batch the keyword arguments of the stages."""
    parts = {name: split_batch(value, count, name) for name, value in values.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(count)]


def split_arguments(batch: Any, count: int) -> list[tuple[Any, ...]]:
    """For each micro-batch the positional arguments: a tuple is several, each of them cut; anything else is one."""
    if isinstance(batch, tuple):
        return list(zip(*(split_batch(part, count, "batch") for part in batch), strict=True))
    return [part if isinstance(part, tuple) else (part,) for part in split_batch(batch, count, "batch")]


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

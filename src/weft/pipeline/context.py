"""What a rank keeps from step to step for its transfers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from weft.pipeline.buffers import Buffers
from weft.pipeline.channel import Channel, Planner, Way
from weft.pipeline.lowered import Transfer
from weft.pipeline.routes import Route
from weft.pipeline.wires import Wires


class Payload(Enum):
    """What transfers carry."""

    TENSORS = "tensors"
    SIGNALS = "signals"  # a few bytes in place of each tensor, whose values are then 0: the speed without a network


@dataclass
class Context:
    """What a rank keeps from step to step for its transfers.

    ways:     how each route's tensors lie on both sides
    channels: those that this rank takes part in, by their number
    stop:     set when anything has failed
    fail:     told of errors of the transfer threads
    devices:  of each stage of this rank: where what arrives for it is put
    """

    rank: int
    wires: Wires
    planner: Planner
    buffers: Buffers
    ways: dict[Route, Way]
    channels: dict[int, Channel]
    stop: threading.Event
    payload: Payload
    start: Callable[[Callable[[], None]], None]
    fail: Callable[[BaseException, Transfer], None]
    first_shape_note: int
    devices: dict[int, torch.device]
    zeros: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = field(default_factory=dict)

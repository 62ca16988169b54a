"""Streams of a GPU. This has never run on a GPU: it was type-checked, and its twin in `threads.py` was run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.overlap.streams.device import Event


@dataclass(frozen=True)
class CudaStream:
    """A `torch.cuda.Stream`. This has never run on a GPU."""

    stream: torch.cuda.Stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def record(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self.stream.wait_event(event)


class CudaDevice:
    """One GPU, with one stream for communication. This has never run on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Of high priority: a collective that is due takes the next free multiprocessor before the next tile does.
        self._side = CudaStream(torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]
        self._tiles = torch.cuda.get_device_properties(device).multi_processor_count

    def current(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self._device))

    def side(self) -> CudaStream:
        return self._side

    def tiles_at_once(self) -> int:
        return self._tiles

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def fetch(self, flag: Tensor) -> tuple[Tensor, Event]:
        on_host = torch.empty(flag.shape, dtype=flag.dtype, pin_memory=True)
        on_host.copy_(flag, non_blocking=True)
        return on_host, self.current().record()

    def finish(self, *, seconds: float) -> None:
        """Nothing: who reads the results does so in stream order."""

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

"""Processes that run one numbered case after the other, and are replaced when one of them failed or hung."""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

_context = mp.get_context("forkserver")
_LAST_WORDS_SECONDS = 10.0


class RankSet:
    """`world` ranks with a gloo group over loopback. Each calls `setup` once, and then `run(state, number)`.

    `setup` and `run` are functions of a module. They are started with the first case.
    """

    def __init__(
        self,
        world: int,
        setup: Callable[..., Any],
        run: Callable[[Any, int], None],
        *args: Any,
        timeout: float = 120.0,
        preload: tuple[str, ...] = ("torch.distributed.tensor", "weft.overlap", "weft.reshard"),
    ) -> None:
        self._world, self._timeout = world, timeout
        self._job = (setup, run, args)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        _context.set_forkserver_preload(list(preload))

    def run(self, number: int) -> str | None:
        """Runs a case on all ranks: None, or what went wrong on each rank. After a failure the ranks are new ones."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send(number)
        failures: dict[int, str] = {}
        left, deadline = dict(enumerate(self._pipes)), time.monotonic() + self._timeout
        while left:
            ready = wait(list(left.values()), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failures |= dict.fromkeys(left, "not done in time")
                break
            for rank in [rank for rank, pipe in left.items() if pipe in ready]:
                try:
                    text = left.pop(rank).recv()
                except EOFError:
                    text = "died"
                if text is not None:
                    failures[rank] = text
                    deadline = min(deadline, time.monotonic() + _LAST_WORDS_SECONDS)
        if not failures:
            return None
        self.close()
        return "\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))

    def close(self) -> None:
        """Ends the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.kill()
            process.join()
        self._pipes, self._processes = [], []

    def _start(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self._world):
            here, there = _context.Pipe()
            job = (rank, self._world, self._store.port, self._timeout, there, *self._job)
            process = _context.Process(target=_rank_main, args=job, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)


def _rank_main(
    rank: int,
    world: int,
    port: int,
    timeout: float,
    pipe: Connection,
    setup: Callable[..., Any],
    run: Callable[[Any, int], None],
    args: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    state = setup(*args)
    while True:
        try:
            number = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(timeout + _LAST_WORDS_SECONDS, exit=True)
        try:
            run(state, number)
            text = None
        except BaseException:
            text = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        pipe.send(text)

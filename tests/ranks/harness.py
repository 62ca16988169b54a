"""Runs a function on a few ranks: real processes, a gloo group over loopback, a deadline on everything."""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import RankFailed

# The server imports once what every test module needs and forks each rank from there: a clean process, without
# pytest's threads, that starts fast.
_context = mp.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch.distributed.tensor",
        "torch._dynamo",
        "hypothesis",
        "pytest",
        "weft.comm",
        "weft.overlap",
        "weft.reshard",
        "weft.pipeline.run.api",
        "weft.parallel",
        "transformers.models.llama.modeling_llama",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.bert.modeling_bert",
    ]
)

# What the other ranks get to report their own error after the first one.
_LAST_WORDS_SECONDS = 5.0


def run_ranks(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0, killed: Sequence[int] = ()
) -> list[Any]:
    """`fn(*args)` on `world` ranks, each with the default process group made; their results in rank order.

    `fn` is a function of a test module. `RankFailed` when a rank raises, dies or is not done after `timeout`
    seconds. The ranks in `killed` must die of a signal; their result is its number. The group's store is in
    this process, as it is in torchrun's agent, so that it outlives each rank.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, processes = [], []
    for rank in range(world):
        here, there = _context.Pipe()
        job = (fn, args, rank, world, store.port, timeout, there)
        process = _context.Process(target=_rank_main, args=job, daemon=True)
        process.start()
        there.close()
        ours.append(here)
        processes.append(process)
    try:
        return _collect(ours, processes, timeout, set(killed))
    finally:
        for pipe, process in zip(ours, processes, strict=True):
            pipe.close()
            process.kill()
            process.join()


def _collect(pipes: list[Connection], processes: list[Any], timeout: float, killed: set[int]) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while len(results) + len(failures) < len(pipes):
        open_ranks = [rank for rank in range(len(pipes)) if rank not in results and rank not in failures]
        ready = wait([pipes[rank] for rank in open_ranks], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            failures |= dict.fromkeys(open_ranks, "not done in time")
        for rank in (rank for rank in open_ranks if pipes[rank] in ready):
            _take(rank, pipes[rank], processes[rank], killed, results, failures)
        if failures:
            deadline = min(deadline, time.monotonic() + _LAST_WORDS_SECONDS)
    if failures:
        raise RankFailed("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
    for rank, pipe in enumerate(pipes):
        if rank not in killed:
            pipe.send("all are done")
            processes[rank].join(timeout)
    return [results[rank] for rank in range(len(pipes))]


def _take(
    rank: int,
    pipe: Connection,
    process: Any,
    killed: set[int],
    results: dict[int, Any],
    failures: dict[int, str],
) -> None:
    try:
        good, value = pipe.recv()
    except EOFError:
        process.join(_LAST_WORDS_SECONDS)
        good = rank in killed and process.exitcode is not None and process.exitcode < 0
        value = -process.exitcode if good else f"died with exit code {process.exitcode}"
    else:
        if rank in killed:
            good, value = False, f"is alive, and should have been killed: {value}"
    (results if good else failures)[rank] = value


def _rank_main(
    fn: Callable[..., Any],
    args: Sequence[Any],
    rank: int,
    world: int,
    port: int,
    timeout: float,
    pipe: Connection,
) -> None:
    # Ends this process, and says where it hung, even if the one that started it was killed.
    faulthandler.dump_traceback_later(timeout + _LAST_WORDS_SECONDS, exit=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        pipe.send((True, fn(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    # A rank that left now would close connections that others still use.
    try:
        pipe.poll(timeout)
        dist.destroy_process_group()
    finally:
        faulthandler.cancel_dump_traceback_later()

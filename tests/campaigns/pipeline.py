"""Random pipelines against the same stages in one process: losses, gradients, buffers, outputs; and stages that raise.

Every schedule and random ones, 2 to 8 stages on 2 to 4 ranks, meshes of one or two ranks a stage with cut tensors
between, skips, types, views, dropout, checkpointed stages, stages that keep their inputs; several steps with weights
that change in between in every way that users have, calls that are refused, evaluations; and a stage that raises at a
random point. Process sets live for many cases.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait

sys.path.insert(0, os.path.dirname(__file__))

import torch
import torch.distributed as dist
from campaign import Tally, case_random, main
from pipeline_case import Case, case_of
from pipeline_run import run_case

_HUNG_SECONDS = 180.0
_PER_SET = 500
_fork = mp.get_context("fork")


def campaign(seed: int, first: int, count: int) -> Tally:
    """Runs the cases by the number of ranks that they need."""
    tally = Tally("pipeline", seed)
    cases = [case_of(number, case_random(seed, number)) for number in range(first, first + count)]
    for world in sorted({case.world for case in cases}):
        mine = [case for case in cases if case.world == world]
        for start in range(0, len(mine), _PER_SET):
            _run_all(mine[start : start + _PER_SET], world, seed, tally)
    return tally


def _run_all(cases: Sequence[Case], world: int, seed: int, tally: Tally) -> None:
    """All cases on one set of processes; on a new one after a case that ended the set."""
    left = list(cases)
    while left:
        done = _run_set(left, world, seed, tally)
        left = left[done:]


def _run_set(cases: Sequence[Case], world: int, seed: int, tally: Tally) -> int:
    """Runs cases until they are done, or a process dies or hangs; how many were run."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(world):
        here, there = _fork.Pipe()
        process = _fork.Process(target=_rank_main, args=(cases, rank, world, store.port, there), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        for done, case in enumerate(cases):
            said = _hear(pipes)
            tally.cases += 1
            texts = [f"  rank {rank}: {text}" for rank, text in enumerate(said) if text]
            if texts:
                again = f"python tests/campaigns/pipeline.py --seed {seed} --first {case.number} --cases 1"
                failure = f"{case}\n  again: {again}\n" + "\n".join(texts)
                print(failure, file=sys.stderr, flush=True)
                tally.failures.append(failure)
            elif tally.cases % 500 == 0:
                print(f"{tally}", file=sys.stderr, flush=True)
            if any(text.startswith("gone") for text in said):
                return done + 1
        return len(cases)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _hear(pipes: Sequence[Connection]) -> list[str]:
    """What each rank says of the next case: nothing, or what was wrong."""
    said: dict[int, str] = {}
    deadline = time.monotonic() + _HUNG_SECONDS
    while len(said) < len(pipes):
        open_ranks = [rank for rank in range(len(pipes)) if rank not in said]
        ready = wait([pipes[rank] for rank in open_ranks], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            said |= dict.fromkeys(open_ranks, f"gone: said nothing for {_HUNG_SECONDS:g} s")
        for rank in open_ranks:
            if pipes[rank] in ready:
                try:
                    said[rank] = pipes[rank].recv()
                except EOFError:
                    said[rank] = "gone: the process died"
                    deadline = min(deadline, time.monotonic() + 20.0)
    return [said[rank] for rank in range(len(pipes))]


def _rank_main(cases: Sequence[Case], rank: int, world: int, port: int, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = timedelta(seconds=120)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    for case in cases:
        pipe.send(_tried(case))
    with suppress(EOFError):
        pipe.recv()  # the others may still be at work
    os._exit(0)


def _end_with(parent: int) -> None:
    """Ends this process when the one that started it is gone, also by a kill."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _tried(case: Case) -> str:
    """What was wrong, or nothing."""
    try:
        run_case(case)
    except BaseException as error:
        return "".join(traceback.format_exception(error))
    return ""


if __name__ == "__main__":
    main(campaign)

"""Checks and measures weft on GPUs, and writes one report: NAME.json, and NAME.txt to read.

    torchrun --nproc-per-node 8 examples/gpu_check.py --report gpu_check
    torchrun --nproc-per-node 2 examples/gpu_check.py --interpret          # no GPU: tiny shapes, Triton's interpreter

First every operation against plain torch in double precision, then the overlapped matmuls with the shapes of GPT-3's
MLP: torch's matmul and collective in turn, against weft. All systems take turns, the slowest rank counts, and of the
rounds the median. Exits with 1 if a result is wrong. `--interpret` says nothing about speed: it shows that this script
runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_check_ops import Place, judged, kernels, overlaps
from torch import Tensor
from torch.nn import functional as F

MODEL, HIDDEN = 12288, 49152  # GPT-3 175B
# By the names that torch had before 2.13, where it has not yet the new ones.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def systems(place: Place, group: dist.ProcessGroup, op: str, m: int) -> tuple[dict[str, Callable[[], object]], str]:
    """The matmul alone, torch's matmul and collective in turn, and weft; on this rank's part of GPT-3's MLP."""
    from weft import overlap

    model, hidden = (32, 64) if place.interpreted else (MODEL, HIDDEN)
    gathers = op == "all_gather_matmul"
    n, k = (hidden // place.size, model) if gathers else (model, hidden // place.size)
    dtype = torch.bfloat16
    x = place.random(m // place.size if gathers else m, k, dtype=dtype, seed=place.rank)
    w = place.random(n, k, dtype=dtype, seed=100 + place.rank)
    gathered, mine = x.new_empty(m, k), x.new_empty(m // place.size, n)

    def torch_in_turn() -> Tensor:
        if gathers:
            ALL_GATHER(gathered, x, group=group)
            return F.linear(gathered, w)
        y = F.linear(x, w)
        if op == "matmul_all_reduce":
            dist.all_reduce(y, group=group)
            return y
        REDUCE_SCATTER(mine, y, group=group)
        return mine

    ours, whole = getattr(overlap, op), gathered if gathers else x
    found = {
        "matmul": lambda: F.linear(whole, w),
        "torch": torch_in_turn,
        "weft": lambda: ours(x, w, group=group),
    }
    return found, f"m={m} n={n} k={k}"


def seconds(place: Place, run: Callable[[], object], repeats: int) -> float:
    """Of one call, on the slowest rank."""
    dist.barrier()
    place.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    place.synchronize()
    took = torch.tensor([(time.perf_counter() - start) / repeats])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def measured(place: Place, group: dist.ProcessGroup, rounds: int) -> Iterator[dict[str, Any]]:
    repeats = 1 if place.interpreted else 10
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        for m in (16,) if place.interpreted else (64, 512, 1024, 2048, 4096, 8192):
            found, shape = systems(place, group, op, m)
            taken: dict[str, list[float]] = {name: [] for name in found}
            with torch.no_grad():
                for turn in range(rounds + 1):
                    for name, run in found.items():
                        took = seconds(place, run, repeats)
                        if turn:  # the first round compiles, connects and makes room
                            taken[name].append(took)
            median = {name: statistics.median(values) for name, values in taken.items()}
            exposed = {name: median[name] - median["matmul"] for name in ("torch", "weft")}
            yield {
                "op": op, "shape": shape, **{f"{name}_ms": 1e3 * median[name] for name in median},
                "speedup": median["torch"] / median["weft"], "e_overlap": 1 - exposed["weft"] / exposed["torch"],
            }  # fmt: skip


def text_of(report: dict[str, Any]) -> str:
    lines = [f"{report['device']} x {report['ranks']}, torch {report['torch']}, triton {report['triton']}", ""]
    for row in report["checks"]:
        word = "right" if row["right"] else "WRONG"
        lines.append(f"{word}  {row['check']:<32} {row['dtype']:<9} error {row['error']:.1e} of {row['limit']:.1e}")
    lines += ["", *(["times of the interpreter, which say nothing of a GPU:"] if report["interpreted"] else [])]
    for row in report["overlap"]:
        lines.append(
            f"{row['op']:<22} {row['shape']:<26} matmul {row['matmul_ms']:8.3f} ms  torch {row['torch_ms']:8.3f} ms  "
            f"weft {row['weft_ms']:8.3f} ms  {row['speedup']:.2f}x  E_overlap {row['e_overlap']:.0%}"
        )
    return "\n".join(lines) + "\n"


def check_all(place: Place, rounds: int) -> dict[str, Any]:
    import triton

    from weft.overlap import streams

    group = dist.group.WORLD
    assert group is not None
    checks = []
    for dtype in place.dtypes:
        checks += [judged(check, dtype) for check in kernels(place, dtype)]
        checks += [judged(check, dtype) for check in overlaps(place, group, dtype)]
    rows = list(measured(place, group, rounds))
    streams.check(group)
    name = "Triton's interpreter" if place.interpreted else torch.cuda.get_device_name(place.device)
    return {
        "device": name, "interpreted": place.interpreted, "ranks": place.size,
        "torch": torch.__version__, "triton": triton.__version__,
        "checks": checks, "overlap": rows, "right": all(row["right"] for row in checks),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, default=Path("gpu_check"), help="the files to write, without ending")
    parser.add_argument("--rounds", type=int, default=7, help="how often each system is timed")
    parser.add_argument("--interpret", action="store_true", help="tiny shapes on the CPU, in Triton's interpreter")
    given = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start me with torchrun, as the first lines of this file show")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if given.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which is below
        torch.set_num_threads(1)
        place, backend = Place(torch.device("cpu"), rank, size, True), "gloo"
    else:
        if not torch.cuda.is_available():
            parser.error("torch finds no GPU here; --interpret runs without one")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        place, backend = Place(device, rank, size, False), "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend)
    from weft.kernels.dispatch import TRITON, routed

    if given.interpret:
        from weft.kernels.triton.interpreter import mend

        mend()
    with routed("cpu", TRITON) if given.interpret else nullcontext():
        report = check_all(place, given.rounds)
    if rank == 0:
        given.report.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        given.report.with_suffix(".txt").write_text(text_of(report), encoding="utf-8")
        print(text_of(report), end="")
    dist.destroy_process_group()
    sys.exit(0 if report["right"] else 1)


if __name__ == "__main__":
    main()

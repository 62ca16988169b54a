"""`weft tune`: measure overlapped plans, and write the best to a file that `weft.overlap.use_tuned` reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.comm.deadline import COMMAND

if TYPE_CHECKING:
    from weft.lab import Rank
    from weft.overlap.tuning import Shape, TunedPlan


def tune(
    shapes: Annotated[list[str], typer.Argument(help="OP:MxNxK, such as matmul_reduce_scatter:2048x3072x768.")],
    file: Annotated[Path, typer.Option("--file", help="Where the plans go; those of others in it stay.")],
    ranks: Annotated[str, typer.Option(help="HOSTSxDEVICES of a lab on this machine.")] = "2x1",
    gbps: Annotated[float, typer.Option(help="The rate of each host's card in the lab, Gbit/s.")] = 1.0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    candidates: Annotated[int, typer.Option(help="How many predicted plans to measure.", min=1)] = 4,
) -> None:
    """Measure the best few predicted plans for each shape on a lab, and keep the fastest.

    On a real cluster call `weft.overlap.tune` from a script that torchrun starts: the file is the same.
    """
    from weft.lab import Cluster
    from weft.overlap import tuning

    wanted = [_shape(text, dtype) for text in shapes]
    hosts, devices = _ranks(ranks)
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"got the file {file}, but {folder} is not a directory; create it first")
    with Cluster(hosts=hosts, devices=devices, gbps=gbps) as cluster:
        for shape in wanted:
            found = cluster.run(_tune_on, shape, candidates, timeout=COMMAND.seconds)[0]
            typer.echo(f"{found.plan}")
            tuning.save(file, [found])
    typer.echo(f"wrote {file}", err=True)


def _tune_on(rank: Rank, shape: Shape, candidates: int) -> TunedPlan:
    from weft.overlap.tuning import tune as measure

    return measure(shape, group=rank.group, candidates=candidates)


def _shape(text: str, dtype: str) -> Shape:
    from weft.overlap.plan import Op
    from weft.overlap.tuning import Shape

    ops = [op.value for op in Op if op is not Op.GATHER_BACK]
    match = re.fullmatch(r"(\w+):(\d+)x(\d+)x(\d+)", text)
    if match is None or match[1] not in ops:
        raise ValueError(f"got the shape {text!r}, expected OP:MxNxK with OP one of {', '.join(ops)}")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"got the dtype {dtype!r}, expected float32 or bfloat16")
    return Shape(Op(match[1]), int(match[2]), int(match[3]), int(match[4]), dtype)


def _ranks(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None:
        raise ValueError(f"got the ranks {text!r}, expected HOSTSxDEVICES, such as 2x1")
    return int(match[1]), int(match[2])

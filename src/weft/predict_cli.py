"""`weft predict`: one overlapped matmul on GPUs that are only declared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from weft.scale import OpPrediction

DECLARED = "from declared figures; nothing was measured on a GPU"


def predict(
    gpu: Annotated[str, typer.Option(help="A100, A100-PCIe, H100, H800 or RTX4090.")],
    m: Annotated[int, typer.Option(help="All rows; for all-to-all those of one GPU.")],
    n: Annotated[int, typer.Option(help="Columns of the product, of all GPUs together.")],
    k: Annotated[int, typer.Option(help="What is summed over, of all GPUs together.")],
    op: Annotated[str, typer.Option(help="The op, such as all_gather_matmul.")] = "matmul_reduce_scatter",
    tp: Annotated[int, typer.Option(help="GPUs of one host.")] = 8,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    transport: Annotated[str, typer.Option(help="windows, messages, or whichever is faster: auto.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Predict a matmul that communicates: sequential, overlapped, the bound, and the plan, on declared GPUs."""
    from weft.overlap.plan import Op, Transport
    from weft.scale import find_gpu, predict_op
    from weft.scale.gpus import find_dtype

    check_folder(json_file)
    one_of("op", op, [each.value for each in Op])
    one_of("transport", transport, ["auto", *(each.value for each in Transport)])
    card, kind, way = find_gpu(gpu), find_dtype(dtype), None if transport == "auto" else Transport(transport)
    found = predict_op(card, op, m, n, k, tp=tp, dtype=kind, transport=way)
    typer.echo(f"{op} on {tp} x {card.name}, {kind}: [{m}, {k}] x [{n}, {k}]^T\n{describe(found)}\n{DECLARED}")
    if json_file is not None:
        asked = {"gpu": card.name, "tp": tp, "op": op, "m": m, "n": n, "k": k, "dtype": kind}
        json_file.write_text(json.dumps({**asked, **found.as_dict()}, indent=1) + "\n", encoding="utf-8")
        typer.echo(f"wrote {json_file}", err=True)


def describe(found: OpPrediction) -> str:
    """The figures as lines, then the plan."""
    from weft.timeline.text import align_columns, format_seconds

    rows = [
        ["matmul alone", format_seconds(found.matmul), ""],
        ["collective alone", format_seconds(found.wire), ""],
        ["sequential", format_seconds(found.sequential), "1.00x"],
        ["overlapped", format_seconds(found.overlapped), f"{found.speedup:.2f}x"],
        ["bound", format_seconds(found.bound), f"{found.sequential / found.bound:.2f}x"],
    ]
    figures = f"E_overlap {found.e_overlap:.1%}, {found.of_bound:.1%} of the bound"
    return f"{align_columns(rows)}\n{figures}\nplan: {found.plan}"


def one_of(name: str, value: str, known: list[str]) -> str:
    """The value, if it is known."""
    if value not in known:
        raise ValueError(f"got {name} {value!r}; expected one of: {', '.join(known)}")
    return value


def check_folder(file: Path | None) -> None:
    """Raises before the work is done, not after it."""
    if file is not None and not file.absolute().parent.is_dir():
        raise ValueError(f"got the output file {file}, but its directory is not there; create it first")

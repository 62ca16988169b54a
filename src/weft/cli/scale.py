"""`weft predict` and `weft simulate`: one overlapped matmul, and a whole step, on GPUs that are only declared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.report.result import announce, check_writable, parse_grid, write

if TYPE_CHECKING:
    from weft.scale import OpPrediction, ScaleJob, Step

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

    check_writable(json_file)
    one_of("op", op, [each.value for each in Op])
    one_of("transport", transport, ["auto", *(each.value for each in Transport)])
    card, kind, way = find_gpu(gpu), find_dtype(dtype), None if transport == "auto" else Transport(transport)
    found = predict_op(card, op, m, n, k, tp=tp, dtype=kind, transport=way)
    typer.echo(f"{op} on {tp} x {card.name}, {kind}: [{m}, {k}] x [{n}, {k}]^T\n{describe(found)}\n{DECLARED}")
    if json_file is not None:
        given = {"gpu": card.name, "tp": tp, "op": op, "m": m, "n": n, "k": k, "dtype": kind}
        write(json_file, json.dumps({**given, **found.as_dict()}, indent=1) + "\n")


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


_DEFAULTS = {"train": (0, 1), "prefill": (1, 8), "decode": (1, 64)}  # micro-batches (0: four a stage), sequences


def simulate(
    cluster: Annotated[str, typer.Option(help="Hosts x GPUs of each, such as 16x8.")],
    model: Annotated[str, typer.Option(help="gpt3-175b, gpt3-13b, llama2-7b, llama2-70b, llama3-405b or bert-large.")],
    tp: Annotated[int, typer.Option(help="Tensor parallel, inside a host.")],
    pp: Annotated[int, typer.Option(help="Stages of the pipeline.")] = 1,
    dp: Annotated[int, typer.Option(help="Replicas.")] = 1,
    gpu: Annotated[str, typer.Option(help="A100, A100-PCIe, H100, H800 or RTX4090.")] = "A100",
    schedule: Annotated[str, typer.Option(help="Of the pipeline, such as eager-1f1b.")] = "eager-1f1b",
    mode: Annotated[str, typer.Option(help="train, prefill or decode.")] = "train",
    microbatches: Annotated[
        int | None, typer.Option(help="Of a step, in each replica. [default: 4 a stage; 1 in inference]")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences of a micro-batch. [default: 1; 8 in prefill, 64 in decode]")
    ] = None,
    tokens: Annotated[int, typer.Option(help="The longest sequence, or context in decode.")] = 2048,
    lengths: Annotated[
        str, typer.Option(help="full, uniform, squad, wikipedia, azure-code or azure-chat: how long the others are.")
    ] = "full",
    activations: Annotated[str, typer.Option(help="Between the halves of a layer: sharded or replicated.")] = "sharded",
    gbps: Annotated[
        float | None, typer.Option(help="Gbit/s of a host's cards. [default: the GPU's usual ones]")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    timeline_file: Annotated[Path | None, typer.Option("--timeline", help="Write a Chrome trace here.")] = None,
) -> None:
    """Simulate a step on a declared cluster: time, exposed communication, bubble, memory; without each promise too."""
    from weft.scale import ScaleJob, compare, find_gpu, find_model
    from weft.scale.job import Activations, Mode, find_lengths
    from weft.scale.step import ALL

    check_writable(json_file, timeline_file)
    hosts, devices = parse_cluster(cluster)
    kind = Mode(one_of("mode", mode, [each.value for each in Mode]))
    layout = Activations(one_of("activations", activations, [each.value for each in Activations]))
    usual_microbatches, usual_batch = _DEFAULTS[mode]
    job = ScaleJob(
        model=find_model(model),
        gpu=find_gpu(gpu),
        hosts=hosts,
        devices=devices,
        tp=tp,
        pp=pp,
        dp=dp,
        schedule=schedule,
        microbatches=microbatches if microbatches is not None else usual_microbatches or 4 * pp,
        sequences=batch if batch is not None else usual_batch,
        tokens=tokens,
        lengths=find_lengths(lengths),
        mode=kind,
        activations=layout,
        gbps=gbps,
    )
    found = compare(job)
    typer.echo(f"{headline(job)}\n{table(found)}\n{DECLARED}")
    if json_file is not None:
        write(json_file, json.dumps(as_json(job, found), indent=1) + "\n")
    if timeline_file is not None:
        found[ALL].timeline.save(timeline_file)
        announce(timeline_file)


def parse_cluster(text: str) -> tuple[int, int]:
    """Hosts and GPUs of each.

    >>> parse_cluster("16x8")
    (16, 8)
    """
    found = parse_grid(text)
    if found is None:
        raise ValueError(f"got the cluster {text!r}; expected hosts x GPUs of each, such as 16x8")
    return found


def headline(job: ScaleJob) -> str:
    """What was simulated, in a line."""
    return (
        f"{job.model.name}, {job.mode.value}: {job.hosts}x{job.devices} {job.gpu.name}, tp {job.tp}, pp {job.pp}, "
        f"dp {job.dp}, {job.schedule}, {job.microbatches} micro-batches of {job.sequences} x {job.tokens} tokens "
        f"({job.lengths.name}), {job.activations.value}, {job.host_gbps:g} Gbit/s a host"
    )


def table(found: dict[str, Step]) -> str:
    """A row for each case; `time` is that of all four promises for 1."""
    from weft.scale.step import ALL
    from weft.timeline.text import align_columns, format_bytes, format_seconds

    rows = [["promises", "step", "time", "exposed", "bubble", "peak memory", "MFU", "tokens/s"]]
    for name, step in found.items():
        share = f"{step.exposed / step.seconds:.1%}"
        memory = format_bytes(step.memory) + ("" if step.fits else " !")
        figures = [format_seconds(step.seconds), f"{step.seconds / found[ALL].seconds:.3f}x", share]
        rate = f"{step.tokens_per_second:,.0f}"
        rows.append([name, *figures, f"{step.bubble:.1%}", memory, f"{step.mfu:.1%}", rate])
    notes = []
    if not all(step.fits for step in found.values()):
        size = format_bytes(next(iter(found.values())).job.gpu.memory)
        notes.append(f"! does not fit into {size}: smaller micro-batches, or more tp or pp")
    return "\n".join([align_columns(rows), *notes, *explain(found)])


def explain(found: dict[str, Step]) -> list[str]:
    """Why a promise made no difference, where it made none."""
    from weft.scale.step import ALL

    job, best = found[ALL].job, found[ALL].seconds

    def idle(promise: str) -> bool:
        return found[f"without {promise}"].seconds == best

    notes = []
    if idle("overlap") and job.tp > 1:
        notes.append("overlap: no matmul has waves enough for a plan that is faster than none")
    if idle("reshard") and job.pp > 1:
        notes.append(
            "reshard: every GPU sends its rows to one other already; --activations replicated has more to move"
        )
    if idle("packed"):
        notes.append("packed: nothing is padded; --lengths and --batch make batches that would be")
    return notes


def as_json(job: ScaleJob, found: dict[str, Step]) -> dict[str, object]:
    """What --json writes."""
    from weft.scale.step import ideal_seconds

    given = {"cluster": f"{job.hosts}x{job.devices}", "gpu": job.gpu.name, "model": job.model.name}
    given |= {
        name: getattr(job, name) for name in ("tp", "pp", "dp", "schedule", "microbatches", "sequences", "tokens")
    }
    given |= {"mode": job.mode.value, "activations": job.activations.value, "lengths": job.lengths.name}
    rows = [{"case": name, **step.as_dict()} for name, step in found.items()]
    return {**given, "gbps": job.host_gbps, "ideal_seconds": ideal_seconds(job), "rows": rows}

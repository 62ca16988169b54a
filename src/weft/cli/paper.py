"""What is computed on paper, without a device or a process group: `weft plan reshard`, `weft plan pipeline` (plans
compared, printed and drawn), `weft predict` and `weft simulate` (a matmul, and a whole step, on GPUs that are only
declared)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.report.result import announce, check_writable, parse_grid, write

if TYPE_CHECKING:
    from weft.layout import Layout
    from weft.pipeline import Simulation
    from weft.reshard import Plan
    from weft.scale import OpPrediction, ScaleJob, Step

app = typer.Typer(no_args_is_help=True, help="Plans: printed, compared with their bound, and drawn.")


@app.command("reshard")
def reshard(
    shape: Annotated[str, typer.Option(help="The tensor, such as 1024,1024,512.")],
    src: Annotated[str, typer.Option(help='Hosts x devices and layout of the source, such as "2x4:S0RR".')],
    dst: Annotated[str, typer.Option(help='The same of the destination, such as "2x4:RS0R".')],
    dtype: Annotated[str, typer.Option(help="The type of its elements.")] = "float32",
    gbps: Annotated[float, typer.Option(help="The rate of each host's card, Gbit/s.")] = 10.0,
    strategy: Annotated[str, typer.Option(help="Which plan is described; all are compared.")] = "optimal",
    same_hosts: Annotated[bool, typer.Option("--same-hosts", help="Both meshes begin at rank 0.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="Only the comparison, not the plan.")] = False,
    chunks: Annotated[bool, typer.Option("--chunks", help="The whole plan: every stream and chunk.")] = False,
    html_file: Annotated[Path | None, typer.Option("--html", help="Draw the timelines here.")] = None,
) -> None:
    """Plan a move of one tensor from a mesh and layout to another: every strategy's time, the plan, its bound.

    S0 is a dim cut along mesh axis 0 (the hosts), S1 along axis 1 (the devices of a host), S01 along both, R a
    dim that is not cut.
    """
    from weft.report import timeline_page
    from weft.reshard import STRATEGIES
    from weft.reshard.plan import bound_line, header

    check_writable(html_file)
    plans = _plans_of(shape, src, dst, dtype, gbps, same_hosts)
    if strategy not in plans:
        raise ValueError(f"got the strategy {strategy!r}; expected one of: {', '.join(STRATEGIES)}")
    typer.echo(compare(plans))
    plan = plans[strategy]
    if chunks:
        typer.echo(f"\n{plan}", nl=False)
    elif not summary:
        sizes = f"{len(plan.streams)} streams in {len(plan.chunks)} chunks; --chunks prints them"
        typer.echo("\n".join(["", *header(plan), bound_line(plan), sizes]))
    if html_file is not None:
        timelines = [plan.simulate() for plan in plans.values()]
        write(html_file, timeline_page(timelines, title=f"reshard {shape}: {src} to {dst}"))


def compare(plans: dict[str, Plan]) -> str:
    """One line for each strategy: predicted seconds, of the bound, chunks, and the busiest card's bytes."""
    from weft.timeline.text import align_columns, format_bytes, format_seconds

    rows = [["strategy", "predicted", "of bound", "chunks", "busiest out", "busiest in"]]
    for name, plan in plans.items():
        cards = plan.bytes_by_card.values()
        share = plan.lower_bound / plan.seconds if plan.seconds else 1.0
        most = (max(card.out for card in cards), max(card.into for card in cards))
        figures = [format_seconds(plan.seconds), f"{share:.3f}", str(len(plan.chunks)), *map(format_bytes, most)]
        rows.append([name, *figures])
    bound = next(iter(plans.values())).lower_bound
    rows.append(["bound", format_seconds(bound), "1.000", "", "", ""])
    return align_columns(rows)


def _plans_of(shape: str, src: str, dst: str, dtype: str, gbps: float, same_hosts: bool) -> dict[str, Plan]:
    import torch

    from weft.layout.mesh import DeclaredCluster
    from weft.reshard import STRATEGIES, plan_reshard

    try:
        sizes = [int(size) for size in shape.split(",") if size.strip()]
    except ValueError:
        raise ValueError(f"got the shape {shape!r}; expected whole numbers, such as 1024,1024,512") from None
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"got the type {dtype!r}; expected one of torch's, such as float32 or bfloat16")
    a = parse_side(src, ndim=len(sizes))
    start = 0 if same_hosts else a.mesh.size
    b = parse_side(dst, ndim=len(sizes), first_rank=start, first_host=0 if same_hosts else max(a.mesh.hosts) + 1)
    cluster = DeclaredCluster.uniform(max(*a.mesh.hosts, *b.mesh.hosts) + 1, gbps=gbps)
    return {name: plan_reshard(sizes, kind, src=a, dst=b, cluster=cluster, strategy=name) for name in STRATEGIES}


def parse_side(text: str, *, ndim: int, first_rank: int = 0, first_host: int = 0) -> Layout:
    """A layout from hosts x devices and the papers' notation.

    >>> str(parse_side("2x4:S0R", ndim=2).mesh)
    '2x4 ranks 0-7 hosts 0*4,1*4 axes host,device'
    """
    from weft.layout import Layout, Mesh

    mesh, _, notation = text.partition(":")
    shape = parse_grid(mesh)
    if shape is None:
        raise ValueError(f"got the mesh {text!r}; expected hosts x devices and a layout, such as 2x4:S0RR")
    grid = Mesh.grid(*shape, first_rank=first_rank, first_host=first_host)
    layout = Layout.parse(grid, notation)
    dims = sum(letter in "RS" for letter in notation)
    if dims != ndim:
        raise ValueError(f"got the layout {notation!r} of {dims} dims for a shape of {ndim}; expected one S or R a dim")
    return layout


PEER = "1f1b, synchronous"
UNITS = "times in forwards of a rank; activations in micro-batches of a rank"


@app.command("pipeline")
def pipeline(
    stages: Annotated[int, typer.Option(help="How many stages.")],
    microbatches: Annotated[int, typer.Option(help="How many micro-batches a step has.")],
    schedule_name: Annotated[
        str, typer.Option("--schedule", help="Which schedule is printed; all are compared.")
    ] = "eager-1f1b",
    ranks: Annotated[int | None, typer.Option(help="Fewer than stages, for interleaved-1f1b only.")] = None,
    comm: Annotated[float, typer.Option(help="Seconds of a transfer, if a rank's forward takes 1.")] = 0.5,
    backward: Annotated[float, typer.Option(help="Seconds of a backward, if a rank's forward takes 1.")] = 2.0,
    summary: Annotated[bool, typer.Option("--summary", help="Only the comparison, not the grid.")] = False,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Write the schedule here, for torch.distributed.pipelining.")
    ] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Draw the timelines here.")] = None,
) -> None:
    """Plan a pipeline's step: the schedule's grid, and every schedule's time, bubble and memory.

    Ranks have equal work; a transfer takes --comm of a rank's forward. interleaved-1f1b, zb-v and dualpipe-v get the
    same ranks and the same work, cut into twice as many stages (or into --stages, if one of them is printed).
    """
    from weft.pipeline import schedule
    from weft.pipeline.schedules.generators import SEVERAL_STAGES
    from weft.pipeline.schedules.schedule import to_torch_csv
    from weft.report import Column, Table
    from weft.report.pipeline import pipeline_page
    from weft.timeline.text import align_columns

    check_writable(csv_file, html_file)
    chosen = schedule(schedule_name, stages=stages, microbatches=microbatches, ranks=ranks)
    halved_stages = stages if schedule_name in SEVERAL_STAGES else 2 * stages
    found = simulate_all(len(chosen.ranks), microbatches, comm=comm, backward=backward, halved_stages=halved_stages)
    if not summary:
        typer.echo(f"{chosen}\n")
    head, *rows = compare_schedules(found, chosen=schedule_name)
    typer.echo(f"{align_columns([head, *rows])}\n{UNITS}; * is above")
    if csv_file is not None:
        write(csv_file, to_torch_csv(chosen))
    if html_file is not None:
        title = f"{schedule_name}: {stages} stages, {microbatches} micro-batches, a transfer takes {comm:g} forwards"
        order = sorted(found, key=lambda name: name != schedule_name)
        columns = [Column(text, text, right=text != head[0]) for text in head]
        table = Table("", columns, [dict(zip(head, row, strict=True)) for row in rows], [f"{UNITS}; * is drawn first"])
        write(html_file, pipeline_page({name: found[name] for name in order}, title=title, table=table))


def simulate_all(
    ranks: int, microbatches: int, *, comm: float, backward: float, halved_stages: int
) -> dict[str, Simulation]:
    """Every schedule on the same ranks with the same work, and 1F1B that stops for its transfers."""
    from weft.pipeline import SCHEDULES, Costs, Transfers, schedule
    from weft.pipeline.schedules.generators import SEVERAL_STAGES
    from weft.pipeline.schedules.vees import V_SCHEDULES

    def simulated(name: str, transfers: Transfers = Transfers.OVERLAPPED) -> Simulation:
        stages = halved_stages if name in SEVERAL_STAGES else ranks
        if name in V_SCHEDULES and (stages + 1) // 2 != ranks:  # --stages of the interleaved one, three or more a rank
            stages = 2 * ranks
        part = ranks / stages  # of a rank's work, on average, is one stage's
        costs = Costs.uniform(stages, forward=part, backward=backward * part, transfer=comm)
        made = schedule(name, stages=stages, microbatches=microbatches, ranks=ranks)
        return made.simulate(costs, transfers=transfers)

    return {PEER: simulated("1f1b", Transfers.SYNCHRONOUS), **{name: simulated(name) for name in SCHEDULES}}


def compare_schedules(found: dict[str, Simulation], *, chosen: str) -> list[list[str]]:
    """The head of a table, and one row for each schedule."""
    peer = found[PEER].seconds
    rows = [["schedule", "step", "bound", "bubble", "speed", "peak activations of each rank"]]
    for name, simulation in found.items():
        part = len(simulation.schedule.ranks) / simulation.schedule.stages
        peaks = " ".join(f"{peak * part:g}" for peak in simulation.schedule.peak_by_rank)
        times = [f"{simulation.seconds:.2f}", f"{simulation.lower_bound:.2f}", f"{simulation.bubble:.1%}"]
        rows.append([f"{name} *" if name == chosen else name, *times, f"{peer / simulation.seconds:.2f}x", peaks])
    return rows


# Declared GPUs ----------------------------------------------------------------------------------------------

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

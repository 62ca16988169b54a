"""Resharding in a lab of 1 Gbit/s cards: every strategy, against the bound of the busiest card.

The cases are those of the resharding paper's artefact, at 64 MB; the systems are the strategies of the same executor.
Then a scaled Llama's state dict by one plan, against what a torch user writes today. Bytes are verified after every
run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from weft.bench.bounds import (
    NOISY_COLUMN,
    NOISY_NOTE,
    beats,
    calm,
    median_of,
    message_cpu,
    noisy_extremes,
    settle,
    trust,
    with_cpu,
)
from weft.bench.harness import BenchOptions, Result, column, over_cards, track
from weft.bench.systems.reshard import measure_case, measure_state
from weft.lab import Cluster
from weft.layout import Layout, Mesh
from weft.report import Column, Headline, Report, Row
from weft.reshard import STRATEGIES, TensorSpec, plan_reshard

NAME = "reshard"
HELP = "tensors and a state dict between meshes, in a lab of 1 Gbit/s cards: each strategy against the bound"
GBPS = 1.0
STAGING_LIMIT = 64 << 20
_RUN_TIMEOUT = 600.0
COLUMNS = [
    NOISY_COLUMN,
    Column("case", "case"),
    *(Column(f"{name}_s", f"{name}, s", form=".3f") for name in STRATEGIES),
    Column("full_broadcast_s", "full tensors, s", form=".3f"),
    Column("dcp_files_s", "checkpoint, s", form=".3f"),
    Column("bound_s", "bound, s", form=".3f"),
    Column("cpu_bound_s", "+cpu, s", form=".3f"),
    Column("fraction", "of bound", form=".3f", bar=True),
    Column("predict_error", "prediction off", form=".1%"),
    Column("disturbed", "disturbed", form="d"),
]


def run(options: BenchOptions) -> Report:
    """All cases, one lab each; then the state dict; then the planner alone."""
    return over_cards(options, partial(_run, options))


def _run(options: BenchOptions, cards: str) -> Report:
    cases = QUICK_CASES if options.quick else CASES
    rounds = 3 if options.quick else 7
    rows, figures = [], []
    for case in track(cases, title=NAME):
        result = settle(partial(_case, case, cards, rounds=rounds))
        rows.append(_row(result))
        figures.append(result.figure(f"optimal: {case.name}"))
    state = _state_row(settle(partial(_state, cards, scale=2 if options.quick else 1, rounds=rounds)))
    cpu_per_byte = message_cpu(cards)
    return Report(
        NAME,
        rows=[_with_cpu_bound(row, cpu_per_byte) for row in (*rows, state)],
        summary=summary(rows, state, plan_seconds=_plan_seconds()),
        columns=COLUMNS,
        title=f"resharding, cards of {GBPS:g} Gbit/s: each strategy, and how close `optimal` is to the bound",
        notes=[
            "bound: the busiest network card, in or out, under the best choice of senders",
            "prediction off: the largest of the strategies' |predicted / measured - 1|",
            "+cpu: the same, or the CPU that the bytes between hosts take of all cores, whichever is longer",
            "checkpoint: its files stay in this machine's memory and cross no card",
            NOISY_NOTE,
        ],
        figures=figures,
    )


def demo() -> list[Headline]:
    """The line of `weft demo`: one tensor to every device of another mesh."""
    case = REPLICATE[-3]
    result = _case(case, "tcp", rounds=3, strategies=("send_recv", "optimal"))
    what, figures = f"reshard {case.name}, against send/recv", [result.figure(f"optimal: {case.name}")]
    return [result.headline(what, today="send_recv", ours="optimal", unit="s", figures=figures)]


def _case(case: ReshardCase, cards: str, *, rounds: int, strategies: Iterable[str] = STRATEGIES) -> Result:
    with Cluster(case.hosts, case.devices, GBPS, cards=cards) as lab:
        job = (case.name, [case.spec()], list(strategies), GBPS, rounds)
        result = lab.run(measure_case, *job, timeout=_RUN_TIMEOUT)[0]
    assert result is not None
    return result


def _state(cards: str, *, scale: int, rounds: int) -> Result:
    name = "state dict of 150 tensors, (2,2) FSDP to (1,2) TP"
    with tempfile.TemporaryDirectory() as folder, Cluster(3, 2, GBPS, cards=cards) as lab:
        job = (name, llama_state(scale=scale), GBPS, rounds, STAGING_LIMIT, f"{folder}/checkpoint")
        result = lab.run(measure_state, *job, timeout=_RUN_TIMEOUT)[0]
    assert result is not None
    return result


def _with_cpu_bound(row: Row, cpu_per_byte: float) -> Row:
    carried = with_cpu(0.0, nbytes=row["wire_bytes"], cpu_per_byte=cpu_per_byte)
    return {**row, "cpu_bound_s": max(row["bound_s"], carried)}


def _row(result: Result) -> Row:
    measured, bound = result.measured, result.bound or 0.0
    row: dict[str, object] = {
        "case": measured.case.name, "bound_s": bound, "fraction": bound / measured.median("optimal"),
    }  # fmt: skip
    for name in STRATEGIES:
        row |= {f"{name}_s": measured.median(name), f"{name}_spread": measured.spread(name)}
        row[f"{name}_predicted_s"] = result.predicted[name]
    row |= beats(result.bound, map(measured.median, STRATEGIES))
    return {**row, "predict_error": max(result.prediction_errors), **result.facts, "disturbed": measured.disturbed}


def _state_row(result: Result) -> Row:
    measured, bound = result.measured, result.bound or 0.0
    return {
        "case": measured.case.name,
        "optimal_s": measured.median("weft"),
        "optimal_spread": measured.spread("weft"),
        "full_broadcast_s": measured.median("full_broadcast"),
        "dcp_files_s": measured.median("dcp_files"),
        "bound_s": bound,
        "fraction": bound / measured.median("weft"),
        "predict_error": result.prediction_errors[0],
        **beats(result.bound, [measured.median("weft"), measured.median("full_broadcast")]),
        **result.facts,
        "disturbed": measured.disturbed,
    }


def summary(rows: Sequence[Row], state: Row, *, plan_seconds: float) -> dict[str, object]:
    """The figures that the README quotes."""
    others = [name for name in STRATEGIES if name != "optimal"]
    errors = [abs(row[f"{name}_predicted_s"] / row[f"{name}_s"] - 1) for row in calm(rows) for name in STRATEGIES]
    return {
        "bound_fraction_min": min(column(rows, "fraction")),
        "bound_fraction_median": median_of(rows, "fraction"),
        "vs_send_recv_best": max(row["send_recv_s"] / row["optimal_s"] for row in rows),
        "vs_best_other_worst": min(row[f"{name}_s"] / row["optimal_s"] for row in rows for name in others),
        "predict_error_median": statistics.median(errors),
        "state_dict_bound_fraction": state["fraction"],
        "state_dict_vs_full_broadcast": state["full_broadcast_s"] / state["optimal_s"],
        "state_dict_vs_dcp_files": state["dcp_files_s"] / state["optimal_s"],
        "staging_peak_fraction": state["staging_peak_mb"] / state["staging_limit_mb"],
        "plan_seconds_1024": plan_seconds,
        **trust([*rows, state]),
        "noisy_extremes": noisy_extremes(rows, {"bound_fraction_min": (min, "fraction")}),
    }


def _plan_seconds() -> float:
    """Planning between two meshes of 1,024 devices, 2-D layouts: every source rank meets every destination rank."""
    array = np.arange(1024).reshape(32, 32)
    src, dst = (Mesh.of(array + 1024 * i, hosts=array // 8 + 128 * i) for i in (0, 1))
    start = time.perf_counter()
    plan_reshard((8192, 8192), torch.bfloat16, src=Layout.parse(src, "S01R"), dst=Layout.parse(dst, "RS01"))
    return time.perf_counter() - start


_SHAPE = (1024, 1024, 16)  # float32: 64 MB; the paper's last dim is 512
_THIRDS = (3072, 1024, 5)  # divisible by 3 hosts: 60 MB


@dataclass(frozen=True)
class ReshardCase:
    """A tensor of float32 from a mesh of (hosts, devices) and layout to another, on other hosts.

    >>> REPLICATE[-1].name
    '1 device to 4x4'
    """

    name: str
    shape: tuple[int, ...]
    src: tuple[int, int]
    src_notation: str
    dst: tuple[int, int]
    dst_notation: str

    @property
    def hosts(self) -> int:
        """Hosts of the lab."""
        return self.src[0] + self.dst[0]

    @property
    def devices(self) -> int:
        """Devices of each host of the lab; a mesh uses the first ones."""
        return max(self.src[1], self.dst[1])

    def layouts(self) -> tuple[Layout, Layout]:
        """Source and destination, on the ranks of a lab of `hosts` x `devices`."""
        src = lab_mesh(self.src, devices=self.devices, first_host=0)
        dst = lab_mesh(self.dst, devices=self.devices, first_host=self.src[0])
        return Layout.parse(src, self.src_notation), Layout.parse(dst, self.dst_notation)

    def spec(self) -> TensorSpec:
        """The tensor to be moved."""
        src, dst = self.layouts()
        return TensorSpec("tensor", self.shape, torch.float32, src, dst, torch.float32)


def lab_mesh(shape: tuple[int, int], *, devices: int, first_host: int) -> Mesh:
    """The first `shape[1]` devices of `shape[0]` hosts of a lab with `devices` ranks a host."""
    hosts = np.repeat(np.arange(shape[0]) + first_host, shape[1]).reshape(shape)
    return Mesh.of(hosts * devices + np.arange(shape[1]), hosts=hosts, axes=("host", "device"))


def _paper_case(number: int, src: str, dst: str, shape: tuple[int, ...] = _SHAPE) -> ReshardCase:
    sides = []
    for text in (src, dst):
        mesh, notation = text.split(":")
        hosts, devices = mesh.split("x")
        sides.append(((int(hosts), int(devices)), notation))
    (a, src_notation), (b, dst_notation) = sides
    return ReshardCase(f"case {number}: {src} to {dst}", shape, a, src_notation, b, dst_notation)


PAPER = (
    _paper_case(1, "2x4:S0RR", "2x4:S0RR"),
    _paper_case(2, "2x4:RRR", "2x4:S0RR"),
    _paper_case(3, "2x4:RS0R", "2x4:S0RR"),
    _paper_case(4, "2x4:RS01R", "2x4:S01RR"),
    _paper_case(5, "2x4:S1RR", "2x4:S0RR"),
    _paper_case(6, "2x4:S0RR", "3x4:S0RR", _THIRDS),
    _paper_case(7, "1x4:S1RR", "2x4:RRR"),
    _paper_case(9, "2x4:RS0R", "2x4:RRS0"),
)
REPLICATE = tuple(
    ReshardCase(f"1 device to {h}x{d}", _SHAPE, (1, 1), "RRR", (h, d), "RRR")
    for h, d in ((1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (3, 2), (4, 2), (4, 4))
)
CASES = PAPER + REPLICATE
QUICK_CASES = (PAPER[2], PAPER[3], REPLICATE[-1])


def llama_state(*, scale: int) -> list[TensorSpec]:
    """A small Llama from a (2, 2) FSDP mesh to a (1, 2) tensor-parallel mesh on another host; bfloat16.

    16 layers of 9 tensors, 6 more around them: 150 tensors, 400 MB at `scale` 1. Fused (qkv, gate and up) and
    unfused projections; dims that 4 ranks do not divide.
    """
    width, hidden, vocabulary = 1150 // scale, 2010 // scale, 16000 // scale
    fsdp = lab_mesh((2, 2), devices=2, first_host=0)
    tensor_parallel = lab_mesh((1, 2), devices=2, first_host=2)
    rows, columns = Shard(0), Shard(1)
    shapes: list[tuple[str, tuple[int, ...], Placement]] = []
    for layer in range(16):
        block = [
            ("attention.qkv", (3 * width // 2, width), rows),
            ("attention.qkv_bias", (3 * width // 2,), rows),
            ("attention.out", (width, width), columns),
            ("mlp.gate_up", (2 * hidden, width), rows),
            ("mlp.down", (width, hidden), columns),
            ("mlp.down_bias", (width,), Replicate()),
            ("norm_1", (width,), Replicate()),
            ("norm_2", (width,), Replicate()),
            ("rotary", (64,), Replicate()),
        ]
        shapes += [(f"layers.{layer}.{name}", shape, placement) for name, shape, placement in block]
    shapes += [
        ("embed", (vocabulary, width), rows),
        ("head.weight", (vocabulary, width), rows),
        ("head.bias", (vocabulary,), rows),
        ("norm", (width,), Replicate()),
        ("adapter.q", (width, width), rows),
        ("adapter.v", (width, width), columns),
    ]
    source = Layout(fsdp, (Shard(0), Shard(0)))
    return [
        TensorSpec(
            name, shape, torch.bfloat16, source, Layout(tensor_parallel, (Replicate(), placement)), torch.bfloat16
        )
        for name, shape, placement in shapes
    ]

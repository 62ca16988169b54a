"""`weft serve` against the servers that people use, under load, and against itself without HTTP.

Servers are processes with as many threads each; the client runs beside them on the same machine. Some loads
have so many requests at a time; others find the most requests a second, at random times, of which 99 in 100 are
answered within one limit. The limit is the p99 that sentence-transformers has at half of what it can do, and a tenth.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from weft.bench.harness import BenchOptions, column
from weft.bench.systems.servers import workload
from weft.bench.systems.servers.alone import offline_row, overhead_row, overload_row, soak_row
from weft.bench.systems.servers.client import LoadResult
from weft.bench.systems.servers.commands import command_row, data_path_row, start_row
from weft.bench.systems.servers.lineup import SearchEffort, ServerLineup, Sustained
from weft.bench.systems.servers.processes import INFINITY_EMB, SENTENCE_TRANSFORMERS, VLLM, WEFT, setups
from weft.bench.systems.servers.workload import SizedText, mixed_texts
from weft.kernels.cpu import thread_count
from weft.report import Column, Report, Row

NAME = "serve"
HELP = "embeddings over HTTP against sentence-transformers behind FastAPI, vLLM's pooling runner and infinity"

SATURATING = 32  # requests at a time that show what a server can do
TEXTS = 600
SHORT = 16  # tokens of a request alone
COLUMNS = [
    Column("case", "case"),
    Column("system", "system"),
    Column("requests_s", "req/s", form=".1f"),
    Column("tokens_s", "tokens/s", form=".0f"),
    Column("p50_ms", "p50 ms", form=".0f"),
    Column("p99_ms", "p99 ms", form=".0f"),
    Column("vs_weft", "weft / it", form=".2f", bar=True),
    Column("client_cores", "client cores", form=".2f"),
    Column("note", "note"),
]


@dataclass(frozen=True)
class ServePlan:
    """How much is measured of one model: loads of so many requests at a time, and the search of the sustained rate.

    choose_with:  texts with which sentence-transformers' best size of batches is found
    peers:        who is measured beside weft
    """

    model: str
    make: Callable[[Path], Path]
    concurrencies: Sequence[int]
    requests: int
    effort: SearchEffort
    choose_with: int
    peers: Sequence[str] = (SENTENCE_TRANSFORMERS, VLLM, INFINITY_EMB)


@dataclass(frozen=True)
class AloneAmounts:
    """How much is measured of weft alone."""

    rounds: int
    offline_texts: int
    overload_seconds: float
    soak_requests: int
    soak_longest: int  # tokens
    command_texts: int
    command_rounds: int
    path_texts: int
    path_rounds: int


QUICK = ServePlan(
    "MiniLM-L6",
    workload.minilm,
    (SATURATING,),
    48,
    SearchEffort(80, 4.0, steps=3, rounds=1, retries=1),
    16,
    peers=(SENTENCE_TRANSFORMERS, VLLM),
)
FULL = (
    ServePlan(
        "MiniLM-L6", workload.minilm, (1, 8, SATURATING), 128, SearchEffort(100, 10.0, steps=4, rounds=2, retries=4), 32
    ),
    ServePlan(
        "BERT-base",
        workload.bert_base,
        (1, SATURATING),
        64,
        SearchEffort(40, 20.0, steps=4, rounds=1, retries=2),
        8,
        peers=(SENTENCE_TRANSFORMERS, VLLM),
    ),
)
QUICK_AMOUNTS = AloneAmounts(3, 64, 4.0, 1200, 32, 200, 1, 900, 3)
FULL_AMOUNTS = AloneAmounts(7, 300, 8.0, 10_000, 64, 3000, 2, 20_000, 10)


def run(options: BenchOptions) -> Report:
    """The rows of the claim; the quick form has one model and few requests."""
    plans, amounts = ((QUICK,), QUICK_AMOUNTS) if options.quick else (FULL, FULL_AMOUNTS)
    threads, rows = thread_count(0), list[Row]()
    import_module("transformers.utils.logging").disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as name:
        home = Path(name)
        for plan in plans:
            folder = plan.make(home / plan.model)
            texts = mixed_texts(folder, TEXTS)
            chosen = [setup for setup in setups(threads) if setup.name in (WEFT, *plan.peers)]
            with ServerLineup(chosen, folder, texts, choose_with=plan.choose_with) as lineup:
                rows += load_rows(lineup, plan)
                if plan is plans[0]:
                    rows += alone_rows(lineup, folder, texts, home, amounts)
        folder = home / plans[0].model
        rows += [
            command_row(folder, home, texts=amounts.command_texts, rounds=amounts.command_rounds),
            start_row(folder, home, rounds=amounts.command_rounds),
        ]
    return Report(
        NAME,
        rows=rows,
        summary=summary(rows),
        columns=COLUMNS,
        title=f"serve: {threads} threads a server, float32, texts of {workload.SHORTEST} to {workload.LONGEST} tokens",
        notes=["p99 etc. count from when a request was due", "client cores: CPU of the client, on the same machine"],
    )


def load_rows(lineup: ServerLineup, plan: ServePlan) -> list[Row]:
    """All servers: so many requests at a time, then what each sustains."""
    rows, capacities = list[Row](), dict[str, float]()
    lineup.closed(SATURATING, SATURATING)  # the first requests make buffers, and compile
    for concurrency in plan.concurrencies:
        count = min(plan.requests, 32 * concurrency)
        loads = lineup.closed(concurrency, count)
        rows += closed_rows(plan.model, concurrency, loads)
        if concurrency == SATURATING:
            capacities = {name: len(load.latencies) / load.seconds for name, load in loads.items()}
    limit = lineup.p99_at_half(SENTENCE_TRANSFORMERS, capacities[SENTENCE_TRANSFORMERS], plan.effort)
    found = lineup.sustained(limit, capacities, plan.effort)
    return rows + sustained_rows(plan.model, limit, found, lineup.absent)


def closed_rows(model: str, concurrency: int, loads: Mapping[str, LoadResult]) -> list[Row]:
    """A row a server."""
    rates = {name: len(load.latencies) / load.seconds for name, load in loads.items()}
    return [
        {
            "case": f"{model}, {concurrency} at a time", "figure": "closed", "model": model,
            "concurrency": concurrency, "system": name, **load.row(), "vs_weft": _over(rates[WEFT], rates[name]),
        }
        for name, load in loads.items()
    ]  # fmt: skip


def sustained_rows(
    model: str, limit: float, found: Mapping[str, Sustained], absent: Mapping[str, str]
) -> list[Row]:  # fmt: skip
    """A row a server, and one for each that could not run."""
    common = {"case": f"{model}, p99 in {limit * 1e3:.0f} ms", "figure": "sustained", "model": model}
    rows: list[Row] = []
    for name, one in found.items():
        load = {} if one.load is None else one.load.row()
        rates = {"requests_s": one.rate, "rates": list(one.rates), "spread": one.spread}
        note = None if one.rates else "never within the limit"
        rows.append(
            {**common, "limit_ms": limit * 1e3, "system": name, **load, **rates, "disturbed": one.disturbed,
             "vs_weft": None if name == WEFT else _over(found[WEFT].rate, one.rate), "note": note}
        )  # fmt: skip
    missing = [{"system": name, "absent": why, "note": f"could not run: {why}"} for name, why in absent.items()]
    return rows + [{**common, **one} for one in missing]


def _over(ours: float, theirs: float) -> float | None:
    return ours / theirs if theirs else None


def alone_rows(
    lineup: ServerLineup, folder: Path, texts: Sequence[SizedText], home: Path, amounts: AloneAmounts
) -> list[Row]:
    """weft's server by itself."""
    server, encoder = lineup.servers[WEFT], lineup.encoder
    short = min(texts, key=lambda text: abs(text.tokens - SHORT))
    few = mixed_texts(folder, 300, longest=amounts.soak_longest)
    return [
        overhead_row(server, encoder, short, rounds=amounts.rounds),
        offline_row(server, encoder, texts[: amounts.offline_texts], home, rounds=max(2, amounts.rounds // 2)),
        overload_row(server, texts, seconds=amounts.overload_seconds),
        soak_row(server, encoder, few, count=amounts.soak_requests),
        data_path_row(encoder, home, texts=amounts.path_texts, rounds=amounts.path_rounds),
    ]


def summary(rows: Sequence[Row]) -> dict[str, object]:
    """The figures that the README quotes; where several models were measured, the smallest ratio. Of a peer that could
    not run, the reason."""
    return {
        "vs_sentence_transformers": _against(rows, SENTENCE_TRANSFORMERS),
        "vs_vllm_pooling": _against(rows, VLLM),
        **{key: _only(rows, key) for key in ("of_offline", "overhead_ms", "rejected_ms")},
        "errors": sum(column(rows, "errors")),
        "rss_slope": _only(rows, "rss_slope"),
        "embed_command_vs_st": _only(rows, "embed_command_vs_st"),
        "embed_command_vs_st_default": _only(rows, "embed_command_vs_st_default"),
        "embed_start_s": _only(rows, "embed_start_s"),
        "embed_path_share": _only(rows, "embed_path_share"),
    }


def _against(rows: Sequence[Row], system: str) -> object:
    its = [row for row in rows if row.get("figure") == "sustained" and row.get("system") == system]
    absent = [row["absent"] for row in its if row.get("absent")]
    return min(column(its, "vs_weft"), default=absent[0] if absent else "never within the limit")


def _only(rows: Sequence[Row], key: str) -> object:
    """The value of the one row that has the key."""
    found = [row[key] for row in rows if key in row]
    return found[0] if found and found[0] is not None else "not measured"

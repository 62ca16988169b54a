"""`weft serve` by itself: beside the bare call, beside `weft embed`, with too much to do, and for a long time."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.bench.harness import Case, Measurement, Round, System, measure, take_rounds
from weft.bench.machine import NoiseMeter, foreign_cores
from weft.bench.systems.servers.client import BlockingClient, HttpAnswer, closed_loop, overload, run_client
from weft.bench.systems.servers.processes import ServerProcess
from weft.bench.systems.servers.rates import Slope, percentile
from weft.bench.systems.servers.workload import SizedText, mixed_requests, vectors
from weft.jobs.embed import EmbedOptions, Encoder
from weft.jobs.embed import run as run_embed
from weft.report import Row

CONCURRENT = 512  # requests that the server takes at once, which is its default
_EXTRA = 32  # clients that find it full
_PAUSE = 0.25  # seconds until a client that was sent away comes back
_SATURATING = 64  # requests at a time
_SOAKING = 16
_SILENCE = 0.02  # seconds until threads of the turn before have gone to sleep
_CALLS = 20  # of each in a round
_SAMPLED = 25  # requests from one look at the memory to the next


def overhead_row(server: ServerProcess, encoder: Encoder, text: SizedText, *, rounds: int) -> Row:
    """A request alone, against the same call in this process, each call out of silence. In a round all calls of one
    come before those of the other: OpenMP's threads wake up slowly on a core that another process has just left."""
    meter, request = NoiseMeter(), text.request()
    with server.turn(), BlockingClient(server.port) as client:
        systems: dict[str, System] = {
            "bare": lambda: encoder.embed(encoder.tokenize([text.text])),
            "served": lambda: client.ask(request),
        }

        def take() -> Round:
            before = meter.sample()
            medians = {name: statistics.median(_alone(call) for _ in range(_CALLS)) for name, call in systems.items()}
            return Round(medians, foreign_cores(before, meter.sample()))

        take()  # warms up
        kept, disturbed = take_rounds(take, rounds=rounds, max_retries=rounds)
    measured = Measurement(Case(f"a text of {text.tokens} tokens alone", systems), tuple(kept), disturbed)
    served, bare = (measured.median(name) * 1e3 for name in ("served", "bare"))
    return {
        **measured.row(), "figure": "overhead", "system": server.name, "p50_ms": served, "overhead_ms": served - bare,
        "note": f"{served:.2f} ms, bare call {bare:.2f} ms",
    }  # fmt: skip


def _alone(system: System) -> float:
    """Seconds of a call, after a pause in which threads go to sleep."""
    time.sleep(_SILENCE)
    start = time.perf_counter()
    system()
    return time.perf_counter() - start


def offline_row(server: ServerProcess, encoder: Encoder, texts: Sequence[SizedText], home: Path, *, rounds: int) -> Row:
    """Tokens a second of a server that always has enough to do, against the job of `weft embed` from file to file."""
    requests, tokens = [text.request() for text in texts], sum(text.tokens for text in texts)
    source, out = home / "offline.txt", home / "offline.npy"
    source.write_text("\n".join(text.text for text in texts), encoding="utf-8")
    cores = 0.0

    def served() -> None:
        nonlocal cores
        with server.turn():
            load = run_client(closed_loop(server.port, requests, concurrency=_SATURATING))
        assert len(load.latencies) == len(requests), f"{load.errors[:1]}, {len(load.rejections)} rejected"
        cores = load.client_cpu / load.seconds

    def offline() -> None:
        run_embed(EmbedOptions(source, out, resume=False), encoder)

    case = Case(f"{len(texts)} texts, {_SATURATING} at a time", {"served": served, "offline": offline})
    measured = measure(case, rounds=rounds, warmup=0, max_retries=rounds // 2, start=lambda: time.sleep(_SILENCE))
    return {
        **measured.row(), "figure": "offline", "system": server.name, "of_offline": measured.ratio("offline", "served"),
        "tokens_s": tokens / measured.median("served"), "requests_s": len(texts) / measured.median("served"),
        "client_cores": cores, "note": f"weft embed: {tokens / measured.median('offline'):.0f} tokens/s",
    }  # fmt: skip


def overload_row(server: ServerProcess, texts: Sequence[SizedText], *, seconds: float) -> Row:
    """More clients than it takes at once: how fast those that are sent away know."""
    clients = CONCURRENT + _EXTRA
    requests = [texts[n % len(texts)].request() for n in range(4 * clients)]
    with server.turn():
        load = run_client(overload(server.port, requests, clients=clients, pause=_PAUSE, seconds=seconds))
        _wait_until_idle(server, texts[0])
    found = [percentile(load.rejections, share) * 1e3 for share in (0.5, 0.99)] if load.rejections else [None, None]
    return {
        "case": f"{clients} clients for {seconds:g} s", "figure": "overload", "system": server.name, **load.row(),
        "rejected_p50_ms": found[0], "rejected_ms": found[1], "rejections": len(load.rejections),
        "note": "no answer was 429" if found[1] is None else f"429 in {found[1]:.1f} ms, half in {found[0]:.1f}",
    }  # fmt: skip


def _wait_until_idle(server: ServerProcess, text: SizedText) -> None:
    """Returns when a request is taken and answered."""
    with BlockingClient(server.port, timeout=120.0) as caller:
        while caller.ask(text.request()).status == 429:
            time.sleep(0.05)


def soak_row(server: ServerProcess, encoder: Encoder, texts: Sequence[SizedText], *, count: int) -> Row:
    """Many mixed requests: every vector must have the bits that the encoder gives in this process, and the memory of
    the server must not grow with them."""
    mixed = mixed_requests(texts, count)
    want = encoder.embed(encoder.tokenize([text.text for text in texts])).numpy()
    memory: list[tuple[int, float]] = []
    done = 0

    def check(number: int, answer: HttpAnswer) -> str | None:
        nonlocal done
        done += 1
        if done % _SAMPLED == 0:
            memory.append((done, server.resident_mib()))
        return what_differs(answer.body, [want[n] for n in mixed[number].texts])

    with server.turn():
        requests = [one.request for one in mixed]
        load = run_client(closed_loop(server.port, requests, concurrency=_SOAKING, check=check))
    half = [(at / 1000, mib) for at, mib in memory if at > count / 2]
    slope = Slope.of([at for at, _ in half], [mib for _, mib in half])
    note = f"{memory[-1][1]:.0f} MiB, {slope.gain:+.2f} a 1,000 requests, noise {slope.noise:.2f}"
    return {
        "case": f"{count:,} mixed requests", "figure": "soak", "system": server.name, **load.row(),
        "rss_mib": memory[-1][1], "rss_slope": slope.gain, "rss_noise": slope.noise, "rss_flat": slope.is_flat,
        "note": note if slope.is_flat else f"{note}: it grows" if slope.gain > 0 else note,
    }  # fmt: skip


def what_differs(body: bytes, want: Sequence[Any]) -> str | None:
    """What is wrong with an answer; None if it has these vectors, bit by bit.

    >>> import numpy as np
    >>> what_differs(b"[[0.5]]", [np.float32([0.5])]), what_differs(b"[[0.5]]", [np.float32([0.25])])
    (None, 'vector 0 has other bits than the encoder gives')
    """
    try:
        found = vectors(json.loads(body))
    except (ValueError, KeyError, TypeError) as error:
        return f"an answer that cannot be read: {type(error).__name__}: {error}"
    if len(found) != len(want):
        return f"{len(found)} vectors for {len(want)} texts"
    wrong = [n for n, (got, row) in enumerate(zip(found, want, strict=True)) if got.tobytes() != row.tobytes()]
    return f"vector {wrong[0]} has other bits than the encoder gives" if wrong else None

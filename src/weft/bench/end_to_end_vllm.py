"""vLLM's CPU backend with and without weft's plugin, in turns: prefill of mixed prompts, and decoding.

    python -m weft.bench.end_to_end_vllm MODEL_DIR [ROUNDS [compiled]]        prints JSON

Each engine is a process in the environment that has vLLM (`make test-vllm` makes it), loaded once, and stopped while
another has its turn. Rates are tokens/s of medians over rounds; a row whose tokens differ from those of the first
engine says so.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.bench.end_to_end_inputs import spread_lengths, token_lists
from weft.bench.end_to_end_vllm_engine import PYTHON, Engine, Setup
from weft.bench.harness import FOREIGN_LIMIT, Round, relative_spread, select_rounds
from weft.bench.noise import Meter, foreign_cores

__all__ = ["PYTHON", "SETUPS", "Engine", "Setup", "Work", "compare", "summary"]

SETUPS = (
    Setup("vllm_1", ranks=1, threads=2),
    Setup("vllm_2", ranks=2),
    Setup("vllm_2_plugin", ranks=2, plugin=True),
)


@dataclass(frozen=True)
class Work:
    """What every engine is given: prompts to read, and prompts to go on from, `new_tokens` each."""

    prefill: Sequence[Sequence[int]]
    decode: Sequence[Sequence[int]]
    new_tokens: int

    @classmethod
    def usual(cls, vocabulary: int = 32_000) -> Work:
        """16 prompts of 32 to 512 tokens; 16 of 16 tokens, with 64 to come."""
        lengths = spread_lengths(16, shortest=32, longest=512)
        return cls(token_lists(lengths, vocabulary), token_lists([16] * 16, vocabulary, seed=1), 64)

    @property
    def prefill_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prefill)

    @property
    def decode_tokens(self) -> int:
        return len(self.decode) * self.new_tokens


def compare(
    model: Path, work: Work, *, setups: Sequence[Setup] = SETUPS, python: Path = PYTHON, rounds: int = 7
) -> dict[str, Any]:
    """Rows for each engine and the ratios between them: {"rows": [...], "summary": {...}}.

    A round that others disturbed is repeated, up to `rounds` times in all.
    """
    with ExitStack() as stack:
        engines = [stack.enter_context(Engine(setup, model, python=python)) for setup in setups]
        for engine in engines:
            engine.wait_until_ready()
        answers = {engine.setup.name: _turn(engine, work)[1] for engine in engines}  # also warms up
        meter, shuffle, taken = Meter(), random.Random(0).sample, list[Round]()
        while sum(r.foreign <= FOREIGN_LIMIT for r in taken) < rounds and len(taken) < 2 * rounds:
            before, seconds = meter.sample(), dict[str, float]()
            for engine in shuffle(engines, len(engines)):
                seconds |= _turn(engine, work)[0]
            taken.append(Round(seconds, foreign_cores(before, meter.sample())))
    kept, disturbed = select_rounds(taken, wanted=rounds)
    return _report(setups, work, kept, disturbed, answers)


def _turn(engine: Engine, work: Work) -> tuple[dict[str, float], list[list[int]]]:
    name = engine.setup.name
    prefill, decode = engine.generate(work.prefill, 1), engine.generate(work.decode, work.new_tokens + 1)
    return {f"{name} prefill": prefill.first_seconds, f"{name} decode": decode.rest_seconds}, [
        *prefill.tokens,
        *decode.tokens,
    ]


def _report(
    setups: Sequence[Setup], work: Work, rounds: Sequence[Round], disturbed: int, answers: Mapping[str, Any]
) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for setup in setups:
        row: dict[str, Any] = {"engine": setup.name, "ranks": setup.ranks, "plugin": setup.plugin}
        for phase, tokens in (("prefill", work.prefill_tokens), ("decode", work.decode_tokens)):
            seconds = [r.seconds[f"{setup.name} {phase}"] for r in rounds]
            row[f"{phase}_tokens_per_s"] = tokens / statistics.median(seconds)
            row[f"{phase}_spread"] = relative_spread(seconds)
        row["tokens_equal"] = answers[setup.name] == answers[setups[0].name]
        rows.append({**row, "rounds": len(rounds), "disturbed": disturbed})
    return {"rows": rows, "summary": summary(rows)}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The plugin against vLLM without it: two ranks each, and two ranks against the best that there is without it.

    >>> row = {"plugin": False, "ranks": 2, "prefill_tokens_per_s": 100.0, "decode_tokens_per_s": 10.0}
    >>> summary([row, {**row, "plugin": True, "decode_tokens_per_s": 15.0}])["vllm_plugin_decode"]
    1.5
    """
    figures: dict[str, float] = {}
    for phase in ("prefill", "decode"):
        rates = {(row["ranks"], row["plugin"]): row[f"{phase}_tokens_per_s"] for row in rows}
        plain = {key: rate for key, rate in rates.items() if not key[1]}
        if plain:
            figures[f"vllm_{phase}_tokens_per_s"] = max(plain.values())
        for (ranks, plugin), rate in rates.items():
            if plugin and (ranks, False) in plain:
                figures[f"vllm_plugin_{phase}"] = rate / plain[ranks, False]
                figures[f"vllm_plugin_{phase}_vs_best"] = rate / max(plain.values())
    return figures


if __name__ == "__main__":
    eager = "compiled" not in sys.argv[3:]
    chosen = [replace(setup, eager=eager) for setup in SETUPS]
    report = compare(Path(sys.argv[1]), Work.usual(), setups=chosen, rounds=int(sys.argv[2]) if sys.argv[2:] else 7)
    print(json.dumps(report, indent=2))

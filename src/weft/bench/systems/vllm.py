"""vLLM's engines as processes of their own: started, asked for tokens, stopped while others have their turn, ended.

`vllm_child` is the program of such a process, in the environment that has vLLM, which need not be this one
(`make test-vllm` makes it). As a program this module compares vLLM with and without weft's plugin, in turns: prefill of
mixed prompts, and decoding.

    python -m weft.bench.systems.vllm MODEL_DIR [ROUNDS [compiled]]        prints JSON

Rates are tokens/s of medians over rounds; a row whose tokens differ from those of the first engine says so.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from weft.bench.harness import Case, Measurement, Round, take_rounds
from weft.bench.machine import NoiseMeter, foreign_cores
from weft.bench.systems.end_to_end import spread_lengths, token_lists
from weft.errors import WeftError

PYTHON = Path(".venv-vllm/bin/python")
_START_SECONDS, _ANSWER_SECONDS = 600.0, 600.0
_ALLOCATORS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/lib/aarch64-linux-gnu")


@dataclass(frozen=True)
class EngineSetup:
    """How an engine is started: `threads` cores for each of `ranks`."""

    name: str
    ranks: int
    plugin: bool = False
    eager: bool = True
    threads: int = 1

    def environment(self, python: Path) -> dict[str, str]:
        """What vLLM's documentation asks to be set: its allocator and OpenMP loaded first, ranks bound to cores."""
        folder = python.absolute().parent.parent / "lib"
        preload = [folder / "libiomp5.so", *(Path(p) / "libtcmalloc_minimal.so.4" for p in _ALLOCATORS)]
        cores = [range(r * self.threads, (r + 1) * self.threads) for r in range(self.ranks)]
        wanted = {
            "LD_PRELOAD": ":".join(str(path) for path in preload if path.exists()),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(f"{c[0]}-{c[-1]}" for c in cores),
            "WEFT_VLLM": str(int(self.plugin)),
        }
        if self.ranks == 1:  # one process less, which is vLLM at its best with one rank
            wanted |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(self.threads)}
        return wanted


SETUPS = (
    EngineSetup("vllm_1", ranks=1, threads=2),
    EngineSetup("vllm_2", ranks=2),
    EngineSetup("vllm_2_plugin", ranks=2, plugin=True),
)


class VllmEngine:
    """A running engine. Leaving the `with` block ends its processes; `log` is what it wrote.

    Between two calls its processes are stopped: they would look for work in a loop for seconds, on the cores of whoever
    has the next turn.
    """

    def __init__(
        self,
        setup: EngineSetup,
        model: Path,
        *,
        python: Path = PYTHON,
        max_length: int = 2048,
        max_tokens: int = 8192,
    ) -> None:
        self.setup = setup
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close()
        answers, replies = os.pipe()
        with os.fdopen(replies, "w") as end:
            command = [str(python.absolute()), "-m", "weft.bench.systems.vllm_child", str(end.fileno())]
            # env(1) adds variables to those that are inherited.
            variables = [f"{name}={value}" for name, value in setup.environment(python).items()]
            self._process = subprocess.Popen(
                ["env", *variables, *command],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=[end.fileno()],
                start_new_session=True,  # its processes are a group of their own, which close() ends
                cwd=tempfile.gettempdir(),
            )
        self._answers: IO[str] = os.fdopen(answers)
        wanted = {"model": str(model.absolute()), "ranks": setup.ranks, "eager": setup.eager}
        self._say({**wanted, "max_length": max_length, "max_tokens": max_tokens})

    def wait_until_ready(self) -> VllmEngine:
        """Returns when the model is loaded. Engines that are started together load at the same time."""
        self._hear(_START_SECONDS)
        self._signal(signal.SIGSTOP)
        return self

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> EngineAnswer:
        """Greedy tokens of each prompt, all prompts at once."""
        self._signal(signal.SIGCONT)
        self._say({"prompts": [list(p) for p in prompts], "new_tokens": new_tokens})
        answer = EngineAnswer(**self._hear(_ANSWER_SECONDS))
        self._signal(signal.SIGSTOP)
        return answer

    @property
    def log(self) -> str:
        """All that the engine's processes wrote so far."""
        self._log.flush()
        self._log.seek(0)
        return self._log.read()

    def _say(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("ended") from None

    def _hear(self, seconds: float) -> dict[str, Any]:
        ready, _, _ = select.select([self._answers], [], [], seconds)
        line = self._answers.readline() if ready else None
        if not line:
            raise self._failed("ended" if line == "" else f"did not answer within {seconds:g} s")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self, how: str) -> WeftError:
        return WeftError(f"the engine {self.setup.name} {how}; the end of its log:\n{self.log[-4000:]}")

    def close(self) -> None:
        """Ends the engine and all its processes."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired, BrokenPipeError):
            self._process.stdin.close()
            self._process.wait(20.0)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._answers.close()
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        """To all processes of the engine."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class EngineAnswer:
    """What an engine made of prompts: seconds to the first token of all, seconds from there on, and the tokens."""

    first_seconds: float
    rest_seconds: float
    tokens: list[list[int]]


@dataclass(frozen=True)
class VllmWork:
    """What every engine is given: prompts to read, and prompts to go on from, `new_tokens` each."""

    prefill: Sequence[Sequence[int]]
    decode: Sequence[Sequence[int]]
    new_tokens: int

    @classmethod
    def usual(cls, vocabulary: int = 32_000) -> VllmWork:
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
    model: Path, work: VllmWork, *, setups: Sequence[EngineSetup] = SETUPS, python: Path = PYTHON, rounds: int = 7
) -> dict[str, Any]:
    """Rows for each engine and the ratios between them: {"rows": [...], "summary": {...}}.

    A round that others disturbed is repeated, up to `rounds` times in all.
    """
    with ExitStack() as stack:
        engines = [stack.enter_context(VllmEngine(setup, model, python=python)) for setup in setups]
        for engine in engines:
            engine.wait_until_ready()
        answers = {engine.setup.name: _turn(engine, work)[1] for engine in engines}  # also warms up
        meter, shuffle = NoiseMeter(), random.Random(0).sample

        def take() -> Round:
            before, seconds = meter.sample(), dict[str, float]()
            for engine in shuffle(engines, len(engines)):
                seconds |= _turn(engine, work)[0]
            return Round(seconds, foreign_cores(before, meter.sample()))

        kept, disturbed = take_rounds(take, rounds=rounds, max_retries=rounds)
    return _report(setups, work, Measurement(Case("vllm", {}), tuple(kept), disturbed), answers)


def _turn(engine: VllmEngine, work: VllmWork) -> tuple[dict[str, float], list[list[int]]]:
    name = engine.setup.name
    prefill, decode = engine.generate(work.prefill, 1), engine.generate(work.decode, work.new_tokens + 1)
    return {f"{name} prefill": prefill.first_seconds, f"{name} decode": decode.rest_seconds}, [
        *prefill.tokens,
        *decode.tokens,
    ]


def _report(
    setups: Sequence[EngineSetup], work: VllmWork, measured: Measurement, answers: Mapping[str, Any]
) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for setup in setups:
        row: dict[str, Any] = {"engine": setup.name, "ranks": setup.ranks, "plugin": setup.plugin}
        for phase, tokens in (("prefill", work.prefill_tokens), ("decode", work.decode_tokens)):
            row[f"{phase}_tokens_per_s"] = tokens / measured.median(f"{setup.name} {phase}")
            row[f"{phase}_spread"] = measured.spread(f"{setup.name} {phase}")
        row["tokens_equal"] = answers[setup.name] == answers[setups[0].name]
        rows.append({**row, "rounds": len(measured.rounds), "disturbed": measured.disturbed})
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
    report = compare(Path(sys.argv[1]), VllmWork.usual(), setups=chosen, rounds=int(sys.argv[2]) if sys.argv[2:] else 7)
    print(json.dumps(report, indent=2))

"""A vLLM engine in a process of its own, for benchmarks and tests: started, asked for tokens, ended.

The process runs `end_to_end_vllm_child` in the environment that has vLLM, which need not be this one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from weft.errors import WeftError

PYTHON = Path(".venv-vllm/bin/python")
_START_SECONDS, _ANSWER_SECONDS = 600.0, 600.0
_ALLOCATORS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/lib/aarch64-linux-gnu")


@dataclass(frozen=True)
class Setup:
    """How an engine is started: `threads` cores for each of `ranks`."""

    name: str
    ranks: int
    plugin: bool = False
    eager: bool = True
    threads: int = 1

    def environment(self, python: Path) -> dict[str, str]:
        """What vLLM's documentation asks for: its allocator and OpenMP loaded first, ranks bound to cores."""
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
        return {**os.environ, **wanted}


@dataclass(frozen=True)
class Answer:
    """What an engine made of prompts: seconds to the first token of all, seconds from there on, and the tokens."""

    first_seconds: float
    rest_seconds: float
    tokens: list[list[int]]


class Engine:
    """A running engine. Leaving the `with` block ends its processes; `log` is what it wrote.

    Between two calls its processes are stopped: they would look for work in a loop for seconds, on the cores of whoever
    has the next turn.
    """

    def __init__(
        self,
        setup: Setup,
        model: Path,
        *,
        python: Path = PYTHON,
        max_length: int = 2048,
        max_tokens: int = 8192,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.setup = setup
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close()
        answers, replies = os.pipe()
        with os.fdopen(replies, "w") as end:
            self._process = subprocess.Popen(
                [python.absolute(), "-m", "weft.bench.end_to_end_vllm_child", str(end.fileno())],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=[end.fileno()],
                start_new_session=True,  # its processes are a group of their own, which close() ends
                env={**setup.environment(python), **(environment or {})},
                cwd=tempfile.gettempdir(),
            )
        self._answers: IO[str] = os.fdopen(answers)
        wanted = {"model": str(model.absolute()), "ranks": setup.ranks, "eager": setup.eager}
        self._say({**wanted, "max_length": max_length, "max_tokens": max_tokens})

    def wait_until_ready(self) -> Engine:
        """Returns when the model is loaded. Engines that are started together load at the same time."""
        self._hear(_START_SECONDS)
        self._signal(signal.SIGSTOP)
        return self

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Answer:
        """Greedy tokens of each prompt, all prompts at once."""
        self._signal(signal.SIGCONT)
        self._say({"prompts": [list(p) for p in prompts], "new_tokens": new_tokens})
        answer = Answer(**self._hear(_ANSWER_SECONDS))
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

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

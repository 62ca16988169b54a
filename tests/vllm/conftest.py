"""Processes with vLLM that the tests ask: started two at a time, each once, if a test of this run needs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commands import Serve, measure
from outcome import Outcome

HERE = Path(__file__).parent
_SECONDS = 900.0  # an engine imports and loads for a quarter of a minute on a machine at rest


@dataclass(frozen=True)
class Run:
    """A program of `child`, with or without the plugin; `windows` as on a CPU where vLLM has nothing better."""

    program: str
    plugin: bool = True
    windows: bool = False

    def __call__(self, folders: Path, answer: Path) -> Outcome:
        done = subprocess.run(
            [sys.executable, HERE / "child.py", self.program, folders, answer],
            env={**os.environ, **self._environment()},
            cwd=answer.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:]
        return Outcome(json.loads(answer.read_text()), done.stdout)

    def _environment(self) -> dict[str, str]:
        wanted = {
            "WEFT_VLLM": str(int(self.plugin)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process less
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # so that functions may be sent to the ranks
            "VLLM_CPU_OMP_THREADS_BIND": "0|1" if self.program.startswith("two_ranks") else "0-1",
        }
        if self.windows:
            wanted["PYTHONPATH"] = str(HERE / "spy")
        return wanted


RUNS = {
    "stock": Run("one_rank", plugin=False),
    "plugin": Run("one_rank"),
    "windows": Run("two_ranks", windows=True),
    "windows_compiled": Run("two_ranks_compiled", windows=True),
    "windows_kinds": Run("two_ranks_kinds", windows=True),
    "server": Serve(0),
    "server_stock": Serve(0, plugin=False),
    "server_two_ranks": Serve(1),
    "benchmark": measure,
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from folders import make_all

    return make_all(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def running(
    request: pytest.FixtureRequest, folders: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Outcome]]]:
    needed = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    results = tmp_path_factory.mktemp("answers")
    pool = ThreadPoolExecutor(2)
    yield {name: pool.submit(run, folders, results / f"{name}.json") for name, run in RUNS.items() if name in needed}
    pool.shutdown(cancel_futures=True)


def _outcome_of(name: str) -> Any:
    @pytest.fixture(scope="session", name=name)
    def outcome(running: dict[str, Future[Outcome]]) -> Outcome:
        return running[name].result()

    return outcome


stock, plugin = _outcome_of("stock"), _outcome_of("plugin")
windows, windows_compiled, windows_kinds = map(_outcome_of, ("windows", "windows_compiled", "windows_kinds"))
server, server_stock, server_two_ranks = map(_outcome_of, ("server", "server_stock", "server_two_ranks"))
benchmark = _outcome_of("benchmark")

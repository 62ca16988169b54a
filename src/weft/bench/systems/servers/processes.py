"""Servers as processes of their own, each with the same number of threads, and stopped while others have their turn.

weft                   `weft serve`, in this environment
sentence-transformers  `sentence_transformers_app`, in this environment
vllm                   vLLM's pooling runner, in the environment that `make setup-vllm` makes
infinity               infinity-emb, in the environment that `make setup-infinity` makes
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from weft.bench.systems.servers.client import HOST, BlockingClient, HttpRequest
from weft.bench.systems.servers.workload import MODEL
from weft.bench.systems.vllm import PYTHON, EngineSetup
from weft.errors import WeftError

INFINITY = Path(".venv-infinity/bin/infinity_emb")
WEFT, SENTENCE_TRANSFORMERS, VLLM, INFINITY_EMB = "weft", "sentence-transformers", "vllm", "infinity"
_APP = Path(__file__).with_name("sentence_transformers_app.py")  # not imported: it needs nothing of weft
_START_SECONDS = 300.0
_END_SECONDS = 20.0
_OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}  # a folder is all they need


@dataclass(frozen=True)
class ServerSetup:
    """How a server is started: words of `command` may say {model}, {port} and {texts}, a file with texts like
    those to come.

    `needs` is the program without which it cannot run, and `remedy` what brings that.
    """

    name: str
    command: str
    variables: Mapping[str, str] = field(default_factory=dict)
    needs: Path | None = None
    remedy: str = ""

    @property
    def absent(self) -> str | None:
        """Why it cannot run here; None if it can."""
        if self.needs is None or self.needs.exists():
            return None
        return f"no {self.needs}; {self.remedy}"


def setups(threads: int) -> list[ServerSetup]:
    """weft first, then all peers."""
    own = {"OMP_NUM_THREADS": str(threads), **_OFFLINE}
    bound = EngineSetup("serve", ranks=1, threads=threads).environment(PYTHON)
    vllm = {name: value for name, value in bound.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    common = f"--host {HOST} --port {{port}} --served-model-name {MODEL}"
    return [
        ServerSetup(WEFT, f"{sys.executable} -m weft serve {{model}} {common}", own),
        ServerSetup(
            SENTENCE_TRANSFORMERS, f"{sys.executable} {_APP} --model {{model}} --port {{port}} --texts {{texts}}", own
        ),
        ServerSetup(
            VLLM,
            f"{PYTHON.absolute()} -m vllm.entrypoints.openai.api_server --model {{model}} {common} "
            f"--runner pooling --dtype float32 --disable-uvicorn-access-log",
            {**vllm, **_OFFLINE, "VLLM_NO_USAGE_STATS": "1"},
            needs=PYTHON,
            remedy="make setup-vllm makes it",
        ),
        ServerSetup(
            INFINITY_EMB,
            f"{INFINITY.absolute()} v2 --model-id {{model}} {common} --url-prefix /v1 --device cpu --engine torch "
            "--batch-size 4",
            {**own, "INFINITY_ANONYMOUS_USAGE_STATS": "0"},
            needs=INFINITY,
            remedy="make setup-infinity makes it",
        ),
    ]


class ServerProcess:
    """A running server. Leaving the `with` block ends its processes; `log` is what it wrote.

    Outside of `turn()` its processes are stopped, so that they take nothing from who has the turn.
    """

    def __init__(self, setup: ServerSetup, model: Path, *, texts: Path | None = None) -> None:
        self.setup, self.port = setup, free_port()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close()
        values = {"model": str(model.absolute()), "port": str(self.port), "texts": str(texts)}
        command = [part.format(**values) for part in setup.command.split()]
        variables = [f"{name}={value}" for name, value in setup.variables.items()]
        # env(1) adds variables to those that are inherited. The processes are a group of their own, which close() ends;
        # if this process is killed before that, setpriv(1) sees to it, where there is one.
        tied = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        self._process = subprocess.Popen(
            ["env", *variables, *tied, *command], stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
            start_new_session=True, cwd=tempfile.gettempdir(),
        )  # fmt: skip

    @property
    def name(self) -> str:
        return self.setup.name

    @property
    def log(self) -> str:
        """All that its processes wrote so far."""
        self._log.flush()
        self._log.seek(0)
        return self._log.read()

    def wait_until_ready(self, *, timeout: float = _START_SECONDS) -> ServerProcess:
        """Returns when it answers. Servers that are started together load at the same time."""
        start = time.perf_counter()
        while not self._is_healthy():
            if self._process.poll() is not None:
                raise self._failed(f"ended with {self._process.returncode}")
            if time.perf_counter() - start > timeout:
                raise self._failed(f"was not ready within {timeout:g} s")
            time.sleep(0.1)
        self._signal(signal.SIGSTOP)
        return self

    @contextmanager
    def turn(self) -> Iterator[ServerProcess]:
        """It runs within; where a load fails, the end of its log is told."""
        if self._process.poll() is not None:
            raise self._failed(f"ended with {self._process.returncode}")
        self._signal(signal.SIGCONT)
        try:
            yield self
        except (OSError, WeftError) as error:
            raise self._failed(f"failed: {error}") from error
        finally:
            self._signal(signal.SIGSTOP)

    def resident_mib(self) -> float:
        """Memory of its processes; what they share counts for each."""
        return sum(_resident_mib(pid) for pid in self._pids())

    def _pids(self) -> list[int]:
        """The processes of its session."""
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with suppress(OSError):
                if os.getsid(pid) == self._process.pid:
                    found.append(pid)
        return found

    def _is_healthy(self) -> bool:
        try:
            with BlockingClient(self.port, timeout=5.0) as caller:
                return caller.ask(HttpRequest.get("/health")).status == 200
        except (OSError, ValueError):
            return False

    def _failed(self, how: str) -> WeftError:
        return WeftError(f"the server {self.name} {how}; the end of its log:\n{self.log[-3000:]}")

    def close(self) -> None:
        """Ends the server and all its processes."""
        self._signal(signal.SIGCONT)
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        """To all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def free_port() -> int:
    """A port of the loopback that nobody uses now."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def _resident_mib(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0  # it has ended
    lines = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(lines[0].split()[1]) / 1024 if lines else 0.0

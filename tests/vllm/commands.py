"""The commands of docs/vllm.md, run as they stand there: with a real model in place of MODEL, and on a free port."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcome import Outcome

_PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
_START_SECONDS, _ANSWER_SECONDS = 600.0, 120.0


def documented(part: str) -> list[str]:
    """The command lines of docs/vllm.md that have `part` in them, in order."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", "").splitlines()
    return [line.split("  #")[0].strip() for line in lines if part in line]


@dataclass(frozen=True)
class Serve:
    """The server of line `number` of the page, asked over HTTP; `plugin=False` takes `WEFT_VLLM=1` away."""

    number: int
    plugin: bool = True

    def __call__(self, folders: Path, answer: Path) -> Outcome:
        line = documented("api_server")[self.number].replace("MODEL", str(folders / "llama"))
        if not self.plugin:
            line = line.replace("WEFT_VLLM=1 ", "")
        with open(answer.with_suffix(".log"), "w+") as log, socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
            held.close()
            # Short: a test need not wait for the compiler, nor share a machine's memory with nobody.
            short = f" --port {port} --host 127.0.0.1 --enforce-eager --max-model-len 512 --kv-cache-memory-bytes 64M"
            with _running(line + short, answer.parent, log) as process:
                answers = _ask(f"http://127.0.0.1:{port}", str(folders / "llama"), process, log)
            log.seek(0)
            return Outcome(answers, log.read())


@contextmanager
def _running(line: str, folder: Path, log: Any) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("WEFT_VLLM", None)
    process = subprocess.Popen(
        ["sh", "-c", f"exec env {line}"],
        cwd=folder,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # its processes are a group of their own, which is ended as one
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30.0)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ask(address: str, model: str, process: subprocess.Popen[bytes], log: Any) -> dict[str, Any]:
    deadline = time.monotonic() + _START_SECONDS
    while not _is_healthy(address):
        if process.poll() is not None or time.monotonic() > deadline:
            log.seek(0)
            raise AssertionError(f"the server did not come up:\n{log.read()[-6000:]}")
        time.sleep(0.5)
    asked = {"model": model, "max_tokens": 8, "temperature": 0, "logprobs": 1}
    return {
        "text": _post(f"{address}/v1/completions", {**asked, "prompt": "w20 w31 w99"}),
        "several": _post(f"{address}/v1/completions", {**asked, "prompt": [[20, 30, 40], [50], [9] * 70]}),
        "page": _ask_as_the_page(address, model),
    }


def _is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5.0) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _ask_as_the_page(address: str, model: str) -> list[dict[str, Any]]:
    (line,) = documented("curl")
    found = re.fullmatch(r"curl http://localhost:8000(\S+) -H .* -d '(.*)'", line)
    assert found, line
    return _post(address + found[1], json.loads(found[2].replace("MODEL", model)))


def _post(address: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as reply:
        choices = json.load(reply)["choices"]
    return [{"text": c["text"], "logprobs": c["logprobs"] and c["logprobs"]["token_logprobs"]} for c in choices]


def measure(folders: Path, answer: Path) -> Outcome:
    """The benchmark of the page, in one round."""
    (line,) = documented("systems.vllm")
    line = line.replace("MODEL 7", f"{folders / 'large_vocabulary'} 1")
    with open(answer.with_suffix(".log"), "w+") as log:
        done = subprocess.run(line.split(), cwd=_PAGE.parents[1], stdout=subprocess.PIPE, stderr=log, timeout=900.0)
        log.seek(0)
        assert done.returncode == 0, log.read()[-6000:]
        log.seek(0)
        return Outcome(json.loads(done.stdout), log.read())

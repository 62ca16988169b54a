"""`weft serve` as a process: its start, its end, its workers, and what it refuses before it loads anything."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import DEADLINE, started
from typer.testing import CliRunner

from weft.cli.app import app
from weft.jobs.serve import ModelChoice, ServeOptions

SECRET = "nobodyshouldreadthis"


def embed(url: str, text: str = "a", **options: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/embeddings", json={"input": text}, timeout=DEADLINE, **options)


def is_answered(url: str) -> bool:
    try:
        return embed(url).status_code == 200
    except httpx.TransportError:
        return False


def wait_for(condition: Any) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def accepted(port: int) -> int:
    """How many connections the server has taken and not closed: those that still queue have no inode."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] != "0A" and row[9] != "0" for row in rows)


def begun(port: int, body: bytes) -> socket.socket:
    """A request whose last byte is missing."""
    connection = socket.create_connection(("127.0.0.1", port), DEADLINE)
    connection.sendall(f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode())
    connection.sendall(body[:-1])
    return connection


def test_one_process(folders: dict[str, Path]) -> None:
    """A drain that loses nothing, file descriptors at their limit, and no text in the log."""
    body = json.dumps({"input": SECRET}).encode()
    with started(folders["unit"], "--log-requests") as server:
        assert embed(server.url, SECRET).status_code == 200
        assert embed(server.url, SECRET * 100).status_code == 413
        pid = server.process.pid
        wait_for(lambda: accepted(server.port) == 0)
        used = len(os.listdir(f"/proc/{pid}/fd"))
        most = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 5, most))
        idle = [socket.create_connection(("127.0.0.1", server.port), DEADLINE) for _ in range(40)]
        wait_for(lambda: accepted(server.port) >= 4)
        for connection in idle:
            connection.close()
        wait_for(lambda: is_answered(server.url))  # still within the limit
        wait_for(lambda: accepted(server.port) == 0)
        with begun(server.port, body) as last:  # it is in when SIGTERM comes
            wait_for(lambda: accepted(server.port) == 1)
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: not is_answered(server.url))  # it takes no more
            last.sendall(body[-1:])
            assert last.recv(15).startswith(b"HTTP/1.1 200")
        assert server.process.wait(DEADLINE) == 0
        log = server.log()
    assert '"POST /v1/embeddings HTTP/1.1" 200' in log
    assert SECRET not in log


def test_workers(folders: dict[str, Path]) -> None:
    """One that is killed is started anew, counts go on, and the last signal goes to all; then killed with all."""
    with started(folders["unit"], "--workers", "2") as server:
        parent = server.process.pid
        first = children(parent)
        assert len(first) == 2
        assert len(os.listdir(f"/proc/{parent}/task")) == 1  # else workers could not use OpenMP
        assert "threads" not in server.log()
        cores = [os.sched_getaffinity(pid) for pid in first]
        if len(os.sched_getaffinity(0)) > 1:
            assert not cores[0] & cores[1]
        wanted = embed(server.url).json()["data"]
        for _ in range(9):
            assert embed(server.url).json()["data"] == wanted  # whoever answers
        assert httpx.get(f"{server.url}/stats").json()["requests"] == 10
        stop, failures = threading.Event(), list[Exception]()

        def load() -> None:
            while not stop.is_set():
                try:
                    assert embed(server.url).json()["data"] == wanted
                except httpx.TransportError as error:
                    failures.append(error)  # of the one that is killed

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        os.kill(first[0], signal.SIGKILL)
        wait_for(lambda: len(now := children(parent)) == 2 and first[0] not in now)
        stop.set()
        for thread in threads:
            thread.join(DEADLINE)
        wait_for(lambda: embed(server.url).json()["data"] == wanted)
        assert httpx.get(f"{server.url}/stats").json()["requests"] > 10
        assert "worker 0 ended with status 9" in server.log()
        port, workers = server.port, children(parent)
        server.end(signal.SIGKILL)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    with started(folders["unit"], "--workers", "2", "--port", port) as again:  # the last --port counts
        assert again.port != 0
        assert embed(again.url).json()["data"] == wanted
        assert again.end() == 0


def run(*arguments: object) -> str:
    """The message of a command that is refused."""
    done = CliRunner().invoke(app, ["serve", *map(str, arguments)])
    assert done.exit_code == 2, done.output
    return done.output


@pytest.mark.timeout(60)  # what is not refused would serve
def test_what_is_refused_before_it_serves(folders: dict[str, Path], tmp_path: Path) -> None:
    assert "expected a folder" in run()
    assert "expected a folder" in run(tmp_path / "none", "--port", "0")
    two = run(folders["unit"], "--model", f"unit={folders['plain']}")
    assert "two models with the name 'unit'" in two
    assert "--model other=" in two
    assert "from 1 on" in run(folders["unit"], "--max-batch-tokens", "0")
    assert "65535" in run(folders["unit"], "--port", "70000")
    assert "--api-key" in run(folders["unit"], "--api-key", "")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        for workers in (1, 2):
            said = run(folders["unit"], "--port", taken.getsockname()[1], "--workers", workers)
            assert "pass another --port" in said


@pytest.mark.timeout(60)
def test_a_folder_without_a_tokenizer(folders: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    bare = tmp_path / "bare"
    shutil.copytree(folders["unit"], bare)
    for path in bare.glob("tokenizer*"):
        path.unlink()
    assert "no tokenizer" in run(bare, "--port", "0")


def test_names_of_models(tmp_path: Path) -> None:
    assert ModelChoice.parse("a=/models/b") == ModelChoice("a", Path("/models/b"))
    assert ModelChoice.parse("/models/a=b") == ModelChoice("a=b", Path("/models/a=b"))
    (tmp_path / "x=y").mkdir()
    assert ModelChoice.parse(str(tmp_path / "x=y")).name == "x=y"
    with pytest.raises(ValueError, match="name=folder"):
        ModelChoice.parse("a=")
    with pytest.raises(ValueError, match="got no model"):
        ServeOptions(())

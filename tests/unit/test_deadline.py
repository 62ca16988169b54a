"""One table of deadlines: what it says, and that nobody has one of his own."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import weft
from weft.comm.deadline import RESHARD, Limit

ROOT = Path(weft.__path__[0])


def test_the_first_wait_on_a_group_may_be_longer() -> None:
    class Group:
        """Anything that can be referred to weakly."""

    one, other = Group(), Group()
    limit = Limit("a test", 5.0, first=50.0)
    assert [limit.of(None, one), limit.of(None, one), limit.of(None, other), limit.of(7.0, one)] == [
        50.0,
        5.0,
        50.0,
        7.0,
    ]
    assert Limit("another", 5.0).first == 5.0
    assert RESHARD.first > RESHARD.seconds


WORDS = {"timeout", "grace", "margin", "patience", "seconds", "wait"}  # of a constant that says how long
WAITING = {"wait", "join", "poll", "result", "get", "acquire", "create_connection"}
NOT_DEADLINES = {
    "LONGEST_SECONDS",  # the most that a deadline may be
    "_SLICE_SECONDS", "_LOOK_SECONDS",  # how often a wait looks up
    "_SILENT_SECONDS",  # the age of a lock that was left behind
    "LAUNCH_SECONDS",  # what a GPU takes
}  # fmt: skip
A_LOOK = 0.01  # seconds: what is shorter waits for nobody


def _own_defaults(tree: ast.AST) -> list[str]:
    """Numbers that are the default of a `timeout`, a constant of such a name, or given to a wait."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            a = node.args
            pairs = list(zip([*a.posonlyargs, *a.args][::-1], a.defaults[::-1], strict=False))
            pairs += [(arg, default) for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True) if default]
            found += [f"line {node.lineno}" for arg, value in pairs if arg.arg == "timeout" and _is_number(value)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _is_number(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            found += [f"line {node.lineno}: {name}" for name in names if _says_how_long(name)]
        if isinstance(node, ast.Call) and _name_of(node.func) in WAITING:
            given = [*node.args[:1], *(k.value for k in node.keywords if k.arg in ("timeout", "seconds"))]
            longer = [
                v
                for v in given
                if isinstance(v, ast.Constant) and isinstance(v.value, float | int) and v.value > A_LOOK
            ]
            found += [f"line {node.lineno}: {_name_of(node.func)}" for _ in longer]
    return found


def _says_how_long(name: str) -> bool:
    words = set(name.lower().split("_"))
    return name not in NOT_DEADLINES and ("timeout" in words or (name.isupper() and bool(WORDS & words)))


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float | str)


def test_nobody_has_a_default_of_his_own() -> None:
    found = {
        str(path.relative_to(ROOT)): defaults
        for path in sorted(ROOT.rglob("*.py"))
        # Benchmarks have limits for a whole run, of which each knows how long it takes.
        if path.relative_to(ROOT).parts[0] != "bench"
        and path != ROOT / "comm" / "deadline.py"
        and (defaults := _own_defaults(ast.parse(path.read_text())))
    }
    assert found == {}, "take it from weft.comm.deadline"


def test_the_check_sees_what_it_looks_for() -> None:
    text = "def f(x, timeout=3.0): ...\ndef g(*, timeout: float = 60.0): ...\nDEFAULT_TIMEOUT = 5\n"
    assert len(_own_defaults(ast.parse(f"{text}class C:\n timeout: float = 1.0"))) == 4
    assert len(_own_defaults(ast.parse("GRACE_SECONDS = 5.0\n_MARGIN = 30.0\njob.join(seconds=60.0)\nx.poll(3)"))) == 4
    assert not _own_defaults(ast.parse("_SLICE_SECONDS = 0.5\nseconds = 1e-6\nx.wait(timeout=0.001)\nx.wait(0, 1)"))


def test_the_table_needs_no_torch() -> None:
    code = "import sys, weft.comm.deadline; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


ENDS_WHILE_A_THREAD_COMPUTES = """
import threading
import torch
from weft.overlap.executor.resources import Worker

begun = threading.Event()
x = torch.randn(1000, 1000)
def work(job):
    begun.set()
    for _ in range(3):
        x @ x
worker = Worker("test")
worker.start(work)
begun.wait()
"""


def test_a_process_does_not_end_under_its_threads() -> None:
    """Python would end the thread by unwinding torch's C++, which aborts the process."""
    done = subprocess.run([sys.executable, "-c", ENDS_WHILE_A_THREAD_COMPUTES], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")

"""Tags have one owner: leases that never overlap, and nobody who makes tags elsewhere."""

from __future__ import annotations

import ast
import random
import threading
from pathlib import Path

import pytest

import weft
from weft.comm.deadline import Deadline
from weft.comm.tags import FIRST_TAG, Ledger, Line, Mark, Tag, channel_tags, turn
from weft.errors import PeerTimeout, WeftError

SOURCES = sorted(Path(weft.__path__[0]).rglob("*.py"))


def test_lines_do_not_overlap() -> None:
    ends = FIRST_TAG
    for line in Line:
        assert line.first == ends
        ends += line.size
        for tag in (line.mark(Mark.DIGEST), line.mark(Mark.NEVER), line.data(0)):
            assert isinstance(tag, Tag)
            assert line.first <= tag < ends
        assert max(line.mark(mark) for mark in Mark) < line.data(0)
    assert ends <= 1 << 31, "a backend has 31 bits for a tag"


def test_a_line_and_a_channel_end_somewhere() -> None:
    with pytest.raises(ValueError, match="expected 0 to"):
        Line.OVERLAP.data(Line.OVERLAP.size)
    with pytest.raises(ValueError, match="use fewer micro-batches"):
        channel_tags(1 << 20)
    with pytest.raises(ValueError, match="use fewer"):
        channel_tags(3).tag(1 << 14)


def test_ranks_that_release_at_other_times_lease_the_same_tags() -> None:
    """Three ranks, thousands of leases, each given back on each rank whenever it likes: never two on one tag."""
    dice = random.Random(7)
    ranks = [Ledger(Line.RESHARD) for _ in range(3)]
    held: list[list] = [[] for _ in ranks]
    for _ in range(3000):
        claims = [ledger.claim() for ledger in ranks]
        tags = dice.choice([1, 10, Line.RESHARD.part, Line.RESHARD.part + 1, 5 * Line.RESHARD.part])
        leases = [ledger.lease(claims, tags) for ledger in ranks]
        assert len({(lease.first, lease.count) for lease in leases}) == 1, "the same on all ranks"
        first, last = leases[0].first, leases[0].first + leases[0].count
        assert leases[0].tag(tags - 1) < Line.RESHARD.first + Line.RESHARD.size
        for mine, lease in zip(held, leases, strict=True):
            assert all(last <= other.first or other.first + other.count <= first for other in mine)
            mine.append(lease)
            while len(mine) > 20 or (mine and dice.random() < 0.5):
                mine.pop(dice.randrange(len(mine))).release()


def test_too_many_at_once_is_an_error_and_not_a_collision() -> None:
    ledger, other = Ledger(Line.RESHARD), Ledger(Line.RESHARD)
    leases = [ledger.lease([ledger.claim(), other.claim()], 1) for _ in range(256)]
    with pytest.raises(WeftError, match="too many reshards are under way"):
        ledger.lease([ledger.claim(), other.claim()], 1)
    leases[17].release()
    leases[17].release()
    again = ledger.lease([ledger.claim(), other.claim()], 1)
    assert again.first == leases[17].first
    leases[17].release()
    with pytest.raises(WeftError):
        ledger.lease([ledger.claim(), other.claim()], 1)
    with pytest.raises(ValueError, match="expected up to"):
        Ledger(Line.RESHARD).lease([], 1 << 29)


def test_a_turn_is_waited_for_until_a_deadline() -> None:
    class Group:
        """Anything that can be referred to weakly."""

    pg, inside, leave = Group(), threading.Event(), threading.Event()

    def hold() -> None:
        with turn(pg, "reshards", Deadline.after(10.0)), turn(pg, "reshards", Deadline.after(10.0)):
            inside.set()
            leave.wait(10.0)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(10.0)
    with turn(pg, "clocks", Deadline.after(0.05)):
        pass
    with pytest.raises(PeerTimeout, match="another thread of this rank"), turn(pg, "reshards", Deadline.after(0.05)):
        pass
    leave.set()
    thread.join()
    with turn(pg, "reshards", Deadline.after(5.0)):
        pass


# Nobody goes around ----------------------------------------------------------------------------------------------


def _numbers(node: ast.AST) -> bool:
    """Whether an expression is made of literal numbers."""
    return all(
        isinstance(part, ast.Constant | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop) for part in ast.walk(node)
    ) and any(isinstance(part, ast.Constant) and type(part.value) is int for part in ast.walk(node))


def _own_tags(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == "tag" and _numbers(keyword.value):
                    found.append(f"line {node.lineno}: tag={ast.unparse(keyword.value)}")
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "Tag":
                found.append(f"line {node.lineno}: makes a Tag")
            # The process group's own functions, past `Group`.
            straight = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "dist"
            sends = name == "P2POp" or (straight and name in ("send", "recv", "isend", "irecv"))
            if sends and "tag" not in {keyword.arg for keyword in node.keywords}:
                found.append(f"line {node.lineno}: {name} without a tag")
        if isinstance(node, ast.FunctionDef):
            arguments = node.args
            given = zip(
                [*arguments.posonlyargs, *arguments.args][-len(arguments.defaults) or None :], arguments.defaults,
                strict=False,
            )  # fmt: skip
            given = [*given, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
            for argument, default in given:
                if argument.arg == "tag" and default is not None and _numbers(default):
                    found.append(f"line {node.lineno}: a default of tag")
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
            if any("tag" in name.lower().split("_") for name in names) and any(map(_numbers, _values(node.value))):
                found.append(f"line {node.lineno}: {', '.join(names)} is a number")
    return found


def _values(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


# The plain-torch twins of the ops: a process group of the caller's, and torch's own tags.
_OUTSIDE = {"comm/tags.py", "reference.py"}


def test_nobody_makes_tags_elsewhere() -> None:
    root = Path(weft.__path__[0])
    found = {
        str(path.relative_to(root)): tags
        for path in SOURCES
        if str(path.relative_to(root)) not in _OUTSIDE and (tags := _own_tags(ast.parse(path.read_text())))
    }
    assert found == {}, "take tags from weft.comm.tags"


def test_the_check_sees_what_it_looks_for() -> None:
    text = "_TAG = (1 << 30) - 8\n_A_TAG, _B_TAG = 1, 2\ngroup.send(x, 1, tag=3)\nTag(4)\ndist.recv(x)"
    assert len(_own_tags(ast.parse(f"{text}\ndef f(x, *, tag: int = 0): ..."))) == 6
    assert _own_tags(ast.parse("tags = [0] * 3\ngroup.send(x, 1, tag=line.data(3))\nstage = 4")) == []

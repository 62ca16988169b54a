"""Each rule has one owner, and nobody goes around it: read off the source, without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import weft

ROOT = Path(weft.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in FILES}

# Which packages may import which: those that stand before them.
ORDER = (
    ("errors", "_core", "_torch"),
    ("_torch_check",),
    ("layout",),
    ("comm",),
    ("timeline",),
    ("kernels",),
    ("overlap", "reshard", "models"),
    ("pipeline", "transformer"),
    ("packed",),
    ("parallel",),
    ("lab", "vllm", "scale"),
    ("report",),
    ("jobs",),
    ("bench",),
    ("cli",),
)
PLACE = {name: place for place, names in enumerate(ORDER) for name in names}


def imports(tree: ast.Module) -> Iterator[str]:
    """The packages of weft that a module imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "weft":
            yield from [node.module] if node.module != "weft" else [f"weft.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "weft")


def room(name: str) -> str:
    return name.split(".")[1]


def test_imports_run_one_way() -> None:
    wrong = []
    for path, tree in TREES.items():
        here = path.split("/")[0].removesuffix(".py")
        if here not in PLACE:  # the package itself, which imports all
            continue
        for there in {room(name) for name in imports(tree) if "." in name} - {here}:
            if PLACE.get(there, len(ORDER)) >= PLACE[here]:
                wrong.append(f"{path} imports weft.{there}")
    assert wrong == []


# What only its owner may touch, and who that is; the folders and files beside it have a reason.
OWNED = {
    # Whether a weight has changed. Pipelines ask another question: was an activation written to, which torch counts?
    "_version": {"_torch.py"},
    "version_of": {
        "_torch.py",
        "_torch_check.py",
        "kernels/freshness.py",
        "pipeline/run/stage.py",
        "pipeline/transport/exchange.py",
    },
    "increment_version": {"kernels/matmul.py", "reshard/tensors.py"},  # of a caller's `out` that was written to
    "_unsafe_preserve_version_counter": set(),
}


def mentions(tree: ast.Module, name: str) -> bool:
    """Whether a module uses the name: as an attribute, a variable, or one that it imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            return True
        if getattr(node, "attr", None) == name or getattr(node, "id", None) == name:
            return True
    return False


@pytest.mark.parametrize("name", OWNED)
def test_nobody_goes_around(name: str) -> None:
    assert {path for path, tree in TREES.items() if mentions(tree, name)} <= OWNED[name]


# Who hands addresses to the native core: the kernels' own modules and the program for inference, which checks at
# its door (`kernels/door.py`), memory that ranks share, the lab's cards (which get flat tensors), and who only asks
# which CPU this is.
NATIVE = (
    "kernels/", "comm/host_collectives.py", "comm/signal.py", "transformer/passes.py", "transformer/network.py",
    "lab/card.py", "bench/machine.py", "bench/packed.py", "cli/doctor.py",
)  # fmt: skip


def test_only_those_who_check_reach_the_native_core() -> None:
    found = {path for path, tree in TREES.items() if "weft._core" in set(imports(tree))}
    assert {path for path in found if not path.startswith(NATIVE)} == set()
    assert len(found) > 8

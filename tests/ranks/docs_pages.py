"""The code of README.md and docs/*.md: which blocks there are, and how a page is run.

Python blocks of a page run in order, in one namespace. A comment on the line above a fence says more:

    <!-- runs: ranks=2 -->       on two ranks, with a gloo group; all unmarked blocks of the page run there too
    <!-- runs: script -->        as a file of its own, for code that starts processes
    <!-- runs: no: reason -->    not here

In fences without a language, and those of a shell, the lines that begin with `weft ` are run, after the page's Python.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).parents[2]
SHELLS = ("", "sh", "bash", "console", "shell")
_FENCE = re.compile(r"^(\s*)(```+)\s*([\w-]*)\s*$")
_MARK = re.compile(r"^\s*<!--\s*runs:\s*(.*?)\s*-->\s*$")


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is that of its first line of code. `ranks` 0 is without a group."""

    page: str
    line: int
    language: str
    code: str
    ranks: int = 0
    is_script: bool = False
    reason: str | None = None  # why it does not run here

    @property
    def commands(self) -> list[list[str]]:
        """The commands of a shell block, without `weft`."""
        if self.language not in SHELLS or self.reason is not None:
            return []
        joined = self.code.replace("\\\n", " ").splitlines()
        lines = [line.strip().removeprefix("$ ") for line in joined]
        return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("weft ")]


def blocks(page: str, text: str) -> list[Block]:
    """All fenced blocks of a page."""
    found = []
    lines = text.splitlines()
    mark, at = "", 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is None:
            if mark:
                raise ValueError(f"{page}:{at}: the mark {mark!r} stands above no fence")
            mark = match.group(1) if (match := _MARK.match(lines[at])) else ""
            at += 1
            continue
        end = at + 1
        while end < len(lines) and lines[end].strip() != fence.group(2):
            end += 1
        inside = [line.removeprefix(fence.group(1)) for line in lines[at + 1 : end]]
        code = "\n".join(inside) + "\n"
        found.append(_marked(Block(page, at + 2, fence.group(3), code), mark))
        mark, at = "", end + 1
    return found


def _marked(block: Block, mark: str) -> Block:
    where = (block.page, block.line, block.language, block.code)
    if not mark:
        return block
    if mark == "script":
        return Block(*where, is_script=True)
    if match := re.fullmatch(r"ranks=([1-9])", mark):
        return Block(*where, ranks=int(match.group(1)))
    if match := re.fullmatch(r"no:\s*(\S.*)", mark):
        return Block(*where, reason=match.group(1))
    raise ValueError(f"{block.page}:{block.line}: unknown mark {mark!r}; expected ranks=N, script or no: reason")


def pages() -> dict[str, list[Block]]:
    """README.md and docs/*.md by their path."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {str(f.relative_to(ROOT)): blocks(str(f.relative_to(ROOT)), f.read_text(encoding="utf-8")) for f in files}


def worlds(page: list[Block]) -> list[int]:
    """The numbers of ranks that the Python of a page is run on; [0] is one process without a group."""
    runnable = [b for b in page if b.language == "python" and b.reason is None and not b.is_script]
    return sorted({b.ranks for b in runnable if b.ranks}) or ([0] if runnable else [])


def run_page(page: list[Block], world: int, folder: str, port: int) -> None:
    """Executes the Python of a page that is for `world` ranks, or for any number, on this rank."""
    chosen = [b for b in page if b.language == "python" and b.reason is None and not b.is_script]
    chosen = [b for b in chosen if b.ranks in (0, world)]
    makes_group = world == 0 or any("init_process_group(" in b.code for b in chosen)
    rank = dist.get_rank()
    os.chdir(folder)
    if makes_group:
        dist.barrier()  # else one rank may leave the group while another is still about to join it
        dist.destroy_process_group()
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(max(world, 1)), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if world else {}
    namespace: dict[str, Any] = {"__name__": "__main__"}
    _show_lines(chosen)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        for block in chosen:
            _execute(block, namespace)
            if not makes_group:
                dist.barrier()  # else one rank may read what another one still writes to the same folder
    if not dist.is_initialized():  # which whoever started this process takes down again
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _show_lines(chosen: list[Block]) -> None:
    """Lets tracebacks show the lines of the page."""
    lines = [""] * max((b.line + b.code.count("\n") for b in chosen), default=0)
    for block in chosen:
        code = block.code.splitlines(keepends=True)
        lines[block.line - 1 : block.line - 1 + len(code)] = code
    for page in {b.page for b in chosen}:
        linecache.cache[page] = (len(lines), None, lines, page)


def _execute(block: Block, namespace: dict[str, Any]) -> None:
    exec(compile("\n" * (block.line - 1) + block.code, block.page, "exec"), namespace)


def imported(block: Block) -> list[tuple[str, str]]:
    """The names that a block imports from weft, as (module, name)."""
    found = []
    for node in ast.walk(ast.parse(block.code, block.page)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "weft":
            found += [(node.module or "", alias.name) for alias in node.names]
    return found


def weft(arguments: list[str]) -> list[str]:
    """The command line of a `weft` command."""
    return [sys.executable, "-m", "weft", *arguments]

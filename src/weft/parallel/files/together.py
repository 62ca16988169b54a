"""What ranks must know of each other before one of them reads or writes: the problems of all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import ProcessGroup

from weft.comm.tell import tell_all
from weft.errors import WeftError


@contextmanager
def together(what: str, *, group: ProcessGroup | None, timeout: float) -> Iterator[None]:
    """A part of a collective: what fails in it on one rank is raised on all at its end, and nobody waits for more."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    mine = [] if problem is None else [f"{type(problem).__name__}: {problem}"]
    found = join_problems(tell_all(what, mine, group=group, timeout=timeout))
    if problem is not None:
        raise problem
    if found:
        raise WeftError(f"{what} failed:\n  " + "\n  ".join(found))


def join_problems(problems: list[list[str]]) -> list[str]:
    """The problems of all ranks, each once, with the ranks that have it where it is not all of them.

    >>> join_problems([["no file", "a is missing"], ["a is missing"]])
    ['no file (rank 0)', 'a is missing']
    """
    holders: dict[str, list[int]] = {}
    for rank, own in enumerate(problems):
        for problem in dict.fromkeys(own):
            holders.setdefault(problem, []).append(rank)
    return [
        problem if len(ranks) == len(problems) else f"{problem} (rank {', '.join(map(str, ranks))})"
        for problem, ranks in holders.items()
    ]


def rank_of(group: ProcessGroup | None) -> int:
    """This rank in the group; 0 without one.

    >>> rank_of(None)
    0
    """
    if group is None:
        return dist.get_rank() if dist.is_initialized() else 0
    return int(group.rank())

"""What all campaigns share: numbered random cases that can be run again one by one, and the line that sums them up.

A campaign is a program of its own, `python tests/campaigns/NAME.py --cases N --seed S`. Case i of a seed is always the
same program, whatever ran before it; `--first I --cases 1` runs it alone. CI runs each one briefly.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class Tally:
    """How a run of cases went. `failures` are texts: the number of the case, what it did, what was wrong."""

    name: str
    seed: int
    cases: int = 0
    failures: list[str] = field(default_factory=list)
    note: str = ""  # figures of the campaign's own

    def __str__(self) -> str:
        return f"{self.name}: cases {self.cases}, failures {len(self.failures)}, seed {self.seed}"


Campaign = Callable[[int, int, int], Tally]
"""`campaign(seed, first, cases)` runs the cases first, first + 1, ... and returns how they went."""


def case_random(seed: int, number: int) -> random.Random:
    """The random numbers of one case: the same in every process, whichever cases ran before.

    >>> case_random(1, 7).random() == case_random(1, 7).random() != case_random(1, 8).random()
    True
    """
    return random.Random(f"{seed}/{number}")


def main(campaign: Campaign, arguments: Sequence[str] | None = None) -> None:
    """The command line of a campaign: prints `NAME: cases N, failures F, seed S`, and exits with 1 on a failure."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--cases", "--count", type=int, default=100, help="how many to run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first; with --cases 1, that one alone")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    tally = campaign(options.seed, options.first, options.cases)
    for failure in tally.failures:
        print(failure)
    if tally.note:
        print(tally.note)
    print(f"{tally}, seconds {time.monotonic() - start:.0f}")
    sys.exit(1 if tally.failures else 0)

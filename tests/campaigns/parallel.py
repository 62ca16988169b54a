"""Lives of parallel models: random configs of all families on 1 to 4 ranks, trained, called, generated from, written
to, cut, hooked, refused and copied in any order, beside the same model of Hugging Face in one process.

    python tests/campaigns/parallel.py --cases 2000 --seed 1
"""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))

from campaign import Tally, case_random, main
from harness import run_ranks
from parallel_life import run_cases

from weft.errors import RankFailed

WORLDS = (1, 1, 2, 2, 2, 3, 3, 4)
CHUNK = 250  # cases for which processes are started once
SECONDS = 120.0, 8.0  # that these may take, and each of their cases


def world_of(seed: int, number: int) -> int:
    return WORLDS[int(case_random(seed, number).random() * len(WORLDS))]


def campaign(seed: int, first: int, cases: int) -> Tally:
    tally = Tally("parallel", seed, cases)
    by_world: dict[int, list[int]] = {}
    for number in range(first, first + cases):
        by_world.setdefault(world_of(seed, number), []).append(number)
    chunks = [(world, some[i : i + CHUNK]) for world, some in by_world.items() for i in range(0, len(some), CHUNK)]
    with ThreadPoolExecutor(2) as pool:
        for failures in pool.map(lambda chunk: _run_chunk(seed, *chunk), chunks):
            tally.failures += failures
    return tally


def _run_chunk(seed: int, world: int, numbers: list[int]) -> list[str]:
    """The failures of these cases. After one, ranks may be out of step: the rest runs in new processes."""
    failures = []
    while numbers:
        try:
            run_ranks(run_cases, world, seed, numbers, timeout=SECONDS[0] + SECONDS[1] * len(numbers))
            break
        except RankFailed as error:
            found = [int(n) for n in re.findall(r"parallel case (\d+)", str(error))]
            number = min(found, default=numbers[0])
            failures.append(f"case {number} on {world} ranks (--seed {seed} --first {number} --cases 1):\n{error}")
            numbers = numbers[numbers.index(number) + 1 :] if found else []
    return failures


if __name__ == "__main__":
    main(campaign)

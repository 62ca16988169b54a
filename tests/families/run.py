"""Every family on any number of random configs: `python tests/families/run.py --configs 30 --seed 1 [--family NAME]`.

Config i of a family and a seed is always the same; `--first I --configs 1` tries it alone. CI tries three of each.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path

import torch

for folder in ("campaigns", "ranks"):
    sys.path.append(str(Path(__file__).parents[1] / folder))

from campaign import Tally  # noqa: E402
from family_case import ALONE, Case, losses_on_ranks, one_rank  # noqa: E402
from family_table import ROWS  # noqa: E402
from harness import run_ranks  # noqa: E402

from weft.errors import RankFailed  # noqa: E402


def run(names: list[str], seed: int, numbers: range) -> Tally:
    """All checks of all configs."""
    tally = Tally("families", seed)
    for name in names:
        before = len(tally.failures)
        with one_rank():
            for number in numbers:
                tally.cases += 1
                tally.failures += alone(name, seed, number)
        if ROWS[name].family.on_ranks:
            tally.failures += on_ranks([(name, seed, number) for number in numbers])
        print(f"{name}: configs {len(numbers)}, failures {len(tally.failures) - before}", flush=True)
    return tally


def alone(name: str, seed: int, number: int) -> list[str]:
    failures = []
    for what, check in ALONE.items():
        case = Case(name, seed, number)
        try:
            check(case)
        except AssertionError as error:
            failures.append(f"{name} seed {seed} case {number}, {what}: {error}\n{case.config}")
        except Exception:
            failures.append(f"{name} seed {seed} case {number}, {what}: {traceback.format_exc()}\n{case.config}")
    return failures


def on_ranks(cases: list[tuple[str, int, int]]) -> list[str]:
    try:
        found = run_ranks(losses_on_ranks, 2, cases, timeout=60.0 + 10.0 * len(cases))
    except RankFailed as error:
        return [str(error)]
    return [wrong for rank in found for wrong in rank]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", type=int, default=30, help="how many of each family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--first", type=int, default=0, help="the number of the first; with --configs 1, that one alone"
    )
    parser.add_argument("--family", choices=ROWS, help="one family only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    names = list(ROWS) if options.family is None else [options.family]
    tally = run(names, options.seed, range(options.first, options.first + options.configs))
    for failure in tally.failures:
        print(failure)
    print(f"{tally}, seconds {time.monotonic() - start:.0f}")
    sys.exit(1 if tally.failures else 0)


if __name__ == "__main__":
    main()

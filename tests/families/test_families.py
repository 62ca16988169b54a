"""Every family on random configs: a few here, any number by `python tests/families/run.py --configs N`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[1] / "ranks"))

from family_case import ALONE, Case, losses_on_ranks, one_rank
from family_table import ROWS
from harness import run_ranks

from weft.models.families import FAMILIES

SEED, CONFIGS = 1, 3


@pytest.fixture(scope="module", autouse=True)
def a_group_of_one() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with one_rank():
        yield
    torch.set_num_threads(threads)


def test_every_family_has_a_row() -> None:
    assert {family.base for family in FAMILIES} == {row.base for row in ROWS.values()}


@pytest.mark.parametrize("check", ALONE)
@pytest.mark.parametrize("name", ROWS)
def test_alone(name: str, check: str) -> None:
    for number in range(CONFIGS):
        case = Case(name, SEED, number)
        try:
            ALONE[check](case)
        except Exception as error:
            raise AssertionError(f"case {number}: {error}\n{case.config}") from error


def test_losses_on_two_ranks() -> None:
    cases = [(name, SEED, number) for name, row in ROWS.items() if row.family.on_ranks for number in range(CONFIGS)]
    for wrong in run_ranks(losses_on_ranks, 2, cases, timeout=200):
        assert not wrong, "\n".join(wrong)

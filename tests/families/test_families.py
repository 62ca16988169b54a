"""Every family on random configs: a few here, any number by `python tests/families/run.py --configs N`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[1] / "ranks"))

from exact_gradients import check_by_exact
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


def test_a_gradient_that_rounding_makes() -> None:
    """Of a model in which Hugging Face's gradient is ten times farther from the exact one than the packed model's."""
    ALONE["gradients"](Case("Gemma3TextModel, both ways", 5, 0))


def test_what_the_exact_gradient_decides() -> None:
    """A packed gradient may be as far off as is allowed, or as Hugging Face's own is, and no farther."""
    exact = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    theirs = {"w": torch.tensor([1.0, 2.001])}
    for ours, is_fine in ((2.00005, True), (2.0009, True), (2.0011, False), (1.9988, False), (float("nan"), False)):
        got = {"w": torch.tensor([1.0, ours])}
        if is_fine:
            check_by_exact(got, theirs, exact, {"w": 1e-4})
        else:
            with pytest.raises(AssertionError, match="from that in float64"):
                check_by_exact(got, theirs, exact, {"w": 1e-4})


def test_losses_on_two_ranks() -> None:
    cases = [(name, SEED, number) for name, row in ROWS.items() if row.family.on_ranks for number in range(CONFIGS)]
    for wrong in run_ranks(losses_on_ranks, 2, cases, timeout=200):
        assert not wrong, "\n".join(wrong)

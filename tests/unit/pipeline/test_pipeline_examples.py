"""The examples in the docstrings of the planning half."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = ["action", "costs", "graph", "interleaved", "lower", "lowered", "schedule", "schedules", "simulate", "text"]


@pytest.mark.parametrize("name", [*MODULES, "torch_csv", "validate"])
def test_examples(name: str) -> None:
    found = doctest.testmod(importlib.import_module(f"weft.pipeline.{name}"))
    assert found.attempted > 0
    assert found.failed == 0

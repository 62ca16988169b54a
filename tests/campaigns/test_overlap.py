"""A few cases of the overlap campaign, the same every time."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import overlap


def test_a_few_cases() -> None:
    tally = overlap.campaign(seed=0, first=0, cases=40)
    assert tally.failures == []
    assert tally.cases == 40

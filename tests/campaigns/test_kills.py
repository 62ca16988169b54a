"""A few cases of the campaign of kills, the same every time."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import kills


def test_a_few_cases() -> None:
    tally = kills.campaign(seed=0, first=0, cases=4)
    assert tally.failures == []
    assert tally.cases == 4

"""A short run of the campaign of reshards; `python tests/campaigns/reshard.py` runs as many cases as asked for."""

from __future__ import annotations

from reshard import campaign


def test_a_short_campaign() -> None:
    tally = campaign(seed=13, first=0, cases=40)
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.cases == 40

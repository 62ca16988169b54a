"""A short run of the campaign."""

from __future__ import annotations

from parallel import campaign


def test_lives_of_parallel_models() -> None:
    tally = campaign(seed=0, first=0, cases=60)
    assert not tally.failures, "\n".join([str(tally), *tally.failures])

"""One place of `weft bench end_to_end` on a tiny model: all systems run, and their losses and tokens agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from weft.bench.end_to_end import Bench, figure, finished_row, summary
from weft.bench.systems.end_to_end import WorkKind, tiny

pytest.importorskip("accelerate")  # what Hugging Face cuts models with


@pytest.mark.timeout(600)  # it loads transformers on ranks that share two cores
def test_a_place_gives_a_row_of_each_kind(namespaces: None, tmp_path: Path) -> None:
    scale = tiny()
    place, kinds = scale.places[0]
    bench = Bench(scale.load, tmp_path, None)
    results = bench.results(replace(place, share=None), kinds, 1, gbps=1.0)  # a given rate saves the lab that finds it
    rows = {each.kind.value: finished_row(each, scale.load, bench.machine, cpu_per_byte=2e-9) for each in results}
    assert set(rows) == {kind.value for kind in WorkKind}
    for row in rows.values():
        assert all(row[key] for key in ("weft_ms", "padded_ms", "vs_padded", "bound_ms", "gbps", "weft_tokens_per_s"))
        assert row["bound_ms"] <= row["cpu_bound_ms"]
    figures = summary(list(rows.values()))
    assert all(figures[key] for key in ("train_vs_torch_packed", "train_vs_torch_padded", "prefill_vs_hf_tp"))
    exposed = figures["exposed_comm_fraction"]
    assert isinstance(exposed, float)
    assert 0 < exposed < 1
    train = next(each.result for each in results if each.kind is WorkKind.TRAIN)
    assert [timeline.name for timeline in figure(train).timelines] == ["predicted", "measured"]

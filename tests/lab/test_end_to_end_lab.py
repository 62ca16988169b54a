"""One place of `weft bench end_to_end` on a tiny model: all systems run, and their losses and tokens agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from weft.bench.end_to_end import Bench, figure, summary
from weft.bench.systems.end_to_end import WorkKind, tiny

pytest.importorskip("accelerate")  # what Hugging Face cuts models with


@pytest.mark.timeout(600)  # it loads transformers on ranks that share two cores
def test_a_place_gives_a_row_of_each_kind(namespaces: None, tmp_path: Path) -> None:
    scale = tiny()
    place, kinds = scale.places[0]
    bench = Bench(scale.load, tmp_path, None)
    results = bench.results(replace(place, share=None), kinds, 1, gbps=1.0)  # a given rate saves the lab that finds it
    rows = {row["kind"]: row for row, _ in results}
    assert set(rows) == {kind.value for kind in WorkKind}
    for row in rows.values():
        assert all(row[key] for key in ("weft_ms", "padded_ms", "vs_padded", "bound_ms", "gbps", "weft_tokens_per_s"))
    figures = summary(list(rows.values()))
    assert all(figures[key] for key in ("train_vs_torch_packed", "train_vs_torch_padded", "prefill_vs_hf_tp"))
    exposed = figures["exposed_comm_fraction"]
    assert isinstance(exposed, float)
    assert 0 < exposed < 1
    train = next(result for row, result in results if row["kind"] == WorkKind.TRAIN.value)
    assert [timeline.name for timeline in figure(train).timelines] == ["predicted", "measured"]

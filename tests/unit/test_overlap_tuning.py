"""The tuner's file: what is written is read, by many at once, and nothing that is wrong with it is fatal."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import stat
from pathlib import Path

import pytest

from weft.overlap import tuning
from weft.overlap.plan import Op, OverlapPlan
from weft.overlap.tuning import TunedPlan, load, save


def measured(m: int) -> TunedPlan:
    return TunedPlan(OverlapPlan(Op.ALL_REDUCE, m, 8, 4, "float32", (0, 1), groups=(1, m)), 0.5, 1.0)


def test_what_is_saved_is_loaded_and_added_to(tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    save(file, [measured(1), measured(2)])
    save(file, [measured(3)])
    found, notes = load(file)
    assert [t.plan.m for t in found] == [1, 2, 3]
    assert found[0] == measured(1)
    assert notes == []
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".plans")] == [], "no temporary file is left"


def save_many(path: str, start: int) -> None:
    for m in range(start, start + 20):
        save(path, [measured(m)])


def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    context = mp.get_context("forkserver")
    writers = [context.Process(target=save_many, args=(str(file), 100 * i)) for i in range(1, 4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
        assert writer.exitcode == 0
    found, notes = load(file)
    assert sorted(t.plan.m for t in found) == [100 * i + j for i in range(1, 4) for j in range(20)]
    assert notes == []


def document(**changes: object) -> str:
    entries = {tuning.key_of(measured(1).plan): measured(1).to_json()}
    good = {"format": tuning.FORMAT, "version": tuning.VERSION, "plans": {tuning.machine_name(): entries}}
    return json.dumps({**good, **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is ignored"),
        ('{"half', "is ignored"),
        ("[]", "not a file of weft overlap plans"),
        ('{"format": "another tool"}', "not a file of weft overlap plans"),
        (document(version=2), "version 2, this weft reads 1; tune again"),
        (document(plans=[]), "damaged"),
        (document(plans={"another machine": {}}), "none for"),
    ],
)
def test_a_file_that_is_no_good_is_reported_and_replaced(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "plans.json"
    file.write_text(text)
    found, notes = load(file)
    assert found == []
    assert len(notes) == 1
    assert message in notes[0]
    save(file, [measured(5)])
    assert load(file) == ([measured(5)], [])


def test_a_bad_entry_does_not_spoil_the_others(tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    key = tuning.key_of(measured(1).plan)
    entries = {key: measured(1).to_json(), "x": {"plan": "?"}, "y": 3, "z": measured(2).to_json()}
    file.write_text(document(plans={tuning.machine_name(): entries}))
    found, notes = load(file)
    assert found == [measured(1)]
    assert len(notes) == 3


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert load(tmp_path / "none.json")[0] == []
    assert load(tmp_path)[0] == [], "a directory is no file"


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_file_has_the_mode_of_any_new_file(tmp_path: Path, mask: int) -> None:
    path = tmp_path / "plans.json"
    before = os.umask(mask)
    try:
        tuning.save(path, [])
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    path.chmod(0o640)
    tuning.save(path, [])
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plans.json", "plans.json.lock"]

"""weft.trace(): nesting, threads, errors, and next to no cost when off."""

from __future__ import annotations

import contextvars
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from weft.timeline import Baseline, Event, Timeline, TracedCall, record
from weft.timeline.summary import CALL_COLUMNS
from weft.timeline.timeline import figures


def test_a_trace_records_spans_and_added_events(tmp_path: Path) -> None:
    with record.trace(name="run") as t:
        with record.span("compute", "matmul", lane="compute", flops=8):
            pass
        recorder = record.current()
        assert recorder is t
        recorder.add("send", "group 0", lane="comm", start=1.0, end=2.0, bytes=4)
    by_name = {e.name: e for e in t.timeline.events}
    assert (by_name["matmul"].kind, by_name["matmul"].lane, by_name["matmul"].flops) == (
        "compute",
        "compute",
        8,
    )
    assert (by_name["group 0"].seconds, by_name["group 0"].bytes) == (1.0, 4)
    assert {lane.lane for lane in t.summary().lanes} == {"compute", "comm"}
    t.save(tmp_path / "trace.json")
    assert Timeline.load(tmp_path / "trace.json") == t.timeline
    assert t.timeline.name == "run"


def test_without_a_trace_nothing_is_recorded_and_nothing_is_built() -> None:
    assert record.current() is None
    first: AbstractContextManager[None] = record.span("compute", "a", lane="x")
    assert first is record.span("send", "b", lane="y"), "off, every span is the same empty one"
    with first, first:
        pass


def test_a_trace_ends_with_its_block_also_when_it_raises() -> None:
    with (
        pytest.raises(RuntimeError, match="broken"),
        record.trace() as t,
        record.span("compute", "matmul", lane="compute"),
    ):
        raise RuntimeError("broken")
    assert record.current() is None
    assert [e.name for e in t.timeline.events] == ["matmul"]


def test_what_an_inner_trace_records_the_outer_one_records_too() -> None:
    with record.trace() as outer:
        with record.span("other", "before", lane="x"):
            pass
        with record.trace() as inner, record.span("other", "within", lane="x"):
            pass
        with record.span("other", "after", lane="x"):
            pass
    assert [e.name for e in inner.timeline.events] == ["within"]
    assert [e.name for e in outer.timeline.events] == ["before", "within", "after"]


def test_threads_add_to_the_recorder_that_they_are_handed() -> None:
    threads, each = 8, 500

    def work(recorder: record.Trace, number: int) -> None:
        assert record.current() is None, "a new thread does not inherit the trace; it is handed over"
        for i in range(each):
            recorder.add("send", f"{number}.{i}", lane=f"thread {number}", start=float(i), end=i + 1.0)

    with record.trace() as outer, record.trace() as inner:
        recorder = record.current()
        assert recorder is inner
        workers = [threading.Thread(target=work, args=(recorder, n)) for n in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    expected = {f"{n}.{i}" for n in range(threads) for i in range(each)}
    for trace in (inner, outer):
        assert len(trace.timeline.events) == threads * each
        assert {e.name for e in trace.timeline.events} == expected


def test_a_thread_that_runs_in_a_copy_of_the_context_sees_the_trace() -> None:
    def work() -> None:
        with record.span("recv", "group 1", lane="comm"):
            pass

    with record.trace() as t:
        worker = threading.Thread(target=contextvars.copy_context().run, args=(work,))
        worker.start()
        worker.join()
    assert [e.name for e in t.timeline.events] == ["group 1"]


def test_traces_of_two_threads_are_apart() -> None:
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with record.trace():
            inside.set()
            assert done.wait(30)

    worker = threading.Thread(target=other)
    worker.start()
    assert inside.wait(30)
    try:
        assert record.current() is None
    finally:
        done.set()
        worker.join()


def test_an_event_that_comes_late_is_kept() -> None:
    with record.trace() as t:
        pass
    t.add("send", "late", lane="comm", start=0.0, end=1.0)
    assert [e.name for e in t.timeline.events] == ["late"]


def test_a_call_has_its_own_events_and_the_traces_around_it_too() -> None:
    asked = []

    def baseline() -> Baseline:
        asked.append(1)
        return Baseline(1.0, 3.0, 2.0, 2.0)

    with record.trace() as outer, record.trace() as inner:
        first, unfinished = inner.call("matmul 8 x 8", baseline=baseline), inner.call("other")
        first.add("compute", "tiles", lane="compute", start=0.0, end=1.0)
        unfinished.add("send", "rows", lane="comm", start=0.0, end=1.0)
        first.end()
    assert asked == [], "nobody has looked yet"
    for trace in (outer, inner):
        (call,) = trace.calls
        assert [e.name for e in call.timeline.events] == ["matmul: tiles"]
        assert {e.name for e in trace.timeline.events} == {"matmul: tiles", "other: rows"}
        assert call.ect == call.seconds - 1.0
        (row,) = trace.summary().calls
        assert (row.what, row.count, row.seconds) == ("matmul 8 x 8", 1, call.seconds)
        table = trace.summary().call_table()
        assert len(table[0]) == len(table[1])
    assert record.Trace().summary().call_table() == []


def traced_call(seconds: float, *, is_setup: bool = False, reason: str = "") -> TracedCall:
    alone = Timeline([Event("compute", "compute", "matmul", 0.0, seconds)])
    return TracedCall("matmul 8 x 8", "", seconds, alone, Baseline(1.0, 3.0), None, reason, is_setup)


def test_calls_that_made_buffers_are_left_out_where_there_are_others() -> None:
    (row,) = figures([traced_call(900.0, is_setup=True), traced_call(1.5), traced_call(2.5)])
    assert (row.count, row.setups, row.seconds, row.e_overlap) == (3, 1, 2.0, 0.5)
    assert row.note == "set-up: 1 of 3 calls, left out"
    (row,) = figures([traced_call(900.0, is_setup=True)])
    assert (row.seconds, row.e_overlap, row.ect) == (900.0, None, 899.0)
    assert "set-up" in row.note
    assert row.cells(1.0)[CALL_COLUMNS.index("E_overlap") + 1] == "-"


def test_a_summary_says_why_each_kind_of_call_went_as_it_did() -> None:
    with record.trace() as t:
        for what, why in (("a 8 x 8", "one rank"), ("a 8 x 8", "one rank"), ("b 8 x 8", "not worth it")):
            t.call(what, reason=why).end()
        t.call("c 8 x 8").end()
    assert t.summary().call_notes() == ["a 8 x 8: one rank", "b 8 x 8: not worth it"]
    assert str(t.summary()).splitlines()[-2:] == t.summary().call_notes()

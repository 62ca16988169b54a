"""What jobs on texts have in common: threads, repeated inputs, parts and how they are merged."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from test_embed import TEXTS, Counting, expected, texts_file
from test_embed_resume import ENDINGS

from weft.jobs.embed import EmbedOptions, run
from weft.jobs.embed.job import run_task
from weft.jobs.embed.tasks import EmbedTask
from weft.jobs.texts.batches import Kept
from weft.jobs.texts.flow import Ahead, Behind
from weft.jobs.texts.parts import Shard, merge

# ---- threads ---------------------------------------------------------------------------------------------------------


def test_ahead_makes_no_more_than_it_has_room_for():
    made = []

    def items():
        for i in range(100):
            made.append(i)
            yield i

    with Ahead(items(), room=2) as ahead:
        iterator = iter(ahead)
        assert [next(iterator), next(iterator)] == [0, 1]
        time.sleep(0.3)
        assert len(made) <= 6
    assert ahead.has_ended
    assert len(made) <= 6


def test_what_is_raised_ahead_comes_in_its_turn():
    def items():
        yield 1
        raise ValueError("after one")

    found = []
    with Ahead(items(), room=5) as ahead, pytest.raises(ValueError, match="after one"):  # noqa: PT012
        for item in ahead:
            found.append(item)
    assert found == [1]


def test_behind_does_nothing_after_an_error():
    done = []

    def work(item):
        if item == 2:
            raise OSError("full")
        done.append(item)
        return item

    with Behind(work, room=1) as behind:  # noqa: SIM117
        with pytest.raises(OSError, match="full"):  # noqa: PT012
            for i in range(50):
                behind.put(i)
            behind.finish()
    assert done == [0, 1]


def test_leaving_waits_for_what_was_put():
    done = []

    def slow(item):
        time.sleep(0.05)
        done.append(item)

    with pytest.raises(KeyboardInterrupt), Behind(slow, room=4) as behind:  # noqa: PT012
        for i in range(3):
            behind.put(i)
        raise KeyboardInterrupt
    assert done == [0, 1, 2]


def test_computing_and_writing_are_beside_tokenizing(tmp_path):
    threads = {}

    class Named(Counting):
        def tokenize(self, texts):
            threads["tokenize"] = threading.current_thread().name
            return super().tokenize(texts)

        def embed(self, ids):
            threads["embed"] = threading.current_thread().name
            return super().embed(ids)

    run(EmbedOptions(texts_file(tmp_path, TEXTS), tmp_path / "out.npy"), Named())
    assert threads["embed"] == threading.main_thread().name != threads["tokenize"]


def test_a_job_that_waits_for_a_pipe_can_be_stopped(tmp_path):
    program = """
import sys
from test_embed import Counting
from pathlib import Path
from weft.jobs.embed import EmbedOptions, run
try:
    run(EmbedOptions(None, Path(sys.argv[1]), token_budget=1), Counting(), report=lambda p: print(p.rows, flush=True))
except KeyboardInterrupt:
    print("stopped", flush=True)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "out.npy")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.path.dirname(__file__)},
    )  # fmt: skip
    try:
        child.stdin.write(b"".join(b"%d\n" % i for i in range(600)))
        child.stdin.flush()
        assert child.stdout.readline() == b"1\n"
        child.send_signal(signal.SIGINT)
        out, err = child.stdout.read(), child.stderr.read()
        assert child.wait(timeout=60) == 0, err
        assert out.endswith(b"stopped\n")
        assert b"Fatal" not in err
    finally:
        child.kill()
        child.wait()


# ---- equal texts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 7, 1000])
@pytest.mark.parametrize("slots", [1, 2, 3, 8192])
def test_equal_texts_are_computed_once(tmp_path, monkeypatch, budget, slots):
    monkeypatch.setattr("weft.jobs.texts.batches._MOST_KEPT", slots)
    random = np.random.default_rng(slots * 10 + budget)
    texts = [chr(97 + i) * (1 + i % 3) for i in random.integers(0, 9, 700)]
    encoder = Counting()
    run(EmbedOptions(texts_file(tmp_path, texts), tmp_path / "out.npy", token_budget=budget), encoder)
    assert np.array_equal(np.load(tmp_path / "out.npy"), expected(texts))
    computed = sum(map(len, encoder.batches))
    assert computed == 9 if slots == 8192 else 9 <= computed < len(texts)


def test_tokens_of_equal_texts_are_counted(tmp_path):
    done = run(EmbedOptions(texts_file(tmp_path, ["abc", "d", "abc", "abc"]), tmp_path / "out.npy"), Counting())
    assert (done.rows, done.tokens) == (4, 10)


def test_what_is_kept_is_bounded():
    assert Kept(384).slots == 8192
    assert Kept(4096).slots == 1024
    assert Kept(None).slots == 0


# ---- parts -----------------------------------------------------------------------------------------------------------


def sharded(tmp_path, options, count, make, ending):
    parts = []
    for number in range(1, count + 1):
        part = tmp_path / f"part{number}.{ending}"
        asked = EmbedOptions(**{**options, "out": part, "shard": Shard(number, count)})
        run_task(asked, make())
        parts.append(part)
    return parts


@pytest.mark.parametrize("count", [1, 2, 3, 9])
@pytest.mark.parametrize("ending", [*ENDINGS, "jsonl"])
def test_parts_give_the_bytes_of_the_whole(tmp_path, ending, count):
    source = tmp_path / "in.jsonl"
    lines = [json.dumps(text) if text != "f" * 40 else '{"bad' for text in TEXTS * 30]
    source.write_text("\n".join(lines))
    options = {"source": source, "token_budget": 9, "skip_bad": True, "about": {"model": "m"}}
    whole = tmp_path / f"whole.{ending}"
    run_task(EmbedOptions(**options, out=whole), EmbedTask(Counting()))
    parts = sharded(tmp_path, options, count, lambda: EmbedTask(Counting()), ending)
    merged = tmp_path / f"merged.{ending}"
    assert merge(merged, parts[::-1]) == 180
    assert merged.read_bytes() == whole.read_bytes()
    skipped = [path.with_name(path.name + ".skipped").read_bytes() for path in (merged, whole)]
    assert skipped[0] == skipped[1]
    assert not list(tmp_path.glob("*.new"))


def test_parts_of_more_rows_than_a_block(tmp_path):
    pytest.importorskip("pyarrow")
    source = texts_file(tmp_path, [f"{i:05d}" for i in range(10_000)])
    run(EmbedOptions(source, tmp_path / "whole.parquet"), Counting())
    parts = sharded(tmp_path, {"source": source}, 3, lambda: EmbedTask(Counting()), "parquet")
    merge(tmp_path / "merged.parquet", parts)
    assert (tmp_path / "merged.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_a_part_that_was_stopped_goes_on(tmp_path):
    source = texts_file(tmp_path, TEXTS)
    options = EmbedOptions(source, tmp_path / "a.npy", token_budget=2, shard=Shard(1, 2))
    with pytest.raises(KeyboardInterrupt):
        run(options, Counting("g"))
    with pytest.raises(KeyboardInterrupt):
        run(options, Counting("j"))
    with pytest.raises(ValueError, match="another job: shard differ"):
        run(EmbedOptions(source, tmp_path / "a.npy", shard=Shard(2, 2)), Counting())
    run(options, Counting())
    assert np.array_equal(np.load(tmp_path / "a.npy"), expected(TEXTS[::2]))


def test_parts_that_do_not_belong_together(tmp_path):
    source = texts_file(tmp_path, TEXTS)
    one, two = sharded(tmp_path, {"source": source}, 2, lambda: EmbedTask(Counting()), "npy")
    out = tmp_path / "out.npy"
    with pytest.raises(ValueError, match=r"got 1 of 2 parts: 2/2 missing"):
        merge(out, [one])
    with pytest.raises(ValueError, match=r"got 2 of 2 parts: 2/2 missing; 1/2 twice"):
        merge(out, [one, one])
    with pytest.raises(ValueError, match="as a part and as the output"):
        merge(one, [one, two])
    with pytest.raises(ValueError, match=r"ends in \.parquet"):
        merge(tmp_path / "out.parquet", [one, two])
    texts_file(tmp_path, [*TEXTS[:-1], "other"])
    other = tmp_path / "other.npy"
    run(EmbedOptions(source, other, shard=Shard(2, 2)), Counting())
    with pytest.raises(ValueError, match=r"parts of different jobs: input differ"):
        merge(out, [one, other])
    two.write_bytes(two.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"has .* bytes, expected .*; compute it again"):
        merge(out, [one, two])
    (tmp_path / "part2.npy.shard").write_text("{}")
    with pytest.raises(ValueError, match=r"part2\.npy\.shard is broken"):
        merge(out, [one, two])
    (tmp_path / "part2.npy.shard").unlink()
    with pytest.raises(ValueError, match="is no part of a job, or it was moved alone"):
        merge(out, [one, two])
    assert not out.exists()


def test_a_whole_job_forgets_that_its_output_was_a_part(tmp_path):
    source, out = texts_file(tmp_path, TEXTS), tmp_path / "out.npy"
    run(EmbedOptions(source, out, shard=Shard(1, 2)), Counting())
    assert (tmp_path / "out.npy.shard").exists()
    run(EmbedOptions(source, out, resume=False), Counting())
    assert not (tmp_path / "out.npy.shard").exists()


def test_shards_are_parsed():
    assert str(Shard.parse("3/4")) == "3/4"
    for text in ("", "1", "0/4", "5/4", "1/0", "a/b", "1/2/3", "-1/4", "²/4"):
        with pytest.raises(ValueError, match=r"got the shard"):
            Shard.parse(text)

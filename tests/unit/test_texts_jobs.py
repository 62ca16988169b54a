"""What jobs on texts have in common: threads, repeated inputs, parts and how they are merged; ranking, classifying."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from test_embed import TEXTS, Counting, expected, texts_file
from test_embed_resume import ENDINGS
from test_scorer import classifier
from typer.testing import CliRunner

from weft.cli.app import app
from weft.jobs.embed import EmbedOptions, Scorer, run
from weft.jobs.embed.job import run_task
from weft.jobs.embed.tasks import ClassifyTask, EmbedTask, RerankTask
from weft.jobs.texts.batches import Kept
from weft.jobs.texts.flow import Ahead, Behind
from weft.jobs.texts.parts import Shard, merge
from weft.jobs.texts.readers import BadRecord, RecordShape, read

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
        child.stdin.write(b"a\n" * 600)
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
        run(options, Counting("i"))
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


# ---- ranking and classifying -----------------------------------------------------------------------------------------

QUERIES = [
    {"query": "the fox", "documents": ["a fox", "long " * 30, "", "the fox"]},
    {"query": "a", "documents": []},
    {"query": "b", "documents": "one alone"},
    {"query": "the fox", "documents": ["the fox", "x"]},
]


def queries(path, records=QUERIES):
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return path


def scores(scorer, query, documents):
    pairs = [(query, document) for document in documents]
    return scorer.activate(scorer.score(scorer.tokenize(pairs)))[:, 0].tolist()


@pytest.fixture(scope="module")
def ranker(tmp_path_factory):
    return classifier(tmp_path_factory.mktemp("ranker"))


@pytest.mark.parametrize("budget", [1, 50, 4096])
def test_documents_are_ranked(tmp_path, ranker, budget):
    scorer, out = Scorer(ranker), tmp_path / "out.jsonl"
    options = EmbedOptions(
        queries(tmp_path / "in.jsonl"), out, column="query", beside="documents", lists=True, token_budget=budget
    )
    done = run_task(options, RerankTask(scorer))
    assert done.rows == len(QUERIES)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for record, row in zip(QUERIES, rows, strict=True):
        given = [record["documents"]] if isinstance(record["documents"], str) else record["documents"]
        alone = scores(scorer, record["query"], given)
        assert row["index"] == sorted(range(len(given)), key=lambda i: (-alone[i], i))
        assert row["score"] == [alone[i] for i in row["index"]]  # the same bits, whatever the batch


def test_documents_in_their_order_or_only_the_best(tmp_path, ranker):
    scorer = Scorer(ranker)
    options = {"source": queries(tmp_path / "in.jsonl"), "column": "query", "beside": "documents", "lists": True}
    run_task(EmbedOptions(**options, out=tmp_path / "raw.jsonl"), RerankTask(scorer, raw=True, in_order=True))
    row = json.loads((tmp_path / "raw.jsonl").read_text().splitlines()[0])
    assert row["index"] == [0, 1, 2, 3]
    pairs = [(QUERIES[0]["query"], document) for document in QUERIES[0]["documents"]]
    assert row["score"] == scorer.score(scorer.tokenize(pairs))[:, 0].tolist()
    run_task(EmbedOptions(**options, out=tmp_path / "top.jsonl"), RerankTask(scorer, top=2))
    assert [len(json.loads(line)["index"]) for line in (tmp_path / "top.jsonl").read_text().splitlines()] == [
        2,
        0,
        1,
        2,
    ]


def test_ranking_to_parquet_and_from_csv_and_text(tmp_path, ranker):
    parquet = pytest.importorskip("pyarrow.parquet")
    scorer = Scorer(ranker)
    (tmp_path / "in.csv").write_text('query,document\n"the fox",a\n"b, c",the\n')
    out = tmp_path / "out.parquet"
    run_task(EmbedOptions(tmp_path / "in.csv", out, column="query", beside="document", lists=True), RerankTask(scorer))
    table = parquet.read_table(out).to_pydict()
    wanted = [scores(scorer, "the fox", ["a"]), scores(scorer, "b, c", ["the"])]
    assert table == {"index": [[0], [0]], "score": wanted}
    (tmp_path / "in.txt").write_text("a\nthe\n")
    by_text = EmbedOptions(tmp_path / "in.txt", tmp_path / "o.jsonl", beside="documents", query="the fox", lists=True)
    run_task(by_text, RerankTask(scorer))
    rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [row["score"] for row in rows] == [scores(scorer, "the fox", [text]) for text in ("a", "the")]


def test_equal_pairs_are_scored_once(tmp_path, ranker, monkeypatch):
    scorer, seen = Scorer(ranker), []
    real = scorer.score
    monkeypatch.setattr(scorer, "score", lambda ids: (seen.extend(ids), real(ids))[1])
    source = queries(tmp_path / "in.jsonl", [{"query": "a", "documents": ["b", "c", "b"]}] * 40)
    run_task(
        EmbedOptions(source, tmp_path / "o.jsonl", column="query", beside="documents", lists=True), RerankTask(scorer)
    )
    assert len(seen) == 2


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_texts_are_classified(tmp_path, ending):
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    scorer = Scorer(classifier(tmp_path / "m", labels=3, names=["no", "maybe", "yes"]))
    texts = ["a", "the fox", "", "long " * 30, "a"]
    out = tmp_path / f"out.{ending}"
    run_task(EmbedOptions(texts_file(tmp_path, texts), out), ClassifyTask(scorer))
    expected_rows = scorer.activate(scorer.score(scorer.tokenize(texts)))
    if ending == "jsonl":
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    else:
        table = pytest.importorskip("pyarrow.parquet").read_table(out)
        rows = table.to_pylist()
        assert json.loads(table.schema.metadata[b"labels"]) == scorer.labels
    for row, scored in zip(rows, expected_rows, strict=True):
        assert row["scores"] == scored.tolist()
        assert row["label"] == scorer.labels[int(scored.argmax())]
        assert row["score"] == float(scored.max())


def test_parts_of_scores_give_the_bytes_of_the_whole(tmp_path, ranker):
    pytest.importorskip("pyarrow")
    scorer, source = Scorer(ranker), queries(tmp_path / "in.jsonl", QUERIES * 5)
    options = {"source": source, "column": "query", "beside": "documents", "lists": True}
    for ending in ("jsonl", "parquet"):
        whole, merged = tmp_path / f"whole.{ending}", tmp_path / f"merged.{ending}"
        run_task(EmbedOptions(**options, out=whole), RerankTask(scorer))
        merge(merged, sharded(tmp_path, options, 3, lambda: RerankTask(scorer), ending))
        assert merged.read_bytes() == whole.read_bytes()


def test_a_text_without_tokens_has_no_score(tmp_path):
    from embed_folders import tokenizer

    path = classifier(tmp_path / "m", labels=2)
    tokenizer(special=False).save_pretrained(path)
    run_task(EmbedOptions(texts_file(tmp_path, ["a", "", "b"]), tmp_path / "o.jsonl"), ClassifyTask(Scorer(path)))
    rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert rows[1] == {"label": None, "score": None, "scores": None}
    assert rows[0]["label"] is not None


def test_weights_that_give_no_numbers(tmp_path, ranker):
    scorer = Scorer(ranker)
    scorer.score = lambda ids: torch.full((len(ids), 1), float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        run_task(EmbedOptions(texts_file(tmp_path, ["a"]), tmp_path / "o.jsonl"), ClassifyTask(scorer))


def test_bad_records_of_queries(tmp_path):
    shape = RecordShape("query", "documents", lists=True)
    lines = ['{"query": "a", "documents": [3]}', '{"query": "a"}', '{"query": 1, "documents": []}', '["a"]']
    (tmp_path / "in").write_text("\n".join(lines))
    with open(tmp_path / "in", "rb") as stream:
        found = list(read(stream, kind="jsonl", column=shape))
    assert [type(record) for record in found] == [BadRecord] * 4
    assert [record.reason for record in found] == [
        "document 0 is int, not a string", "no key 'documents'; there are 'query'", "the query is int, not a string",
        "list, expected an object with 'query', 'documents'",
    ]  # fmt: skip
    with open(tmp_path / "in", "rb") as stream, pytest.raises(ValueError, match="pass --query"):
        read(stream, kind="txt", column=shape)


def test_what_cannot_be_ranked(tmp_path, ranker):
    with pytest.raises(ValueError, match="has the labels LABEL_0, LABEL_1, expected one"):
        RerankTask(Scorer(classifier(tmp_path, labels=2)))
    for options in ({"top": 0}, {"top": 2, "in_order": True}):
        with pytest.raises(ValueError, match="got the best"):
            RerankTask(Scorer(ranker), **options)
    with pytest.raises(ValueError, match=r"for scores, expected a name that ends in \.jsonl or \.parquet"):
        EmbedOptions(texts_file(tmp_path, ["a"]), tmp_path / "out.npy").check("CrossEncoder")


# ---- the commands ----------------------------------------------------------------------------------------------------


def weft(*args):
    done = CliRunner().invoke(app, [str(a) for a in args])
    assert done.exit_code == 0, done.output
    return done


def test_the_commands(tmp_path, ranker):
    source = queries(tmp_path / "in.jsonl")
    weft("rerank", source, "-o", tmp_path / "out.jsonl", "--model", ranker, "--threads", 1)
    for number in (1, 2):
        weft("rerank", source, "-o", tmp_path / f"{number}.jsonl", "--model", ranker, "--shard", f"{number}/2")
    weft("rerank", "merge", tmp_path / "merged.jsonl", tmp_path / "1.jsonl", tmp_path / "2.jsonl")
    assert (tmp_path / "merged.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    weft("classify", source, "-o", tmp_path / "c.jsonl", "--model", ranker, "--column", "query")
    assert len((tmp_path / "c.jsonl").read_text().splitlines()) == 4
    pairs = queries(tmp_path / "pairs.jsonl", [{"text": "a", "other": "b"}])
    weft("classify", pairs, "-o", tmp_path / "p.jsonl", "--model", ranker, "--pair", "other")
    row = json.loads((tmp_path / "p.jsonl").read_text())
    assert row["scores"] == scores(Scorer(ranker), "a", ["b"])
    other = CliRunner().invoke(app, ["rerank", str(source), "-o", str(tmp_path / "out.npy"), "--model", str(ranker)])
    assert other.exit_code == 2
    assert "expected a name that ends in .jsonl or .parquet" in other.output

"""Documents ranked and texts classified by jobs: the scores that they get alone, whatever the batch and the part."""

import json

import pytest
import torch
from test_embed import texts_file
from test_scorer import classifier
from test_texts_jobs import sharded
from typer.testing import CliRunner

from weft.cli.app import app
from weft.jobs.embed import EmbedOptions, Scorer
from weft.jobs.embed.job import run_task
from weft.jobs.embed.tasks import ClassifyTask, RerankTask
from weft.jobs.texts.parts import merge
from weft.jobs.texts.readers import BadRecord, RecordShape, read

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

"""`weft embed` to JSON lines: sparse vectors, a vector for each token, and dense ones; each as encode gives it."""

import json
import re
import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("sentence_transformers", minversion="6")

from embed_folders import TEXTS, WIDTH, folder, tokenizer
from library_models import KINDS, inference_free, late, sparse_codes, splade, transformer
from test_embed import Counting, expected, texts_file
from typer.testing import CliRunner

from weft.cli.app import app
from weft.jobs.embed import EmbedOptions, Encoder, ModuleEncoder, open_encoder, run
from weft.jobs.texts.writers import EmbeddingWriter

EXPANSION = {"strategy": "fixed", "length": 24, "attend": False}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def saved(tmp_path, model, name="m"):
    model.save_pretrained(str(tmp_path / name), create_model_card=False)
    return tmp_path / name


def texts_of(tmp_path, texts=TEXTS):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def lines(path):
    text = path.read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def embedded(tmp_path, model, *, texts=TEXTS, budget=32, name="out.jsonl", **options):
    encoder = open_encoder(model, **options)
    out = tmp_path / name
    done = run(EmbedOptions(texts_of(tmp_path, texts), out, token_budget=budget, about=encoder.identity()), encoder)
    assert done.rows == len(texts)
    return lines(out)


def theirs(path, kind, how="encode", texts=TEXTS, **options):
    import sentence_transformers

    model = getattr(sentence_transformers, kind)(str(path), **KINDS)
    return getattr(model, how)(texts, batch_size=1, **options)


def assert_sparse(got, want):
    """Same words of the vocabulary, but for values that rounding may make zero; values as near as packing is."""
    assert len(got) == len(want)
    for line, row in zip(got, want.to_dense().float(), strict=True):
        assert list(line) == ["indices", "values"]
        assert line["indices"] == sorted(set(line["indices"]))
        assert all(np.float32(value) == value != 0 for value in line["values"])
        dense = torch.zeros_like(row)
        dense[line["indices"]] = torch.tensor(line["values"])
        torch.testing.assert_close(dense, row, atol=1e-5, rtol=1e-5)


def assert_vectors(got, want):
    assert len(got) == len(want)
    for line, rows in zip(got, want, strict=True):
        assert list(line) == ["vectors"]
        made = torch.tensor(line["vectors"]).reshape(-1, rows.shape[1])
        torch.testing.assert_close(made, rows.float(), atol=1e-5, rtol=1e-5)


# ---- as encode gives it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [splade, lambda p: splade(p, strategy="sum"), sparse_codes], ids=["max", "sum", "codes"]
)
def test_sparse(tmp_path, make):
    path = saved(tmp_path, make(tmp_path / "t"))
    got = embedded(tmp_path, path)
    assert_sparse(got, theirs(path, "SparseEncoder"))
    assert len({len(line["indices"]) for line in got}) > 1 or make is sparse_codes
    assert all(line["indices"] for line in got)


def test_sparse_with_few_active_dims(tmp_path):
    model = splade(tmp_path / "t")
    model.max_active_dims = 5
    path = saved(tmp_path, model)
    got = embedded(tmp_path, path)
    assert {len(line["indices"]) for line in got} == {5}
    assert_sparse(got, theirs(path, "SparseEncoder"))


@pytest.mark.parametrize("task", ["query", "document"])
def test_sparse_by_routes(tmp_path, task):
    path = saved(tmp_path, inference_free(tmp_path / "t"))
    assert_sparse(embedded(tmp_path, path, task=task), theirs(path, "SparseEncoder", f"encode_{task}"))


@pytest.mark.parametrize(
    "expansion", [None, EXPANSION, {**EXPANSION, "attend": True}, {**EXPANSION, "strategy": "min"}]
)
def test_vectors_of_tokens(tmp_path, expansion):
    model = late(tmp_path / "t", expansion=expansion)
    model.prompts = {"query": "Ask ", "document": "Text "}
    path = saved(tmp_path, model)
    documents = theirs(path, "MultiVectorEncoder", "encode_document")
    got = embedded(tmp_path, path)
    assert_vectors(got, documents)
    assert embedded(tmp_path, path, task="document", name="same.jsonl") == got
    queries = embedded(tmp_path, path, task="query", name="queries.jsonl")
    assert_vectors(queries, theirs(path, "MultiVectorEncoder", "encode_query"))
    assert queries != got
    if expansion is not None:
        with pytest.raises(ValueError, match=r"up to 24 tokens; leave --max-length out"):
            open_encoder(path, task="query", max_length=9)


def test_lengths_of_tasks(tmp_path):
    """A folder's length for documents holds, and gives way to one that is asked for."""
    model = late(tmp_path / "t", skip=())
    model[0].document_length, model[0].query_length = 12, 7
    path = saved(tmp_path, model)
    for task, length in (("document", 12), ("query", 7)):
        encoder = open_encoder(path, task=task)
        assert encoder.max_length == max(map(len, encoder.tokenize(TEXTS))) == length
        encoder = open_encoder(path, task=task, max_length=9)
        assert encoder.max_length == max(map(len, encoder.tokenize(TEXTS))) == 9


def test_texts_without_vectors(tmp_path):
    """All tokens are left out, or there are none."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    skip = ["a", "b", "[CLS]", "[SEP]"]
    path = saved(tmp_path, late(tmp_path / "t", skip=skip))
    assert embedded(tmp_path, path, texts=["a", "c", "b"])[::2] == [{"vectors": []}] * 2
    first = transformer(tmp_path / "u", head="ForMaskedLM", task="fill-mask")
    tokenizer(special=False).save_pretrained(tmp_path / "u")
    first = type(first)(str(tmp_path / "u"), transformer_task="fill-mask", model_kwargs={"local_files_only": True})
    path = saved(tmp_path, SparseEncoder(modules=[first, SpladePooling()], device="cpu"), "none")
    got = embedded(tmp_path, path, texts=["c", "", "d e"], name="sparse.jsonl")
    assert got[1] == {"indices": [], "values": []}
    assert got[0]["indices"]
    assert got[2]["indices"]


@pytest.mark.parametrize("make", [Encoder, ModuleEncoder])
def test_dense(tmp_path, make):
    path = folder(tmp_path / "m")
    encoder = make(path)
    run(EmbedOptions(texts_of(tmp_path), tmp_path / "out.jsonl", token_budget=32), encoder)
    run(EmbedOptions(texts_of(tmp_path), tmp_path / "out.npy", token_budget=32), encoder)
    got = lines(tmp_path / "out.jsonl")
    assert all(list(line) == ["vector"] for line in got)
    assert np.array_equal(np.array([line["vector"] for line in got], np.float32), np.load(tmp_path / "out.npy"))
    assert np.load(tmp_path / "out.npy").shape == (len(TEXTS), WIDTH)


# ---- bits, and going on ----------------------------------------------------------------------------------------------

MODELS = {"sparse": splade, "codes": sparse_codes, "tokens": late}
FAMILIES = {f: lambda path, f=f: splade(path, f, strategy="sum") for f in ("DistilBert", "Roberta", "ModernBert")}


@pytest.mark.parametrize("name", [*MODELS, *FAMILIES])
def test_bits_do_not_depend_on_the_batch(tmp_path, name):
    path = saved(tmp_path, {**MODELS, **FAMILIES}[name](tmp_path / "t"))
    alone = embedded(tmp_path, path, budget=1)
    if name in FAMILIES:
        assert_sparse(alone, theirs(path, "SparseEncoder"))
    assert embedded(tmp_path, path, budget=10_000) == alone
    assert embedded(tmp_path, path, budget=50, texts=TEXTS[::-1]) == alone[::-1]


def test_layers_take_a_batch_at_once(tmp_path, monkeypatch):
    """And the head one text: texts one by one would be slow."""
    from weft.packed.huggingface import PackedBase

    encoder = open_encoder(saved(tmp_path, splade(tmp_path / "t")))
    rows, forward = [], PackedBase.weft_forward

    def count(base, original, arguments):
        rows.append(len(arguments["input_ids"]))
        return forward(base, original, arguments)

    monkeypatch.setattr(PackedBase, "weft_forward", count)
    assert len(encoder.embed(encoder.tokenize(TEXTS))) == len(TEXTS)
    assert rows == [len(TEXTS)]


class Stopping:
    """Another encoder, until `calls` batches are done."""

    def __init__(self, encoder, calls):
        self._encoder, self._calls = encoder, calls
        self.kind, self.width, self.tokenize = encoder.kind, encoder.width, encoder.tokenize

    def embed(self, ids):
        self._calls -= 1
        if self._calls < 0:
            raise KeyboardInterrupt
        return self._encoder.embed(ids)


@pytest.mark.parametrize("name", MODELS)
def test_going_on_gives_the_bytes_of_one_run(tmp_path, name):
    path = saved(tmp_path, MODELS[name](tmp_path / "t"))
    embedded(tmp_path, path, name="whole.jsonl")
    encoder, out = open_encoder(path), tmp_path / "out.jsonl"
    options = EmbedOptions(texts_of(tmp_path), out, token_budget=20, about=encoder.identity())
    for calls, torn in ((2, b'{"indices": [1, 2'), (1, b""), (1, b'{"vectors": []}\n{"vec')):
        with pytest.raises(KeyboardInterrupt):
            run(options, Stopping(encoder, calls))
        assert not out.exists()
        partial, journal = (tmp_path / f"out.jsonl.{end}" for end in ("partial", "journal"))
        counted = json.loads(journal.read_text())
        assert counted["line_bytes"] == partial.stat().st_size > 0
        assert counted["rows"] == len(lines(partial))
        with open(partial, "ab") as file:
            file.write(torn)
    run(options, encoder)
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert sorted(p.name for p in tmp_path.glob("out*")) == ["out.jsonl"]


def test_lines_that_are_lost_and_other_jobs(tmp_path):
    path = saved(tmp_path, late(tmp_path / "t"))
    encoder, out = open_encoder(path), tmp_path / "out.jsonl"
    options = EmbedOptions(texts_of(tmp_path), out, token_budget=20, about=encoder.identity())
    with pytest.raises(KeyboardInterrupt):
        run(options, Stopping(encoder, 2))
    queries = open_encoder(path, task="query")
    with pytest.raises(ValueError, match="another job: task"):
        run(EmbedOptions(options.source, out, token_budget=20, about=queries.identity()), queries)
    partial = tmp_path / "out.jsonl.partial"
    partial.write_bytes(partial.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"has lost what .*journal counts"):
        run(options, encoder)


def test_stopped_when_only_the_journal_was_left(tmp_path, monkeypatch):
    texts = ["ab", "c", "def"]
    options = EmbedOptions(texts_file(tmp_path, texts), tmp_path / "out.jsonl", token_budget=2)
    finish = EmbeddingWriter.finish

    def stop(writer):
        journal = writer.out.with_name("out.jsonl.journal")
        finish(writer)
        shutil.copy(tmp_path / "kept", journal)
        raise KeyboardInterrupt

    def keep(writer, journal):
        replace(writer, journal)
        shutil.copy(tmp_path / "out.jsonl.journal", tmp_path / "kept")

    replace = EmbeddingWriter._replace_journal
    with monkeypatch.context() as patch:
        patch.setattr(EmbeddingWriter, "finish", stop)
        patch.setattr(EmbeddingWriter, "_replace_journal", keep)
        with pytest.raises(KeyboardInterrupt):
            run(options, Counting())
    whole = options.out.read_bytes()
    again = Counting()
    run(options, again)
    assert again.batches == []
    assert options.out.read_bytes() == whole
    assert np.array_equal([line["vector"] for line in lines(options.out)], expected(texts))


# ---- the command, and what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("texts", [TEXTS[:3], []], ids=["three", "none"])
def test_the_command(tmp_path, texts):
    path = saved(tmp_path, splade(tmp_path / "t"))
    source = texts_of(tmp_path, texts)
    out = tmp_path / "out.jsonl"
    done = CliRunner().invoke(app, ["embed", str(source), "-o", str(out), "--model", str(path)])
    assert done.exit_code == 0, done.output
    assert f"wrote {len(texts)} embeddings" in done.output
    assert len(lines(out)) == len(texts)


@pytest.mark.parametrize("kind", ["SparseEncoder", "MultiVectorEncoder"])
@pytest.mark.parametrize("ending", ["npy", "safetensors", "parquet"])
def test_files_of_one_width_are_refused(tmp_path, kind, ending):
    """Before the model is loaded: this one has no weights."""
    path = tmp_path / "m"
    path.mkdir()
    (path / "config_sentence_transformers.json").write_text(json.dumps({"model_type": kind}))
    message = rf"out\.{ending} for a {kind}, whose rows differ in length; expected a name that ends in \.jsonl"
    done = CliRunner().invoke(
        app, ["embed", str(texts_of(tmp_path)), "-o", str(tmp_path / f"out.{ending}"), "--model", str(path)]
    )
    assert done.exit_code == 2
    assert re.search(message, " ".join(done.output.split()))
    encoder = Counting()
    encoder.kind = kind
    with pytest.raises(ValueError, match=message):
        run(EmbedOptions(texts_of(tmp_path), tmp_path / f"out.{ending}"), encoder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_json_has_no_word_for(tmp_path, bad):
    class Broken(Counting):
        def embed(self, ids):
            rows = super().embed(ids)
            rows[:, 2] = torch.where(rows[:, 0] == 40, bad, rows[:, 2])
            return rows

    options = EmbedOptions(texts_file(tmp_path, ["abc", "", "f" * 40]), tmp_path / "out.jsonl", token_budget=4)
    with pytest.raises(ValueError, match="embedding of text 2 has values that are not finite"):
        run(options, Broken())
    assert len(lines(tmp_path / "out.jsonl.partial")) == 2

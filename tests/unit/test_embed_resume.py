"""`weft embed` stopped anywhere and started again: the rows of one run that was never stopped, or a refusal by name."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import pytest
from test_embed import TEXTS, Counting, expected, texts_file

from weft.jobs.embed.job import EmbedOptions, run
from weft.jobs.texts import writers
from weft.jobs.texts.writers import EmbeddingWriter

ENDINGS = ["npy", "safetensors", "parquet"]


def load(out):
    if out.suffix == ".npy":
        return np.load(out)
    if out.suffix == ".safetensors":
        from safetensors.numpy import load_file

        return load_file(out)["embeddings"]
    table = pytest.importorskip("pyarrow.parquet").read_table(out)
    return np.array(table.column("embedding").to_pylist(), dtype=np.float32)


def stopped(options, at="g"):
    """Runs until a text that begins with `at`."""
    with pytest.raises(KeyboardInterrupt):
        run(options, Counting(at))


def read_from(monkeypatch, texts):
    """Standard input with these lines."""
    read_end, write_end = os.pipe()
    os.write(write_end, "".join(t + "\n" for t in texts).encode())
    os.close(write_end)
    monkeypatch.setattr(sys, "stdin", os.fdopen(read_end))


# ---- the input -------------------------------------------------------------------------------------------------------

OTHER = [t.upper() for t in TEXTS]


def test_another_standard_input_is_not_taken_for_the_first(tmp_path, monkeypatch):
    options = EmbedOptions(None, tmp_path / "out.npy", token_budget=3)
    read_from(monkeypatch, TEXTS)
    stopped(options)
    for texts in (OTHER, ["abc", "", "dX", *TEXTS[3:]], TEXTS[3:]):
        read_from(monkeypatch, texts)
        with pytest.raises(ValueError, match=r"first 4 records of the input are not those .*; pass --restart"):
            run(options, Counting())
    read_from(monkeypatch, TEXTS[:3])
    with pytest.raises(ValueError, match=r"input has 3 records, of which 4 were embedded before"):
        run(options, Counting())
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match="standard input is closed"):
        run(options, Counting())
    read_from(monkeypatch, TEXTS)
    run(options, Counting())
    assert np.array_equal(np.load(options.out), expected(TEXTS))


def test_a_file_is_known_by_what_was_read_of_it(tmp_path):
    """Not by its name, its size or its first bytes: what is not embedded yet may change."""
    long = "x" * 70_000
    texts = [long, "b", "c", "g", "h"]
    options = EmbedOptions(texts_file(tmp_path, texts), tmp_path / "out.npy", token_budget=2)
    stopped(options)
    texts_file(tmp_path, [long, "b", "C", "g", "h"])
    with pytest.raises(ValueError, match=r"first 3 records of the input are not those"):
        run(options, Counting())
    longer = [long, "b", "c", "mended", "h", "and more"]
    moved = texts_file(tmp_path, longer).rename(tmp_path / "moved.txt")
    run(EmbedOptions(moved, options.out, token_budget=3), Counting())
    assert np.array_equal(np.load(options.out), expected(longer))


def test_a_bad_record_that_was_mended(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.npy"
    lines = ['"ab"', '"c"', '{"bad', '"d"']
    source.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"line 3 .*; mend it, or pass --errors skip; what is done is kept"):
        run(EmbedOptions(source, out, token_budget=1), Counting())
    lines[2] = '"mended"'
    source.write_text("\n".join(lines))
    run(EmbedOptions(source, out, token_budget=1), Counting())
    assert np.array_equal(np.load(out), expected(["ab", "c", "mended", "d"]))


def test_an_input_of_only_bad_records(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.npy"
    for count in (1, 3, 1000):
        source.write_text("{\n" * count)
        done = run(EmbedOptions(source, out, skip_bad=True), Counting())
        assert (done.rows, done.skipped) == (0, count)
        assert np.load(out).shape == (0, 3)
        lines = (tmp_path / "out.npy.skipped").read_text().splitlines()
        assert [json.loads(line)["line"] for line in lines] == list(range(1, count + 1))
    source.write_text("{\n" * 600 + '"ab"\n' + "{\n" * 600)
    assert run(EmbedOptions(source, out, skip_bad=True), Counting()).skipped == 1200
    assert np.array_equal(np.load(out), expected(["ab"]))


# ---- the job ---------------------------------------------------------------------------------------------------------


def test_what_differs_is_named(tmp_path):
    source, out = texts_file(tmp_path, TEXTS), tmp_path / "out.npy"
    about = {"model": {"weights": "a", "config": "b"}, "prompt": ""}
    stopped(EmbedOptions(source, out, token_budget=3, about=about))
    changes = [
        ({"model": {"weights": "x", "config": "b"}, "prompt": ""}, "model weights"),
        ({"model": {"weights": "a", "config": "x"}, "prompt": "x"}, "model config, prompt"),
    ]
    for changed, named in changes:
        with pytest.raises(ValueError, match=rf"another job: {named} differ"):
            run(EmbedOptions(source, out, about=changed), Counting())
    with pytest.raises(ValueError, match=r"another job: column differ"):
        run(EmbedOptions(source, out, about=about, column="body"), Counting())
    run(EmbedOptions(source, out, about=about, token_budget=50), Counting())  # which changes no bit
    assert np.array_equal(np.load(out), expected(TEXTS))


def test_a_job_that_did_nothing_leaves_nothing(tmp_path):
    source, out = tmp_path / "in.csv", tmp_path / "out.npy"
    source.write_text("body\nab\n")
    with pytest.raises(ValueError, match=r"no column 'text'; there are 'body'"):
        run(EmbedOptions(source, out), Counting())
    assert [p.name for p in tmp_path.iterdir()] == ["in.csv"]
    run(EmbedOptions(source, out, column="body"), Counting())  # and the right one is not taken for another job
    assert np.array_equal(np.load(out), expected(["ab"]))


def test_a_file_is_written_by_one_job_at_a_time(tmp_path):
    source, out = texts_file(tmp_path, TEXTS), tmp_path / "out.npy"
    stopped(EmbedOptions(source, out, token_budget=3))
    with EmbeddingWriter(tmp_path / "other.npy", width=3, job={}, resume=True):
        pass
    with open(tmp_path / "out.npy.partial", "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for resume in (True, False):
            with pytest.raises(ValueError, match=r"another weft embed writes .*out\.npy\.partial"):
                run(EmbedOptions(source, out, token_budget=3, resume=resume), Counting())
    run(EmbedOptions(source, out, token_budget=3), Counting())
    assert np.array_equal(np.load(out), expected(TEXTS))


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_earlier_file_stays_until_the_new_one_is_complete(tmp_path, ending):
    out = tmp_path / f"out.{ending}"
    run(EmbedOptions(texts_file(tmp_path, ["old"]), out), Counting())
    options = EmbedOptions(texts_file(tmp_path, TEXTS), out, token_budget=3)
    stopped(options)
    assert np.array_equal(load(out), expected(["old"]))
    run(options, Counting())
    assert np.array_equal(load(out), expected(TEXTS))


# ---- stopped anywhere ------------------------------------------------------------------------------------------------


class Stop(BaseException):
    """What no handler expects, as a kill."""


def stop_at_call(monkeypatch, count):
    """Stops at the count-th change of a file's name, before or after it."""
    calls = {"left": count}

    def counted(real):
        def call(*args, **kwargs):
            for when in ("before", "after"):
                calls["left"] -= 1
                if calls["left"] == 0:
                    raise Stop
                if when == "before":
                    result = real(*args, **kwargs)
            return result

        return call

    monkeypatch.setattr(os, "replace", counted(os.replace))
    monkeypatch.setattr(writers.Path, "unlink", counted(writers.Path.unlink))
    return calls


@pytest.mark.parametrize("ending", ENDINGS)
def test_stopped_at_every_change_of_a_name(tmp_path, ending):
    source, out = texts_file(tmp_path, TEXTS), tmp_path / f"out.{ending}"
    for count in range(1, 100):
        for path in tmp_path.glob("out.*"):
            path.unlink()
        with pytest.MonkeyPatch.context() as patch:
            calls = stop_at_call(patch, count)
            with suppress(Stop):
                run(EmbedOptions(source, out, token_budget=8), Counting())
            if calls["left"] > 0:
                break
        run(EmbedOptions(source, out, token_budget=8), Counting())
        assert np.array_equal(load(out), expected(TEXTS)), count
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["in.txt", out.name]), count
    assert count > 8


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_full_disk(tmp_path, ending):
    """The error says what to do; with room again the job goes on."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root to mount a small file system")
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("cannot mount a small file system here")
    try:
        texts = [chr(97 + i % 26) * (1 + i % 7) for i in range(6000)]
        filler = small / "filler"
        filler.write_bytes(b"\0" * 20_000)
        out = small / f"out.{ending}"
        options = EmbedOptions(texts_file(tmp_path, texts), out, token_budget=64)
        with pytest.raises(OSError, match=r"No space left on device; what is done is kept.*out") as raised:
            run(options, Counting())
        assert raised.value.errno == errno.ENOSPC
        assert not out.exists()
        filler.unlink()
        subprocess.run(["mount", "-o", "remount,size=4m", str(small)], check=True)
        again = Counting()
        run(options, again)
        assert sum(map(len, again.batches)) < len(texts)
        assert np.array_equal(load(out), expected(texts))
        assert [p.name for p in small.iterdir()] == [out.name]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_outputs_that_cannot_be_written_are_refused_first(tmp_path):
    source = texts_file(tmp_path, TEXTS)
    (tmp_path / "folder.npy").mkdir()
    for out, message in [
        (tmp_path / "missing" / "out.npy", "is not a directory; create it first"),
        (tmp_path / "folder.npy", "cannot be written"),
        (tmp_path / "out.txt", "ends in .npy"),
        (tmp_path / "out", "ends in .npy"),
    ]:
        with pytest.raises(ValueError, match=message):
            EmbedOptions(source, out).check()
    with pytest.raises(FileNotFoundError):
        EmbedOptions(tmp_path / "nothing.txt", tmp_path / "out.npy").check()
    with pytest.raises(IsADirectoryError):
        EmbedOptions(tmp_path, tmp_path / "out.npy", kind="txt").check()
    same = tmp_path / "same.parquet"
    same.write_bytes(b"")
    with pytest.raises(ValueError, match="as input and as output"):
        EmbedOptions(same, same).check()
    with pytest.raises(ValueError, match="the format 'pdf'"):
        EmbedOptions(source, tmp_path / "out.npy", kind="pdf")


def test_memory_is_bounded_where_texts_have_no_tokens(tmp_path):
    class Empty(Counting):
        def tokenize(self, texts):
            return [[] for _ in texts]

        def embed(self, ids):
            return super().embed([[7]] * len(ids))

    encoder = Empty()
    run(EmbedOptions(texts_file(tmp_path, [""] * 1000), tmp_path / "out.npy", token_budget=64), encoder)
    assert max(map(len, encoder.batches)) <= 64


# ---- the command -----------------------------------------------------------------------------------------------------

transformers = pytest.importorskip("transformers")
COMMAND = [sys.executable, "-m", "weft", "embed"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models of one name and shape, with other weights; and the first with a prompt."""
    from embed_folders import folder

    root = tmp_path_factory.mktemp("models")
    folder(root / "a" / "model", seed=1, modules=("Pooling", "Dense"))
    folder(root / "b" / "model", seed=2, modules=("Pooling", "Dense"))
    folder(root / "c" / "model", seed=1, config={"prompts": {"q": "Q "}, "default_prompt_name": "q"})
    return root


def test_models_are_told_apart_by_content(tmp_path, models):
    from weft.jobs.embed import Encoder
    from weft.jobs.texts.writers import _changes

    first = Encoder(models / "a" / "model").identity()

    def changes(folder, **options):
        return _changes(Encoder(folder, **options).identity(), first)

    assert changes(models / "b" / "model") == ["model weights"]
    assert changes(models / "c" / "model") == ["model config", "model weights", "prompt"]
    assert changes(models / "a" / "model", prompt="x ") == ["prompt"]
    assert changes(models / "a" / "model", max_length=7) == ["max_length"]
    assert changes(models / "a" / "model", dtype="bfloat16") == ["dtype"]
    moved = shutil.copytree(models / "a" / "model", tmp_path / "moved")
    (moved / "README.md").write_text("changed")
    assert changes(moved) == []
    for name, named in [("2_Dense/model.safetensors", "model weights"), ("tokenizer.json", "model config"),
                        ("1_Pooling/config.json", "model config")]:  # fmt: skip
        changed = shutil.copytree(models / "a" / "model", tmp_path / name.replace("/", "_"))
        data = (changed / name).read_bytes()
        (changed / name).write_bytes(data + b"\n" if name.endswith("json") else data[:-3] + b"?" + data[-2:])
        assert changes(changed) == [named], name


def embed(*args, **options):
    return subprocess.run([*COMMAND, *map(str, args)], capture_output=True, text=True, timeout=200, **options)


def killed(args, journal, number, rows):
    """Starts the command and ends it by a signal when it has so many rows."""
    child = subprocess.Popen([*COMMAND, *map(str, args)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 150
    while not (journal.exists() and json.loads(journal.read_text())["rows"] > rows):
        assert child.poll() is None, child.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(child.pid, number)
    return child.communicate(timeout=60)[1], child.returncode


def test_a_command_that_is_stopped(tmp_path, models):
    """SIGKILL, then Ctrl-C; another model of the same name; the same one elsewhere."""
    from weft.jobs.embed import Encoder

    count = 6000
    source = texts_file(tmp_path, [f"text {i} " + "ab " * (i % 40) for i in range(count)])
    out, journal = tmp_path / "out.npy", tmp_path / "out.npy.journal"
    args = [source, "--out", out, "--token-budget", "16", "--threads", "1", "--model"]
    killed([*args, models / "a" / "model"], journal, signal.SIGKILL, 5)
    refused = embed(*args, models / "b" / "model")
    assert refused.returncode == 2
    assert refused.stderr.startswith("weft: ")
    assert "is of another job: model weights differ; pass --restart" in refused.stderr
    said, code = killed(
        [*args, models / "a" / "model"], journal, signal.SIGINT, json.loads(journal.read_text())["rows"]
    )
    assert code == 130, said
    assert "stopped; the same command goes on from here" in said
    assert json.loads(journal.read_text())["rows"] < count
    assert not out.exists()
    done = embed(*args, shutil.copytree(models / "a" / "model", tmp_path / "moved"), "--token-budget", 4096)
    assert done.returncode == 0, done.stderr
    run(EmbedOptions(source, tmp_path / "whole.npy"), Encoder(models / "a" / "model"))
    assert np.array_equal(np.load(out), np.load(tmp_path / "whole.npy"))

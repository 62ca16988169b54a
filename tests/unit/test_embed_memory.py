"""`weft embed` on files several times larger than the memory that it may take, in a process of its own."""

import json
import subprocess
import sys

import numpy as np
import pytest

_MIB = 1 << 20
_FILE_MIB = 128
_ALLOWED_MIB = 32

_CHILD = """
import sys
from pathlib import Path
import torch
from weft.jobs.embed.job import EmbedOptions, run


class Lengths:
    kind = "SentenceTransformer"
    width = 2

    def tokenize(self, texts):
        return [[len(text)] for text in texts]

    def embed(self, ids):
        return torch.tensor([[i[0], 1.0] for i in ids])


def status(key):
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(key)).split()[1])


source, out, warm = (Path(a) for a in sys.argv[1:4])
if source.suffix == ".parquet":
    import pyarrow.parquet
run(EmbedOptions(warm, out.with_name("warm.npy")), Lengths())  # what is loaded once is not what is asked here
Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
before = status("VmRSS")
run(EmbedOptions(source, out), Lengths())
print((status("VmHWM") - before) // 1024)
"""


def write(path, texts):
    if path.suffix == ".parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        with pq.ParquetWriter(
            path, pa.schema([("text", pa.string())]), compression="none", use_dictionary=False
        ) as file:
            for start in range(0, len(texts), 1000):
                file.write_table(pa.table({"text": texts[start : start + 1000]}))
        return
    form = {".txt": str, ".jsonl": lambda t: json.dumps({"text": t}), ".csv": lambda t: f'"{t}"'}[path.suffix]
    with open(path, "w") as file:
        if path.suffix == ".csv":
            file.write("text\n")
        for text in texts:
            file.write(form(text) + "\n")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of memory from /proc")
@pytest.mark.parametrize(
    ("ending", "length"), [("txt", 1000), ("jsonl", 1000), ("csv", 1000), ("parquet", 1000), ("jsonl", 1_000_000)]
)
def test_memory_does_not_grow_with_the_file(tmp_path, ending, length):
    source, warm, out = tmp_path / f"in.{ending}", tmp_path / f"warm.{ending}", tmp_path / "out.npy"
    count = _FILE_MIB * _MIB // length
    write(source, [f"{i:08d}" + "x" * (length - 8) for i in range(count)])
    write(warm, ["a", "b"])
    assert source.stat().st_size > 3 * _ALLOWED_MIB * _MIB
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(source), str(out), str(warm)], capture_output=True, text=True, timeout=250,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = np.load(out)
    assert rows.shape == (count, 2)
    assert (rows[:, 0] == length).all()
    assert int(done.stdout.split()[-1]) < _ALLOWED_MIB

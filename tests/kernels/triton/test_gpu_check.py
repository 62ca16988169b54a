"""examples/gpu_check.py, as far as it goes without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the GPU kernels need Triton")

SCRIPT = Path(__file__).parents[3] / "examples" / "gpu_check.py"
OPS = {"all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"}


def test_interpreted(tmp_path):
    report = tmp_path / "report"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT),
         "--interpret", "--rounds", "1", "--report", str(report)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads(report.with_suffix(".json").read_text())
    assert found["right"] is True
    assert {row["dtype"] for row in found["checks"]} == {"float32", "bfloat16"}
    names = {row["check"] for row in found["checks"]}
    assert OPS | {"matmul_all_to_all", "packed attention, causal=True", "rotary", "gate", "rmsnorm", "pack"} <= names
    assert all(0 <= row["error"] <= row["limit"] < 0.1 for row in found["checks"])
    assert {row["op"] for row in found["overlap"]} == OPS
    assert all(row[f"{name}_ms"] > 0 for row in found["overlap"] for name in ("matmul", "torch", "weft"))
    assert report.with_suffix(".txt").read_text() in done.stdout


@pytest.mark.parametrize(
    ("ranks", "message"),
    [({}, "start me with torchrun"), ({"RANK": "0", "WORLD_SIZE": "1"}, "torch finds no GPU here")],
)
def test_what_it_cannot_do(ranks, message):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    bare = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=bare | ranks, capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert done.returncode == 2
    assert message in done.stderr

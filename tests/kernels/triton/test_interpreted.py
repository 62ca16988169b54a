"""Runs interpreted/cases_*.py in Triton's interpreter, a process each: Triton chooses it when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the GPU kernels need Triton")

CASES = sorted((Path(__file__).parent / "interpreted").glob("cases_*.py"))


@pytest.mark.parametrize("file", CASES, ids=lambda file: file.stem)
def test_interpreted(file):
    """To see one case: TRITON_INTERPRET=1 pytest -o python_files='cases_*.py' tests/kernels/triton/interpreted."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-o", "python_files=cases_*.py", "-p", "no:cacheprovider", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_there_are_cases():
    assert [file.stem for file in CASES] == [
        f"cases_{name}" for name in ("attention", "matmul", "public", "rows", "signals", "streams")
    ]

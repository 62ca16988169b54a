"""A short form of the pipeline campaign."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_random_pipelines() -> None:
    program = Path(__file__).with_name("pipeline.py")
    # In a process of its own, as it forks its ranks from one without threads.
    done = subprocess.run([sys.executable, program, "--cases", "30", "--seed", "5"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "pipeline: cases 30, failures 0, seed 5" in done.stdout

"""The recipe of docs/hosts.md for Ray Train, on two workers of this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from page import recipes

pytest.importorskip("ray.train", reason="needs the extra `hosts`")

BEFORE = """\
import ray
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True)
"""
AFTER = """
assert result.error is None, result.error
ray.shutdown()
"""


def test_the_recipe(tmp_path: Path) -> None:
    (code,) = recipes()["Ray Train"]
    script = tmp_path / "recipe.py"
    script.write_text(BEFORE + code.replace("/tmp/runs/a", str(tmp_path / "run")) + AFTER)
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "GLOO_SOCKET_IFNAME": "lo", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, script], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280.0
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    losses = [float(text) for text in re.findall(r"metrics=\{'loss': ([\d.]+)\}", done.stdout + done.stderr)]
    assert len(losses) == 2, done.stdout[-3000:] + done.stderr[-3000:]  # Ray has them in the log of each worker
    assert losses[0] == losses[1]
    assert 0.0 < losses[0] < 6.0
    assert (tmp_path / "run" / "latest").exists()

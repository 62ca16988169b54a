"""The commands of docs/hosts.md for torchrun: on both hosts of a lab, as they stand there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from page import folder_of_a_user, losses_in, path_with_this_python, recipes

from weft.lab import Cluster

TORCHRUN = [(title, code) for title, codes in recipes().items() for code in codes if "HOST0:" in code]
SECONDS = 200.0


def test_the_page_has_them() -> None:
    assert [title for title, _ in TORCHRUN] == ["torchrun", "Ranks that die", "Hosts that die"]
    assert {title: len(codes) for title, codes in recipes().items()} == {
        "torchrun": 2, "Ranks that die": 1, "Hosts that die": 1, "Slurm": 2, "Kubernetes": 1, "Ray Train": 1,
    }  # fmt: skip


@pytest.mark.parametrize(("title", "code"), TORCHRUN)
def test_torchrun(title: str, code: str, lab: Cluster, tmp_path: Path) -> None:
    folder, name = folder_of_a_user(tmp_path), tmp_path / "said"
    with name.open("w") as file:
        line = code.replace("HOST0", "host0")
        agents = [
            lab.command(host, ["bash", "-c", line], cwd=folder, env=path_with_this_python(), stdout=file, stderr=file)
            for host in range(2)
        ]
        ends = [agent.wait(timeout=SECONDS) for agent in agents]
    assert ends == [0, 0], name.read_text()
    losses = losses_in(name.read_text())
    assert sorted(losses) == list(range(1, 21))
    assert losses[20] < losses[1]
    assert "20 steps of" in name.read_text()
    assert "would do so in vain" not in name.read_text()


def test_in_a_lab(tmp_path: Path, lab: Cluster) -> None:
    (code,) = [code for code in recipes()["torchrun"] if code.startswith("weft ")]
    line = code.replace("weft ", f"{sys.executable} -m weft ", 1)
    folder = folder_of_a_user(tmp_path)
    done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(losses_in(done.stdout)) == list(range(1, 21))

"""torchrun in a lab: an agent on each of two hosts, which meet by c10d; ranks and hosts that go in mid-run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from weft.jobs.train import StepFigures, TrainJob, train
from weft.jobs.train.run import read_log
from weft.lab import Cluster, Command, Rank

JOB = TrainJob(tp=2, steps=6, microbatches=2, tokens=96, context=48, lr=3e-3, every=2, timeout=30.0)
PROGRAM = str(Path(__file__).with_name("torchrun_train.py"))
RESTARTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.fixture(scope="module")
def lab(namespaces: None) -> Iterator[Cluster]:
    with Cluster(hosts=2, devices=1, gbps=1.0) as cluster:
        yield cluster


def figures_of(rank: Rank, job: TrainJob) -> list[StepFigures]:
    return list(train(job).steps)


def losses(figures: list[StepFigures]) -> list[float]:
    assert [each.step for each in figures] == list(range(1, JOB.steps + 1))
    return [each.loss for each in figures]


def start(lab: Cluster, job: TrainJob, folder: Path, port: int, *options: str, **given: Any) -> list[Command]:
    """An agent on each host, with a rank each."""
    (folder / "job.json").write_text(json.dumps(asdict(job)))
    words = ["torchrun", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "a"]
    words += ["--rdzv-endpoint", f"{lab.address(0)}:{port}", *options, PROGRAM, "job.json", "figures.jsonl"]
    words += given.pop("say", [])
    return [lab.command(host, words, cwd=folder, **given) for host in range(2)]


def ends(agents: list[Command]) -> list[int]:
    return [agent.wait(timeout=150.0) for agent in agents]


@pytest.fixture(scope="module")
def undisturbed(lab: Cluster) -> list[float]:
    return losses(lab.run(figures_of, JOB, timeout=100.0)[0])


@pytest.mark.hosts  # the next one compares the same, after a restart
def test_two_agents_get_the_losses_of_the_lab(lab: Cluster, undisturbed: list[float], tmp_path: Path) -> None:
    assert ends(start(lab, JOB, tmp_path, 29501, "--nnodes", "2")) == [0, 0]
    assert losses(read_log(tmp_path / "figures.jsonl")) == undisturbed  # bit by bit
    assert undisturbed[-1] < undisturbed[0]


def test_a_killed_rank_restarts_to_the_same_losses(lab: Cluster, undisturbed: list[float], tmp_path: Path) -> None:
    job = replace(JOB, checkpoint=str(tmp_path / "run"), resume=True)
    options = ("--nnodes", "2", "--max-restarts", "2", "--monitor-interval", "0.2")
    agents = start(lab, job, tmp_path, 29502, *options, env=RESTARTS, say=["kill", str(tmp_path / "killed")])
    assert ends(agents) == [0, 0]
    assert (tmp_path / "killed").exists()
    assert losses(read_log(tmp_path / "figures.jsonl")) == undisturbed


@pytest.mark.hosts
def test_a_lost_host_leaves_the_other_to_go_on(lab: Cluster, tmp_path: Path) -> None:
    job = replace(JOB, tp=1, dp="auto", checkpoint=str(tmp_path / "run"), resume=True)
    expected = losses(lab.run(figures_of, replace(job, checkpoint="", resume=False), timeout=100.0)[0])
    options = ["--nnodes", "1:2", "--max-restarts", "2", "--monitor-interval", "0.2"]
    options += ["--rdzv-conf", "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"]
    lost = tmp_path / "lost"
    agents = start(lab, job, tmp_path, 29503, *options, env=RESTARTS, say=["hang", str(lost)])
    deadline = time.monotonic() + 100.0
    while not lost.exists():
        assert time.monotonic() < deadline, "the run did not come to the step in which a host is lost"
        time.sleep(0.05)
    agents[1].kill()  # the agent and its rank, at once
    assert agents[0].wait(timeout=90.0) == 0
    found = losses(read_log(tmp_path / "figures.jsonl"))
    assert found[:2] == expected[:2]  # until the checkpoint two copies, bit by bit; then one
    assert found == pytest.approx(expected, rel=2e-5)

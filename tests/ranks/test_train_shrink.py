"""A training run that loses a copy of its model goes on from memory, in the same processes, to the same losses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

from weft._torch import local_tensor
from weft.errors import PeerLost
from weft.jobs.train import TrainJob, run, train
from weft.jobs.train.replicas import Replicas

JOB = TrainJob(
    dp=3, steps=5, microbatches=3, tokens=96, context=48, lr=3e-3, timeout=4.0, every=2, on_failure="shrink"
)  # fmt: skip
SLOW = 60.0  # a step's first calls, on a machine that has other things to do


def losses_of(job: TrainJob) -> list[float]:
    return train(job).losses


def lose_a_copy(job: TrainJob, victim: int, where: str, how: str) -> tuple[list[float], float] | str:
    """Rank `victim` goes in step 3: before gradients are exchanged, when it has them, or while the step is saved."""
    calls = 0
    home, name = {"before": (Replicas, "add_gradients"), "after": (run, "tell_all"), "save": (run, "save_checkpoint")}[
        where
    ]
    original: Any = getattr(home, name)

    def go(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1 if where != "after" or args[0] == "training step" else 0
        if calls == (1 if where == "save" else 3):
            if how == "stopped":
                waker = "import os, signal, sys, time; time.sleep(12); os.kill(int(sys.argv[1]), signal.SIGCONT)"
                subprocess.Popen([sys.executable, "-ISc", waker, str(os.getpid())])
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        return original(*args, **options)

    if dist.get_rank() == victim:
        setattr(home, name, go)
    weights: list[torch.Tensor] = []
    built: Any = run.build

    def build(*args: Any) -> Any:
        model = built(*args)
        weights.extend(local_tensor(p.detach()) for p in model.module.parameters())
        return model

    run.build = build
    try:
        with warnings.catch_warnings(record=True) as told:
            losses = train(job).losses
    except PeerLost as error:  # of a rank that was given up, or whose copy was
        return str(error)
    assert any("1 of" in str(each.message) and "the rest go on" in str(each.message) for each in told)
    return losses, float(sum(w.double().abs().sum() for w in weights))


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_copy_is_killed(where: str) -> None:
    undisturbed = run_ranks(losses_of, 1, replace(JOB, dp=1))[0]
    said = run_ranks(lose_a_copy, 3, JOB, 1, where, "killed", killed=[1], timeout=SLOW)
    assert said[0] == said[2]  # bit by bit: losses and weights
    assert said[0][0] == pytest.approx(undisturbed, rel=1e-4)
    assert undisturbed[-1] < undisturbed[0]


def test_the_rest_of_a_copy_ends(tmp_path: Path) -> None:
    """Two ranks share each copy: with one of them the other goes, and the third saves what is left."""
    job = replace(JOB, tp=2, dp=2, microbatches=4, checkpoint=str(tmp_path / "run"))
    said = run_ranks(lose_a_copy, 4, job, 2, "save", "killed", killed=[2], timeout=SLOW)
    assert "this copy of the model has lost a rank (lost: 2); 1 whole copies go on" in said[3]
    assert said[0][0] == said[1][0]
    assert len(said[0][0]) == JOB.steps
    resumed = run_ranks(losses_of, 2, replace(job, dp=1, resume=True, steps=JOB.steps + 1), timeout=SLOW)
    assert [len(each) for each in resumed] == [1, 1]


def test_a_copy_that_was_stopped_is_told() -> None:
    said = run_ranks(lose_a_copy, 3, JOB, 2, "before", "stopped", timeout=SLOW)
    assert "rank 2 was given up: ranks 0, 1 went on without it" in said[2]
    assert said[0] == said[1]


def test_what_cannot_shrink_is_refused() -> None:
    with pytest.raises(ValueError, match="'shrink' with pp 2, expected pp 1"):
        replace(JOB, pp=2, dp=2, microbatches=4).check(4)
    with pytest.raises(ValueError, match="on_failure is 'explode'"):
        replace(JOB, on_failure="explode").check(3)  # type: ignore[arg-type]


def fail_without_a_loss() -> str:
    """An error that all ranks have is not taken for a loss, again and again."""

    def broken(*_: Any) -> None:
        raise RuntimeError("a bug of the program")

    Replicas.add_gradients = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a bug of the program"):
        train(JOB)
    return "raised"


def test_an_error_without_a_loss_is_raised() -> None:
    assert run_ranks(fail_without_a_loss, 3, timeout=SLOW) == ["raised"] * 3

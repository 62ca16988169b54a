"""Training runs: the same losses however ranks are used, and after a kill; figures and logs."""

from __future__ import annotations

import os
import signal
import time
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch.nn import functional as F

from weft.errors import WeftError
from weft.jobs.train import StepFigures, TrainJob, train
from weft.jobs.train.job import END, Corpus, cut, documents_of
from weft.jobs.train.run import LossLog, RunProgress, read_log
from weft.packed.inputs import IGNORED_LABEL
from weft.parallel.files.checkpoint import has_checkpoint
from weft.parallel.files.save import save_model

JOB = TrainJob(steps=4, microbatches=2, tokens=96, context=48, lr=3e-3, timeout=15.0)


def losses_of(job: TrainJob) -> list[float]:
    return train(job).losses


def losses_without_weft(job: TrainJob) -> list[float]:
    """The Hugging Face model in one process, document by document, with torch's own loss."""
    import transformers

    torch.manual_seed(job.seed)
    model = transformers.LlamaForCausalLM(job.config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr)
    text = Corpus.of(documents_of(()), context=job.context, tokens=job.tokens, seed=job.seed)
    losses = []
    for step in range(job.steps):
        micros = [text.microbatch(step * job.microbatches + i) for i in range(job.microbatches)]
        total, loss = sum(m.counted for m in micros), torch.zeros(())
        for micro in micros:
            bounds = micro.batch.cu_seqlens.tolist()
            for first, end in pairwise(bounds):
                logits = model(micro.batch.values[None, first:end]).logits[0]
                targets = micro.targets[first:end]
                loss = loss + F.cross_entropy(logits, targets, ignore_index=IGNORED_LABEL, reduction="sum")
        (loss / total).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() / total)
    return losses


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return run_ranks(losses_without_weft, 1, JOB)[0]  # in a process with one thread


@pytest.mark.parametrize(("pp", "dp", "tp"), [(1, 1, 2), (2, 1, 2), (1, 2, 2), (2, 2, 1)])
def test_losses_do_not_depend_on_how_ranks_are_used(expected: list[float], pp: int, dp: int, tp: int) -> None:
    runs = run_ranks(losses_of, pp * dp * tp, replace(JOB, pp=pp, dp=dp, tp=tp))
    assert all(run == runs[0] for run in runs)
    assert runs[0] == pytest.approx(expected, rel=2e-5)
    assert expected[-1] < expected[0] - 0.2


def train_until_killed(job: TrainJob, victim: int, after: int) -> tuple[str, str, float]:
    """How this rank ended when rank `victim` was killed after step `after`."""
    killed_at = 0.0

    def report(figures: StepFigures) -> None:
        nonlocal killed_at
        killed_at = time.monotonic()
        if figures.step == after and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        train(job, report=report)
    except WeftError as error:
        dist.destroy_process_group()  # as the end of the process would: who waits for this rank learns of it
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the harness to end
        return type(error).__name__, str(error), time.monotonic() - killed_at
    raise AssertionError("the run went on without a rank")


@pytest.mark.parametrize(("pp", "dp", "tp", "victim"), [(2, 1, 2, 3), (1, 2, 2, 1)])
def test_a_killed_rank_ends_all_and_the_run_resumes_to_the_same_losses(
    tmp_path: Path, pp: int, dp: int, tp: int, victim: int
) -> None:
    job = replace(JOB, pp=pp, dp=dp, tp=tp, every=2, checkpoint=str(tmp_path / "run"))
    undisturbed = run_ranks(losses_of, 4, replace(job, checkpoint=str(tmp_path / "calm")))[0]
    ends = run_ranks(train_until_killed, 4, job, victim, 3, killed=[victim])
    assert ends[victim] == signal.SIGKILL
    for rank, end in enumerate(ends):
        if rank != victim:
            kind, text, seconds = end
            assert seconds < job.timeout + 10.0, (rank, kind, text)
            assert kind in ("PeerLost", "PeerTimeout", "StageFailed")
            assert "rank" in text
    assert has_checkpoint(job.checkpoint)
    resumed = run_ranks(losses_of, 4, replace(job, resume=True))[0]
    assert resumed == undisturbed[2:]  # from the checkpoint of step 2, bit by bit


def save_trained(job: TrainJob, folder: str) -> None:
    from weft.jobs.train.model import build, make_mesh

    with build(job, make_mesh((job.pp, job.dp, job.tp), timeout=job.timeout)) as model:
        save_model(model.module, folder)


def test_a_run_starts_from_files_and_resumes_with_other_ranks(tmp_path: Path, expected: list[float]) -> None:
    staged = replace(JOB, pp=2, steps=2)
    run_ranks(save_trained, 2, staged, str(tmp_path / "model"))
    first = replace(staged, init=str(tmp_path / "model"), seed=0, checkpoint=str(tmp_path / "run"))
    assert run_ranks(losses_of, 2, first)[0] == pytest.approx(expected[:2], rel=2e-5)
    again = replace(JOB, tp=2, init=first.init, checkpoint=first.checkpoint, resume=True)
    assert run_ranks(losses_of, 2, again)[0] == pytest.approx(expected[2:], rel=2e-5)
    with pytest.raises(Exception, match="tokens was 96 and is 128; expected the same, or the run would see other data"):
        run_ranks(losses_of, 2, replace(again, tokens=128))
    with pytest.raises(Exception, match="run has step-00000004 of an earlier run; expected an empty directory"):
        run_ranks(losses_of, 2, replace(again, resume=False))


def resume_in_turns(job: TrainJob, folder: str) -> list[list[float]]:
    """The learning rate of a resumed job is its own, also where the checkpoint has another one."""
    whole = train(replace(job, steps=4)).losses
    train(replace(job, steps=2, checkpoint=f"{folder}/a"))
    same = train(replace(job, checkpoint=f"{folder}/a", resume=True)).losses
    train(replace(job, steps=2, checkpoint=f"{folder}/b"))
    still = train(replace(job, checkpoint=f"{folder}/b", resume=True, lr=1e-12)).losses
    return [whole[2:], same, still]


def test_a_resumed_job_has_its_own_learning_rate(tmp_path: Path) -> None:
    (whole, same, still) = run_ranks(resume_in_turns, 1, replace(JOB, steps=4), str(tmp_path))[0]
    assert same == whole
    assert still[0] == same[0]
    assert still[1] != same[1]


def train_on_other_texts(job: TrainJob, folder: str) -> str:
    """Files of the same name with other contents, on a run that is resumed."""
    file = Path(folder) / "text"
    file.write_bytes(b"one two three\n" * 40)
    train(replace(job, data=(str(file),), steps=1, checkpoint=f"{folder}/run"))
    moved = Path(folder) / "moved"
    moved.write_bytes(file.read_bytes())
    train(replace(job, data=(str(moved),), steps=2, checkpoint=f"{folder}/run", resume=True))
    file.write_bytes(b"one two four\n" * 40)
    with pytest.raises(ValueError, match=r"text was '[0-9a-f]+' and is '[0-9a-f]+'; expected the same") as caught:
        train(replace(job, data=(str(file),), steps=3, checkpoint=f"{folder}/run", resume=True))
    return str(caught.value)


def test_texts_are_told_apart_by_what_they_say(tmp_path: Path) -> None:
    run_ranks(train_on_other_texts, 1, JOB, str(tmp_path))


def differ(job: TrainJob) -> None:
    with pytest.raises(ValueError, match="seed is 0 on rank 0 and 1 on rank 1; expected one job"):
        train(replace(job, seed=dist.get_rank()))


def end_in_nan(job: TrainJob) -> None:
    """A rate that is far too large: the run ends by name, and what is saved are numbers."""
    with pytest.raises(WeftError, match=r"step \d+ has (loss nan|gradients that are not n\w+), expected numbers"):
        train(replace(job, lr=1e30, every=1, steps=10))
    assert train(replace(job, steps=0, resume=True)).losses == []


def report_that_raises(job: TrainJob) -> str:
    def report(figures: StepFigures) -> None:
        if dist.get_rank() == 1 and figures.step == 2:
            raise ArithmeticError("the reporter fell over")

    with pytest.raises((WeftError, ArithmeticError)) as caught:
        train(job, report=report)
    return str(caught.value)


def test_ranks_with_different_jobs_and_losses_that_are_no_numbers(tmp_path: Path) -> None:
    run_ranks(differ, 2, replace(JOB, tp=2))
    run_ranks(end_in_nan, 2, replace(JOB, pp=2, checkpoint=str(tmp_path / "run")))
    for text in run_ranks(report_that_raises, 2, replace(JOB, pp=2)):
        assert "the reporter fell over" in text


def two_runs(job: TrainJob) -> None:
    """A run that begins while another one of this directory is under way is refused; the first one goes on."""

    def report(figures: StepFigures) -> None:
        if figures.step == 2:
            with pytest.raises(ValueError, match=f"in use by another run, process {os.getpid()} of this host"):
                train(replace(job, resume=True))

    assert len(train(job, report=report).steps) == 4


def test_two_runs_of_one_directory(tmp_path: Path) -> None:
    run_ranks(two_runs, 1, replace(JOB, checkpoint=str(tmp_path / "run"), every=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp": 2}, "tp 2 x pp 1 x dp 1 is 2 ranks, and there are 1"),
        ({"model": "huge"}, "model is 'huge', expected one of tiny"),
        ({"resume": True}, "resume without a checkpoint directory"),
        ({"steps": -1}, "expected at least 0"),
        ({"microbatches": 0}, "expected at least 0 steps and at least 1 of the others"),
        ({"keep": 0}, "expected at least 0 steps and at least 1 of the others"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"timeout": 0.0}, "timeout 0"),
    ],
)
def test_a_job_that_cannot_run_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(JOB, **change).check(1)


def test_as_many_copies_as_there_are_ranks_for() -> None:
    found = run_ranks(losses_of, 2, replace(JOB, dp="auto"))
    assert found == run_ranks(losses_of, 2, replace(JOB, dp=2))
    assert replace(JOB, tp=2, pp=2, dp="auto", microbatches=6).on(12).dp == 3
    with pytest.raises(ValueError, match=r"tp 2 x pp 1 on 3 ranks; expected a number of ranks that 2 divides"):
        replace(JOB, tp=2, dp="auto").on(3)
    with pytest.raises(ValueError, match="2 micro-batches cannot be shared evenly by 3 copies"):
        replace(JOB, dp="auto").on(3)
    with pytest.raises(ValueError, match=r"use job\.on\(ranks\)"):
        replace(JOB, dp="auto").check(2)


def warnings_of(restarts: str, shares_store: str) -> list[str]:
    """What a run says that torchrun has started like this."""
    os.environ |= {"TORCHELASTIC_MAX_RESTARTS": restarts, "TORCHELASTIC_USE_AGENT_STORE": shares_store}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(replace(JOB, steps=0))
    return [str(each.message) for each in seen if "torchrun" in str(each.message)]


@pytest.mark.parametrize(
    ("restarts", "shares_store", "warns"), [("3", "True", True), ("0", "True", False), ("3", "False", False)]
)
def test_restarts_that_cannot_work_are_told(restarts: str, shares_store: str, warns: bool) -> None:
    (said,) = run_ranks(warnings_of, 1, restarts, shares_store)
    assert len(said) == warns
    assert all("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text for text in said)


def test_progress_says_how_long_a_run_is_and_what_is_left() -> None:
    times = iter([100.0, 104.0, 106.0])
    progress = RunProgress(replace(JOB, steps=40), 2, clock=lambda: next(times))
    assert str(progress) == "40 steps of 192 tokens on 2 ranks: tensor 1 x pipeline 1 x data 1"
    lines = [progress.line(StepFigures(step, 5.0, 192, 1.0, 0.0)) for step in (11, 12, 13)]  # of a run that resumed
    assert [line.rpartition("  ")[2] for line in lines] == ["29 steps left", "1:52 left", "1:21 left"]


def test_microbatches_are_full_of_whole_documents() -> None:
    text = Corpus.of(documents_of(()), context=48, tokens=200, seed=3)
    one, other = text.microbatch(5), text.microbatch(6)
    assert one.batch.tokens == other.batch.tokens == 200
    assert not torch.equal(one.batch.values, other.batch.values)
    assert int(one.batch.lengths.max()) <= 48
    assert len(set(one.batch.lengths.tolist())) > 1
    ends = one.batch.cu_seqlens[1:].long() - 1
    assert torch.equal(one.batch.values[ends[:-1]], torch.full((len(ends) - 1,), END))
    assert torch.equal((one.targets == IGNORED_LABEL).nonzero().squeeze(1), ends)
    inside = one.targets != IGNORED_LABEL
    assert torch.equal(one.targets[inside], one.batch.values.roll(-1)[inside])


def test_nothing_of_a_document_is_lost() -> None:
    document = b"".join(b"%d\n" % i for i in range(500)) + b"x" * 100
    assert b"".join(cut(document, 33)) == document
    assert max(map(len, cut(document, 33))) <= 33
    with pytest.raises(ValueError, match="hold no text"):
        Corpus.of([b" \n"], context=8, tokens=8)


def test_a_log_goes_on_where_a_run_resumes(tmp_path: Path) -> None:
    figures = [StepFigures(step, 5.0 - step, 100, 0.5, 0.1) for step in range(1, 5)]
    log = LossLog(tmp_path / "log", after=0)
    for each in figures[:3]:
        log.add(each)
    with (tmp_path / "log").open("a") as out:
        out.write('{"step": 4, "lo')  # cut off by a kill
    LossLog(tmp_path / "log", after=2).add(figures[2])
    assert read_log(tmp_path / "log") == figures[:3]

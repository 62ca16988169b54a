"""What torchrun starts in `test_torchrun`: a run of weft.jobs.train, in the middle of which a rank or a host goes.

torchrun ... torchrun_train.py JOB.json FIGURES.jsonl [kill FILE | hang FILE]
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from weft.jobs.train import StepFigures, TrainJob, train
from weft.jobs.train.run import LossLog

STEP = 3  # after which it happens, once: where FILE is not there yet, which tells that it did


def main(job_file: str, figures: str, how: str = "", file: str = "") -> None:
    torch.set_num_threads(1)
    job = TrainJob(**json.loads(Path(job_file).read_text()))
    dist.init_process_group("gloo", timeout=timedelta(seconds=job.timeout))
    logs: list[LossLog] = []

    def report(said: StepFigures) -> None:
        if dist.get_rank() == 0:
            logs[:] = logs or [LossLog(figures, after=said.step - 1)]
            logs[0].add(said)
        if how and said.step == STEP and os.environ["WEFT_LAB_HOST"] == "1" and not Path(file).exists():
            Path(file).touch()
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)

    train(job, report=report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What each rank of a lab runs. The lab imports this module once and forks its ranks from there, so all that a run
needs is imported here.
"""

from __future__ import annotations

from transformers.models.llama import modeling_llama  # noqa: F401

from weft.lab import Rank
from weft.train.figures import StepFigures
from weft.train.job import Job
from weft.train.run import Trained, train


def train_on(rank: Rank, job: Job) -> Trained:
    """Runs a job on a rank; rank 0 prints the figures of each step."""

    def report(figures: StepFigures) -> None:
        if rank.rank == 0:
            print(figures)

    return train(job, report=report)

"""A training run: text in packed batches, a Llama on tensor x pipeline x data parallel ranks, checkpoints, figures."""

from weft.jobs.train.figures import StepFigures
from weft.jobs.train.job import TrainJob
from weft.jobs.train.run import Trained, train

__all__ = ["StepFigures", "TrainJob", "Trained", "train"]

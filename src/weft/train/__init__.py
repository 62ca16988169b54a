"""A training run: text in packed batches, a Llama on tensor x pipeline x data parallel ranks, checkpoints, figures."""

from weft.train.figures import StepFigures
from weft.train.job import Job
from weft.train.run import Trained, train

__all__ = ["Job", "StepFigures", "Trained", "train"]

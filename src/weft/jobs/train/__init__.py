"""A training run: text in packed batches, a Llama on tensor x pipeline x data parallel ranks, checkpoints, figures.

job       what a run is, and the text that it reads
model     its model on the ranks: cut, staged, copied
replicas  copies of it that can be lost, while the others go on
run       the loop, the figures of each step, and their log
"""

from weft.jobs.train.job import TrainJob
from weft.jobs.train.run import StepFigures, TrainResult, train

__all__ = ["StepFigures", "TrainJob", "TrainResult", "train"]

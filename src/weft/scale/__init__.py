"""Scale on paper: what declared GPUs and clusters would do. Pure arithmetic; nothing here has met a GPU.

`predict_op` predicts one overlapped matmul, `simulate_step` a whole step of training or inference, and `compare` the
same step without each promise. The planners and simulators are those that run on the CPU; only the curves are declared.

gpus    what the data sheets say: seconds of a matmul, of a copy, of a collective
job     what is to be simulated: a model as sizes, cut over a cluster, and a batch of texts
ops     one overlapped matmul
step    a whole step: layers, edges, pipeline, gradients, memory
"""

from weft.scale.gpus import GPUS, Gpu, find_gpu
from weft.scale.job import MODELS, Mode, Model, Promise, ScaleJob, find_model
from weft.scale.ops import OpPrediction, predict_op
from weft.scale.step import Step, compare, simulate_step

__all__ = [
    "GPUS",
    "MODELS",
    "Gpu",
    "Mode",
    "Model",
    "OpPrediction",
    "Promise",
    "ScaleJob",
    "Step",
    "compare",
    "find_gpu",
    "find_model",
    "predict_op",
    "simulate_step",
]

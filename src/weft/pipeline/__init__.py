"""A pipeline of meshes that never waits for a transfer that could have been early.

`schedule` makes a schedule (a value), `StageGraph` says which tensors go where, `lower` adds sends and receives,
`simulate` predicts the run; `Pipeline` runs it, and loads torch only when it is first named.

schedules/  what each rank computes, sends and receives, in which order, and how long it takes (pure)
transport/  how tensors get from stage to stage
run/        `Pipeline`, its stages and its steps
cut         which layers go to which stage
models      two models in stages, to train, measure and test with
"""

from importlib import import_module
from typing import TYPE_CHECKING

from weft.pipeline.schedules.costs import Costs, Transfers
from weft.pipeline.schedules.generators import SCHEDULES, schedule
from weft.pipeline.schedules.graph import Action, Edge, Kind, StageGraph, chain
from weft.pipeline.schedules.lower import lower
from weft.pipeline.schedules.lowered import Direction, Lowered, Receive, Send, TensorTransfer
from weft.pipeline.schedules.schedule import Schedule, validate
from weft.pipeline.schedules.simulate import Simulation, simulate

if TYPE_CHECKING:
    from weft.pipeline.cut import cut
    from weft.pipeline.run.api import Evaluation, Pipeline
    from weft.pipeline.transport.connections import StageFailed

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Direction",
    "Edge",
    "Evaluation",
    "Kind",
    "Lowered",
    "Pipeline",
    "Receive",
    "Schedule",
    "Send",
    "Simulation",
    "StageFailed",
    "StageGraph",
    "TensorTransfer",
    "Transfers",
    "chain",
    "cut",
    "lower",
    "schedule",
    "simulate",
    "validate",
]


def __getattr__(name: str) -> object:
    home = {"Evaluation": "run.api", "Pipeline": "run.api", "StageFailed": "transport.connections", "cut": "cut"}
    if name not in home:
        raise AttributeError(f"weft.pipeline has no {name!r}; its names are {', '.join(__all__)}")
    value = getattr(import_module(f"weft.pipeline.{home[name]}"), name)
    globals()[name] = value
    return value

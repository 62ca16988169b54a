"""A pipeline of meshes that never waits for a transfer that could have been early.

`schedule` makes a schedule (a value), `StageGraph` says which tensors go where, `lower` adds sends and receives,
`simulate` predicts the run; `Pipeline` runs it, and loads torch only when it is first named.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from weft.pipeline.action import Action, Kind
from weft.pipeline.costs import Costs, Transfers
from weft.pipeline.graph import Edge, StageGraph, chain
from weft.pipeline.lower import lower
from weft.pipeline.lowered import Direction, Lowered, Receive, Send, Transfer
from weft.pipeline.schedule import Schedule
from weft.pipeline.schedules import SCHEDULES, schedule
from weft.pipeline.simulate import Simulation, simulate
from weft.pipeline.validate import validate

if TYPE_CHECKING:
    from weft.pipeline.api import Evaluation, Pipeline
    from weft.pipeline.failure import StageFailed

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
    "Transfer",
    "Transfers",
    "chain",
    "lower",
    "schedule",
    "simulate",
    "validate",
]


def __getattr__(name: str) -> object:
    home = {"Evaluation": "api", "Pipeline": "api", "StageFailed": "failure"}
    if name not in home:
        raise AttributeError(f"weft.pipeline has no {name!r}; its names are {', '.join(__all__)}")
    value = getattr(import_module(f"weft.pipeline.{home[name]}"), name)
    globals()[name] = value
    return value

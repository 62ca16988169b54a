"""A sharded tensor from any mesh and layout to any other, at the speed of the wires.

`plan_reshard` makes a plan (pure); `reshard` and `reshard_state_dict` make and execute one; `Executor` executes
a plan again and again.

api        the two functions: a user's arguments, checked; the result and its gradient
describe   what ranks tell each other of their tensors, joined
tensors    users' tensors: the layouts of DTensors, what their memory must be like
spec       what is asked: tensors with both layouts, reductions and casts, the table of strategies
planner    from that to a plan, through units, senders and order; the paper's search, for comparison
units      which box goes from which ranks to which; streams and demands
senders    who sends what, by maximum flow; the lower bound
order      in which order: an open shop; chunks, and hops from rank to rank
plan       the plan: prints, parses back, knows its bound
simulate   when each hop will happen
executor/  the I/O
"""

import sys
from types import ModuleType
from typing import Any

from weft.reshard.api import reshard, reshard_state_dict
from weft.reshard.describe import Source
from weft.reshard.executor.executor import Executor, Handle
from weft.reshard.executor.workers import Pending
from weft.reshard.plan import Plan, Traffic
from weft.reshard.planner import plan_reshard, plan_tensors
from weft.reshard.spec import STRATEGIES, TensorSpec

__all__ = [
    "STRATEGIES",
    "Executor",
    "Handle",
    "Pending",
    "Plan",
    "Source",
    "TensorSpec",
    "Traffic",
    "plan_reshard",
    "plan_tensors",
    "reshard",
    "reshard_state_dict",
]


class _CallableModule(ModuleType):
    """`weft.reshard(x, ...)` is the function and `weft.reshard.Plan` is in the package: one name serves both."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return reshard(*args, **options)


sys.modules[__name__].__class__ = _CallableModule

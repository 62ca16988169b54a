"""A sharded tensor from any mesh and layout to any other, at the speed of the wires.

`plan_reshard` makes a plan (pure); `reshard` and `reshard_state_dict` make and execute one; `Executor` executes
a plan again and again.

    units, demands, flow, assign, search, open_shop, chunks -> planner, plan, text    from layouts to a plan (pure)
    script, simulate                        what each rank does in it, and when (pure)
    execute, lanes, parts, staging          doing it
    terms, memory                           what elements and tensors must be like
    api, arguments, sides, describe, job, autograd, dtensor, progress     the functions, from a user's tensors to a plan
    reference                               the same in plain torch
"""

import sys
from types import ModuleType
from typing import Any

from weft.reshard.api import reshard, reshard_state_dict
from weft.reshard.executor.executor import Executor
from weft.reshard.executor.job import Handle
from weft.reshard.executor.workers import Pending
from weft.reshard.plan import Plan, Traffic
from weft.reshard.planner import STRATEGIES, plan_reshard, plan_tensors
from weft.reshard.sides import Source
from weft.reshard.units import TensorSpec

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

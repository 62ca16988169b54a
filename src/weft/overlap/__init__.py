"""Matmuls that communicate while they compute.

api        the ops as users call them, and `plan_overlap`
inputs     what a call was given: cast and checked
ops        the same as custom ops of torch: gradients, compiling, flop counts
styles     layers for `parallelize_module`
plan       what a call will do, as a value that prints and parses
blocks     index maps: whose rows, which blocks, which hosts
speeds     what a group can do, and what a plan asks of it
search     from shapes and speeds to a plan; simulate: a plan on paper
short      calls so short that their data goes with the ranks' agreement (pure)
tuning     plans that were measured, and the file that keeps them
outgoing   from a plan to what each rank does where the output travels; incoming: where the input does (pure)
executor/  runs that on a CPU; streams/ on devices with streams
"""

from weft.comm.group import keep_gloo_priority
from weft.overlap.api import (
    all_gather_matmul,
    curves_of,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
    plan_overlap,
)
from weft.overlap.plan import Op, OverlapPlan, Transport
from weft.overlap.speeds import Curve, Curves
from weft.overlap.styles import ColwiseOverlap, RowwiseOverlap
from weft.overlap.tuning import Shape, tune, use_tuned

__all__ = [
    "ColwiseOverlap",
    "Curve",
    "Curves",
    "Op",
    "OverlapPlan",
    "RowwiseOverlap",
    "Shape",
    "Transport",
    "all_gather_matmul",
    "curves_of",
    "keep_gloo_priority",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "plan_overlap",
    "tune",
    "use_tuned",
]

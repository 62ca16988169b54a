"""Matmuls that communicate while they compute."""

from weft.comm.priority import keep_gloo_priority
from weft.overlap.curves import Curve, Curves
from weft.overlap.functional import all_gather_matmul, matmul_all_reduce, matmul_all_to_all, matmul_reduce_scatter
from weft.overlap.linear import ColwiseOverlap, RowwiseOverlap
from weft.overlap.plan import Op, OverlapPlan, Transport
from weft.overlap.planning import curves_of, plan_overlap
from weft.overlap.tune import Shape, tune, use_tuned

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

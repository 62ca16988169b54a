"""Matmuls that communicate while they compute."""

from weft.overlap.choose import plan_overlap
from weft.overlap.curves import Curve, Curves
from weft.overlap.functional import all_gather_matmul, matmul_all_reduce, matmul_all_to_all, matmul_reduce_scatter
from weft.overlap.plan import Op, OverlapPlan, Transport

__all__ = [
    "Curve",
    "Curves",
    "Op",
    "OverlapPlan",
    "Transport",
    "all_gather_matmul",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "plan_overlap",
]

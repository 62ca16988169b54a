"""Matmuls that communicate while they compute."""

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
from weft.overlap.predict import Curve, Curves
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

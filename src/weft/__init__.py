"""weft: model-parallel transformers that neither wait for communication nor compute on padding.

overlap/  reshard/  pipeline/  packed/      the four promises
models/  transformer/  parallel/            whole models: what they are, how they are computed, on a mesh axis
layout/  timeline/  comm/  kernels/         what all of that stands on
jobs/  cli/  vllm/  scale/  lab/  bench/  report/     what is built of it
reference                                   what each promise computes, in plain torch
errors, _torch, _torch_check                the named errors; torch's private names, and whether they still mean that

Names load when they are first used, so that `weft --help` does not wait for torch.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft import reshard as reshard
    from weft.comm.survivors import survivors
    from weft.errors import PeerLost, PeerMismatch, PeerTimeout
    from weft.kernels import PackedWeight, linear
    from weft.kernels.freshness import refresh
    from weft.kernels.norm import LayerNorm, RMSNorm
    from weft.layout import DeclaredCluster, Layout, Mesh
    from weft.overlap import (
        ColwiseOverlap,
        RowwiseOverlap,
        all_gather_matmul,
        matmul_all_reduce,
        matmul_all_to_all,
        matmul_reduce_scatter,
        plan_overlap,
    )
    from weft.packed import PackedBatch, flash_attn_varlen_func, pack, packed_attention, register_attention
    from weft.parallel import load_sharded, parallelize
    from weft.pipeline import Pipeline
    from weft.pipeline.cut import cut
    from weft.pipeline.schedules.generators import schedule
    from weft.reshard import plan_reshard, reshard_state_dict
    from weft.timeline import Timeline
    from weft.timeline.record import trace
    from weft.transformer.generation import Generator, generate

__version__ = version("weft")

_HOME = {
    "weft.comm.survivors": ("survivors",),
    "weft.errors": ("PeerLost", "PeerMismatch", "PeerTimeout"),
    "weft.kernels": ("PackedWeight", "linear"),
    "weft.kernels.freshness": ("refresh",),
    "weft.kernels.norm": ("LayerNorm", "RMSNorm"),
    "weft.layout": ("DeclaredCluster", "Layout", "Mesh"),
    "weft.overlap": (
        "ColwiseOverlap",
        "RowwiseOverlap",
        "all_gather_matmul",
        "matmul_all_reduce",
        "matmul_all_to_all",
        "matmul_reduce_scatter",
        "plan_overlap",
    ),
    "weft.packed": ("PackedBatch", "flash_attn_varlen_func", "pack", "packed_attention", "register_attention"),
    "weft.parallel": ("load_sharded", "parallelize"),
    "weft.transformer.generation": ("Generator", "generate"),
    "weft.pipeline": ("Pipeline", "schedule"),
    "weft.pipeline.cut": ("cut",),
    "weft.reshard": ("plan_reshard", "reshard_state_dict"),
    "weft.timeline": ("Timeline",),
    "weft.timeline.record": ("trace",),
}
_PACKAGES = ("comm", "kernels", "lab", "overlap", "packed", "parallel", "pipeline", "reshard")
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "ColwiseOverlap",
    "DeclaredCluster",
    "Generator",
    "LayerNorm",
    "Layout",
    "Mesh",
    "PackedBatch",
    "PackedWeight",
    "PeerLost",
    "PeerMismatch",
    "PeerTimeout",
    "Pipeline",
    "RMSNorm",
    "RowwiseOverlap",
    "Timeline",
    "all_gather_matmul",
    "cut",
    "flash_attn_varlen_func",
    "generate",
    "linear",
    "load_sharded",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "pack",
    "packed_attention",
    "parallelize",
    "plan_overlap",
    "plan_reshard",
    "refresh",
    "register_attention",
    "reshard",
    "reshard_state_dict",
    "schedule",
    "survivors",
    "trace",
]


def __getattr__(name: str) -> object:
    if name in _PACKAGES:  # `reshard` is both: a package that can be called
        return importlib.import_module(f"weft.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"weft has no {name!r}; its names are {', '.join(__all__)}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

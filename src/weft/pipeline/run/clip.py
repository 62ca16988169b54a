"""The norm of all gradients of a pipeline, and gradients cut down to it.

Every rank tells the norms of its stages' gradients, one number for each parameter, and all take the norm of all these
numbers in the order of the stages: what `torch.nn.utils.clip_grad_norm_` does with the parameters of all stages in one
process, operation by operation, so that the result has the same bits. One short message from each rank to each other.
Parameters that ranks share (DTensors) are summed over their mesh first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_

from weft.comm import Group
from weft.pipeline.run.stage import Stage


def clip_gradients(stages: Mapping[int, Stage], group: Group, max_norm: float, norm_type: float) -> Tensor:
    """Collective over the pipeline's ranks. Returns the norm before, a tensor of one number, on every rank."""
    mine: dict[str, list[tuple[str, str]]] = {}
    seen: set[nn.Parameter] = set()
    for index in sorted(stages):
        own = [p for p in stages[index].module.parameters() if p not in seen]
        seen.update(own)
        mine[str(index)] = [_as_text(norm) for norm in _norms(own, norm_type)]
    call = f"max_norm={max_norm!r} norm_type={norm_type!r}"
    told = [json.loads(text) for text in group.tell("clip_grad_norm_", json.dumps({"call": call, "norms": mine}))]
    calls = [each["call"] for each in told]
    if len(set(calls)) > 1:
        listed = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(calls))
        raise ValueError(f"ranks called clip_grad_norm_ with different values, expected the same on all: {listed}")
    by_stage: dict[int, list[tuple[str, str]]] = {}
    for each in reversed(told):  # of the ranks that share a stage the first counts
        by_stage |= {int(stage): norms for stage, norms in each["norms"].items()}
    norms = [_from_text(*norm) for stage in sorted(by_stage) for norm in by_stage[stage]]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.tensor(0.0)
    clip_grads_with_norm_(list(seen), max_norm, total)
    return total


def _norms(parameters: Iterable[nn.Parameter], norm_type: float) -> list[Tensor]:
    found = []
    for parameter in parameters:
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(parameter.grad.detach(), norm_type)
            found.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).cpu())
    return found


def _as_text(norm: Tensor) -> tuple[str, str]:
    return str(norm.dtype).removeprefix("torch."), float(norm).hex()  # exact: a double holds every smaller type


def _from_text(dtype: str, value: str) -> Tensor:
    types = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return torch.tensor(float.fromhex(value), dtype=types[dtype])

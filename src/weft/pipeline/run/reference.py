"""A step without a pipeline: all stages in one process, micro-batch by micro-batch. Runs are compared with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.pipeline.run.microbatch import seed_of, seeded, split_arguments, split_batch, split_keywords
from weft.pipeline.run.stage import LossFn
from weft.pipeline.schedules.graph import StageGraph, chain


def step_reference(
    modules: Sequence[nn.Module],
    batch: Any,
    targets: Any,
    *,
    microbatches: int,
    loss_fn: LossFn,
    graph: StageGraph | None = None,
    loss_scale: float = 1.0,
    seed: int | None = None,
    step: int = 0,
    **keywords: Any,
) -> Tensor:
    """The losses [micro-batches] of `Pipeline.step`, and its gradients in the modules.

    >>> layers = [nn.Linear(2, 2), nn.Linear(2, 1)]
    >>> step_reference(layers, torch.ones(4, 2), torch.ones(4, 1), microbatches=2, loss_fn=nn.functional.mse_loss).shape
    torch.Size([2])
    """
    graph = chain(len(modules)) if graph is None else graph
    words = split_keywords(keywords, microbatches)
    goals = split_batch(targets, microbatches, "targets")
    parts = split_arguments(batch, microbatches)
    losses = []
    for i in range(microbatches):
        seeds = [None if seed is None else seed_of(seed, step, stage, i) for stage in range(len(modules))]
        output = forward_reference(modules, parts[i], graph=graph, seeds=seeds, keywords=words[i])
        with seeded(seeds[-1]):
            loss = loss_fn(output, goals[i])
        torch.autograd.backward(loss * (loss_scale / microbatches))
        losses.append(loss.detach())
    return torch.stack(losses)


def forward_reference(
    modules: Sequence[nn.Module],
    args: tuple[Any, ...],
    *,
    graph: StageGraph,
    seeds: Sequence[int | None],
    keywords: Mapping[str, Any],
) -> Any:
    """One micro-batch through all stages; the result of the last one."""
    made: dict[tuple[int, str], Tensor] = {}
    result: Any = None
    for stage, module in enumerate(modules):
        inputs = {edge.tensor: made[edge.source, edge.tensor] for edge in graph.into(stage)}
        with seeded(seeds[stage]):
            if len(inputs) <= 1:
                result = module(*(inputs.values() or args), **keywords)
            else:
                result = module(**inputs, **keywords)
        if isinstance(result, Tensor) and (names := {edge.tensor for edge in graph.out_of(stage)}):
            result = {names.pop(): result}
        if graph.out_of(stage):
            made |= {(stage, name): tensor for name, tensor in result.items()}
    return result

"""What `Pipeline` is given, checked and put into shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

from torch import nn

from weft.layout import check_hosts
from weft.pipeline.run.microbatch import as_arguments, check_rows, seed_of, split_batch, split_keywords
from weft.pipeline.run.stage import Given, LossFn, Stage
from weft.pipeline.schedules.graph import Edge, StageGraph, chain
from weft.pipeline.schedules.schedule import Schedule
from weft.pipeline.schedules.text import run_in_steps
from weft.pipeline.transport.connections import Connections
from weft.pipeline.transport.placing import Placing, StageLayouts, as_mesh

E = TypeVar("E", bound=Enum)


def as_graph(edges: StageGraph | Sequence[Edge] | None, stages: int) -> StageGraph:
    """The stage graph; a chain where nothing is said."""
    if edges is None:
        return chain(stages)
    return edges if isinstance(edges, StageGraph) else StageGraph(stages, tuple(edges))


def as_member(kind: type[E], given: E | str, what: str) -> E:
    """A member of an enum, from itself or its value."""
    values = {member.value: member for member in kind}
    if isinstance(given, kind):
        return given
    if given not in values:
        raise ValueError(f"{what} is {given!r}, expected one of {', '.join(values)}")
    return values[given]


def make_placing(
    graph: StageGraph,
    schedule: Schedule,
    meshes: Sequence[Any],
    wires: Connections,
    input_layouts: StageLayouts | None,
    output_layouts: StageLayouts | None,
) -> Placing:
    """Meshes and layouts, once they fit the schedule, the graph and the ranks that there are."""
    real = dict(zip(wires.world, wires.hosts, strict=True))
    values = [as_mesh(mesh, real) for mesh in meshes]
    placing = Placing.of(schedule, graph, values, input_layouts, output_layouts)
    check_hosts(values, real)
    return placing


def make_stages(
    placing: Placing,
    rank: int,
    given: Mapping[int, nn.Module] | Sequence[nn.Module | None],
    loss_fn: LossFn | None,
    checkpoint: bool | Sequence[int],
) -> dict[int, Stage]:
    """The stages of a rank, by their numbers."""
    schedule, place = placing.schedule, placing.schedule_rank(rank)
    modules = dict(given) if isinstance(given, Mapping) else dict(enumerate(given))
    kept = range(schedule.stages) if checkpoint is True else (checkpoint or ())
    found = {}
    for index in () if place is None else schedule.stages_of(place):
        module = modules.get(index)
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"stage {index} is {module!r} on rank {rank}, expected an nn.Module, since the rank is in the mesh "
                f"of that stage; give {{{index}: module}}"
            )
        _check_copies(index, module, schedule)
        is_last = index == schedule.stages - 1
        if is_last and loss_fn is None and schedule.has_backward:
            raise ValueError(
                f"rank {rank} has the last stage and no loss_fn; expected loss_fn=(output, targets) -> loss"
            )
        found[index] = Stage(
            index, module, placing.graph, loss_fn=loss_fn if is_last else None, checkpoint=index in kept
        )
    return found


def _check_copies(index: int, module: nn.Module, schedule: Schedule) -> None:
    """FSDP frees and exchanges weights by the one backward pass that it knows of."""
    from torch.distributed.fsdp import FSDPModule  # here, as it is slow to import

    split = any(schedule.splits_backward(index, i) for i in range(schedule.microbatches))
    if split and any(isinstance(part, FSDPModule) for part in module.modules()):
        raise ValueError(
            f"stage {index} has modules of FSDP, and schedule {schedule.name} runs its backward pass in two parts, "
            "which FSDP cannot follow; expected another schedule, such as eager-1f1b"
        )


def in_order_of_ends(placing: Placing) -> tuple[int, ...]:
    """All ranks that have a stage, those that should be through with a step last before those that end early."""
    steps = run_in_steps(placing.schedule, placing.graph).of
    last = [max(steps[action] for action in actions) for actions in placing.schedule.ranks]
    ends = {
        each: last[placing.schedule.rank_of(stage)]
        for stage in range(placing.schedule.stages)
        for each in placing.ranks_of(stage)
    }
    return tuple(sorted(ends, key=lambda each: (-ends[each], each)))


def give(
    placing: Placing,
    stages: Sequence[int],
    batch: Any,
    targets: Any,
    keywords: Mapping[str, Any],
    *,
    scale: float,
    seed: int | None,
    step: int,
    training: bool,
) -> dict[tuple[int, int], Given]:
    """What each stage of a rank is given for each micro-batch; checked before anything starts."""
    count, last = placing.schedule.microbatches, placing.schedule.stages - 1
    heads = [stage for stage in stages if not placing.graph.into(stage)]
    if heads and batch is None and not keywords:
        raise ValueError(f"batch is None, expected one for stage {heads[0]}, which has no incoming edge")
    if last in stages and training and targets is None:
        raise ValueError("targets is None on a rank of the last stage, expected targets for loss_fn")
    whole = {f"batch[{i}]": x for i, x in enumerate(batch)} if isinstance(batch, tuple) else {"batch": batch}
    check_rows({**(whole if heads else {}), **({"targets": targets} if last in stages else {}), **keywords}, count)
    if isinstance(batch, tuple):
        parts = [tuple(p) for p in zip(*(split_batch(x, count, "batch") for x in batch), strict=True)]
    else:
        parts = [as_arguments(part) for part in split_batch(batch if heads else None, count, "batch")]
    goals = split_batch(targets if last in stages else None, count, "targets")
    words = split_keywords(keywords, count)
    return {
        (stage, i): Given(
            parts[i] if stage in heads and batch is not None else (),
            words[i],
            goals[i] if stage == last else None,
            scale / count,
            None if seed is None else seed_of(seed, step, stage, i),
        )
        for stage in stages
        for i in range(count)
    }

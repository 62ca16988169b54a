"""One move of some tensors on one rank: planned, checked, carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.cluster import Cluster
from weft.comm import Group
from weft.errors import PeerMismatch
from weft.reshard.execute import Executor, Pending, check_locals
from weft.reshard.planner import plan_tensors
from weft.reshard.progress import progress_bar
from weft.reshard.units import TensorSpec


@dataclass(frozen=True)
class Options:
    """How to move: what the planner and the executor take."""

    cluster: Cluster | None
    strategy: str
    chunk_bytes: int | None
    max_staging_bytes: int


class Handle:
    """A reshard under way. `wait` returns what the function would have returned; sources must not change before."""

    def __init__(self, pending: Pending, finish: Callable[[], Any]) -> None:
        self._pending, self._finish = pending, finish

    def wait(self) -> Any:
        """The result; raises what went wrong."""
        self._pending.wait()
        return self._finish()


class Job:
    """Tensors to move, with this rank's shards of both sides. Making one is collective.

    src, out: local tensors by name; what is missing in `out` is made here
    """

    def __init__(
        self,
        comm: Group,
        specs: Sequence[TensorSpec],
        src: Mapping[str, Tensor],
        out: Mapping[str, Tensor],
        options: Options,
        *,
        device: torch.device,
    ) -> None:
        self.comm, self.specs, self.options = comm, tuple(specs), options
        self.rank = dist.get_process_group_ranks(comm.pg)[comm.rank]
        self.device = device
        plan = plan_tensors(specs, cluster=options.cluster, strategy=options.strategy, chunk_bytes=options.chunk_bytes)
        self.src = {i: src[spec.name] for i, spec in enumerate(specs) if spec.name in src}
        self.out = {i: out[spec.name] for i, spec in enumerate(specs) if spec.name in out}
        for i, spec in enumerate(specs):
            if self.rank in spec.dst.mesh.ranks and i not in self.out:
                shape = spec.dst.local_shape(spec.shape, self.rank)
                self.out[i] = torch.empty(shape, dtype=spec.dst_dtype, device=device)
        problem = self._problem(plan)
        try:
            note = "ready" if problem is None else f"refused: {problem}"
            self.executor = Executor(plan, comm, max_staging_bytes=options.max_staging_bytes, note=note)
        except PeerMismatch:
            if problem is not None:
                raise problem from None
            raise

    def _problem(self, plan: Any) -> ValueError | None:
        try:
            for tensors, side in ((self.src, "src"), (self.out, "dst")):
                check_locals(plan, self.rank, tensors, side)
            _check_memory(self.src.values(), self.out.values())
        except ValueError as error:
            return error
        return None

    def run(self, *, progress: bool = False) -> dict[str, Tensor]:
        """Moves, and returns this rank's shards of the result by name."""
        shown = progress and self.rank == min(min(spec.dst.mesh.ranks) for spec in self.specs)
        total = sum(tensor.numel() * self.specs[i].wire_dtype.itemsize for i, tensor in self.out.items())
        with self.executor, progress_bar(total, show=shown) as advance:
            self.executor.start(self.src, self.out, on_bytes=advance if shown else None).wait()
        return self.result()

    def start(self, finish: Callable[[dict[str, Tensor]], Any]) -> Handle:
        """Starts to move; the handle returns `finish` of this rank's shards."""
        pending = self.executor.start(self.src, self.out)

        def end() -> Any:
            self.executor.close()
            return finish(self.result())

        return Handle(pending, end)

    def result(self) -> dict[str, Tensor]:
        """This rank's shards by name; an empty tensor where it is outside of the destination."""
        empty = {spec.name: torch.empty(0, dtype=spec.dst_dtype, device=self.device) for spec in self.specs}
        return {**empty, **{self.specs[i].name: tensor for i, tensor in self.out.items()}}


def _check_memory(sources: Any, outs: Any) -> None:
    """A destination in the memory of a source would be read after it was written."""
    held = {tensor.untyped_storage().data_ptr() for tensor in sources if tensor.numel()}
    for tensor in outs:
        if tensor.numel() and tensor.untyped_storage().data_ptr() in held:
            raise ValueError(
                "a destination tensor lies in the same memory as a source tensor, expected memory of its own; "
                "leave out= away, or clone() one of them"
            )

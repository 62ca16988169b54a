"""One move of some tensors on one rank, as the user asks for it: planned, checked, carried out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm import Group
from weft.errors import PeerMismatch
from weft.layout.mesh import DeclaredCluster
from weft.reshard.executor.executor import Executor
from weft.reshard.executor.parts import check_locals
from weft.reshard.executor.workers import Pending
from weft.reshard.plan import Plan
from weft.reshard.planner import plan_tensors
from weft.reshard.spec import TensorSpec


@dataclass(frozen=True)
class TransferOptions:
    """How to move: what the planner and the executor take."""

    cluster: DeclaredCluster | None
    strategy: str
    chunk_bytes: int | None
    max_staging_bytes: int


class TransferJob:
    """Tensors to move, with this rank's shards of both sides. Making one is collective.

    src, out: the memory of local tensors by name; what is missing in `out` is made here
    written:  the users' tensors that `out` is the memory of
    note:     what else the ranks must have in common
    """

    def __init__(
        self,
        comm: Group,
        specs: Sequence[TensorSpec],
        src: Mapping[str, Tensor],
        out: Mapping[str, Tensor],
        options: TransferOptions,
        *,
        device: torch.device,
        note: str,
        written: Sequence[Tensor] = (),
    ) -> None:
        self.comm, self.specs, self.options = comm, tuple(specs), options
        self.rank = dist.get_process_group_ranks(comm.pg)[comm.rank]
        self.device, self._written = device, tuple(written)
        plan = plan_tensors(specs, cluster=options.cluster, strategy=options.strategy, chunk_bytes=options.chunk_bytes)
        self.src = {i: src[spec.name] for i, spec in enumerate(specs) if spec.name in src}
        self.out = {i: out[spec.name] for i, spec in enumerate(specs) if spec.name in out}
        for i, spec in enumerate(specs):
            if self.rank in spec.dst.mesh.ranks and i not in self.out:
                shape = spec.dst.local_shape(spec.shape, self.rank)
                self.out[i] = torch.empty(shape, dtype=spec.dst_dtype, device=device)
        problem = self._problem(plan)
        try:
            state = "ready" if problem is None else f"refused: {problem}"
            self.executor = Executor(plan, comm, max_staging_bytes=options.max_staging_bytes, note=f"{note}, {state}")
        except PeerMismatch:
            if problem is not None:
                raise problem from None
            raise

    def _problem(self, plan: Plan) -> ValueError | None:
        try:
            for tensors, side in ((self.src, "src"), (self.out, "dst")):
                check_locals(plan, self.rank, tensors, side)
        except ValueError as error:
            return error
        return None

    def run(self, *, progress: bool = False) -> dict[str, Tensor]:
        """Moves, and returns this rank's shards of the result by name."""
        shown = progress and self.rank == min(min(spec.dst.mesh.ranks) for spec in self.specs)
        total = sum(tensor.numel() * self.specs[i].wire_dtype.itemsize for i, tensor in self.out.items())
        with self.executor, progress_bar(total, show=shown) as advance:
            on_bytes = advance if shown else None
            self.executor.start(self.src, self.out, on_bytes=on_bytes, also_written=self._written).wait()
        return self.result()

    def start(self) -> Pending:
        """Starts to move copies of the sources, which may change then; the executor is closed when all is done."""
        read = self.executor.script.tensors_read(self.executor.plan)
        self.src = {i: tensor.clone() if i in read else tensor for i, tensor in self.src.items()}
        return self.executor.start(self.src, self.out, also_written=self._written, then=self.executor.close)

    def result(self) -> dict[str, Tensor]:
        """This rank's shards by name; an empty tensor where it is outside of the destination."""
        empty = {spec.name: torch.empty(0, dtype=spec.dst_dtype, device=self.device) for spec in self.specs}
        return {**empty, **{self.specs[i].name: tensor for i, tensor in self.out.items()}}


class Handle:
    """A reshard under way. `wait` returns what the function would have returned.

    The source was copied: it may be changed or freed at once. What is written into (`out=`, DTensors of a state dict)
    holds anything until `wait` has returned. A handle may be dropped: the transfer goes on without it, as the other
    ranks need it.
    """

    def __init__(self, pending: Pending, finish: Callable[[], Any]) -> None:
        self._pending, self._finish = pending, finish
        self._lock = threading.Lock()
        self._is_finished = False
        self._result: Any = None
        self._modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def wait(self) -> Any:
        """The result; raises what went wrong. Waiting again gives the same."""
        with self._lock:
            if not self._is_finished:
                self._pending.wait()
                # The result is of the mode in which it was asked for, wherever it is waited for.
                with torch.inference_mode(self._modes[0]), torch.set_grad_enabled(self._modes[1]):
                    self._result = self._finish()
                self._is_finished = True
                self._finish = _nothing  # it holds the tensors
            return self._result

    def __repr__(self) -> str:
        return f"<Handle of a reshard, {'finished' if self._is_finished else 'not waited for yet'}>"


def _nothing() -> None:
    pass


@contextmanager
def progress_bar(total: int, *, show: bool) -> Iterator[Callable[[int], None]]:
    """A function that is told of bytes, from any thread; it draws a bar on a terminal's stderr if `show`."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        progress.TextColumn("reshard"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, disable=not (show and console.is_terminal)) as bar:
        task = bar.add_task("reshard", total=total)
        yield lambda count: bar.advance(task, count)

"""Whole copies of the model, each of which can be lost (`on_failure="shrink"`): the others go on from memory.

FSDP would share parameters and moments among the copies, so that those of a lost one would be gone. Here each copy has
all of them, and only gradients are exchanged. A step counts when all ranks have said so, before any of them changes a
parameter: that is passed by all ranks or by none. So after a failure all that are left are at the same step, with the
same parameters, and make the step again: its micro-batches are shared by the copies that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from weft._torch import cpu_group, local_tensor
from weft.comm.survivors import survivors
from weft.comm.tell import tell_all
from weft.errors import LONGEST_SECONDS, PeerLost, WeftError
from weft.timeline import record

T = TypeVar("T")


class Replicas:
    """The copies of a run that are left; `mesh` has the axes pp, dp and tp.

    world:  the group of all ranks of these copies
    copies: the ranks of each, as the default group numbers them
    """

    def __init__(self, mesh: DeviceMesh, *, timeout: float) -> None:
        world: Any = dist.group.WORLD
        self.world: ProcessGroup = world
        self.copies: list[list[int]] = mesh.mesh.movedim(1, 0).flatten(1).tolist()
        self._across: ProcessGroup = mesh["dp"].get_group()
        self._timeout = timeout

    @property
    def own(self) -> int:
        """Which of the copies this rank is in."""
        return next(i for i, ranks in enumerate(self.copies) if dist.get_rank() in ranks)

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This copy's part of a step's micro-batches; parts differ by one at most."""
        count, own = len(self.copies), self.own
        return items[own * len(items) // count : (own + 1) * len(items) // count]

    def add_gradients(self, module: nn.Module) -> None:
        """Every gradient becomes the sum over all copies; the same bits on all of them."""
        found = [local_tensor(p.grad) for p in module.parameters() if p.grad is not None]
        if len(self.copies) == 1 or not found:
            return
        flat = torch.cat([gradient.reshape(-1) for gradient in found])
        try:
            with record.span("recv", "copies: gradients", lane="comm", bytes=flat.nbytes):
                dist.all_reduce(flat, group=self._across)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise PeerLost(f"gradients of the copies: the connection failed: {reason}") from error
        parts: Sequence[Tensor] = torch.split(flat, [gradient.numel() for gradient in found])
        for gradient, total in zip(found, parts, strict=True):
            gradient.copy_(total.view_as(gradient))

    def keep(self, step: int, call: Callable[[], T], undo: Callable[[], None], told: Callable[[str], None]) -> T:
        """`call()`, again with fewer copies whenever one is lost in it; `undo()` comes before that.

        An error without a loss is raised as it is. `told` is given what happened.
        """
        while True:
            try:
                return call()
            except (WeftError, RuntimeError) as error:
                before = len(self.copies)
                self.shrink(step, error)
                told(
                    f"step {step + 1}: {before - len(self.copies)} of {before} copies lost, and the rest go on: {error}"
                )
            undo()

    def shrink(self, step: int, error: Exception) -> None:
        """Gives up the copies that have lost a rank; collective among those that are left. `error` is why."""
        new = survivors(self.world, timeout=min(2 * self._timeout, LONGEST_SECONDS))
        name, here, left = new.group_name, dist.get_rank(), set(dist.get_process_group_ranks(new))
        if left == {rank for ranks in self.copies for rank in ranks}:
            raise error  # nobody is lost: it would come again
        whole = [ranks for ranks in self.copies if set(ranks) <= left]
        if not any(here in ranks for ranks in whole):
            lost = sorted({rank for ranks in self.copies for rank in ranks} - left)
            raise PeerLost(
                f"this copy of the model has lost a rank (lost: {', '.join(map(str, lost))}); "
                f"{len(whole)} whole copies go on without it: {error}"
            ) from error
        self._forget()
        self.copies = whole
        ranks, place = sorted(rank for copy in whole for rank in copy), whole[self.own].index(here)
        self.world = new if set(ranks) == left else cpu_group(f"{name}/whole", ranks, timeout=self._timeout)
        self._across = cpu_group(f"{name}/{place}", [copy[place] for copy in whole], timeout=self._timeout)
        said = tell_all("the step after a loss", step, group=self.world, timeout=self._timeout)
        if len(set(said)) > 1:
            raise WeftError(f"ranks are at steps {said} after a loss, expected one; go on from the last checkpoint")

    def _forget(self) -> None:
        for group in (self._across, self.world):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)

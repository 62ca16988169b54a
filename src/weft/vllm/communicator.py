"""vLLM's CPU communicator with windows in place of gloo, for the tensor-parallel ranks of one host."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed

from weft.comm import hosts_of
from weft.comm.deadline import VLLM
from weft.comm.host_collectives import HostGroup

# 1,024 rows of a hidden size of 1,024 in float32, 256 of 4,096: enough for a matmul to run at its full speed.
_BANK_BYTES = 4 << 20


class WindowCommunicator(CpuCommunicator):  # type: ignore[misc]
    """All-reduce and all-gather through memory that the ranks share. `weft_left_alone` says why not, where not."""

    timeout: ClassVar[float] = VLLM.seconds

    def __init__(
        self,
        cpu_group: ProcessGroup,
        device: torch.device | None = None,
        device_group: ProcessGroup | None = None,
        unique_name: str = "",
        use_all2all: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(cpu_group, device, device_group, unique_name, use_all2all, **kwargs)
        self.lean: HostGroup | None = None
        self.weft_left_alone = self._why_not()
        if self.weft_left_alone is None:
            self.lean = HostGroup(self.device_group, bank_bytes=_BANK_BYTES, timeout=self.timeout)

    def _why_not(self) -> str | None:
        """The same answer on all ranks: what it looks at, all ranks have in common."""
        if self.world_size == 1:
            return "it has one rank"
        if not self.unique_name.startswith("tp"):
            return "it is not tensor-parallel"
        if isinstance(self.dist_module, _CPUSHMDistributed):
            return "vLLM has its own communicator through shared memory here"
        hosts = hosts_of(self.device_group, timeout=self.timeout)
        if len(set(hosts)) > 1:
            return f"its ranks are on {len(set(hosts))} hosts, expected one"
        return None

    def all_reduce(self, input_: Tensor) -> Tensor:
        """The sum over ranks, in rank order."""
        if self.lean is None:
            y: Tensor = super().all_reduce(input_)
        elif torch.compiler.is_compiling():
            y = all_reduce(input_, self.unique_name)
        else:
            y = self.lean.all_reduce(input_)
        return y

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """All ranks' tensors end to end along `dim`."""
        if self.lean is None:
            y: Tensor = super().all_gather(input_, dim)
        elif torch.compiler.is_compiling():
            y = all_gather(input_, dim, self.world_size, self.unique_name)
        else:
            y = self.lean.all_gather(input_, dim=dim)
        return y


def lean_group(name: str) -> HostGroup:
    """The lean group of the communicator of vLLM's group `name`: what a compiled graph can name is a text."""
    coordinator = parallel_state._groups[name]()
    assert coordinator is not None
    lean = coordinator.device_communicator.lean
    assert isinstance(lean, HostGroup)
    return lean


@torch.library.custom_op("weft::window_all_reduce", mutates_args=())
def all_reduce(part: Tensor, group: str) -> Tensor:
    """`HostGroup.all_reduce` for compiled graphs."""
    return lean_group(group).all_reduce(part)


@all_reduce.register_fake
def _(part, group):  # type: ignore[no-untyped-def]
    return part.new_empty(part.shape)


@torch.library.custom_op("weft::window_all_gather", mutates_args=())
def all_gather(shard: Tensor, dim: int, size: int, group: str) -> Tensor:
    """`HostGroup.all_gather` for compiled graphs."""
    return lean_group(group).all_gather(shard, dim=dim)


@all_gather.register_fake
def _(shard, dim, size, group):  # type: ignore[no-untyped-def]
    shape = list(shard.shape)
    shape[dim] *= size
    return shard.new_empty(shape)

"""Copies of the model over the data-parallel axis: torch's FSDP2, whose messages show in a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from weft import tracing
from weft.errors import PeerLost


def copy_over(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shares parameters and moments among the ranks of `mesh`; gradients become means over them. In place.

    Parameters may be DTensors on another axis of the same mesh. They are whole from the first forward pass of a step
    to its last backward pass: a pipeline has several micro-batches under way, and they must find what they left.
    """
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    assert isinstance(module, FSDPModule)
    # By what they do, not by descent: FSDP's own classes are private.
    module.set_custom_all_gather(_Gather())  # type: ignore[arg-type]
    module.set_custom_reduce_scatter(_Scatter())  # type: ignore[arg-type]


def sync_gradients(module: nn.Module, wanted: bool) -> None:
    """Whether the next backward pass exchanges gradients; the others of a step only add theirs up."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(wanted)
        module.set_is_last_backward(wanted)
        module.set_reshard_after_backward(wanted)


def sync_in_last(module: nn.Module, backwards: int) -> None:
    """Exchanges gradients in the last of every `backwards` backward passes: for a stage that a pipeline runs."""
    done = 0

    def begins(_: Tensor) -> None:
        nonlocal done
        done += 1
        sync_gradients(module, done % backwards == 0)

    def watch(_module: nn.Module, _args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(begins)  # type: ignore[no-untyped-call]

    module.register_forward_hook(watch)


@contextmanager
def _named(what: str, group: dist.ProcessGroup, nbytes: int) -> Iterator[None]:
    """Shows a message in the trace; an error says which ranks it was with, which gloo's own does not."""
    try:
        with tracing.span("recv", f"fsdp: {what}", lane="comm", bytes=nbytes):
            yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        ranks = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
        raise PeerLost(
            f"{what} of the copies on ranks {', '.join(map(str, ranks))} (FSDP): the connection failed: {reason}. A "
            "rank died, or it gave up and its own error says why"
        ) from error


class _Comm:
    """What FSDP asks of a collective of its own: memory, which is torch's here as it is without one."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        with _named("parameters", group, output_tensor.nbytes):
            return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _Scatter(_Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        with _named("gradients", group, input_tensor.nbytes):
            return dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)

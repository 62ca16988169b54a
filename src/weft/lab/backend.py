"""`torch.distributed` on the lab's DMA cards: the backend `dma`, which every rank of such a lab has.

Tagged messages and all collectives that gloo has, so that torch's own programs (DTensor, FSDP2, DDP, Hugging Face's
tensor parallelism) and weft run on the same wire, unchanged. It fails as gloo does: a wait that runs out of time, or a
peer that dies, raises a RuntimeError, and ends what others wait for from this rank in the group.

Collectives of a group run one after the other, in the order in which they were called: those that the caller waits for
on its own thread, the others on a thread of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import Store

from weft._torch import backend_settings
from weft.lab import collectives
from weft.lab.card import Card, CardChannel, open_card
from weft.lab.collectives import TAGS, Combine
from weft.lab.works import CollectiveWork, CollectiveWorker, MessageWork

if TYPE_CHECKING:
    ProcessGroup = object
else:
    from torch.distributed import ProcessGroup  # whose methods are declared with other names of arguments

BACKEND = "dma"
_OWN_TAGS = 1 << 62  # of collectives; those of messages are 32-bit numbers

_IN_PLACE: dict[Any, Combine] = {
    ReduceOp.SUM: lambda x, y: x.add_(y),  # type: ignore[dict-item]
    ReduceOp.AVG: lambda x, y: x.add_(y),  # type: ignore[dict-item]
    ReduceOp.PRODUCT: lambda x, y: x.mul_(y),  # type: ignore[dict-item]
    ReduceOp.MIN: lambda x, y: torch.minimum(x, y, out=x),  # type: ignore[dict-item]
    ReduceOp.MAX: lambda x, y: torch.maximum(x, y, out=x),  # type: ignore[dict-item]
    ReduceOp.BAND: lambda x, y: x.bitwise_and_(y),  # type: ignore[dict-item]
    ReduceOp.BOR: lambda x, y: x.bitwise_or_(y),  # type: ignore[dict-item]
    ReduceOp.BXOR: lambda x, y: x.bitwise_xor_(y),  # type: ignore[dict-item]
}


def register(wire: int, host: int) -> None:
    """Gives this process a card of `host` on the wire behind the descriptor, and torch the backend `dma`."""
    card = open_card(wire, host)

    def make(store: Store, rank: int, size: int, timeout: timedelta) -> CardGroup:
        return CardGroup(card, store, rank, size, timeout)

    dist.Backend.register_backend(BACKEND, make, devices=["cpu"])


class CardGroup(ProcessGroup):
    """A process group whose messages go over the lab's cards. torch makes it: `dist.new_group(backend="dma")`."""

    def __init__(self, card: Card, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._channel = CardChannel(card, store, rank, size, timeout)
        self._worker = CollectiveWorker()
        self._calls = 0
        self._settings = backend_settings(BACKEND, timeout)
        self._name = self._description = ""

    # Names ------------------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def name(self) -> str:
        return BACKEND

    def _get_backend_name(self) -> str:
        return BACKEND

    # A group of backends asks one of them for its name; this one has none. C++ calls the first two, Python the rest.
    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    @property
    def group_name(self) -> Any:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: Any) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc  # noqa: N815

    def getRank(self) -> int:  # noqa: N802
        return self._channel.rank

    def getSize(self) -> int:  # noqa: N802
        return self._channel.size

    def rank(self) -> int:
        return self._channel.rank

    def size(self) -> int:
        return self._channel.size

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"the lab's cards send CPU tensors, got the device {device}")
        return self._settings

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def set_timeout(self, timeout: timedelta) -> None:
        self._channel.timeout = timeout
        self._settings = backend_settings(BACKEND, timeout)

    def abort(self) -> None:
        self._channel.give_up()

    def shutdown(self) -> None:
        self._channel.close()
        self._worker.stop()

    def __del__(self) -> None:
        with suppress(Exception):  # while the interpreter ends
            self.shutdown()

    def carried(self) -> tuple[int, int]:
        """Bytes that the card of this rank's host has sent, and received, since the run began."""
        return self._channel.carried()

    @property
    def reads_memory(self) -> bool:
        """Whether messages cost one copy; where processes may not read each other's memory they cost two."""
        return self._channel.reads_memory

    # Messages ---------------------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> MessageWork:
        return MessageWork(self._channel.send(_flat(_single(tensors)), dst, tag), tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> MessageWork:
        return MessageWork(self._channel.recv(_flat(_single(tensors)), src, tag), tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> MessageWork:
        return MessageWork(self._channel.recv(_flat(_single(tensors)), None, tag), tensors)

    # Collectives ------------------------------------------------------------------------------------------------------

    def _run(self, opts: Any, results: Any, *steps: Callable[[int], None]) -> CollectiveWork:
        """Starts the steps, each with tags of its own; all ranks call collectives in the same order."""
        tags = [_OWN_TAGS + (self._calls + i) * TAGS for i in range(len(steps))]
        self._calls += len(steps)

        def all_steps() -> None:
            with torch.inference_mode():
                for step, tag in zip(steps, tags, strict=True):
                    step(tag)

        work = CollectiveWork(all_steps, results, self._channel)
        self._worker.run(work, is_awaited=opts is not None and not getattr(opts, "asyncOp", True))
        return work

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> CollectiveWork:
        return self.allreduce_coalesced(tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> CollectiveWork:
        op = _op(opts)

        def one(x: Tensor) -> Callable[[int], None]:
            flat = _numbers(x)

            def step(tag: int) -> None:
                collectives.all_reduce(self._channel, flat, _IN_PLACE[op], tag)
                self._average(op, flat)

            return step

        return self._run(opts, tensors, *map(one, tensors))

    def _average(self, op: Any, x: Tensor) -> None:
        if op == ReduceOp.AVG:
            x.div_(self._channel.size)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> CollectiveWork:
        flat, root = _flat(_single(tensors)), 0 if opts is None else opts.rootRank
        return self._run(opts, tensors, lambda tag: collectives.broadcast(self._channel, flat, root, tag))

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> CollectiveWork:
        flat, op, root = _numbers(_single(tensors)), _op(opts), 0 if opts is None else opts.rootRank

        def step(tag: int) -> None:
            collectives.reduce(self._channel, flat, root, _IN_PLACE[op], tag)
            if self._channel.rank == root:
                self._average(op, flat)

        return self._run(opts, tensors, step)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> CollectiveWork:
        return self.allgather_coalesced(outputs, inputs, opts)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> CollectiveWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._run(opts, outputs, *(self._gathered(_each(o), _flat(i)) for o, i in pairs))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> CollectiveWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> CollectiveWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._run(opts, outputs, *(self._gathered(self._parts(o), _flat(i)) for o, i in pairs))

    def _gathered(self, parts: list[Tensor], own: Tensor) -> Callable[[int], None]:
        _check_parts(parts, [own.numel()] * self._channel.size)
        return lambda tag: collectives.all_gather(self._channel, parts, own, tag)

    def _parts(self, x: Tensor) -> list[Tensor]:
        """Of a tensor that holds the same of every rank."""
        if x.numel() % self._channel.size:
            raise ValueError(f"got a tensor of {x.numel()} elements, expected a multiple of {self._channel.size} ranks")
        return list(_flat(x).chunk(self._channel.size)) if x.numel() else [_flat(x)] * self._channel.size

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> CollectiveWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._run(opts, outputs, *(self._scattered(o, [_numbers(x) for x in i], opts) for o, i in pairs))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> CollectiveWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> CollectiveWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._run(opts, outputs, *(self._scattered(o, self._parts(_numbers(i)), opts) for o, i in pairs))

    def _scattered(self, output: Tensor, parts: list[Tensor], opts: Any) -> Callable[[int], None]:
        out, op = _numbers(output), _op(opts)
        _check_parts(parts, [out.numel()] * self._channel.size)

        def step(tag: int) -> None:
            collectives.reduce_scatter(self._channel, out, parts, _IN_PLACE[op], tag)
            self._average(op, out)

        return step

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> CollectiveWork:
        into, out = _each(outputs), _each(inputs)
        return self._run(opts, outputs, lambda tag: collectives.all_to_all(self._channel, into, out, tag))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> CollectiveWork:
        into, out = self._split(output, output_sizes), self._split(input, input_sizes)
        return self._run(opts, [output], lambda tag: collectives.all_to_all(self._channel, into, out, tag))

    def _split(self, x: Tensor, rows: list[int]) -> list[Tensor]:
        """The rows for each rank; without sizes, as many for each."""
        if not rows:
            return self._parts(x)
        if sum(rows) != (x.shape[0] if x.dim() else 1):
            raise ValueError(f"got split sizes {rows} for a tensor of {tuple(x.shape)}, expected a sum of {x.shape[0]}")
        row = x[0].numel() if x.shape[0] else 0
        return list(torch.split(_flat(x), [count * row for count in rows]))

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> CollectiveWork:
        own, root = _flat(_single(inputs)), 0 if opts is None else opts.rootRank
        into = _each(outputs[0]) if self._channel.rank == root else None
        return self._run(opts, outputs, lambda tag: collectives.gather(self._channel, into, own, root, tag))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> CollectiveWork:
        into, root = _flat(_single(outputs)), 0 if opts is None else opts.rootRank
        out = _each(inputs[0]) if self._channel.rank == root else None
        return self._run(opts, outputs, lambda tag: collectives.scatter(self._channel, into, out, root, tag))

    def barrier(self, opts: Any = None) -> CollectiveWork:
        return self._run(opts, [], lambda tag: collectives.barrier(self._channel, tag))

    # Names that torch had before.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _single(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) != 1:
        raise ValueError(f"got {len(tensors)} tensors, expected one")
    return tensors[0]


def _each(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [_flat(x) for x in tensors]


def _flat(x: Tensor) -> Tensor:
    """Its memory as a vector."""
    if x.device.type != "cpu" or x.layout != torch.strided:
        raise RuntimeError(f"the lab's cards send dense CPU tensors, got one of {x.layout} on {x.device}")
    if not x.is_contiguous():
        dense = sorted(zip(x.stride(), x.shape, strict=True))
        expected = 1
        for stride, size in dense:
            if size != 1 and stride != expected:
                raise ValueError(f"got strides {x.stride()} for {tuple(x.shape)}, expected a tensor without gaps")
            expected *= size
    return x.detach().as_strided((x.numel(),), (1,))


def _numbers(x: Tensor) -> Tensor:
    """Its memory as a vector that can be added up."""
    flat = _flat(x)
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat


def _op(opts: Any) -> Any:
    if getattr(opts, "sparseIndices", None) is not None:
        raise RuntimeError("the lab's cards do not add up sparse tensors")
    op = ReduceOp.SUM if opts is None else opts.reduceOp
    found = next((known for known in _IN_PLACE if op == known), None)
    if found is None:
        raise RuntimeError(f"the lab's cards do not know the operation {op}")
    return found


def _check_parts(parts: Sequence[Tensor], sizes: Sequence[int]) -> None:
    got = [part.numel() for part in parts]
    if got != list(sizes):
        raise ValueError(f"got parts of {got} elements, expected {list(sizes)}, one of each rank")

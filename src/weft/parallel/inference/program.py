"""`RankProgram`: inference on the ranks of a group, with weights packed once and buffers used again.

    prefill    T tokens of many prompts end to end, no padding; only the rows asked for leave the last layer's attention
    decode     one token (or a few) for each sequence: T rows on every rank, keys and values in a `RankCache`

Inside a host every rank has all T rows between blocks: a row-parallel matmul writes its partial result where the others
read it, and each rank adds them up (`host_wire.py`), a chunk of rows while the next one is computed. Where the group
spans hosts, long inputs are split and overlapped instead (`network.py`). Either way a row's bits depend on its
own sequence only: not on the batch, nor on whether a token came in the prompt or was decoded.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from weft.comm.deadline import timeout_of
from weft.comm.window import hosts_of
from weft.kernels.cpu import dtype_code, empty, isa
from weft.packed import spec
from weft.packed.call import Inputs
from weft.packed.held import Dense, PackedLayer, Tables, common_dtype
from weft.parallel.inference.cache import RankCache
from weft.parallel.inference.door import check_program, job_of
from weft.parallel.inference.host_wire import CHUNK_ROWS, HostWire
from weft.parallel.inference.memory import Memory
from weft.parallel.inference.network import NetworkPass, NetworkWire
from weft.parallel.inference.passes import Pass
from weft.parallel.rank import RankModel


class RankProgram:
    """A rank's part of a transformer ready to run. It holds packed copies of the weights: make a new one when they have
    changed. Making one is collective over the group, and so is every call.
    """

    def __init__(self, model: RankModel, *, wire: HostWire | NetworkWire | None = None) -> None:
        """`wire` is that of an earlier program of the same group, if there was one."""
        self.model, self.transformer = model, model.transformer
        self.dtype = common_dtype(list(spec.weights((model.transformer, model.head))))
        self.code, self.kernels = dtype_code(self.dtype), isa()
        self.layers = [PackedLayer.of(layer) for layer in model.transformer.layers]
        self.head = None if model.head is None else Dense.of(model.head)
        check_program(self)
        self.wire = _wire(model, self.dtype, wire)
        everything = isinstance(self.wire, NetworkWire)  # is split among ranks, and not done in chunks
        self.memory = Memory(self.layers, model.transformer.width, self.dtype, None if everything else CHUNK_ROWS)
        self.tables = Tables()
        self._lock = threading.Lock()  # calls share the buffers

    def cache(self, *, slots: int, capacity: int) -> RankCache:
        """An empty cache for this rank's heads."""
        return RankCache(self.transformer, slots=slots, capacity=capacity, dtype=self.dtype)

    def run(
        self, inputs: Inputs, *, cache: RankCache | None = None, slots: Tensor | None = None, rows: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Hidden states after the last layer, [T, width], or [n, width] of the n tokens `rows`; the same on all ranks.

        With a `cache`, sequence s goes on behind the tokens that slot `slots[s]` holds, and is added to it. The model
        must be causal then. What was given is checked here, and nowhere behind it (`door.py`).
        """
        # Made before inference mode: what comes out may meet gradients, what is kept inside never does.
        out = empty(inputs.tokens if rows is None else rows.numel(), self.transformer.width, dtype=self.dtype)
        with self._lock, torch.inference_mode():
            job = job_of(self, inputs, cache, slots, rows)
            if not inputs.tokens:
                return out
            if isinstance(self.wire, NetworkWire):
                NetworkPass(self, self.wire, job).run(out)
            else:
                Pass(self, self.wire, job).run(out)
            if cache is not None:
                cache.lengths[job.slots] = job.past + job.lengths
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, V_r]: the logits of this rank's words, of hidden states [n, width]."""
        if self.head is None:
            raise ValueError("the model has no head, expected one that gives logits, such as LlamaForCausalLM")
        return self.head.apply(hidden)

    def gather(self, part: Tensor) -> list[Tensor]:
        """What each rank gave, all of one shape."""
        if self.wire is None:
            return [part]
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.wire.size)]
        with self._lock, torch.inference_mode():
            self.wire.gather(part.contiguous(), parts)
        return parts


def _wire(model: RankModel, dtype: torch.dtype, before: HostWire | NetworkWire | None) -> HostWire | NetworkWire | None:
    """How the ranks reach each other: not at all, through memory, or through the group."""
    group, width = model.group, model.transformer.width
    if group.size() == 1:
        return None
    if isinstance(before, NetworkWire) or (before is not None and before.fits(width, dtype)):
        return before
    timeout = timeout_of(group)
    if len(set(hosts_of(group, timeout=timeout))) == 1:
        return HostWire(group, width, dtype, timeout=timeout)
    return NetworkWire(group)

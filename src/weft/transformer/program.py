"""`RankProgram`: inference on one rank or on those of a group, with weights packed once and buffers used again."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.comm.host_collectives import CHUNK_ROWS, HostWire
from weft.kernels.cpu import empty
from weft.models.spec import VocabularyHead
from weft.transformer.call import NO_EXTRAS, Extras, Inputs, checked_call
from weft.transformer.memory import PassBuffers, RankCache, Workspace
from weft.transformer.parts import RankModel, capped
from weft.transformer.passes import Pass

if TYPE_CHECKING:
    from weft.transformer.network import NetworkWire


class RankProgram:
    """A rank's part of a transformer ready to run. It holds packed copies of the weights: make a new one when they have
    changed. Making one is collective over the group, and so is every call; a model alone has no group.
    """

    def __init__(self, model: RankModel, *, wire: HostWire | NetworkWire | None = None) -> None:
        """`wire` is that of an earlier program of the same group, if there was one."""
        self.model, self.transformer = model, model.transformer
        self.work = Workspace(model)
        self.dtype = self.work.dtype
        self.wire: HostWire | NetworkWire | None = None
        if model.group is not None and model.size > 1:
            # Here, because it imports what overlaps, which takes longer than to pack a small model.
            from weft.transformer.network import wire_of

            self.wire = wire_of(model.group, max(self.work.width, self.work.input_width), self.dtype, wire)
        # Chunks are for the ranks of a host: across hosts rows are split, and a rank alone would lose 1 to 3 % by them.
        chunk = CHUNK_ROWS if isinstance(self.wire, HostWire) else None
        self.buffers = PassBuffers(
            self.work.layers, self.work.width, self.dtype, chunk=chunk, alone=self.wire is None,
            embedded=0 if self.work.projection is None else self.work.input_width,
        )  # fmt: skip
        self._lock = threading.Lock()  # calls share the buffers

    def with_head(self, head: VocabularyHead) -> RankProgram:
        """The same program with this head: it shares the layers and the buffers, so that calls of both take turns."""
        twin = copy.copy(self)
        twin.model = replace(self.model, head=head.projection, transform=head.transform, cap=head.cap)
        twin.work = self.work.with_head(twin.model)
        return twin

    def cache(self, *, slots: int, capacity: int) -> RankCache:
        """An empty cache for this rank's heads."""
        return RankCache(self.transformer, slots=slots, capacity=capacity, dtype=self.dtype)

    def run(
        self, inputs: Inputs, *, cache: RankCache | None = None, slots: Tensor | None = None,
        rows: Tensor | None = None, extras: Extras = NO_EXTRAS,
    ) -> Tensor:  # fmt: skip
        """Hidden states after the last layer, [T, width], or [n, width] of the n tokens `rows`; the same on all ranks.

        With a `cache`, sequence s goes on behind the tokens that slot `slots[s]` holds, and is added to it. The model
        must be causal then. Of a rank alone `extras` get copies of what they ask for. What was given is checked here,
        and nowhere behind it.
        """
        if self.wire is not None and not extras.is_empty:
            raise ValueError("states, keys and values are handed out by a rank alone; expected no extras")
        # Made before inference mode: what comes out may meet gradients, what is kept inside never does.
        out = empty(inputs.tokens if rows is None else rows.numel(), self.work.width, dtype=self.dtype)
        # A rank alone without a cache calls torch for nothing, and the mode takes a while to enter.
        plain = self.wire is None and cache is None and rows is None
        with self._lock, nullcontext() if plain else torch.inference_mode():
            call = checked_call(self.work, inputs, extras, cache, slots, rows)
            if not inputs.tokens and extras.is_empty:
                return out
            self.buffers.reserve(max(inputs.tokens, 1))
            if self.wire is None or isinstance(self.wire, HostWire):
                Pass(self.work, self.buffers, self.wire, call).run(out)
            else:
                self.wire.new_pass(self.work, self.buffers, call).run(out)
            if cache is not None:
                assert call.slots is not None
                assert call.past is not None
                cache.lengths[call.slots] = call.past + call.lengths
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, V_r]: the logits of this rank's words, of hidden states [n, width]."""
        if self.work.head is None:
            raise ValueError("the model has no head, expected one that gives logits, such as LlamaForCausalLM")
        return capped(self.work.head.apply(hidden), self.model.cap)

    def gather(self, part: Tensor) -> list[Tensor]:
        """What each rank gave, all of one shape."""
        if self.wire is None:
            return [part]
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.wire.size)]
        with self._lock, torch.inference_mode():
            self.wire.gather(part.contiguous(), parts)
        return parts

"""Runs a parallelized module: which tensors it has now, what this rank holds of them, and a pass through them."""

from __future__ import annotations

import operator
import threading
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from weft._torch import own_buffers, own_parameters
from weft.kernels.attention import dropout_seed
from weft.kernels.freshness import Stamp
from weft.packed import spec
from weft.packed.call import Inputs, Kept
from weft.packed.engine import AttentionDropout, runs_as_training
from weft.parallel import training
from weft.parallel.describe import Cuts, Described, cuts, outline
from weft.parallel.exchange import agree, gather
from weft.parallel.inference.door import check_vectors
from weft.parallel.inference.host_wire import HostWire
from weft.parallel.inference.network import NetworkWire
from weft.parallel.inference.program import RankProgram
from weft.parallel.part import Part, part_of
from weft.parallel.share import Share, gather_rows
from weft.parallel.structure import Structure
from weft.parallel.told import digest, told


@dataclass(frozen=True, eq=False)
class Ranks:
    """The mesh axis that shares a model, and the group that its calls run on.

    Calls take turns by `lock`: they share buffers, and ranks must make them in the same order.
    """

    mesh: DeviceMesh
    group: ProcessGroup
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # a copy of a model runs on the same ranks


@dataclass(frozen=True, eq=False)
class Passed:
    """What a pass leaves: this rank's rows [T_r, width] after the last layer, and what it was made with."""

    rows: Tensor
    share: Share
    part: Part

    def whole(self, rows: Tensor | None = None) -> Tensor:
        """[T, width] on every rank, of the last rows or of others."""
        return gather_rows(self.rows if rows is None else rows, self.share, self.part.model.group)


class _Places:
    """Which tensors a module had, and where. FSDP, `to(dtype)` and `functional_call` put others there."""

    def __init__(self, module: nn.Module, described: Described) -> None:
        wanted = {id(t) for t in spec.tensors((described.transformer, described.head))}
        holders: list[dict[str, Any]] = [d for m in module.modules() for d in (own_parameters(m), own_buffers(m))]
        self._taken = [(holder, name, t) for holder in holders for name, t in holder.items() if id(t) in wanted]
        self._is_complete = len({id(t) for _, _, t in self._taken}) == len(wanted)

    def hold(self) -> bool:
        # Tensors that are no parameters, as torch's DDP makes of DTensors, are others in every call.
        return self._is_complete and all(holder.get(name) is t for holder, name, t in self._taken)


@dataclass(eq=False)
class _Kept:
    """What is kept without gradients: this rank's part and a program of it, and what these were made of."""

    outline: str
    leaves: list[Tensor]
    stamp: Stamp
    part: Part
    program: RankProgram | None = None

    def is_of(self, outline: str, leaves: list[Tensor]) -> bool:
        """Whether it was made of the same tensors in the same places, and none has changed."""
        same = self.outline == outline and len(self.leaves) == len(leaves)
        return same and all(map(operator.is_, self.leaves, leaves)) and self.stamp.holds(leaves)


class ParallelEngine:
    """The description of a module and this rank's part of it, made again when the module or its parameters change."""

    def __init__(
        self, module: nn.Module, describe: Callable[[], Described], dropout: AttentionDropout, ranks: Ranks,
        called: Callable[[], Iterable[nn.Module]], stack: Callable[[], nn.Module],
    ) -> None:  # fmt: skip
        """`called` are the modules that run by their own code; `stack` is the one that holds the layers."""
        self._module, self._describe, self._dropout, self.ranks = module, describe, dropout, ranks
        self._called, self._stack = called, stack
        self._described: Described | None = None
        self._structure: Structure | None = None
        self._places: _Places | None = None
        self._outline = ""
        self._leaves: list[Tensor] = []
        self._states: list[dict[str, Any]] = []
        self.looked_at: Described | None = None  # the description of now, for as long as a call takes
        self.cuts: Cuts = {}
        self._kept: _Kept | None = None
        self._wire: HostWire | NetworkWire | None = None

    @property
    def described(self) -> Described:
        """The description of the module as it is now. Raises where a hook of the user's would not run."""
        if self.looked_at is not None:
            return self.looked_at
        if (
            self._described is None
            or self._structure is None
            or self._places is None
            or not (self._structure.holds() and self._places.hold())
        ):
            self._described = None
            self._structure = Structure(self._module, self._called())
            self._structure.check_hooks()
            described = self._describe()
            self.cuts = cuts(described, self.ranks.group.size())
            self._places = _Places(self._module, described)
            self._outline, self._leaves = (
                outline(described),
                list(spec.tensors((described.transformer, described.head))),
            )
            self._states = [m.__dict__ for m in self._stack().modules()]
            self._described = described
        self._structure.check_hooks()
        return self._described

    @property
    def acts(self) -> bool:
        """Whether a layer is in training mode. Where others are not, the description says that these drop nothing."""
        self.described  # noqa: B018
        return any(state["training"] for state in self._states)

    @property
    def model(self) -> spec.Transformer:
        """The described stack; its tensors are DTensors."""
        return self.described.transformer

    @property
    def vocabulary(self) -> int:
        """How many words the head tells apart."""
        head = self.described.head
        assert head is not None
        return head.projection.weights[0].shape[0]

    def part(self, *, split: bool) -> Part:
        """What this rank computes with. Without gradients it is kept until something changes. Collective."""
        described = self.described
        if torch.is_grad_enabled():
            self._kept = None
            return part_of(described, self.cuts, self.ranks.group, split=split)
        return self._current(described, "a pass without gradients").part

    def program(self, asked: str = "inference") -> RankProgram:
        """What inference runs on, made again when something has changed on any rank. Collective.

        `asked` says what for: ranks that say different things raise `PeerMismatch`, before anything else happens.
        """
        with torch.no_grad():
            kept = self._current(self.described, asked)
        if kept.program is None:
            kept.program = RankProgram(kept.part.model, wire=self._wire)
            self._wire = kept.program.wire
        return kept.program

    def forget(self) -> None:
        """Makes what is kept anew in the next call. All ranks do it, or none."""
        self._kept = None

    def _current(self, described: Described, asked: str) -> _Kept:
        """What is kept, if it is good on all ranks; making it is collective, so that one rank's verdict is everyone's.

        A rank cannot know whether another one's weights were written to, and would wait for it, or compute with
        weights of another time than its own.
        """
        kept, leaves = self._kept, self._leaves
        # FSDP fills parameters without counting up their versions.
        is_fsdp = isinstance(self._module, FSDPModule)
        good = kept is not None and not is_fsdp and kept.is_of(self._outline, leaves)
        if not self._all_agree(good, asked):
            self._kept = kept = None  # two copies of the weights need not be held at once
            agree(self.ranks.group, f"{type(self._module).__name__} as {self._outline}")
            stamp = Stamp.of(leaves)  # before they are read: who writes meanwhile is noticed in the next call
            part = part_of(described, self.cuts, self.ranks.group, split=False)
            self._kept = kept = _Kept(self._outline, leaves, stamp, part)
        assert kept is not None
        return kept

    def _all_agree(self, good: bool, asked: str) -> bool:
        """Whether all ranks say that what they keep is good. One word of each: through memory, where there is some."""
        group = self.ranks.group
        if group.size() == 1:
            return good
        numbers = [int(good), zlib.crc32(asked.encode())]
        if isinstance(self._wire, HostWire):
            said = self._wire.tell(numbers)
        else:
            said = [t.tolist() for t in gather(group, torch.tensor(numbers), what="whether weights have changed")]
        if any(other[1] != numbers[1] for other in said):
            agree(group, f"{type(self._module).__name__} at {asked}")  # raises, and names both sides
        return all(other[0] for other in said)

    def is_differentiable(self, inputs: Inputs) -> bool:
        """Whether a call runs as in training."""
        return self.acts or runs_as_training(self._module, inputs, self._leaves)

    def __call__(self, inputs: Inputs, kept: Kept | None = None) -> Tensor:
        """Hidden states [T, width], the same on every rank; `kept` gets what it asks for, whole, too."""
        keeps = kept is not None and (kept.states is not None or kept.keys_values is not None)
        if not keeps and not self.is_differentiable(inputs):
            return self.program(told(inputs)).run(inputs)
        passed = self.run(inputs, kept)
        if kept is not None and kept.states is not None:
            kept.states[:] = [passed.whole(rows) for rows in kept.states]
        return passed.whole()

    def run(
        self, inputs: Inputs, kept: Kept | None = None, *, labels: Tensor | None = None, asked: str = ""
    ) -> Passed:  # fmt: skip
        """The rank's rows of the hidden states; `kept.states` get rows, `kept.keys_values` this rank's heads.

        `labels`, and what else was `asked` for, are only compared between ranks, like the inputs.
        """
        group, described = self.ranks.group, self.described
        if inputs.vectors is not None:
            check_vectors(inputs, described.transformer.width, next(spec.tensors(described.transformer)).dtype)
        share = Share.of(inputs.tokens, rank=group.rank(), size=group.size())
        if share.size > 1:
            told_labels = "none" if labels is None else digest(labels)
            agree(
                group,
                f"{type(self._module).__name__} on {told(inputs)} labels {told_labels} {asked} "
                f"training={self.acts} gradients={torch.is_grad_enabled()} split={share.split} "
                f"model {self._outline}",
            )
        part, noise = self.part(split=share.split), self._noise(described.transformer)
        drops = self._dropout is AttentionDropout.MODEL
        rows = training.forward(part, inputs, share, noise=noise, drops_attention=drops, kept=kept or Kept())
        return Passed(rows, share, part)

    def _noise(self, model: spec.Transformer) -> training.Noise | None:
        if not (self.acts and _drops(model)):
            return None
        group = self.ranks.group
        seeds = gather(group, dropout_seed(), what="the seed of dropout")
        return training.Noise.of(int(seeds[0]), group.rank())


def _drops(model: spec.Transformer) -> bool:
    embedding = 0.0 if model.embedding is None else model.embedding.dropout
    return embedding > 0 or any(
        max(a.attention.dropout, a.mlp.dropout, a.attention_out_dropout, a.mlp_out_dropout) > 0 for a in model.layers
    )

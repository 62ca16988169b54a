"""Runs a parallelized module: which tensors it has now, what this rank holds of them, and a pass through them."""

from __future__ import annotations

import operator
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from weft._torch import own_buffers, own_parameters
from weft.comm.host_collectives import HostWire
from weft.kernels.attention import dropout_seed
from weft.kernels.freshness import Stamp
from weft.models.modules import Watch, check_global_hooks, check_hooks
from weft.models.spec import ModelSpec, Transformer, outline, tensors
from weft.packed.engine import AttentionDropout, runs_as_training
from weft.parallel.cut import Cuts, cuts
from weft.parallel.rank_model import rank_model_of
from weft.parallel.training import Noise, RankOps
from weft.transformer.call import NO_EXTRAS, Extras, Inputs, check_vectors, digest
from weft.transformer.exchange import agree, gather, gather_rows
from weft.transformer.network import NetworkWire
from weft.transformer.parts import RankModel, Share
from weft.transformer.program import RankProgram
from weft.transformer.training import TrainingCall, forward

_GOLDEN = 0x9E3779B97F4A7C15  # far apart, whatever the salt


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
class RankStates:
    """What a pass leaves: this rank's rows [T_r, width] after the last layer, and what it was made with."""

    rows: Tensor
    share: Share
    model: RankModel
    group: ProcessGroup

    def whole(self, rows: Tensor | None = None) -> Tensor:
        """[T, width] on every rank, of the last rows or of others."""
        return gather_rows(self.rows if rows is None else rows, self.share, self.group)


class _Places:
    """Which tensors a module had, and where. FSDP, `to(dtype)` and `functional_call` put others there."""

    def __init__(self, module: nn.Module, leaves: list[Tensor]) -> None:
        wanted = {id(t) for t in leaves}
        holders: list[dict[str, Any]] = [d for m in module.modules() for d in (own_parameters(m), own_buffers(m))]
        self._found = [(holder, name, t) for holder in holders for name, t in holder.items() if id(t) in wanted]
        self._is_complete = len({id(t) for _, _, t in self._found}) == len(wanted)

    def hold(self) -> bool:
        # Tensors that are no parameters, as torch's DDP makes of DTensors, are others in every call.
        return self._is_complete and all(holder.get(name) is t for holder, name, t in self._found)


@dataclass(frozen=True, eq=False)
class _Reading:
    """What was read of a module: its description, what follows from that, and when it is stale.

    `in_training`: a layer is in training mode. Where others are not, the description says that these drop nothing.
    """

    watch: Watch
    places: _Places
    spec: ModelSpec
    cuts: Cuts
    outline: str
    leaves: list[Tensor]
    in_training: bool

    def holds(self) -> bool:
        return self.watch.holds() and self.places.hold()


@dataclass(eq=False)
class _InferenceState:
    """What is held without gradients: this rank's part and a program of it, and what these were made of."""

    outline: str
    leaves: list[Tensor]
    stamp: Stamp
    model: RankModel
    program: RankProgram | None = None

    def is_of(self, read: _Reading) -> bool:
        """Whether it was made of the same tensors in the same places, and none has changed."""
        same = self.outline == read.outline and len(self.leaves) == len(read.leaves)
        return same and all(map(operator.is_, self.leaves, read.leaves)) and self.stamp.holds(read.leaves)


class ParallelEngine:
    """The description of a module and this rank's part of it, made again when the module or its parameters change."""

    def __init__(
        self, module: nn.Module, describe: Callable[[], ModelSpec], dropout: AttentionDropout, ranks: Ranks, *,
        called: Callable[[], Iterable[nn.Module]], stack: Callable[[], nn.Module],
    ) -> None:  # fmt: skip
        """`called` are the modules that run by their own code; `stack` is the one that holds the layers."""
        self._module, self._describe, self._dropout, self.ranks = module, describe, dropout, ranks
        self._called, self._stack = called, stack
        self._last: _Reading | None = None
        self._fixed: ModelSpec | None = None  # the description of now, for as long as a call takes
        self._state: _InferenceState | None = None
        self._wire: HostWire | NetworkWire | None = None

    @property
    def spec(self) -> ModelSpec:
        """The description of the module as it is now. Raises where a hook of the user's would not run."""
        return self._fixed or self._read().spec

    @contextmanager
    def fixed(self, spec: ModelSpec) -> Iterator[None]:
        """Takes a description for that of now, for as long as a call takes: looking at all modules once is enough."""
        before, self._fixed = self._fixed, spec
        try:
            yield
        finally:
            self._fixed = before

    def _read(self) -> _Reading:
        if self._last is not None and self._last.spec is self._fixed:
            return self._last
        check_global_hooks()
        if self._last is None or not self._last.holds():
            self._last = None
            watch = Watch(list(self._module.modules()), tensors=False)
            check_hooks(self._module, called=self._called())
            spec = self._describe()
            leaves = list(tensors(spec))
            self._last = _Reading(
                watch, _Places(self._module, leaves), spec, cuts(spec, self.ranks.group.size()), outline(spec), leaves,
                any(m.training for m in self._stack().modules()),
            )  # fmt: skip
        return self._last

    @property
    def in_training(self) -> bool:
        """Whether dropout acts."""
        return self._read().in_training

    @property
    def cuts(self) -> Cuts:
        """How each tensor of the description is cut."""
        return self._read().cuts

    @property
    def model(self) -> Transformer:
        """The described stack; its tensors are DTensors."""
        return self.spec.transformer

    @property
    def vocabulary(self) -> int:
        """How many words the head tells apart."""
        head = self.spec.head
        assert head is not None
        return head.projection.weights[0].shape[0]

    @property
    def size(self) -> int:
        """How many ranks share the model."""
        return self.ranks.group.size()

    def rank_model(self, *, split: bool) -> RankModel:
        """What this rank computes with. Without gradients it is kept until something changes. Collective."""
        read = self._read()
        if torch.is_grad_enabled():
            self._state = None
            return rank_model_of(read.spec, read.cuts, self.ranks.group, split=split)
        return self._current(read, "a pass without gradients").model

    def program(self, asked: str = "inference") -> RankProgram:
        """What inference runs on, made again when something has changed on any rank. Collective.

        `asked` says what for: ranks that say different things raise `PeerMismatch`, before anything else happens.
        """
        with torch.no_grad():
            state = self._current(self._read(), asked)
        if state.program is None:
            state.program = RankProgram(state.model, wire=self._wire)
            self._wire = state.program.wire
        return state.program

    def forget(self) -> None:
        """Makes what is kept anew in the next call. All ranks do it, or none."""
        self._state = None

    def _current(self, read: _Reading, asked: str) -> _InferenceState:
        """What is kept, if it is good on all ranks; making it is collective, so that one rank's verdict is everyone's.

        A rank cannot know whether another one's weights were written to, and would wait for it, or compute with
        weights of another time than its own.
        """
        state = self._state
        # FSDP fills parameters without counting up their versions.
        is_fsdp = isinstance(self._module, FSDPModule)
        good = state is not None and not is_fsdp and state.is_of(read)
        if not self._all_agree(good, asked):
            self._state = state = None  # two copies of the weights need not be held at once
            agree(self.ranks.group, f"{type(self._module).__name__} as {read.outline}")
            stamp = Stamp.of(read.leaves)  # before they are read: who writes meanwhile is noticed in the next call
            model = rank_model_of(read.spec, read.cuts, self.ranks.group, split=False)
            self._state = state = _InferenceState(read.outline, read.leaves, stamp, model)
        assert state is not None
        return state

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
        read = self._read()
        return read.in_training or runs_as_training(self._module, inputs, read.leaves)

    def __call__(self, inputs: Inputs, extras: Extras = NO_EXTRAS) -> Tensor:
        """Hidden states [T, width], the same on every rank; `extras` get what they ask for, whole, too."""
        alone = self.ranks.group.size() == 1
        if (alone or extras.is_empty) and not self.is_differentiable(inputs):
            return self.program("" if alone else str(inputs)).run(inputs, extras=extras)
        done = self.run(inputs, extras)
        if extras.states is not None:
            extras.states[:] = [done.whole(rows) for rows in extras.states]
        return done.whole()

    def run(
        self, inputs: Inputs, extras: Extras, *, labels: Tensor | None = None, asked: str = ""
    ) -> RankStates:  # fmt: skip
        """The rank's rows of the hidden states; `extras.states` get rows, `extras.keys_values` this rank's heads.

        `labels`, and what else was `asked` for, are only compared between ranks, like the inputs.
        """
        group, read = self.ranks.group, self._read()
        transformer = read.spec.transformer
        if inputs.vectors is not None:
            check_vectors(inputs, transformer.input_width, next(tensors(transformer)).dtype)
        share = Share.of(inputs.tokens, rank=group.rank(), size=group.size())
        if share.size > 1:
            agree(
                group,
                f"{type(self._module).__name__} on {inputs} labels {'none' if labels is None else digest(labels)} "
                f"{asked} training={read.in_training} gradients={torch.is_grad_enabled()} split={share.split} "
                f"model {read.outline}",
            )
        model, noise = self.rank_model(split=share.split), self.noise()
        drops = self._dropout is AttentionDropout.MODEL
        call = TrainingCall(inputs, RankOps(model, share, noise), noise is not None, drops, extras)
        return RankStates(forward(model.transformer, call), share, model, group)

    def noise(self, salt: int = 0) -> Noise | None:
        """Where dropout of a call draws from; None where nothing is dropped. Collective.

        Stages of a pipeline, which may draw the same seed, drop different elements by a `salt` of their own.
        """
        read = self._read()
        if not (read.in_training and _drops(read.spec.transformer)):
            return None
        group = self.ranks.group
        seeds = gather(group, dropout_seed(), what="the seed of dropout")
        return Noise.of((int(seeds[0]) + salt * _GOLDEN) % (1 << 63), group.rank())


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """With FSDP around a model, its parameters lie on the one axis that shares it; collective over the other."""
    if not isinstance(model, FSDPModule):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def _drops(model: Transformer) -> bool:
    embedding = 0.0 if model.embedding is None else model.embedding.dropout
    return embedding > 0 or any(
        max(a.attention.dropout, a.mlp.dropout, a.attention_out_dropout, a.mlp_out_dropout) > 0 for a in model.layers
    )

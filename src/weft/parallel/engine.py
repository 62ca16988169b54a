"""Runs a parallelized module: which tensors it has now, what this rank holds of them, and a pass through them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from weft.kernels.attention import dropout_seed
from weft.packed import spec
from weft.packed.call import Inputs, Kept
from weft.packed.engine import AttentionDropout, runs_as_training
from weft.parallel import training
from weft.parallel.describe import Cuts, Described, cuts
from weft.parallel.exchange import agree, gather
from weft.parallel.inference.program import RankProgram
from weft.parallel.part import Part, part_of
from weft.parallel.share import Share, gather_rows


@dataclass(frozen=True, eq=False)
class Ranks:
    """The mesh axis that shares a model, and the group that its calls run on."""

    mesh: DeviceMesh
    group: ProcessGroup

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


class _Taken:
    """Remembers the parameters of a module that are cut: which they are, and how often they were written to."""

    def __init__(self, module: nn.Module, found: Cuts) -> None:
        self._taken = [
            (owner._parameters, name, p, _version(p), _address(p))
            for owner in module.modules()
            for name, p in owner._parameters.items()
            if p is not None and id(p) in found
        ]
        self._is_complete = len({id(p) for _, _, p, _, _ in self._taken}) == len(found)
        # FSDP fills parameters without counting up their versions.
        self._is_fsdp = any(isinstance(m, FSDPModule) for m in module.modules())

    def are_the_same(self) -> bool:
        # Tensors that are no parameters, as torch's DDP makes of DTensors, are others in every call.
        return self._is_complete and all(owner.get(name) is p for owner, name, p, _, _ in self._taken)

    def hold(self) -> bool:
        """Whether the values are the same, too."""
        if self._is_fsdp or not self.are_the_same():
            return False
        return all(_version(p) == version and _address(p) == at for _, _, p, version, at in self._taken)


def _version(p: Tensor) -> int:
    return -1 if p.is_inference() else p._version  # made in inference mode, it counts nothing


def _address(p: Tensor) -> int:
    return p._local_tensor.data_ptr() if isinstance(p, DTensor) else p.data_ptr()


class ParallelEngine:
    """The description of a module and this rank's part of it, made again when parameters are replaced or change."""

    def __init__(
        self, module: nn.Module, describe: Callable[[], Described], dropout: AttentionDropout, ranks: Ranks
    ) -> None:
        self._module, self._describe, self._dropout, self.ranks = module, describe, dropout, ranks
        self._taken: _Taken | None = None
        self._described: Described | None = None
        self.cuts: Cuts = {}
        self._kept_part: tuple[_Taken, Part] | None = None
        self._program: tuple[Part, RankProgram] | None = None

    @property
    def described(self) -> Described:
        """The description, of the parameters that the module has now."""
        if self._described is None or self._taken is None or not self._taken.are_the_same():
            self._described = self._describe()
            self.cuts = cuts(self._described, self.ranks.group.size())
            self._taken = _Taken(self._module, self.cuts)
        return self._described

    @property
    def model(self) -> spec.Transformer:
        """The described stack; its tensors are DTensors."""
        return self.described.transformer

    @property
    def vocabulary(self) -> int:
        """How many words the head tells apart."""
        assert self.described.head is not None
        return self.described.head.projection.weights[0].shape[0]

    def part(self, *, split: bool) -> Part:
        """What this rank computes with. Without gradients it is kept until a parameter changes."""
        described = self.described
        if torch.is_grad_enabled():
            self._kept_part = self._program = None
            return part_of(described, self.cuts, self.ranks.group, split=split)
        if self._kept_part is None or not self._kept_part[0].hold():
            part = part_of(described, self.cuts, self.ranks.group, split=False)
            self._kept_part = (_Taken(self._module, self.cuts), part)
        return self._kept_part[1]

    def program(self) -> RankProgram:
        """What inference runs on, made again when a parameter has changed. Collective."""
        with torch.no_grad():
            part = self.part(split=False)
        if self._program is None or self._program[0] is not part:
            self._program = None  # two copies of the weights need not be held at once
            self._program = (part, RankProgram(part.model))
        return self._program[1]

    def is_differentiable(self, inputs: Inputs) -> bool:
        """Whether a call runs as in training."""
        return runs_as_training(self._module, inputs, spec.tensors((self.model, self.described.head)))

    def __call__(self, inputs: Inputs, kept: Kept | None = None) -> Tensor:
        """Hidden states [T, width], the same on every rank; `kept` gets what it asks for, whole, too."""
        keeps = kept is not None and (kept.states is not None or kept.keys_values is not None)
        if not keeps and not self.is_differentiable(inputs):
            return self.program().run(inputs)
        passed = self.run(inputs, kept)
        if kept is not None and kept.states is not None:
            kept.states[:] = [passed.whole(rows) for rows in kept.states]
        return passed.whole()

    def run(self, inputs: Inputs, kept: Kept | None = None, *, labels: Tensor | None = None) -> Passed:
        """The rank's rows of the hidden states; `kept.states` get rows, `kept.keys_values` this rank's heads.

        `labels` are only compared between ranks, like the inputs.
        """
        group = self.ranks.group
        share = Share.of(inputs.tokens, rank=group.rank(), size=group.size())
        self._agree(inputs, labels, share)
        part, noise = self.part(split=share.split), self._noise()
        drops = self._dropout is AttentionDropout.MODEL
        rows = training.forward(part, inputs, share, noise=noise, drops_attention=drops, kept=kept or Kept())
        return Passed(rows, share, part)

    def _agree(self, inputs: Inputs, labels: Tensor | None, share: Share) -> None:
        if share.size == 1:
            return
        given = [inputs.cu_seqlens, *inputs.indices] if inputs.vectors is None else [inputs.cu_seqlens]
        told = "none" if labels is None else digest(labels)
        agree(
            self.ranks.group,
            f"{type(self._module).__name__} on {share.tokens} tokens of {inputs.cu_seqlens.numel() - 1} sequences, "
            f"inputs {digest(*given)} labels {told} training={self._module.training} "
            f"gradients={torch.is_grad_enabled()} split={share.split}",
        )

    def _noise(self) -> training.Noise | None:
        if not (self._module.training and _drops(self.model)):
            return None
        group = self.ranks.group
        seeds = gather(group, dropout_seed(), what="the seed of dropout")
        return training.Noise.of(int(seeds[0]), group.rank())


def digest(*tensors: Tensor) -> str:
    """Twelve hexadecimal digits by which ranks compare what they were given."""
    found = hashlib.blake2b(digest_size=6)
    for tensor in tensors:
        array: Any = tensor.detach().contiguous().numpy()
        found.update(array.data)
    return found.hexdigest()


def _drops(model: spec.Transformer) -> bool:
    embedding = 0.0 if model.embedding is None else model.embedding.dropout
    return embedding > 0 or any(
        max(a.attention.dropout, a.mlp.dropout, a.attention_out_dropout, a.mlp_out_dropout) > 0 for a in model.layers
    )

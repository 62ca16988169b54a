"""A decoder in stages for `weft.Pipeline`, each shared by the ranks of a mesh axis.

    stage 0        ids [T]        -> embedding, its layers                -> x [T_r, width]
    stage i        x [T_r, width] -> its layers                           -> x [T_r, width]
    the last one   x [T_r, width] -> its layers, norm, head, loss         -> the sum of the losses, or logits [T, V_r]

T tokens of a packed micro-batch lie as T_r rows on the ranks of a stage, cut as torch.chunk cuts: `Shard(0)` where they
enter and leave. Every stage is told `cu_seqlens`. Parameters have their names in the whole model, so that checkpoints
of any cut fit any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

from weft.kernels.door import offsets_at
from weft.models.families import FAMILIES, family_of
from weft.models.family import Family, HeadKind
from weft.models.spec import ModelSpec
from weft.packed.boundaries import positions_of
from weft.packed.engine import AttentionDropout
from weft.packed.forms import StageTexts
from weft.packed.inputs import checked_index
from weft.parallel.cut import cuts
from weft.parallel.engine import ParallelEngine, Ranks
from weft.parallel.surface import distribute
from weft.parallel.training import RankOps, check_targets, cross_entropy, logits
from weft.transformer.call import Inputs, digest
from weft.transformer.exchange import agree
from weft.transformer.parts import IndexRun, Share
from weft.transformer.training import TrainingCall, embed, layers


class ModelStage(nn.Module):
    """Stage `index` of `count` of a language model, whose modules it takes over. See `model_stage`."""

    def __init__(self, whole: Any, family: Family, index: int, count: int, run: IndexRun) -> None:
        super().__init__()
        assert family.stages is not None
        names = family.stages
        self.index, self.count, self.config = index, count, whole.config
        base, self._family, self._names = getattr(whole, names.base), family, names
        all_layers, mine = getattr(base, names.layers), nn.Module()
        self._first_layer = run.first
        setattr(self, names.base, mine)
        for name in (names.embedding, *names.first) if index == 0 else ():
            setattr(mine, name, getattr(base, name))
        setattr(mine, names.layers, nn.ModuleDict({str(i): all_layers[i] for i in range(run.first, run.end)}))
        for name in names.everywhere:
            setattr(mine, name, getattr(base, name))
        if index == count - 1:
            setattr(mine, names.norm, getattr(base, names.norm))
            setattr(self, names.head, getattr(whole, names.head))
        for module in (self, mine, getattr(mine, names.layers)):  # new ones, in the mode that the model is in
            module.training = whole.training
        self._kind = type(whole)  # not the model: it holds the other stages
        self._engine: ParallelEngine | None = None

    def _init_weights(self, module: nn.Module) -> None:
        """For buffers that were made on the meta device, as Hugging Face's models have it."""
        kind: Any = self._kind
        shell = kind.__new__(kind)  # their code may call super(), and asks for nothing but the config
        nn.Module.__init__(shell)
        shell.config = self.config
        shell._init_weights(module)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Shares the stage among the ranks of a mesh with one axis. Collective over it; rank 0's weights count."""
        distribute(self, mesh, cuts(self._describe(), mesh.size()))
        ranks = Ranks(mesh, mesh.get_group())
        self._engine = ParallelEngine(
            self, self._describe, AttentionDropout.MODEL, ranks, called=lambda: [self], stack=lambda: self
        )

    def forward(
        self, x: Any, *, cu_seqlens: Tensor | None = None, next_ids: Tensor | None = None,
        positions: Tensor | None = None, **said: Any,
    ) -> Tensor:  # fmt: skip
        """x: ids [T] on the first stage, rows [T_r, width] on others; cu_seqlens int32 [B + 1]; next_ids int64 [T],
        what each token must predict; positions int64 [T], counted in each text unless given.

        The last stage returns the sum of the losses over those that are not -100, or this rank's logits without.

        Texts may also come as models of Hugging Face take them: ids padded [B, S] with `attention_mask`, flattened
        [1, T] with `position_ids` that restart, with `cu_seq_lens_q` and `cu_seq_lens_k` or with `seq_idx`; nested, or
        a `PackedBatch`; and `labels` in the same form. All but the ids is told to every stage.
        """
        if said or cu_seqlens is None or not isinstance(x, Tensor) or x.is_nested:
            texts = StageTexts.of(x, cu_seqlens, said)
            if next_ids is not None and texts.next_ids is not None:
                raise ValueError("got labels and next_ids, expected one of them")
            out = self.forward(
                texts.ids if self.is_first else x, cu_seqlens=texts.batch.cu_seqlens, positions=texts.positions,
                next_ids=texts.next_ids if next_ids is None else next_ids,
            )  # fmt: skip
            return texts.placed(out) if self.is_last and out.dim() else out
        engine = self._engine
        if engine is None:
            raise ValueError("the stage has no ranks yet; call parallelize(mesh) first, also for one rank")
        cu_seqlens = cu_seqlens.to(torch.int32).contiguous()
        group, tokens = engine.ranks.group, int(cu_seqlens[-1]) if cu_seqlens.numel() else 0
        offsets_at(cu_seqlens, total=tokens)
        share = Share(tokens, group.rank(), group.size(), split=group.size() > 1)
        positions = positions_of(cu_seqlens, tokens) if positions is None else positions
        farthest = int(positions.max()) if tokens else 0
        self._check(x, share, farthest)
        indices = self._indices(x, positions) if self.is_first else ()
        if next_ids is not None and next_ids.shape != (tokens,):
            raise ValueError(f"next_ids have shape {list(next_ids.shape)}, expected one for each of {tokens} tokens")
        given = (cu_seqlens, positions, x) if self.is_first else (cu_seqlens, positions)
        agree(
            group,
            f"stage {self.index} on {tokens} tokens, inputs {digest(*given)} training={engine.in_training} "
            f"gradients={torch.is_grad_enabled()}",
        )
        model, noise = engine.rank_model(split=share.split), engine.noise(salt=self.index)
        inputs = Inputs(cu_seqlens, tokens, indices, None, positions, farthest)
        call = TrainingCall(inputs, RankOps(model, share, noise), noise is not None, drops_attention=True)
        rows = embed(model.transformer.embedding, call) if self.is_first else x
        rows = layers(model.transformer, rows, call)
        if not self.is_last:
            return rows
        found = logits(model, rows, share)
        if next_ids is None:
            return found
        check_targets(next_ids, self.config.vocab_size)
        return cross_entropy(found, next_ids, model.words, group=group, items=1.0)

    def _check(self, x: Tensor, share: Share, farthest: int) -> None:
        expected = (share.tokens,) if self.is_first else (share.mine.count, self.config.hidden_size)
        if tuple(x.shape) != expected:
            raise ValueError(
                f"stage {self.index} was given {list(x.shape)}, expected {list(expected)} for cu_seqlens that end at "
                f"{share.tokens}; give the rows Shard(0) between stages, as `stage_layouts` says"
            )
        if self.is_first and (x.is_floating_point() or x.dtype == torch.bool):
            raise ValueError(f"stage 0 was given {x.dtype}, expected token numbers")
        if farthest >= self.config.max_position_embeddings:
            raise ValueError(
                f"a sequence has {farthest + 1} tokens, the model has {self.config.max_position_embeddings} positions"
            )

    def _indices(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """What is looked up in each table of the embedding."""
        assert self._engine is not None
        embedding = self._engine.model.embedding
        assert embedding is not None
        given = {"input_ids": ids, "position_ids": positions}
        pairs = list(zip(embedding.names, embedding.tables, strict=True))
        return tuple(checked_index(given[name], name, table.shape[0]) for name, table in pairs)

    def _describe(self) -> ModelSpec:
        names, base = self._names, getattr(self, self._names.base)
        parts = (names.embedding, *names.first, names.norm, *names.everywhere)
        found = {name: getattr(base, name, None) for name in parts}
        found[names.layers] = list(getattr(base, names.layers).values())
        stage = SimpleNamespace(config=self.config, modules=base.modules, first_layer=self._first_layer, **found)
        transformer = self._family.describe(stage)
        read = self._family.heads[self._kind.__name__].vocabulary
        return ModelSpec(transformer, read(self) if read is not None and self.is_last else None)


def layers_of(layers: int, index: int, count: int) -> IndexRun:
    """The layers of a stage, as even as they go; the last stages, which also have the head, get the fewer.

    >>> [(r.first, r.end) for r in (layers_of(7, i, 3) for i in range(3))]
    [(0, 3), (3, 5), (5, 7)]
    """
    if not 0 < count <= layers:
        raise ValueError(f"got {count} stages for {layers} layers, expected at most one stage for each layer")
    return IndexRun.balanced(layers, index, count)


def model_stage(
    model: Any, index: int, count: int, mesh: DeviceMesh, *, layers: Sequence[range] | None = None
) -> ModelStage:
    """Stage `index` of `count` of a Hugging Face language model, shared by the ranks of `mesh`. Collective over these.

        stage = model_stage(LlamaForCausalLM(config), index, count, mesh["tp"])
        pipe = weft.Pipeline({index: stage}, meshes, schedule, loss_fn=lambda summed, count: summed / count,
                             **stage_layouts(count))
        pipe.step([ids, ...], [count, ...], cu_seqlens=[...], next_ids=[...])

    `layers` has those of each stage, as `weft.cut` gives them; equal counts by default. The model, which may be on the
    meta device, gives its modules away.
    """
    family, name = family_of(model), type(model).__name__
    if family is None or name not in supported():
        raise ValueError(f"got a {name}, expected a {' or '.join(supported())} to cut into stages")
    words, head = model.get_input_embeddings(), model.get_output_embeddings()
    if count > 1 and (model.config.tie_word_embeddings or words.weight is head.weight):
        raise ValueError(
            "the first and the last stage would share one tied embedding, expected a model with "
            "tie_word_embeddings=False, or one stage"
        )
    family.read(getattr(model, family.base_of(model)))  # refuses what a stage would not compute, while it is whole
    names = family.stages
    assert names is not None
    total = len(getattr(getattr(model, names.base), names.layers))
    run = layers_of(total, index, count) if layers is None else _checked_run(layers, total, index, count)
    stage = ModelStage(model, family, index, count, run)
    stage.parallelize(mesh)
    return stage


def _checked_run(layers: Sequence[range], total: int, index: int, count: int) -> IndexRun:
    every = [i for run in layers for i in run]
    if len(layers) != count or every != list(range(total)) or not all(layers):
        raise ValueError(
            f"got the layers {list(layers)} for {count} stages; expected consecutive ranges, none empty, that make up "
            f"{total} layers, as weft.cut gives them"
        )
    return IndexRun(layers[index].start, layers[index].stop)


def supported() -> list[str]:
    """The names of the classes that `model_stage` takes."""
    able = [family for family in FAMILIES if family.stages is not None]
    return [name for f in able for name, head in f.heads.items() if head.kind is HeadKind.NEXT_TOKEN]


def stage_layouts(count: int) -> Mapping[str, Any]:
    """How tensors lie between `count` stages, for `weft.Pipeline`: rows, cut over the ranks of a stage.

    >>> stage_layouts(2)
    {'input_layouts': {1: [Shard(dim=0)]}, 'output_layouts': {0: [Shard(dim=0)]}}
    """
    return {
        "input_layouts": {i: [Shard(0)] for i in range(1, count)},
        "output_layouts": {i: [Shard(0)] for i in range(count - 1)},
    }

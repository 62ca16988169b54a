"""A Llama in stages for `weft.Pipeline`, each shared by the ranks of a mesh axis.

    stage 0        ids [T]        -> embedding, its layers                -> x [T_r, width]
    stage i        x [T_r, width] -> its layers                           -> x [T_r, width]
    the last one   x [T_r, width] -> its layers, norm, head, loss         -> the sum of the losses, or logits [T, V_r]

T tokens of a packed micro-batch lie as T_r rows on the ranks of a stage, cut as torch.chunk cuts: `Shard(0)` where they
enter and leave. Every stage is told `cu_seqlens`. Parameters have their names in the whole model, so that checkpoints
of any cut fit any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

from weft.kernels.door import offsets_at
from weft.packed import training as packed_training
from weft.packed.call import Inputs, Kept
from weft.packed.engine import AttentionDropout
from weft.packed.models.common import linear
from weft.packed.models.inputs import checked_index
from weft.packed.models.llama import describe_llama
from weft.parallel.cut import Run
from weft.parallel.describe import Described, VocabularyHead, cuts
from weft.parallel.distribute import distribute
from weft.parallel.embedding import lookup
from weft.parallel.engine import ParallelEngine, Ranks
from weft.parallel.exchange import agree
from weft.parallel.loss import check_targets, cross_entropy
from weft.parallel.part import Part
from weft.parallel.share import Share
from weft.parallel.told import digest
from weft.parallel.training import RankOps, logits


class LlamaStage(nn.Module):
    """Stage `index` of `count` of a `LlamaForCausalLM`, whose modules it takes over. See `llama_stage`."""

    def __init__(self, whole: Any, index: int, count: int) -> None:
        super().__init__()
        self.index, self.count, self.config = index, count, whole.config
        run = layers_of(len(whole.model.layers), index, count)
        self.model = nn.Module()
        if index == 0:
            self.model.embed_tokens = whole.model.embed_tokens
        self.model.layers = nn.ModuleDict({str(i): whole.model.layers[i] for i in range(run.first, run.end)})
        self.model.rotary_emb = whole.model.rotary_emb
        if index == count - 1:
            self.model.norm = whole.model.norm
            self.lm_head = whole.lm_head
        self._kind = type(whole)  # not the model: it holds the other stages
        self._engine: ParallelEngine | None = None

    def _init_weights(self, module: nn.Module) -> None:
        """For buffers that were made on the meta device, as Hugging Face's models have it."""
        self._kind._init_weights(self, module)

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
        self._engine = ParallelEngine(self, self._describe, AttentionDropout.OFF, ranks, lambda: [self], lambda: self)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor, next_ids: Tensor | None = None) -> Tensor:
        """x: ids [T] on the first stage, rows [T_r, width] on others; cu_seqlens int32 [B + 1]; next_ids int64 [T],
        what each token must predict.

        The last stage returns the sum of the losses over those that are not -100, or this rank's logits without.
        """
        engine = self._engine
        if engine is None:
            raise ValueError("the stage has no ranks yet; call parallelize(mesh) first, also for one rank")
        cu_seqlens = cu_seqlens.to(torch.int32).contiguous()
        group, tokens = engine.ranks.group, int(cu_seqlens[-1]) if cu_seqlens.numel() else 0
        offsets_at(cu_seqlens, total=tokens)
        share = Share(tokens, group.rank(), group.size(), split=group.size() > 1)
        positions = torch.arange(tokens) - cu_seqlens[:-1].long().repeat_interleave(cu_seqlens.diff().long())
        farthest = int(positions.max()) if tokens else 0
        self._check(x, share, farthest)
        if next_ids is not None and next_ids.shape != (tokens,):
            raise ValueError(f"next_ids have shape {list(next_ids.shape)}, expected one for each of {tokens} tokens")
        given = (cu_seqlens, x) if self.is_first else (cu_seqlens,)
        agree(group, f"stage {self.index} on {tokens} tokens, inputs {digest(*given)}, {torch.is_grad_enabled()}")
        part = engine.part(split=share.split)
        rows = self._embed(part, x, share) if self.is_first else x
        inputs = Inputs(cu_seqlens, tokens, positions=positions, farthest=farthest)
        call = packed_training.Call(inputs, False, False, Kept(), RankOps(part, share, None))
        rows = packed_training.layers(part.model.transformer, rows, call)
        if not self.is_last:
            return rows
        found = logits(part, rows, share)
        if next_ids is None:
            return found
        check_targets(next_ids, self.config.vocab_size)
        return cross_entropy(found, next_ids, part.model.words, group=group, items=1.0)

    def _embed(self, part: Part, ids: Tensor, share: Share) -> Tensor:
        index = checked_index(ids, "input_ids", self.config.vocab_size)
        embedding = part.model.transformer.embedding
        assert embedding is not None
        table, model = embedding.tables[0], part.model
        return lookup(table, index, model.words, share, model.group, padding=embedding.padding)

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

    def _describe(self) -> Described:
        model: Any = self.model
        parts = SimpleNamespace(
            config=self.config,
            rotary_emb=model.rotary_emb,
            embed_tokens=model.embed_tokens if self.is_first else None,
            layers=list(model.layers.values()),
            norm=model.norm if self.is_last else None,
        )
        transformer = describe_llama(parts)
        return Described(transformer, VocabularyHead(linear(self.lm_head)) if self.is_last else None)


def layers_of(layers: int, index: int, count: int) -> Run:
    """The layers of a stage, as even as they go; the last stages, which also have the head, get the fewer.

    >>> [(r.first, r.end) for r in (layers_of(7, i, 3) for i in range(3))]
    [(0, 3), (3, 5), (5, 7)]
    """
    if not 0 < count <= layers:
        raise ValueError(f"got {count} stages for {layers} layers, expected at most one stage for each layer")
    each, more = divmod(layers, count)
    first = index * each + min(index, more)
    return Run(first, first + each + (index < more))


def llama_stage(model: Any, index: int, count: int, mesh: DeviceMesh) -> LlamaStage:
    """Stage `index` of `count` of a `LlamaForCausalLM`, shared by the ranks of `mesh`. Collective over these.

        stage = llama_stage(LlamaForCausalLM(config), index, count, mesh["tp"])
        pipe = weft.Pipeline({index: stage}, meshes, schedule, loss_fn=lambda summed, count: summed / count,
                             **stage_layouts(count))
        pipe.step([ids, ...], [count, ...], cu_seqlens=[...], next_ids=[...])

    The model, which may be on the meta device, gives its modules away.
    """
    name = type(model).__name__
    if name != "LlamaForCausalLM":
        raise ValueError(f"got a {name}, expected a LlamaForCausalLM to cut into stages")
    if count > 1 and model.config.tie_word_embeddings:
        raise ValueError(
            "the first and the last stage would share one tied embedding, expected a model with "
            "tie_word_embeddings=False, or one stage"
        )
    if model.config.attention_dropout:
        raise ValueError(f"attention_dropout is {model.config.attention_dropout}, expected 0.0 in stages")
    stage = LlamaStage(model, index, count)
    stage.parallelize(mesh)
    return stage


def stage_layouts(count: int) -> Mapping[str, Any]:
    """How tensors lie between `count` stages, for `weft.Pipeline`: rows, cut over the ranks of a stage.

    >>> stage_layouts(2)
    {'input_layouts': {1: [Shard(dim=0)]}, 'output_layouts': {0: [Shard(dim=0)]}}
    """
    return {
        "input_layouts": {i: [Shard(0)] for i in range(1, count)},
        "output_layouts": {i: [Shard(0)] for i in range(count - 1)},
    }

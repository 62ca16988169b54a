"""Hugging Face models on the ranks of a mesh axis: the same class, call and parameters' names, another `forward`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from weft._torch import own_parameters
from weft.kernels.attention import dropout_seed
from weft.packed.batch import PackedBatch
from weft.packed.call import Kept
from weft.packed.models.base import PackedBase, Prepared
from weft.packed.models.cache import goes_on
from weft.packed.models.common import Unsupported
from weft.packed.models.heads import PackedHead
from weft.packed.models.inputs import HeadKind, packed_labels
from weft.parallel.columns import as_sharded, gather_columns
from weft.parallel.describe import VOCABULARY_HEADS, Cuts, Described
from weft.parallel.engine import ParallelEngine, Passed, Ranks
from weft.parallel.exchange import gather
from weft.parallel.inference.hf import answer
from weft.parallel.inference.program import RankProgram
from weft.parallel.keep import kept_tokens
from weft.parallel.loss import IGNORED, check_targets, cross_entropy
from weft.parallel.surface import ParallelModel, gathered
from weft.parallel.told import digest
from weft.parallel.training import logits

_HEAD_ARGUMENTS = {"labels", "return_dict", "num_items_in_batch", "logits_to_keep"}


class ParallelBase(ParallelModel, PackedBase):
    """Mixed into the class of a base model. `_weft_ranks` are those that share it."""

    _weft_ranks: Ranks

    def weft_engine(self) -> ParallelEngine:  # type: ignore[override]  # it is called in the same way
        module: Any = self
        pooler = getattr(self, "pooler", None)  # it runs by its own code, and so does whoever calls the base model
        called = [module] if pooler is None else [module, *pooler.modules()]
        return _engine(module, lambda: Described(self._weft_describe(module)), lambda m: m, lambda: called)

    def weft_prepare(self, arguments: dict[str, Any]) -> Prepared:
        prepared = super().weft_prepare(arguments)
        config: Any = self.config  # type: ignore[attr-defined]
        limit = config.max_position_embeddings
        if prepared.inputs.farthest >= limit:
            raise ValueError(
                f"a sequence of {prepared.inputs.farthest + 1} positions is longer than the model's limit of {limit}; "
                "cut it, or raise max_position_embeddings in the config"
            )
        return prepared

    def weft_forward(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        if goes_on(arguments):
            raise Unsupported("past_key_values of another model; a parallel model goes on with its own cache only")
        with self._weft_ranks.lock:
            engine = self.weft_engine()
            with looked_at(engine, engine.described), local_parameters(self, known=engine.cuts):  # type: ignore[arg-type]
                return super().weft_forward(original, arguments)


class ParallelHead(ParallelModel, PackedHead):
    """Mixed into a model with a small head, which every rank computes on whole states."""

    _weft_ranks: Ranks

    def weft_forward(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        model: Any = self
        base = base_of(self)
        with self._weft_ranks.lock, local_parameters(model, without=base), alike(model, self._weft_ranks):
            if isinstance(self, FSDPModule):
                base.weft_engine().forget()  # FSDP fills its parameters, and nobody counts that
            return super().weft_forward(original, arguments)


class ParallelVocabulary(ParallelModel):
    """Mixed into a model whose head gives logits of words: ranks share these, and the loss is computed as they lie."""

    _weft_ranks: Ranks
    _weft_head: HeadKind
    _weft_base: str

    def weft_engine(self) -> ParallelEngine:
        module: Any = self

        def describe() -> Described:
            base = base_of(module)
            return Described(base._weft_describe(base), VOCABULARY_HEADS[family_head(module)](module))

        return _engine(module, describe, base_of, lambda: [module])

    def weft_forward(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        with self._weft_ranks.lock:
            base, engine = base_of(self), self.weft_engine()
            found = engine.described
            with looked_at(engine, found), looked_at(base.weft_engine(), Described(found.transformer)):
                return self._forward(base, arguments)

    def _forward(self, base: Any, arguments: dict[str, Any]) -> Any:
        """With labels: loss, and logits as a DTensor. Without: whole logits, of the tokens that were asked for."""
        if self._infers(arguments):
            return self._inferred(base, arguments)
        self._check_cache(arguments)
        prepared: Prepared = base.weft_prepare({k: v for k, v in arguments.items() if k not in _HEAD_ARGUMENTS})
        labels, packed = arguments.get("labels"), isinstance(arguments.get("input_ids"), PackedBatch)
        targets = None if labels is None else self._targets(prepared.batch, labels)
        keep = kept_tokens(prepared.batch, arguments.get("logits_to_keep", 0), packed=packed)
        if keep is not None and labels is not None:
            raise Unsupported(
                "logits_to_keep: a loss needs the logits of all tokens; leave labels or logits_to_keep out"
            )
        kept = Kept([] if prepared.wants_states else None)
        items = arguments.get("num_items_in_batch")
        asked = f"items={None if items is None else float(items)} keep={None if keep is None else digest(keep.tokens)}"
        passed = self.weft_engine().run(prepared.inputs, kept, labels=targets, asked=asked)
        words = passed.part.model.words
        part = logits(passed.part, passed.rows, passed.share, keep=None if keep is None else keep.tokens)
        fields: dict[str, Any] = {}
        if targets is not None:
            fields["loss"] = cross_entropy(part, targets, words, group=self._weft_ranks.group, items=items)
            fields["logits"] = as_sharded(_placed(prepared.batch, part, packed), words, self._weft_ranks.mesh)
        else:
            whole = gather_columns(part, words, self._weft_ranks.group)
            fields["logits"] = _placed(prepared.batch, whole, packed) if keep is None else keep.placed(whole)
        if kept.states is not None:
            fields["hidden_states"] = self._states(passed, kept.states, prepared.batch, packed)
        return self._output(fields, arguments.get("return_dict"))

    def weft_program(self, asked: str = "inference") -> RankProgram:
        """What inference runs on; made again when weights have changed. Collective; `asked` is the same everywhere."""
        if self._weft_head is not HeadKind.NEXT_TOKEN:
            raise Unsupported(f"{type(self).__name__} is no decoder; expected a causal language model")
        return self.weft_engine().program(asked)

    @contextmanager
    def weft_alone(self) -> Iterator[ParallelEngine]:
        """The engine, while nobody else calls the model; with FSDP around it, its parameters are gathered."""
        module: Any = self
        with self._weft_ranks.lock, gathered(module):
            engine = self.weft_engine()
            with looked_at(engine, engine.described):
                yield engine

    def _check_cache(self, arguments: dict[str, Any]) -> None:
        """Raises where a call that is no inference asks for a cache, and says why it is none."""
        if arguments.get("past_key_values") is None and not arguments.get("use_cache"):
            return
        reasons = {
            "the model is in training mode (call eval())": self.weft_engine().acts,
            "gradients are on (use torch.no_grad())": torch.is_grad_enabled(),
            "labels were given": arguments.get("labels") is not None,
            "output_hidden_states was asked for": self._wants_states(arguments),
            f"{type(self).__name__} is no decoder": self._weft_head is not HeadKind.NEXT_TOKEN,
        }
        why = ", and ".join(reason for reason, holds in reasons.items() if holds)
        raise Unsupported(f"past_key_values: no cache of keys and values here: {why}; or call it with use_cache=False")

    def _wants_states(self, arguments: dict[str, Any]) -> bool:
        config: Any = self.config  # type: ignore[attr-defined]
        states = arguments.get("output_hidden_states")
        wanted = config.output_hidden_states if states is None else states
        if not isinstance(wanted, bool):
            raise Unsupported(f"output_hidden_states is {wanted!r}, expected True for all of them, or False")
        return wanted

    def _infers(self, arguments: dict[str, Any]) -> bool:
        """Whether a call needs neither gradients nor what only training gives."""
        wants_states = self._wants_states(arguments)
        plain = self._weft_head is HeadKind.NEXT_TOKEN and arguments.get("labels") is None and not wants_states
        return plain and not torch.is_grad_enabled() and not self.weft_engine().acts

    def _inferred(self, base: Any, arguments: dict[str, Any]) -> Any:
        of_base = {k: v for k, v in arguments.items() if k not in _HEAD_ARGUMENTS}
        found = answer(self, base, of_base, arguments.get("logits_to_keep", 0))
        packed = isinstance(arguments.get("input_ids"), PackedBatch)
        placed = _placed(found.batch, found.logits, packed) if found.keep is None else found.keep.placed(found.logits)
        fields: dict[str, Any] = {"logits": placed}
        if found.cache is not None:
            fields["past_key_values"] = found.cache
        return self._output(fields, arguments.get("return_dict"))

    def _targets(self, batch: PackedBatch, labels: Tensor) -> Tensor:
        """[T]: what each token must predict."""
        targets = packed_labels(batch, labels, self._weft_head)
        if self._weft_head is HeadKind.NEXT_TOKEN:
            targets = torch.cat([targets[1:], targets.new_full((min(1, batch.tokens),), IGNORED)])
        check_targets(targets, self.weft_engine().vocabulary)
        return targets

    @staticmethod
    def _states(passed: Passed, states: list[Tensor], batch: PackedBatch, packed: bool) -> tuple[Tensor, ...]:
        return tuple(_placed(batch, passed.whole(rows), packed) for rows in (*states, passed.rows))

    def _output(self, fields: dict[str, Any], return_dict: bool | None) -> Any:
        from transformers import modeling_outputs

        name = "MaskedLMOutput" if self._weft_head is HeadKind.TOKENS else "CausalLMOutputWithPast"
        output = getattr(modeling_outputs, name)(**fields)
        wants_dict = self.config.return_dict if return_dict is None else return_dict  # type: ignore[attr-defined]
        return output if wants_dict else output.to_tuple()


def family_head(module: Any) -> str:
    """The name of the Hugging Face class that a parallel model was made of."""
    return next(kind.__name__ for kind in type(module).__mro__ if kind.__name__ in VOCABULARY_HEADS)


@contextmanager
def looked_at(engine: ParallelEngine, described: Described) -> Iterator[None]:
    """Takes a description for that of now, for as long as a call takes: looking at all modules once is enough."""
    before, engine.looked_at = engine.looked_at, described
    try:
        yield
    finally:
        engine.looked_at = before


def base_of(model: Any) -> Any:
    """The base model inside of one with a head."""
    base = getattr(model, model._weft_base)
    if not isinstance(base, ParallelBase):
        raise Unsupported(
            f"{model._weft_base} of the {type(model).__name__} was replaced after parallelize by one that is not "
            "shared; put it in before, and call parallelize then"
        )
    return base


def _engine(
    module: Any, describe: Callable[[], Described], base: Callable[[Any], Any], called: Callable[[], list[nn.Module]]
) -> ParallelEngine:
    engine: ParallelEngine | None = module.__dict__.get("_weft_engine")
    if engine is None or engine._module is not module:  # a copy must not use the engine of the original
        dropout = base(module)._weft[1]
        engine = ParallelEngine(module, describe, dropout, module._weft_ranks, called, lambda: base(module))
        module.__dict__["_weft_engine"] = engine
    return engine


def _placed(batch: PackedBatch, values: Tensor, packed: bool) -> Tensor:
    """[T, N] as the inputs lay: packed, or padded [B, S, N]."""
    rows, columns = batch.padded_shape
    if packed:
        return values
    if batch.tokens == rows * columns:
        return values.view(rows, columns, values.shape[1])
    return batch.with_values(values).to_padded()


@contextmanager
def alike(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Dropout of the code in this block draws the same on all ranks: what rank 0 would."""
    if not (model.training and any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())):
        yield
        return
    seeds = gather(ranks.group, dropout_seed(), what="the seed of a head's dropout")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(seeds[0]))
        yield


@contextmanager
def local_parameters(
    model: nn.Module, *, without: nn.Module | None = None, known: Cuts | None = None
) -> Iterator[None]:
    """Replicated parameters as plain tensors, for a head's own code; outside of the block they are DTensors.

    Not those of the module `without`, and not those that are described and `known`. Callers take turns by the lock of
    `Ranks`: another thread would find plain tensors where DTensors belong, or the other way round.
    """
    left_out = set() if without is None else set(without.modules())
    swapped: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in model.modules():
            if module not in left_out:
                holder: dict[str, Any] = own_parameters(module)
                for name, p in [*holder.items()]:
                    if isinstance(p, DTensor) and id(p) not in (known or {}):
                        swapped.append((holder, name, p))
                        holder[name] = p.to_local()
        yield
    finally:
        for holder, name, p in swapped:
            holder[name] = p

"""Hugging Face models on the ranks of a mesh axis: the same class, call and parameters' names, another `forward`.

Without gradients a decoder runs on a `RankProgram`. Padding, on either side, is left out before anything is computed,
and so are its keys and values: the cache that a call returns has a slot for each row of the batch with the real tokens
only. `generate()` goes on with it as with any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from weft.errors import Unsupported
from weft.kernels.attention import dropout_seed
from weft.models.family import HeadKind, called_in, check_loss
from weft.models.spec import ModelSpec, VocabularyHead
from weft.packed.batch import PackedBatch
from weft.packed.forms import AnyForm
from weft.packed.huggingface import PackedBase, PackedCall, PackedHead, base_of
from weft.packed.inputs import (
    CACHE_ARGUMENTS,
    HEAD_ARGUMENTS,
    IGNORED_LABEL,
    LogitRows,
    as_output,
    goes_on,
    packed_labels,
    rows_to_keep,
    wants_states,
)
from weft.parallel.engine import ParallelEngine, Ranks, gathered
from weft.parallel.surface import ParallelModel, as_sharded, local_parameters
from weft.parallel.training import check_targets, cross_entropy, logits
from weft.transformer.call import Extras, digest
from weft.transformer.exchange import gather, gather_columns
from weft.transformer.memory import RankCache
from weft.transformer.program import RankProgram
from weft.transformer.sampling import whole_rows

_HEAD_ARGUMENTS = HEAD_ARGUMENTS | {"logits_to_keep"}
_ROOM = 128  # tokens that a new cache has room for behind the prompts; it grows when they are used up
_OTHER_CACHE = "past_key_values of another model; a parallel model goes on with its own cache only"


class ParallelBase(ParallelModel, PackedBase):
    """Mixed into the class of a base model. `_weft_ranks` are those that share it."""

    _weft_ranks: Ranks

    def weft_engine(self) -> ParallelEngine:
        module: Any = self
        family, dropout = self._weft

        def make() -> ParallelEngine:
            read, called = (lambda: ModelSpec(family.read(module))), (lambda: called_in(module))
            return ParallelEngine(module, read, dropout, self._weft_ranks, called=called, stack=lambda: module)

        return self.weft_kept("_weft_engine", make)

    def weft_prepare(self, arguments: dict[str, Any]) -> PackedCall:
        prepared = super().weft_prepare(arguments)
        config: Any = self.config  # type: ignore[attr-defined]
        limit = getattr(config, "max_position_embeddings", None)  # T5 has none
        if limit is not None and prepared.inputs.farthest >= limit:
            raise ValueError(
                f"a sequence of {prepared.inputs.farthest + 1} positions is longer than the model's limit of {limit}; "
                "cut it, or raise max_position_embeddings in the config"
            )
        return prepared

    def weft_forward(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        if goes_on(arguments):
            raise Unsupported(_OTHER_CACHE)
        with self._weft_ranks.lock:
            engine = self.weft_engine()
            with engine.fixed(engine.spec), local_parameters(self, known=engine.cuts):  # type: ignore[arg-type]
                return super().weft_forward(original, arguments)


class ParallelHead(ParallelModel, PackedHead):
    """Mixed into a model with a small head, which every rank computes on whole states."""

    _weft_ranks: Ranks

    def weft_forward(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        model: Any = self
        base = _base_of(self)
        with self._weft_ranks.lock, local_parameters(model, without=base), alike(model, self._weft_ranks):
            if isinstance(self, FSDPModule):
                base.weft_engine().forget()  # FSDP fills its parameters, and nobody counts that
            return super().weft_forward(original, arguments)


class ParallelVocabulary(ParallelModel, AnyForm):
    """Mixed into a model whose head gives logits of words: ranks share these, and the loss is computed as they lie."""

    _weft_ranks: Ranks
    _weft_head: HeadKind
    _weft_base: str
    _weft_vocabulary: Callable[[Any], VocabularyHead]
    _weft_loss: str | None

    def weft_engine(self) -> ParallelEngine:
        module: Any = self

        def read() -> ModelSpec:
            base = _base_of(module)
            return ModelSpec(base._weft[0].read(base), self._weft_vocabulary(module))

        def make() -> ParallelEngine:
            dropout, stack = _base_of(module)._weft[1], (lambda: _base_of(module))
            return ParallelEngine(module, read, dropout, self._weft_ranks, called=lambda: [module], stack=stack)

        return self.weft_kept("_weft_engine", make)

    def weft_forward(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        with self._weft_ranks.lock:
            base, engine = _base_of(self), self.weft_engine()
            spec = engine.spec
            with engine.fixed(spec), base.weft_engine().fixed(ModelSpec(spec.transformer)):
                return self._forward(base, arguments)

    def _forward(self, base: Any, arguments: dict[str, Any]) -> Any:
        """With labels: loss, and logits as a DTensor. Without: whole logits, of the tokens that were asked for."""
        if self._infers(arguments):
            return self._inferred(base, arguments)
        self._check_cache(arguments)
        prepared: PackedCall = base.weft_prepare({k: v for k, v in arguments.items() if k not in _HEAD_ARGUMENTS})
        batch, packed = prepared.batch, isinstance(arguments.get("input_ids"), PackedBatch)
        labels, config = arguments.get("labels"), self.config  # type: ignore[attr-defined]
        targets = None if labels is None else self._targets(batch, labels, flat=packed)
        keep = rows_to_keep(batch, arguments.get("logits_to_keep", 0), packed=packed)
        if keep is not None and labels is not None:
            raise Unsupported(
                "logits_to_keep: a loss needs the logits of all tokens; leave labels or logits_to_keep out"
            )
        extras = Extras([] if prepared.wants_states else None)
        items = None if self._weft_loss is None else arguments.get("num_items_in_batch")
        if labels is not None and self._weft_loss is not None:
            check_loss(self, self._weft_loss)
        asked = f"items={None if items is None else float(items)} keep={None if keep is None else digest(keep.tokens)}"
        done = self.weft_engine().run(prepared.inputs, extras, labels=targets, asked=asked)
        words, group = done.model.words, self._weft_ranks.group
        part = logits(done.model, done.rows, done.share, keep=None if keep is None else keep.tokens)
        fields: dict[str, Any] = {}
        if targets is not None:
            fields["loss"] = cross_entropy(part, targets, words, group=group, items=items)
            fields["logits"] = as_sharded(_placed(batch, part, packed), words, self._weft_ranks.mesh)
        else:
            fields["logits"] = _placed(batch, gather_columns(part, words, group), packed, keep)
        if extras.states is not None:
            states = (*extras.states, done.rows)
            fields["hidden_states"] = tuple(_placed(batch, done.whole(rows), packed) for rows in states)
        return as_output(self._weft_output, fields, config, arguments)

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
            with engine.fixed(engine.spec):
                yield engine

    def _check_cache(self, arguments: dict[str, Any]) -> None:
        """Raises where a call that is no inference asks for a cache, and says why it is none."""
        if arguments.get("past_key_values") is None and not arguments.get("use_cache"):
            return
        reasons = {
            "the model is in training mode (call eval())": self.weft_engine().in_training,
            "gradients are on (use torch.no_grad())": torch.is_grad_enabled(),
            "labels were given": arguments.get("labels") is not None,
            "output_hidden_states was asked for": wants_states(self.config, arguments),  # type: ignore[attr-defined]
            f"{type(self).__name__} is no decoder": self._weft_head is not HeadKind.NEXT_TOKEN,
        }
        why = ", and ".join(reason for reason, holds in reasons.items() if holds)
        raise Unsupported(f"past_key_values: no cache of keys and values here: {why}; or call it with use_cache=False")

    def _infers(self, arguments: dict[str, Any]) -> bool:
        """Whether a call needs neither gradients nor what only training gives."""
        states = wants_states(self.config, arguments)  # type: ignore[attr-defined]
        plain = self._weft_head is HeadKind.NEXT_TOKEN and arguments.get("labels") is None and not states
        return plain and not torch.is_grad_enabled() and not self.weft_engine().in_training

    def _inferred(self, base: Any, arguments: dict[str, Any]) -> Any:
        """A call of a decoder without gradients: whole logits of the tokens asked for, and the cache if it has one."""
        config: Any = self.config  # type: ignore[attr-defined]
        given, packed = arguments.get("past_key_values"), isinstance(arguments.get("input_ids"), PackedBatch)
        past = given if isinstance(given, ParallelCache) else None
        if past is None and goes_on(arguments):
            raise Unsupported(_OTHER_CACHE)
        # Whatever can be wrong with a call is found before the ranks meet.
        prepared: PackedCall = base.weft_prepare(_of_new_columns(arguments, past))
        batch = prepared.batch
        if past is not None and past.held.slots != batch.sequences:
            raise ValueError(f"the cache has {past.held.slots} rows, got inputs of {batch.sequences}")
        caches = past is not None or _wants_cache(config, arguments, batch, packed=packed)
        keep = rows_to_keep(batch, arguments.get("logits_to_keep", 0), packed=packed)
        rows = None if keep is None else keep.tokens
        asked = f"inference on {prepared.inputs} rows {'all' if rows is None else digest(rows)} cache={caches}"
        program = self.weft_engine().program(asked)
        cache = past
        if caches and past is None:
            cache = ParallelCache(program.cache(slots=batch.sequences, capacity=int(batch.lengths.max()) + _ROOM))
        hidden = program.run(prepared.inputs, cache=None if cache is None else cache.held, rows=rows)
        if cache is not None:
            cache.add(batch.real())
        fields: dict[str, Any] = {"logits": _placed(batch, whole_logits(program, hidden), packed, keep)}
        if cache is not None:
            fields["past_key_values"] = cache
        return as_output(self._weft_output, fields, config, arguments)

    def _targets(self, batch: PackedBatch, labels: Tensor, *, flat: bool) -> Tensor:
        """[T]: what each token must predict."""
        targets = packed_labels(batch, labels, self._weft_head, flat=flat)
        if self._weft_head is HeadKind.NEXT_TOKEN:
            targets = torch.cat([targets[1:], targets.new_full((min(1, batch.tokens),), IGNORED_LABEL)])
        check_targets(targets, self.weft_engine().vocabulary)
        return targets

    @property
    def _weft_output(self) -> str:
        return "MaskedLMOutput" if self._weft_head is HeadKind.TOKENS else "CausalLMOutputWithPast"


def _base_of(model: Any) -> Any:
    return base_of(model, ParallelBase, "not shared; put it in before, and call parallelize then")


def _placed(batch: PackedBatch, values: Tensor, packed: bool, keep: LogitRows | None = None) -> Tensor:
    """[T, N] as the inputs lay: packed, or padded [B, S, N]; of the tokens `keep` as these say."""
    rows, columns = batch.padded_shape
    if keep is not None:
        return keep.placed(values)
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


# Caches of keys and values ---------------------------------------------------------------------------------


class ParallelCache:
    """The keys and values of this rank's heads, with what Hugging Face's `generate` asks of a cache.

    `real` [rows, columns] says where the padded inputs so far had tokens; `held` has these and nothing else.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, held: RankCache) -> None:
        self.held = held
        self.real = torch.ones(held.slots, 0, dtype=torch.bool)

    @property
    def columns(self) -> int:
        """Columns of the padded inputs so far."""
        return self.real.shape[1]

    def add(self, real: Tensor) -> None:
        """The columns [rows, S] of one more call are in `held`."""
        self.real = torch.cat([self.real, real], 1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns, padding included, as the length of the attention mask counts them."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit of its own: it grows."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row beam_idx[i]."""
        self.held.select(beam_idx)
        self.real = self.real[beam_idx]

    def crop(self, tokens_to_remove: int) -> None:
        raise Unsupported("assisted decoding, which takes tokens back, is not supported with a parallel model's cache")


def whole_logits(program: RankProgram, hidden: Tensor) -> Tensor:
    """[n, V] on every rank."""
    return whole_rows(program.logits(hidden), program.model.words, program.gather, program.model.size)


def _of_new_columns(arguments: dict[str, Any], past: ParallelCache | None) -> dict[str, Any]:
    """The arguments of the base model as without a cache: the mask and positions of the new columns only."""
    rest = {name: value for name, value in arguments.items() if name not in CACHE_ARGUMENTS | _HEAD_ARGUMENTS}
    if past is None:
        return rest
    new = arguments["input_ids"] if arguments.get("input_ids") is not None else arguments["inputs_embeds"]
    if isinstance(new, PackedBatch):
        raise Unsupported("a cache goes on with padded input_ids, not with a PackedBatch")
    columns, mask = new.shape[1], arguments.get("attention_mask")
    if mask is not None:
        if mask.dim() != 2 or mask.shape[1] != past.columns + columns:
            raise ValueError(
                f"attention_mask has shape {list(mask.shape)}, expected [batch, {past.columns + columns}]: a column "
                f"for each of the {past.columns} in the cache and the {columns} new ones"
            )
        rest["attention_mask"] = mask[:, past.columns :]
    shown = torch.ones_like(past.real) if mask is None else mask[:, : past.columns] != 0
    if not torch.equal(shown, past.real):
        raise Unsupported(
            f"attention_mask shows other tokens of the {past.columns} columns in the cache than when they were computed"
            "; it must be the same there, with columns for the new tokens behind"
        )
    if rest.get("position_ids") is None:
        rest["position_ids"] = (past.columns + torch.arange(columns))[None].expand(new.shape[0], -1)
    return rest


def _wants_cache(config: Any, arguments: dict[str, Any], batch: PackedBatch, *, packed: bool) -> bool:
    """Whether the call wants a new cache: it says so, or the config does."""
    given, wanted = arguments.get("past_key_values"), arguments.get("use_cache")
    if given is not None and not hasattr(given, "get_seq_length"):
        raise Unsupported(f"past_key_values must be a cache, got {type(given).__name__}")
    several = batch.is_flattened
    if wanted is None:
        wanted = given is not None or (config.use_cache and not packed and not several)
    if not wanted or not batch.tokens:
        return False
    if packed:
        raise Unsupported("use_cache: a cache goes with padded input_ids; weft.generate takes lists of any lengths")
    if several:
        raise Unsupported("use_cache: a cache holds one text a row, but rows hold several here; pass them row by row")
    return True

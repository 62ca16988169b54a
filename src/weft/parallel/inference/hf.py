"""Inference of a parallel decoder as Hugging Face calls it: the same arguments and outputs, on a `RankProgram`.

Padding, on either side, is left out before anything is computed, and so are its keys and values: the cache that a
call returns has a slot for each row of the batch with the real tokens only. `generate()` goes on with it as with any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.packed.batch import PackedBatch
from weft.packed.models.cache import goes_on
from weft.packed.models.common import Unsupported
from weft.parallel.cut import Run
from weft.parallel.inference.cache import RankCache
from weft.parallel.inference.program import RankProgram
from weft.parallel.keep import Chosen, kept_tokens
from weft.parallel.told import digest, told

_ROOM = 128  # tokens that a new cache has room for behind the prompts; it grows when they are used up
_CACHE_ARGUMENTS = {"use_cache", "past_key_values", "cache_position"}


class ParallelCache:
    """The keys and values of this rank's heads, with what Hugging Face's `generate` asks of a cache.

    `columns` counts the columns of the padded inputs so far; `held` knows how many real tokens each row has.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, held: RankCache) -> None:
        self.held = held
        self.columns = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns, padding included, as the length of the attention mask counts them."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit of its own: it grows."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row beam_idx[i]."""
        self.held.select(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        raise Unsupported("assisted decoding, which takes tokens back, is not supported with a parallel model's cache")


@dataclass(frozen=True, eq=False)
class Answer:
    """Whole logits of the tokens asked for, and the cache where there is one."""

    logits: Tensor
    batch: PackedBatch
    keep: Chosen | None
    cache: ParallelCache | None


def answer(model: Any, base: Any, arguments: dict[str, Any], keep: int | Tensor | None) -> Answer:
    """One call of a causal model without gradients; `arguments` are those of its base model."""
    given, packed = arguments.get("past_key_values"), isinstance(arguments.get("input_ids"), PackedBatch)
    past = given if isinstance(given, ParallelCache) else None
    if past is None and goes_on(arguments):
        raise Unsupported("past_key_values of another model; a parallel model goes on with its own cache only")
    # Whatever can be wrong with a call is found before the ranks meet.
    prepared = base.weft_prepare(_without_cache(arguments, past))
    batch: PackedBatch = prepared.batch
    if past is not None and past.held.slots != batch.sequences:
        raise ValueError(f"the cache has {past.held.slots} rows, got inputs of {batch.sequences}")
    caches = past is not None or _wants_cache(model, arguments, batch, packed=packed)
    chosen = kept_tokens(batch, keep, packed=packed)
    rows = None if chosen is None else chosen.tokens
    asked = f"inference on {told(prepared.inputs)} rows {'all' if rows is None else digest(rows)} cache={caches}"
    program: RankProgram = model.weft_engine().program(asked)
    cache = past
    if caches and past is None:
        longest = int(batch.lengths.max())
        cache = ParallelCache(program.cache(slots=batch.sequences, capacity=longest + _ROOM))
    hidden = program.run(prepared.inputs, cache=None if cache is None else cache.held, rows=rows)
    if cache is not None:
        cache.columns += batch.padded_shape[1]
    return Answer(whole_logits(program, hidden), batch, chosen, cache)


def whole_logits(program: RankProgram, hidden: Tensor) -> Tensor:
    """[n, V] on every rank."""
    part, words = program.logits(hidden), program.model.words
    size = program.model.group.size()
    counts = [Run.of(words.total, rank, size).count for rank in range(size)]
    padded = torch.nn.functional.pad(part, (0, max(counts) - part.shape[1]))  # ranks send as much as each other
    return torch.cat([p[:, :n] for p, n in zip(program.gather(padded), counts, strict=True)], 1)


def _without_cache(arguments: dict[str, Any], past: ParallelCache | None) -> dict[str, Any]:
    """The arguments as for a call without a cache: the mask and positions of the new columns only."""
    rest = {name: value for name, value in arguments.items() if name not in _CACHE_ARGUMENTS}
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
    if rest.get("position_ids") is None:
        rest["position_ids"] = (past.columns + torch.arange(columns))[None].expand(new.shape[0], -1)
    return rest


def _wants_cache(model: Any, arguments: dict[str, Any], batch: PackedBatch, *, packed: bool) -> bool:
    """Whether the call wants a new cache: it says so, or the config does."""
    given, wanted = arguments.get("past_key_values"), arguments.get("use_cache")
    if given is not None and not hasattr(given, "get_seq_length"):
        raise Unsupported(f"past_key_values must be a cache, got {type(given).__name__}")
    if wanted is None:
        wanted = given is not None or (model.config.use_cache and not packed)
    if not wanted or not batch.tokens:
        return False
    if packed:
        raise Unsupported("use_cache: a cache goes with padded input_ids; weft.generate takes lists of any lengths")
    return True

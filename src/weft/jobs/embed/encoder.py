"""Texts to embeddings, as a folder describes it: tokenizer, packed model, pooling, and the layers behind that.

No row depends on another: an embedding has the same bits alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from weft.jobs.embed import recipe
from weft.jobs.embed.identity import Beside, identity_of
from weft.jobs.embed.loading import check_dtype, load_layers, load_tokenizer, text_length, tokenizer_backend
from weft.jobs.embed.recipe import DENSE, NotPlain, Recipe, Wish
from weft.kernels import PackedWeight, linear
from weft.packed.batch import PackedBatch


class Encoder:
    """A model that embeds texts, as SentenceTransformer(folder).encode does.

    `folder` is what `save_pretrained` of transformers or sentence-transformers wrote. `max_length`, the tokens of a
    text, and `prompt`, what is put before each (or `prompt_name`, one of the folder's, or that of a `task`, "query" or
    "document"), are the folder's unless given. It computes in `dtype`, "float32" or "bfloat16"; by default in that of
    the weights, or in float32 if that is none of these.

    A folder with other modules than Transformer, Pooling, Dense and Normalize, or with options that are not known here,
    raises `recipe.NotPlain`; `open_encoder` takes it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_length: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        task: str | None = None,
        dtype: str | None = None,
    ) -> None:
        check_dtype(dtype)
        wish = Wish(prompt, prompt_name, task)
        self.kind = DENSE
        self.recipe = Recipe.of(folder)
        self._identity = Beside(lambda: identity_of(self.recipe.folders))
        self.prompt = wish.of(self.recipe.prompts, self.recipe.default_prompt)
        folder, given = self.recipe.transformer, self.recipe.max_length
        tokenizer = load_tokenizer(folder, given, is_plain=self.recipe.is_plain)
        model = load_layers(folder, dtype)
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.max_length = text_length(tokenizer, model, given, max_length, pairs=False)
        self.tokenizer = tokenizer_backend(tokenizer, self.max_length, self.recipe.lower_case)
        if "token_type_ids" in tokenizer.model_input_names and any(self.tokenizer.encode("a").type_ids):
            raise NotPlain(f"the tokenizer {type(tokenizer).__name__} gives a single text types other than 0")
        self._special, self._prompt_tokens = set(tokenizer.all_special_ids), dict[str, int]()
        self._model = model
        self._steps, self.width = _steps(self.recipe, model.config.hidden_size)

    def identity(self) -> dict[str, Any]:
        """What makes its embeddings these and no others: the content of the folder, and the options."""
        options = {"prompt": self.prompt, "max_length": self.max_length, "dtype": self.dtype}
        return {"model": self._identity.result(), **options}

    @property
    def ends_normalized(self) -> bool:
        """Whether rows have length 1."""
        return bool(self._steps) and self._steps[-1] is normalize and self.recipe.truncate is None

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, prompt and special tokens included."""
        prompted = [self.prompt + text for text in texts] if self.prompt else list(texts)
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(prompted)]

    def embed(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """float32 [texts, width]."""
        return self.finish(self.states(ids))

    @torch.no_grad()
    def states(self, ids: Sequence[Sequence[int]]) -> PackedBatch:
        """The last hidden states of all tokens, float32 [T, hidden size], packed."""
        lengths = torch.tensor([len(i) for i in ids], dtype=torch.int64)
        tokens = torch.tensor([token for text in ids for token in text], dtype=torch.int64)
        batch = PackedBatch.from_values(tokens, lengths)
        if batch.tokens:
            hidden = self._model(batch).last_hidden_state.float()
        else:
            hidden = torch.zeros(0, self._model.config.hidden_size)
        return batch.with_values(hidden)

    @torch.no_grad()
    def finish(self, states: PackedBatch, *, prompt: str | None = None, normalized: bool | None = None) -> Tensor:
        """[texts, width] of the states [T, hidden size] of texts that began with `prompt`, by default the encoder's.

        `normalized` asks for rows of length 1, or for rows as they were before; by default the folder decides.
        """
        row = pool(states, self.recipe.pooling, prompt=self._count_prompt(self.prompt if prompt is None else prompt))
        steps = self._steps
        if normalized is not None:
            while steps and steps[-1] is normalize:
                steps = steps[:-1]
            steps = [*steps, normalize] if normalized else steps
        for step in steps:
            row = step(row)
        return row if self.recipe.truncate is None else row[:, : self.recipe.truncate]

    def _count_prompt(self, prompt: str) -> int:
        """The tokens of a prompt alone, without the special one at its end."""
        if not prompt or self.recipe.pooling.include_prompt:
            return 0  # nobody asks
        if prompt not in self._prompt_tokens:
            ids = self.tokenizer.encode(prompt).ids
            self._prompt_tokens[prompt] = len(ids) - (1 if ids and ids[-1] in self._special else 0)
        return self._prompt_tokens[prompt]


def _steps(recipe_: Recipe, width: int) -> tuple[list[Callable[[Tensor], Tensor]], int]:
    """What follows pooling, and the width of a row behind it; widths that do not fit are refused."""
    pooling = recipe_.pooling
    if pooling.width not in (None, width):
        raise ValueError(
            f"{recipe_.transformer}: its Pooling is for tokens of width {pooling.width}, they have {width}"
        )
    width *= len(pooling.modes)
    steps: list[Callable[[Tensor], Tensor]] = []
    for step in recipe_.steps:
        if isinstance(step, recipe.Normalize):
            steps.append(normalize)
            continue
        if step.inputs != width:
            raise ValueError(f"{step.folder}: a Dense for rows of width {step.inputs}, they have {width}")
        steps.append(DenseLayer(step))
        width = step.outputs
    return steps, width if recipe_.truncate is None else min(width, recipe_.truncate)


def pool(batch: PackedBatch, pooling: recipe.Pooling, *, prompt: int = 0) -> Tensor:
    """[B, modes * width] of values [T, width], without the first `prompt` tokens of each text where the pooling asks.

    A text without tokens gives zeros.
    """
    skip = 0 if pooling.include_prompt else prompt
    return torch.cat([_pool(batch, mode, skip) for mode in pooling.modes], dim=1)


def _pool(batch: PackedBatch, mode: str, skip: int) -> Tensor:
    if mode in ("cls", "lasttoken"):
        return _pick(batch, mode, skip)
    hidden, positions = batch.values, batch.positions
    owner = torch.arange(batch.sequences).repeat_interleave(batch.lengths)
    if skip:
        kept = positions >= skip
        hidden, positions, owner = hidden[kept], positions[kept], owner[kept]
    out = hidden.new_zeros(batch.sequences, hidden.shape[1])
    if mode == "max":
        return out.scatter_reduce_(0, owner[:, None].expand_as(hidden), hidden, "amax", include_self=False)
    # A token's weight counts the prompt's tokens too: it is the token's place, not its place among those that are left.
    weights = (positions + 1).float() if mode == "weightedmean" else torch.ones(len(positions))
    total = torch.zeros(batch.sequences).index_add_(0, owner, weights).clamp_(min=1e-9)
    sums = out.index_add_(0, owner, hidden * weights[:, None] if mode == "weightedmean" else hidden)
    return sums / (total.sqrt() if mode == "mean_sqrt_len_tokens" else total)[:, None]


def _pick(batch: PackedBatch, mode: str, skip: int) -> Tensor:
    """The first token behind the prompt, or else the very first; or the last, or else zeros."""
    starts, lengths = batch.cu_seqlens[:-1].long(), batch.lengths
    beyond = lengths > skip
    filled = lengths > 0 if mode == "cls" else beyond
    at = starts + (beyond * skip if mode == "cls" else lengths - 1)
    out = batch.values.new_zeros(batch.sequences, batch.values.shape[1])
    out[filled] = batch.values[at[filled]]
    return out


class DenseLayer:
    """sentence-transformers' Dense on [B, inputs], by the matmul whose rows do not depend on the batch."""

    def __init__(self, dense: recipe.DenseRecipe) -> None:
        weights = _weights(dense)
        shapes: dict[str, tuple[int, ...]] = {"linear.weight": (dense.outputs, dense.inputs)}
        if dense.bias:
            shapes["linear.bias"] = (dense.outputs,)
        if dense.residual and dense.inputs != dense.outputs:
            shapes["residual.weight"] = (dense.outputs, dense.inputs)
        found = {name: tuple(value.shape) for name, value in weights.items()}
        if found != shapes:
            raise ValueError(f"{dense.folder}: a Dense with weights {found}, expected {shapes}")
        self._residual = dense.residual
        self._weight = PackedWeight.from_dense(weights["linear.weight"])
        self._bias = weights.get("linear.bias")
        side = weights.get("residual.weight")
        self._side = None if side is None else PackedWeight.from_dense(side)
        self._activation: nn.Module = getattr(nn, dense.activation)()

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = linear(x, self._weight, bias=self._bias)
        if not isinstance(self._activation, nn.Identity) and len(y):
            # Row by row: torch computes the last few elements of a tensor by other instructions than the rest.
            y = torch.stack([self._activation(row) for row in y])
        if self._residual:
            y = y + (x if self._side is None else linear(x, self._side))
        return y


def _weights(dense: recipe.DenseRecipe) -> dict[str, Tensor]:
    path: Path = dense.folder / "model.safetensors"
    if path.exists():
        weights: dict[str, Tensor] = load_file(path)
    else:
        weights = torch.load(dense.folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    return {name: value.float() for name, value in weights.items()}


def normalize(x: Tensor) -> Tensor:
    """Rows of length 1; zeros stay zeros."""
    return F.normalize(x, dim=1)

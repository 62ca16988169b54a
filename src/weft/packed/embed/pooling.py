"""One vector of the states of a text's tokens, and the layers behind it. No row depends on another."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from weft.kernels import PackedWeight, linear
from weft.packed.batch import PackedBatch
from weft.packed.embed import recipe


def pool(batch: PackedBatch, pooling: recipe.Pooling, *, prompt: int = 0) -> Tensor:
    """[B, modes * width] of values [T, width], without the first `prompt` tokens of each text where the pooling asks.

    A text without tokens gives zeros.
    """
    skip = 0 if pooling.include_prompt else prompt
    return torch.cat([_pool(batch, mode, skip) for mode in pooling.modes], dim=1)


def _pool(batch: PackedBatch, mode: str, skip: int) -> Tensor:
    if mode in ("cls", "lasttoken"):
        return _pick(batch, mode, skip)
    kept = batch.positions >= skip
    hidden, positions = batch.values[kept], batch.positions[kept]
    owner = torch.arange(batch.sequences).repeat_interleave(batch.lengths)[kept]
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

    def __init__(self, dense: recipe.Dense) -> None:
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


def _weights(dense: recipe.Dense) -> dict[str, Tensor]:
    path: Path = dense.folder / "model.safetensors"
    if path.exists():
        weights: dict[str, Tensor] = load_file(path)
    else:
        weights = torch.load(dense.folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    return {name: value.float() for name, value in weights.items()}


def normalize(x: Tensor) -> Tensor:
    """Rows of length 1; zeros stay zeros."""
    return F.normalize(x, dim=1)

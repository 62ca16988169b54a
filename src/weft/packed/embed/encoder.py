"""Texts to embeddings: tokenizer, packed model and pooling, as a sentence-transformers folder describes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.packed.batch import PackedBatch
from weft.packed.models import pack

POOLINGS = ("mean", "cls", "last", "max")


@dataclass(frozen=True)
class Recipe:
    """How a folder's model makes one vector of a text."""

    max_length: int
    pooling: str
    normalize: bool

    @classmethod
    def of(cls, folder: Path) -> Recipe:
        """What the folder says; the mean of at most 512 tokens where it says nothing."""
        modules = _json(folder / "modules.json") or []
        kinds = {str(module["type"]).rsplit(".", 1)[-1]: folder / str(module["path"]) for module in modules}
        unknown = sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"})
        if unknown:
            raise ValueError(f"{folder} has modules that weft embed does not know: {', '.join(unknown)}")
        length = (_json(folder / "sentence_bert_config.json") or {}).get("max_seq_length")
        if length is None:
            length = min(int((_json(folder / "config.json") or {}).get("max_position_embeddings", 512)), 512)
        pooling = _pooling(_json(kinds["Pooling"] / "config.json") or {}) if "Pooling" in kinds else "mean"
        return cls(int(length), pooling, "Normalize" in kinds)


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _pooling(config: dict[str, Any]) -> str:
    named = config.get("pooling_mode")
    if isinstance(named, str):
        chosen = [{"lasttoken": "last"}.get(named, named)]
    else:
        modes = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max", "lasttoken": "last"}
        switched_on = [
            k.removeprefix("pooling_mode_") for k, v in config.items() if k.startswith("pooling_mode_") and v
        ]
        chosen = [modes.get(mode, mode) for mode in switched_on]
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        raise ValueError(f"got the pooling {', '.join(chosen) or 'none'}, expected one of {', '.join(POOLINGS)}")
    return chosen[0]


class Encoder:
    """A model that embeds texts. `folder` is what `save_pretrained` of transformers or sentence-transformers wrote."""

    def __init__(self, folder: Path, *, max_length: int | None = None) -> None:
        try:
            from tokenizers import Tokenizer
            from transformers import AutoModel
        except ImportError as error:
            raise ImportError("weft embed needs transformers; pip install 'weft[hf]'") from error
        if not (folder / "config.json").exists() or not (folder / "tokenizer.json").exists():
            raise ValueError(f"got the model {folder}, expected a folder with config.json, tokenizer.json and weights")
        self.recipe = Recipe.of(folder)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(self.recipe.max_length if max_length is None else max_length)
        model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
        self._model = pack(model)
        self.width: int = model.config.hidden_size

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, special tokens included."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]

    @torch.no_grad()
    def embed(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """float32 [texts, width]."""
        lengths = torch.tensor([len(i) for i in ids])
        batch = PackedBatch.from_values(torch.tensor([token for text in ids for token in text]), lengths)
        hidden = self._model(batch).last_hidden_state.float()
        pooled = pool(batch.with_values(hidden), self.recipe.pooling)
        return F.normalize(pooled, dim=1) if self.recipe.normalize else pooled


def pool(batch: PackedBatch, pooling: str) -> Tensor:
    """One vector [B, width] for each sequence of values [T, width]; zeros for a sequence without tokens."""
    hidden, lengths = batch.values, batch.lengths
    out = hidden.new_zeros(batch.sequences, hidden.shape[1])
    owner = torch.arange(batch.sequences).repeat_interleave(lengths)
    if pooling == "mean":
        return out.index_add_(0, owner, hidden) / lengths.clamp(min=1)[:, None]
    if pooling == "max":
        return out.scatter_reduce_(0, owner[:, None].expand_as(hidden), hidden, "amax", include_self=False)
    filled = lengths > 0
    starts = batch.cu_seqlens[:-1].long()
    at = starts if pooling == "cls" else starts + lengths - 1
    out[filled] = hidden[at[filled]]
    return out

"""BERT and its kin read straight from the files of a folder, ready to run: no module is made and transformers, whose
import takes longer than most calls, stays where it is.

Only folders of which everything is known are read: `StoredEncoder.of` gives None for all others, and whoever asked
takes the usual way, by transformers and `pack`. Hidden states have the same bits either way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from weft.models.families.bert import BERT_OPTIONS, DISTILBERT_OPTIONS, roberta_positions
from weft.models.fit import check_model
from weft.models.options import COMMON, Options
from weft.models.spec import Attention, Embedding, Layer, Mlp, Norm, NormOrder, Projection, Transformer
from weft.packed.batch import PackedBatch
from weft.transformer.call import Inputs
from weft.transformer.parts import RankModel
from weft.transformer.program import RankProgram

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu"}  # transformers' names, and ours
# What configs also say, and what nobody reads where hidden states are all that is asked for.
_SAID = {
    "model_type", "_name_or_path", "torch_dtype", "directionality", "pooler_fc_size", "pooler_num_attention_heads",
    "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type", "finetuning_task", "sentence_transformers",
    "sbert_ce_default_activation_function",
}  # fmt: skip
_NAMES: Mapping[str, Mapping[str, str]] = {
    "bert": {
        "layers": "encoder.layer", "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
        "out": "attention.output.dense", "attention_norm": "attention.output.LayerNorm", "up": "intermediate.dense",
        "down": "output.dense", "mlp_norm": "output.LayerNorm",
    },
    "distilbert": {
        "layers": "transformer.layer", "q": "attention.q_lin", "k": "attention.k_lin", "v": "attention.v_lin",
        "out": "attention.out_lin", "attention_norm": "sa_layer_norm", "up": "ffn.lin1", "down": "ffn.lin2",
        "mlp_norm": "output_layer_norm",
    },
}  # fmt: skip


@dataclass(frozen=True)
class _Kind:
    """How a kind of model is stored: how its names begin under a head, its options, and what sizes are called."""

    prefix: str
    options: Options
    names: Mapping[str, str]
    counts_padding: bool  # as RoBERTa: positions count tokens that are not padding, from padding + 1 on
    keys: Mapping[str, str]
    has_types: bool = True


_BERT_KEYS = {
    "width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads", "inner": "intermediate_size",
    "activation": "hidden_act",
}  # fmt: skip
_DISTIL_KEYS = {
    "width": "dim", "layers": "n_layers", "heads": "n_heads", "inner": "hidden_dim", "activation": "activation",
}  # fmt: skip
_KINDS = {
    "bert": _Kind("bert.", BERT_OPTIONS, _NAMES["bert"], False, _BERT_KEYS),
    "roberta": _Kind("roberta.", BERT_OPTIONS, _NAMES["bert"], True, _BERT_KEYS),
    "xlm-roberta": _Kind("roberta.", BERT_OPTIONS, _NAMES["bert"], True, _BERT_KEYS),
    "camembert": _Kind("roberta.", BERT_OPTIONS, _NAMES["bert"], True, _BERT_KEYS),
    "distilbert": _Kind("distilbert.", DISTILBERT_OPTIONS, _NAMES["distilbert"], False, _DISTIL_KEYS, has_types=False),
}


class StoredEncoder:
    """The layers of an encoder, and the program that computes them. It is called as a packed model is, by a
    `PackedBatch` of ids, and gives `last_hidden_state` [T, width]; `places` is how many tokens a text may have."""

    def __init__(self, model: Transformer, config: Mapping[str, Any], kind: _Kind) -> None:
        self.dtype = check_model(model)
        assert model.embedding is not None
        padding = config["pad_token_id"] if kind.counts_padding else None
        places = model.embedding.tables[-1].shape[0]
        self.places = places if padding is None else places - padding - 1
        self.config = SimpleNamespace(hidden_size=model.width, max_position_embeddings=places)
        self._padding: int | None = padding
        self._has_types = "token_type_ids" in model.embedding.names
        self._program = RankProgram(RankModel.alone(model))

    @classmethod
    def of(cls, folder: Path, dtype: torch.dtype | None = None) -> StoredEncoder | None:
        """The encoder of a folder, computing in `dtype` or in that of its weights; None where not all is known."""
        config = _config(folder / "config.json")
        kind = _KINDS.get(str(config.get("model_type")))
        if kind is None or not _is_known(config, kind) or not (folder / "model.safetensors").exists():
            return None
        weights = _Weights.of(folder / "model.safetensors", kind.prefix, config, dtype)
        model = None if weights is None else _described(weights, config, kind)
        return None if model is None else cls(model, config, kind)

    def __call__(self, batch: PackedBatch, *, token_type_ids: Tensor | None = None, return_dict: bool = True) -> Any:
        """Types are [T]; zeros unless given."""
        ids = batch.values.contiguous()
        positions = batch.positions if self._padding is None else roberta_positions(self._counter, batch, None)
        types = torch.zeros_like(ids) if token_type_ids is None else token_type_ids.contiguous()
        indices = (ids, types, positions) if self._has_types else (ids, positions)
        inputs = Inputs.at(batch.cu_seqlens, batch.tokens, tuple(t.contiguous() for t in indices), None, positions)
        return SimpleNamespace(last_hidden_state=self._program.run(inputs))

    @property
    def _counter(self) -> Any:
        """What `roberta_positions` reads of a model."""
        return SimpleNamespace(embeddings=SimpleNamespace(padding_idx=self._padding))


def _config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_known(config: Mapping[str, Any], kind: _Kind) -> bool:
    """Whether everything that a config says is known here, and everything that is needed is said."""
    if set(config) - kind.options.names - COMMON.names - _SAID - {"gradient_checkpointing"}:
        return False
    fixed = {**COMMON.fixed, **kind.options.fixed}
    if any(config.get(name) is not None and config[name] not in list(values) for name, values in fixed.items()):
        return False
    numbers = {"vocab_size", "max_position_embeddings", "pad_token_id", *kind.keys.values()}
    if any(type(config.get(name)) is not int for name in numbers - {kind.keys["activation"]}):
        return False
    if kind.has_types and (type(config.get("layer_norm_eps")) is not float or "type_vocab_size" not in config):
        return False
    width, heads = config[kind.keys["width"]], config[kind.keys["heads"]]
    return str(config.get(kind.keys["activation"])) in _ACTIVATIONS and heads > 0 and width % heads == 0


@dataclass(frozen=True)
class _Weights:
    """The tensors of a file by their names in a base model."""

    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, path: Path, prefix: str, config: Mapping[str, Any], dtype: torch.dtype | None) -> _Weights | None:
        """None where names are not those of the class, or types differ: there transformers decides."""
        found = _read(path, prefix)
        types = {tensor.dtype for tensor in found.values()}
        said = config.get("dtype") or config.get("torch_dtype")
        if len(types) != 1 or not types <= set(_DTYPES.values()) or _DTYPES.get(str(said), *types) not in types:
            return None
        if said is not None and said not in _DTYPES:
            return None
        return cls({n: t if dtype is None else t.to(dtype) for n, t in found.items()})

    def at(self, name: str, *shape: int) -> Tensor:
        found = self.tensors[name]
        if tuple(found.shape) != shape:
            raise KeyError(name)
        return found


def _read(path: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors of a base model; none where they are not there, or may be in two ways."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        return {}
    try:
        with safe_open(str(path), "pt") as file:
            names = set(file.keys())
            starts = [start for start in ("", prefix) if f"{start}embeddings.word_embeddings.weight" in names]
            if len(starts) != 1:
                return {}
            parts = tuple(starts[0] + part for part in ("embeddings.", "encoder.", "transformer."))
            chosen = [name for name in names if name.startswith(parts)]
            # Copies: what a file holds may change while a job runs.
            found = {name.removeprefix(starts[0]): file.get_tensor(name).clone() for name in chosen}
    except (OSError, SafetensorError):
        return {}  # transformers says what is wrong
    return {name: tensor for name, tensor in found.items() if tensor.is_floating_point()}


def _described(weights: _Weights, config: Mapping[str, Any], kind: _Kind) -> Transformer | None:
    """None where a tensor is missing, or has another shape than the config says."""
    try:
        return _Description(weights, config, kind).model()
    except KeyError:
        return None


class _Description:
    """Reads a model in the words of `weft.models.spec`. Raises KeyError where a tensor is not as it must be."""

    def __init__(self, weights: _Weights, config: Mapping[str, Any], kind: _Kind) -> None:
        self._weights, self._config, self._names = weights, config, kind.names
        self._eps = float(config["layer_norm_eps"]) if kind.has_types else 1e-12  # DistilBERT's is always this
        of: Callable[[str], int] = lambda name: int(config[kind.keys[name]])  # noqa: E731
        self._width, self._inner, self._heads, self._layers = of("width"), of("inner"), of("heads"), of("layers")
        self._activation = _ACTIVATIONS[config[kind.keys["activation"]]]
        self._has_types = kind.has_types

    def model(self) -> Transformer:
        known = {name for name in self._weights.tensors if name.startswith(self._names["layers"])}
        layers = tuple(self._layer(f"{self._names['layers']}.{i}.") for i in range(self._layers))
        if len(known) != 16 * self._layers:  # more layers than the config has, or something else inside of them
            raise KeyError(self._names["layers"])
        return Transformer(self._embedding(), layers, None)

    def _embedding(self) -> Embedding:
        rows = {
            "word": ("input_ids", self._config["vocab_size"]),
            "token_type": ("token_type_ids", self._config.get("type_vocab_size")),
            "position": ("position_ids", self._config["max_position_embeddings"]),
        }
        parts = [part for part in rows if part != "token_type" or self._has_types]
        tables = tuple(self._weights.at(f"embeddings.{p}_embeddings.weight", rows[p][1], self._width) for p in parts)
        return Embedding(tables, tuple(rows[p][0] for p in parts), self._norm("embeddings.LayerNorm"))

    def _layer(self, start: str) -> Layer:
        names, width, inner = self._names, self._width, self._inner
        qkv = self._projection(*(start + names[part] for part in "qkv"), shape=(width, width))
        out = self._projection(start + names["out"], shape=(width, width))
        up = self._projection(start + names["up"], shape=(inner, width))
        down = self._projection(start + names["down"], shape=(width, inner))
        head = width // self._heads
        return Layer(
            Attention(qkv, out, self._heads, self._heads, head, head**-0.5),
            self._norm(start + names["attention_norm"]),
            Mlp(up, down, self._activation),
            self._norm(start + names["mlp_norm"]),
            NormOrder.POST,
        )

    def _projection(self, *names: str, shape: tuple[int, int]) -> Projection:
        at = self._weights.at
        return Projection(
            tuple(at(f"{name}.weight", *shape) for name in names), tuple(at(f"{name}.bias", shape[0]) for name in names)
        )

    def _norm(self, name: str) -> Norm:
        at = self._weights.at
        return Norm(at(f"{name}.weight", self._width), at(f"{name}.bias", self._width), self._eps)

"""Folders as sentence-transformers saves them, of small random models, for tests of `weft embed`."""

import json
import string

import torch
from packed_models import build
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

# Upper and lower case are different tokens, so that a text that is not lowered gives other ids.
LETTERS = string.ascii_letters
SPECIAL = ["[PAD]", "<pad>", "[CLS]", "[SEP]", "[UNK]"]  # 1 is the padding of the small models
WIDTH = 64
OLD = "sentence_transformers.models."  # the names of modules before 5.0
NEW = {
    "Transformer": "sentence_transformers.base.modules.transformer.",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.",
    "Dense": "sentence_transformers.base.modules.dense.",
    "Normalize": "sentence_transformers.base.modules.normalize.",
}
TEXTS = [
    "a", "The Fox", "the fox", "", "x" * 9, "Hello World " * 3, "long " * 40, "a[SEP]b", "nul\0byte", "é ß 漢",
    " ", "A b C d E f G h",
]  # fmt: skip


def tokenizer(*, special=True, max_length=60, side="right", lower=False, **options):
    """Of letters: a word of n letters is n tokens, [CLS] before a text and [SEP] behind it."""
    letters = [*LETTERS, *("##" + c for c in LETTERS)][: 99 - len(SPECIAL) - 1]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *letters])}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    if lower:
        made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("", "isolated")]
    )
    if special:
        made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    names = {"unk_token": "[UNK]", "pad_token": "<pad>", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    made.add_special_tokens([AddedToken(t, special=True) for t in ("[CLS]", "[SEP]", "[UNK]", "<pad>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=max_length, truncation_side=side, **names, **options
    )


def folder(
    path, family="Bert", *, modules=("Pooling",), pooling=None, bert=None, config=None, dtype=torch.float32,
    old=False, plain=False, sub="", words=None, head="Model", dense=None, normalize=None, seed=0, **options,
):  # fmt: skip
    """Writes a folder; `modules` come after the Transformer. `pooling`, `bert`, `config`, `dense`, `normalize` are the
    contents of the JSON files, `plain` is what transformers alone would save, `sub` where the transformer lies."""
    path.mkdir(parents=True, exist_ok=True)
    build(family, head, seed=seed, **options).to(dtype).save_pretrained(path / sub)
    (words or tokenizer()).save_pretrained(path / sub)
    if plain:
        return path
    listed = [{"idx": 0, "name": "0", "path": sub, "type": _type("Transformer", old)}]
    if bert is not None:
        write(path / sub / "sentence_bert_config.json", bert)
    if config is not None:
        write(path / "config_sentence_transformers.json", config)
    for i, kind in enumerate(modules, 1):
        listed.append({"idx": i, "name": str(i), "path": f"{i}_{kind}", "type": _type(kind, old)})
        if kind == "Pooling":
            name = "word_embedding_dimension" if old else "embedding_dimension"
            write(path / f"{i}_{kind}" / "config.json", {name: WIDTH, **(pooling or {})})
        if kind == "Normalize" and normalize is not None:
            write(path / f"{i}_{kind}" / "config.json", normalize)
        if kind == "Dense":
            _dense(path / f"{i}_{kind}", {"in_features": WIDTH, "out_features": 24, "bias": True, **(dense or {})}, i)
    write(path / "modules.json", listed)
    return path


def _type(kind, old):
    return (OLD if old else NEW.get(kind, OLD)) + kind


def _dense(path, config, seed):
    write(path / "config.json", config)
    random = torch.Generator().manual_seed(seed)
    shape = config["out_features"], config["in_features"]
    weights = {"linear.weight": torch.randn(*shape, generator=random) * 0.2}
    if config["bias"]:
        weights["linear.bias"] = torch.randn(shape[0], generator=random)
    if config.get("use_residual") and shape[0] != shape[1]:
        weights["residual.weight"] = torch.randn(*shape, generator=random) * 0.2
    save_file(weights, path / "model.safetensors")


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")

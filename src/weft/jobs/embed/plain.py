"""BERT's tokenizer read straight from tokenizer.json, without transformers, whose import takes seconds.

Only a file of which every part is what transformers' own class would make of it is read, so that texts get the same
tokens; `PlainTokenizer.of` gives None for any other, and whoever asked goes to transformers.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CLASSES = {  # by the kind of model: of another one, transformers may take another class
    "bert": ("BertTokenizer", "BertTokenizerFast"),
    "distilbert": ("DistilBertTokenizer", "DistilBertTokenizerFast"),
}
_SPECIAL = {
    "unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]",
}  # fmt: skip
_PLAIN_FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
_SURE = re.compile("[0-9A-Za-z]")
_CHARACTERS_A_TOKEN, _LOOKED_AT = 8, 64  # shorter texts are tokenized as fast as they are looked at
_ENDLESS = 10**30  # what transformers takes for no limit
# What tokenizer_config.json may say without changing a token, and what it may say only so.
_IDLE = {
    "name_or_path", "tokenizer_class", "special_tokens_map_file", "clean_up_tokenization_spaces", "model_max_length",
    "backend", "is_local", "local_files_only", "padding_side", "max_length", "stride", "truncation_strategy",
    "pad_to_multiple_of", "pad_token_type_id", "do_lower_case", "strip_accents", "tokenize_chinese_chars",
    "added_tokens_decoder", "processor_class",
}  # fmt: skip
_FIXED: dict[str, tuple[Any, ...]] = {
    "do_basic_tokenize": (True,),
    "never_split": (None,),
    "truncation_side": ("right",),
    "extra_special_tokens": ({}, []),
    "additional_special_tokens": ([], None),
    "tokenizer_file": (None,),
}


@dataclass(frozen=True)
class PlainTokenizer:
    """What is asked of a tokenizer of transformers, under the same names."""

    backend_tokenizer: Any
    model_max_length: int
    all_special_ids: list[int]
    model_input_names: list[str]
    truncation_side: str = "right"

    @classmethod
    def of(cls, folder: Path, max_length: int | None) -> PlainTokenizer | None:
        """Of a folder; `max_length` stands for what the folder says of lengths where it is given."""
        try:
            from tokenizers import Tokenizer

            text = (folder / "tokenizer.json").read_text(encoding="utf-8")
            config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            parts = json.loads(text)
        except (ImportError, OSError, ValueError):
            return None
        if not all(isinstance(found, dict) for found in (parts, config, model)):
            return None
        if config.get("tokenizer_class") not in _CLASSES.get(str(model.get("model_type")), ()):
            return None
        if any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json", "added_tokens.json")):
            return None
        vocabulary = _vocabulary(parts)
        if vocabulary is None or not _is_usual(config, _other_names(folder)) or not _is_bert(parts, config, vocabulary):
            return None
        limit = config.get("model_max_length", _ENDLESS) if max_length is None else max_length
        has_types = model["model_type"] == "bert"
        names = ["input_ids", "token_type_ids", "attention_mask"] if has_types else ["input_ids", "attention_mask"]
        return cls(Tokenizer.from_str(text), limit, [vocabulary[name] for name in _SPECIAL.values()], names)

    def cut(self, text: str, tokens: int) -> str:
        """The beginning of a text, where its first `tokens` tokens surely are in that; else all of it.

        BERT's words end at spaces, and none depends on another. A word with a letter or a digit has a token at least:
        no normalizer takes those away, nor do special tokens, which hold no space.
        """
        if len(text) <= _CHARACTERS_A_TOKEN * tokens:
            return text
        start, end, found = 0, text.find(" "), 0
        while 0 <= end <= _LOOKED_AT * tokens:  # words that are longer than any are not worth a search
            found += _SURE.search(text, start, end) is not None
            if found == tokens:
                return text[:end]
            start = end + 1
            end = text.find(" ", start)
        return text

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        count: int = self.backend_tokenizer.num_special_tokens_to_add(pair)
        return count


def _vocabulary(parts: dict[str, Any]) -> dict[str, int] | None:
    """Ids of words, where the model is BERT's and the special tokens are among them."""
    model = parts.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        return None
    rest = {name: value for name, value in model.items() if name != "vocab"}
    usual = {"unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    if rest != {"type": "WordPiece", **usual}:
        return None
    vocabulary: dict[str, int] = model["vocab"]
    return vocabulary if all(name in vocabulary for name in _SPECIAL.values()) else None


def _other_names(folder: Path) -> dict[str, Any]:
    """The names of special tokens in a file of their own, which earlier versions wrote."""
    try:
        found = json.loads((folder / "special_tokens_map.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_usual(config: dict[str, Any], others: dict[str, Any]) -> bool:
    """Whether nothing in tokenizer_config.json makes the tokenizer another one than the class makes by default."""
    if set(config) - _IDLE - set(_FIXED) - set(_SPECIAL):
        return False
    if any(name in config and config[name] not in allowed for name, allowed in _FIXED.items()):
        return False
    limit = config.get("model_max_length", 1)
    if not isinstance(limit, (int, float)) or limit < 1 or set(others) - set(_SPECIAL):
        return False
    given = [(has[name], usual) for has in (config, others) for name, usual in _SPECIAL.items() if name in has]
    return all(_content(token) == usual for token, usual in given)


def _content(token: Any) -> Any:
    """A special token is named, or described; None where it is more than its name."""
    if not isinstance(token, dict):
        return token
    flags = {name: value for name, value in token.items() if name not in ("content", "__type")}
    return token.get("content") if all(_PLAIN_FLAGS.get(n) == v for n, v in flags.items()) else None


def _is_bert(parts: dict[str, Any], config: dict[str, Any], vocabulary: dict[str, int]) -> bool:
    """Whether each part of tokenizer.json is what the class makes of the config and the vocabulary."""
    added: list[dict[str, Any]] = [
        {"id": vocabulary[name], "content": name, **_PLAIN_FLAGS} for name in _SPECIAL.values()
    ]
    said = config.get("added_tokens_decoder")
    if said is not None:
        described = {str(token["id"]): {n: v for n, v in token.items() if n != "id"} for token in added}
        if said != described:
            return False
    expected = {
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "strip_accents": config.get("strip_accents"),
            "handle_chinese_chars": config.get("tokenize_chinese_chars", True),
            "lowercase": config.get("do_lower_case", True),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _template(vocabulary),
    }  # fmt: skip
    direction = (parts.get("truncation") or {}).get("direction", "Right")
    known = {"version", "truncation", "padding", "decoder", "model", *expected}
    has = {name: parts.get(name) for name in expected}
    return set(parts) <= known and parts.get("version") == "1.0" and direction == "Right" and has == expected


def _template(vocabulary: dict[str, int]) -> dict[str, Any]:
    def special(name: str, kind: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": kind}}

    def text(name: str, kind: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": kind}}

    single = [special("[CLS]", 0), text("A", 0), special("[SEP]", 0)]
    names = ("[CLS]", "[SEP]")
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, text("B", 1), special("[SEP]", 1)],
        "special_tokens": {name: {"id": name, "ids": [vocabulary[name]], "tokens": [name]} for name in names},
    }

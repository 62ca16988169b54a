"""Tokenizer and model of a folder, read strictly: what is missing, or would compute something else, is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.jobs.embed.plain import PlainTokenizer
from weft.jobs.embed.recipe import NotPlain
from weft.packed.api import pack
from weft.packed.stored import StoredEncoder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
UNREAD = ("pooler.", "embeddings.position_ids")  # of a model whose hidden states are all that is asked for
_ENDLESS = 10**20  # tokenizers that know no limit give a number beyond this one
# Kinds of models that also have a decoder, which makes no vectors: what is loaded of them.
ENCODERS = {"t5": "T5EncoderModel"}


def check_dtype(dtype: str | None) -> None:
    """Raises where a dtype is asked for that is not computed in."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"got the dtype {dtype}, expected {' or '.join(DTYPES)}")


def _transformers() -> Any:
    """Imported where a folder asks for it: that takes seconds, for which usual folders need not wait."""
    try:
        return import_module("transformers")
    except ImportError as error:
        raise ImportError("weft embed needs transformers; pip install transformers") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bar of transformers: jobs have their own."""
    logging = import_module("transformers.utils.logging")
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def load_layers(folder: Path, dtype: str | None) -> Any:
    """The packed model whose hidden states a vector is made of: read from its files, or else by transformers."""
    found = StoredEncoder.of(folder, None if dtype is None else DTYPES[dtype])
    return pack(load_model(folder, dtype)) if found is None else found


def load_model(folder: Path, dtype: str | None) -> Any:
    """The model of transformers whose hidden states a vector is made of, without what nobody reads."""
    transformers = _transformers()
    config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    loader: Any = getattr(transformers, ENCODERS.get(config.model_type, "AutoModel"))
    model, missing = _loaded(loader, folder, dtype)
    check_complete(folder, model, missing, unread=UNREAD)
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # of a BERT: nobody reads it
    return model


def load_classifier(folder: Path, dtype: str | None) -> Any:
    """A model with a head that gives a text, or a pair of texts, one logit for each of its labels."""
    model, missing = _loaded(_transformers().AutoModelForSequenceClassification, folder, dtype)
    check_complete(folder, model, missing)
    return model


def _loaded(loader: Any, folder: Path, dtype: str | None) -> tuple[Any, Iterable[str]]:
    options: dict[str, Any] = {} if dtype is None else {"dtype": DTYPES[dtype]}
    with _quiet():
        model, found = loader.from_pretrained(folder, local_files_only=True, output_loading_info=True, **options)
    if model.dtype not in DTYPES.values():
        model = model.float()
    return model.eval(), found["missing_keys"]


def check_complete(folder: Path, model: nn.Module, missing: Iterable[str], *, unread: tuple[str, ...] = ()) -> None:
    """Raises where weights that are read were not in the files; transformers gives them random numbers."""
    names = sorted(name for name in missing if not name.startswith(unread))
    if names:
        named = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise ValueError(f"{folder} lacks weights of its {type(model).__name__}: {named}; they would be random numbers")


def load_tokenizer(folder: Path, max_length: int | None, *, is_plain: bool) -> Any:
    """The folder's tokenizer, which must be a fast one. `is_plain`: transformers alone saved it."""
    plain = PlainTokenizer.of(folder, max_length)
    if plain is not None:
        return plain
    options = {} if max_length is None else {"model_max_length": max_length}
    library = _transformers()
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)
    except Exception as error:  # tokenizers has no class of its own for its errors
        raise ValueError(f"{folder} has no tokenizer that transformers can read: {error}") from error
    if not tokenizer.is_fast:
        kind = type(tokenizer).__name__
        raise NotPlain(f"{folder} has the tokenizer {kind}, which has no tokenizer.json; convert it")
    names = {"tokenizer.json", *tokenizer.vocab_files_names.values()}
    if not any((folder / name).exists() for name in names):  # transformers makes one of a few special tokens then
        raise ValueError(f"{folder} has no tokenizer: expected one of {', '.join(sorted(names))} there")
    if is_plain and getattr(tokenizer, "chat_template", None) is not None:
        raise NotPlain(
            f"{folder} has a chat template and no modules.json, so that a text could be embedded as it is "
            f"or as a message; save the model with sentence-transformers, which says what is meant"
        )
    return tokenizer


def text_length(tokenizer: Any, model: Any, given: int | None, asked: int | None, *, pairs: bool) -> int | None:
    """Tokens of a text, or of a pair, special ones included; None for no limit. `given` is the folder's. Raises where
    the model has fewer positions."""
    has = positions_of(model)
    length = given if asked is None else asked
    if length is None:
        limits = [tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", -1), has]
        limits = [int(limit) for limit in limits if limit is not None and 0 < limit < _ENDLESS]
        return min(limits, default=None)
    least = int(tokenizer.num_special_tokens_to_add(pair=pairs)) + 1
    if length < least:
        raise ValueError(f"got at most {length} tokens a text, expected at least {least}: special tokens are counted")
    check_positions(length, model)
    return int(length)


def check_positions(length: int, model: Any) -> None:
    """Raises where a text of this many tokens has more than the model has positions."""
    has = positions_of(model)
    if has is not None and length > has:
        raise ValueError(
            f"got at most {length} tokens a text, but the model has {has} positions; pass --max-length {has}"
        )


def positions_of(model: Any) -> int | None:
    """How many tokens of a text have a position; None where positions are computed and not looked up."""
    if isinstance(model, StoredEncoder):
        return model.places
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in ("position_embeddings", "wpe") and isinstance(module, nn.Embedding):
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return None


def tokenizer_backend(tokenizer: Any, max_length: int | None, lower_case: bool) -> Any:
    """What the tokenizer computes with, set as its own call sets it; that call costs more than the work."""
    from tokenizers import normalizers

    several: Any = normalizers.Sequence
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    if max_length is None:
        backend.no_truncation()
    else:
        backend.enable_truncation(max_length, direction=tokenizer.truncation_side)
    if lower_case:
        has = backend.normalizer
        given = list(has) if isinstance(has, several) else [] if has is None else [has]
        if not any(isinstance(each, normalizers.Lowercase) for each in given):
            backend.normalizer = several([normalizers.Lowercase(), *given])
    return backend


@contextmanager
def one_thread() -> Iterator[None]:
    """torch's matmuls give other bits by other numbers of threads; packed transformers do not."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Options of configs: each is followed, changes nothing, or is refused by name. None is ignored unknowingly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from family_case import Case, close  # noqa: E402
from family_table import ROWS  # noqa: E402

import weft  # noqa: E402
from weft.errors import Unsupported  # noqa: E402
from weft.models.options import COMMON, declared  # noqa: E402

OTHER_WORDS = {"gelu": "relu", "relu": "gelu", "silu": "gelu", "cls": "mean", "late": "mean", "cls_index": "mean"}


def options_of(name: str) -> dict[str, Any]:
    return declared(getattr(transformers, ROWS[name].config))


@pytest.mark.parametrize("name", ROWS)
def test_every_option_is_in_one_list(name: str) -> None:
    """A failure means that transformers has a new option: read its modelling file for what it does."""
    found, own = options_of(name), ROWS[name].family.options
    assert not found.keys() - COMMON.names - own.names
    assert not (own.followed | own.idle) - found.keys(), "no such options"
    lists = [own.followed, own.idle, own.fixed.keys()]
    assert sum(map(len, lists)) == len(own.names), "an option is in two lists"
    assert not (own.followed | own.idle) & COMMON.names, "these stand in COMMON"


def other(value: Any) -> list[Any]:
    """Values that an option might have instead."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2]
    if isinstance(value, float):
        return [value * 0.5 + 0.01]
    if isinstance(value, str):
        return [OTHER_WORDS.get(value, "gelu")]
    return [0.5, 3, True, "gelu"] if value is None else []


def made(case: Case, option: str, *, by_it: bool) -> Any:
    """A model whose config has another value of an option: the one that it was made by, or only the one that it has.

    None where Hugging Face makes no such model.
    """
    for value in other(getattr(case.config, option, None)):
        altered = copy.copy(case)
        altered.config = copy.deepcopy(case.config)
        try:
            if by_it:
                setattr(altered.config, option, value)
            model = altered.model(case.row.words)
            setattr(model.config, option, value)
            with torch.no_grad():
                model(case.texts[0][None])
        except Exception:
            continue
        return model
    return None


def became(model: Any, inputs: list[tuple[Tensor, Tensor]]) -> str:
    """Whether weft gives the `same` numbers as Hugging Face, or the model is `refused`."""
    with torch.no_grad():
        wanted = [model(ids, attention_mask=mask)[0] for ids, mask in inputs]
        try:
            packed = weft.pack(model)
            found = [packed(ids, attention_mask=mask)[0] for ids, mask in inputs]
        except Unsupported:
            return "refused"
    for (_, mask), want, got in zip(inputs, wanted, found, strict=True):
        close(got[mask.bool()], want[mask.bool()], "outputs")
    return "same"


@pytest.mark.parametrize("name", ROWS)
def test_another_value_is_followed_or_refused(name: str) -> None:
    """Of every option: in the config that the model is made by, and in the config of a model that is there.

    With `sdpa`, which goes by what modules say where there is no mask.
    """
    case = Case(name, 7, 0)
    whole = (case.texts[0][None], torch.ones(1, len(case.texts[0])))
    results: dict[str, set[str]] = {}
    for option in options_of(name):
        for by_it in (True, False):
            model = made(case, option, by_it=by_it)
            if model is None:
                continue
            model.set_attn_implementation("sdpa")
            try:
                results.setdefault(option, set()).add(became(model, [whole, case.padded()]))
            except Exception as error:
                value = getattr(model.config, option)
                raise AssertionError(f"{option} = {value!r}, made by it: {by_it}: {error}") from error
    unseen = {option for option in case.row.family.options.fixed if results.get(option) == {"same"}}
    assert not unseen, "nobody refused these"
    assert sum("same" in found for found in results.values()) > len(results) / 2


@pytest.mark.parametrize("name", ROWS)
def test_idle_options_are_idle(name: str) -> None:
    """Hugging Face's own model computes the same, whatever they say."""
    case = Case(name, 7, 1)
    ids, mask = case.padded()
    with torch.no_grad():
        want = case.model(case.row.words)(ids, attention_mask=mask)[0]
        for option in case.row.family.options.idle | COMMON.idle:
            for by_it in (True, False):
                model = made(case, option, by_it=by_it)
                if model is not None:
                    close(model(ids, attention_mask=mask)[0], want, f"outputs at another {option}", 1e-5)


# ---- options of somebody's own ---------------------------------------------------------------------------------------


class Modern(transformers.LlamaConfig):
    logit_scale: float = 1.0


class Older(transformers.LlamaConfig):
    def __init__(self, logit_scale: float = 1.0, **rest: Any) -> None:
        self.logit_scale = logit_scale
        super().__init__(**rest)


def llama(kind: Any, **more: Any) -> Any:
    case = Case("LlamaModel", 7, 2)
    case.config = kind(**{**case.row.draw(case.random, 1), **more})
    return case.model()


@pytest.mark.parametrize("kind", [Modern, Older])
def test_an_unknown_option_is_refused_unless_it_has_its_default(kind: Any) -> None:
    weft.pack(llama(kind))
    weft.pack(llama(kind, logit_scale=1.0))
    with pytest.raises(
        Unsupported, match=r"\w+\.logit_scale = 2.0 is an option that weft does not know.* expected 1.0"
    ):
        weft.pack(llama(kind, logit_scale=2.0))
    packed = weft.pack(llama(kind))
    packed(torch.ones(1, 3).long())
    packed.config.logit_scale = 2.0  # noticed in the next call
    with pytest.raises(Unsupported, match="logit_scale"):
        packed(torch.ones(1, 3).long())


def test_what_no_class_declares_is_nobodys() -> None:
    model = llama(transformers.LlamaConfig, my_notes="kept", logit_scale=2.0)
    assert model.config.logit_scale == 2.0
    weft.pack(model)(torch.ones(1, 3).long())


def test_options_that_shared_code_of_transformers_asks_for() -> None:
    with pytest.raises(Unsupported, match=r"config.is_heterogeneous = True is not supported; expected False"):
        weft.pack(llama(transformers.LlamaConfig, per_layer_config={0: {"my_notes": 2}}, my_notes=1))
    model = llama(transformers.LlamaConfig)
    with pytest.raises(Unsupported, match="is_causal=False, a decoder that looks ahead"):
        weft.pack(model)(torch.ones(1, 3).long(), is_causal=False)
    encoder = Case("BertModel", 7, 0)
    encoder.config.is_causal = True
    with pytest.raises(Unsupported, match=r"config.is_causal = True is not supported; expected False"):
        weft.pack(encoder.model())


def test_a_layer_that_was_made_by_another_config_counts() -> None:
    case = Case("BertModel", 7, 0)
    model, decoder = case.model(), copy.copy(case)
    decoder.config = copy.deepcopy(case.config)
    decoder.config.is_decoder = True
    model.encoder.layer[0] = decoder.model().encoder.layer[0]
    with pytest.raises(Unsupported, match=r"config.is_decoder = True is not supported; expected False"):
        weft.pack(model)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.family.has_cache])
def test_an_encoder_with_a_causal_attention_is_refused(name: str) -> None:
    """One that was made as a decoder and then told to be none: kernels of transformers do not agree what that means."""
    model = Case(name, 7, 0).model()
    attentions = [m for m in model.modules() if getattr(m, "is_causal", None) is False]
    assert bool(attentions) == (name != "MPNetModel")  # which knows nothing of the kind
    for attention in attentions[-1:]:
        attention.is_causal = True
        with pytest.raises(Unsupported, match="has is_causal = True, expected False"):
            weft.pack(model)

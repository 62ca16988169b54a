"""PEFT adapters on packed models: refused where they are modules, used where they were merged into weights."""

from __future__ import annotations

import copy
from typing import Any

import packed_models as small
import pytest
import torch

import weft
from weft.errors import Unsupported

peft = pytest.importorskip("peft")

TARGETS = {"Bert": ["query", "value"], "Llama": ["q_proj", "v_proj"]}
LENGTHS = [9, 1, 4]


def adapted(model: torch.nn.Module, family: str) -> Any:
    """The model with adapters that matter, the same in every call."""
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=TARGETS[family], init_lora_weights=False))


def states(model: Any) -> torch.Tensor:
    ids, mask = small.inputs(LENGTHS)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]


@pytest.mark.parametrize("family", TARGETS)
def test_adapters_are_refused_until_they_are_merged(family: str) -> None:
    plain = small.build(family).eval()
    wanted = states(adapted(copy.deepcopy(plain), family))
    packed = weft.pack(copy.deepcopy(plain))
    before = states(packed)
    assert (before - wanted).abs().max() > 1e-3
    wrapped = adapted(packed, family)
    with pytest.raises(Unsupported, match=r"peft\.tuners\.lora.*merge adapters"):
        states(wrapped)
    merged = wrapped.merge_and_unload()
    torch.testing.assert_close(states(merged), wanted, atol=1e-5, rtol=1e-4)
    with pytest.raises(Unsupported, match="PeftModel"):
        weft.pack(adapted(copy.deepcopy(plain), family))

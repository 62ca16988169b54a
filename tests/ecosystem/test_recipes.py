"""The recipes of docs/packed.md for programs that only this folder has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from programs import built, sentences, tokenizer

pytest.importorskip("trl", reason="the tests of TRL need the extra `ecosystem`, and Python 3.11")

import weft

PAGE = Path(__file__).parents[2] / "docs" / "packed.md"
MARKED = re.compile(r"<!-- runs: no: tests/ecosystem runs it.*?-->\n```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("code", MARKED.findall(PAGE.read_text(encoding="utf-8")))
def test_a_recipe(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    built("Llama", "ForCausalLM").save_pretrained("model")
    tokenizer().save_pretrained("model")
    known = {"weft": weft, "transformers": transformers, "folder": "model", "lines": sentences(24)}
    known |= {"llama": built("Llama", "ForCausalLM"), "texts": [torch.arange(6, 6 + n) for n in (31, 7, 12)]}
    exec(compile(code, str(PAGE), "exec"), known)
    assert known["trainer"].state.global_step > 0


def test_there_is_a_recipe() -> None:
    assert len(MARKED.findall(PAGE.read_text(encoding="utf-8"))) == 2

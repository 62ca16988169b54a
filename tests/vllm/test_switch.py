"""The switch: without it nothing of vLLM is imported, let alone replaced. Needs no vLLM."""

from __future__ import annotations

import subprocess
import sys

import pytest

import weft.vllm


@pytest.mark.parametrize("value", [None, "0", ""])
def test_off_imports_nothing(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_VLLM", raising=False)
    if value is not None:
        monkeypatch.setenv("WEFT_VLLM", value)
    code = "import sys, weft.vllm; weft.vllm.register(); sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_other_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_VLLM", "yes")
    with pytest.raises(ValueError, match=r"WEFT_VLLM is 'yes', expected 1 \(on\) or 0 \(off\)"):
        weft.vllm.register()


@pytest.mark.parametrize("value", ["soon", "0", "-1", "inf"])
def test_wrong_timeouts_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match="expected seconds above 0"):
        weft.vllm._seconds(value)

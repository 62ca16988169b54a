"""What `install` changes in a process, and what makes it change nothing. Each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

pytest.importorskip("vllm")

_LOOK = """
import vllm
from vllm.compilation import caching
from vllm.config import VllmConfig
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers import utils
from vllm.platforms import current_platform
def state():
    return [
        utils.dispatch_cpu_unquantized_gemm.__module__,
        current_platform.get_device_communicator_cls().split(".")[0],
        sorted(cls.__name__ for cls in op_registry_oot.values()),
        [factor for factor in caching.aot_compile_hash_factors(VllmConfig()) if str(factor).startswith("weft")],
    ]
"""
_INSTALL = "from weft.vllm.install import install; "


def _run(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _LOOK + code], check=False, timeout=280, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("state ") or "weft:" in line]


UNCHANGED = "state ['vllm.model_executor.layers.utils', 'vllm', [], []]"
CHANGED = f"state ['weft.vllm.matmul', 'weft', ['WindowRowParallelLinear'], ['weft {version('weft')}']]"


def test_installing_twice_is_installing_once() -> None:
    code = f"print('state', state()); {_INSTALL}install(timeout=5.0); install(timeout=5.0); print('state', state())"
    assert _run(code) == [UNCHANGED, CHANGED]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("vllm.__version__ = '9.1.0'", "vLLM is 9.1.0, expected 0.32"),
        ("current_platform.is_cpu = lambda: False", "the platform is cpu, expected cpu"),
    ],
)
def test_another_vllm_is_left_alone(change: str, reason: str) -> None:
    lines = _run(f"{change}; {_INSTALL}install(timeout=5.0); print('state', state())")
    assert UNCHANGED in lines
    assert any(f"weft: left alone everything: {reason}" in line for line in lines)


def test_a_layer_that_another_plugin_has_replaced_is_left_alone() -> None:
    code = "op_registry_oot['RowParallelLinear'] = type('Theirs', (), {'__module__': 'theirs'})"
    lines = _run(f"{code}; {_INSTALL}install(timeout=5.0); print('state', state())")
    assert any("left alone every RowParallelLinear: theirs has replaced it" in line for line in lines)
    assert CHANGED.replace("WindowRowParallelLinear", "Theirs") in lines

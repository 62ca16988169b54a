"""What `install` changes in a process, and what makes it change nothing. Each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("vllm")

# vLLM takes ten seconds to import: one process does, and forks for each case.
_LOOK = """
import os, sys
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
        [f.split(",")[0] for f in map(str, caching.aot_compile_hash_factors(VllmConfig())) if "weft" in f],
    ]
for number, code in enumerate(sys.argv[1:]):
    if os.fork() == 0:
        print("case", number, flush=True)
        exec(code)
        print("state", state(), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
_INSTALL = "from weft.vllm import install; install(timeout=5.0)"
UNCHANGED = "state ['vllm.model_executor.layers.utils', 'vllm', [], []]"
CHANGED = f"state ['weft.vllm.layers', 'weft', ['WindowRowParallelLinear'], ['weft {version('weft')}']]"
CASES = {
    "nothing": ("", UNCHANGED, ""),
    "once": (_INSTALL, CHANGED, ""),
    "twice": (f"{_INSTALL}; install(timeout=6.0)", CHANGED, ""),
    "another release": (
        f"vllm.__version__ = '9.1.0'; {_INSTALL}",
        UNCHANGED,
        "weft: left alone everything: vLLM is 9.1.0, expected 0.32",
    ),
    "another platform": (
        f"current_platform.is_cpu = lambda: False; {_INSTALL}",
        UNCHANGED,
        "weft: left alone everything: the platform is cpu, expected cpu",
    ),
    "no native core": (
        f"sys.modules['weft._core'] = None; {_INSTALL}",
        UNCHANGED,
        "weft: left alone everything: weft's native core cannot be loaded",
    ),
    "another plugin's layer": (
        f"op_registry_oot['RowParallelLinear'] = type('Theirs', (), {{'__module__': 'theirs'}}); {_INSTALL}",
        CHANGED.replace("WindowRowParallelLinear", "Theirs"),
        "weft: left alone every RowParallelLinear: theirs has replaced it",
    ),
}


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """What each case wrote."""
    codes = [code for code, _, _ in CASES.values()]
    done = subprocess.run(
        [sys.executable, "-c", _LOOK, *codes],
        check=False,
        timeout=280,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return dict(zip(CASES, done.stdout.split("case ")[1:], strict=True))


@pytest.mark.parametrize("case", CASES)
def test_what_is_changed_and_said(texts: dict[str, str], case: str) -> None:
    _, state, said = CASES[case]
    assert state in texts[case]
    assert said in texts[case]
    assert ("weft: " in texts[case]) == bool(said)


_OTHER = {  # what every release has, and nothing more
    "__init__.py": "__version__ = '0.31.0'",
    "logger.py": "import logging\nlogging.basicConfig()\ninit_logger = logging.getLogger",
    "platforms.py": "current_platform = None",
}


def test_another_release_is_refused_by_name_before_its_insides_are_needed(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    for name, text in _OTHER.items():
        (tmp_path / "vllm" / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "WEFT_VLLM": "1"}
    code = "import weft.vllm; weft.vllm.register()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "weft: left alone everything: vLLM is 0.31.0, expected 0.32; install the release" in done.stderr

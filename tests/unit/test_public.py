"""The public surface: few names, all there, and cheap to import."""

import doctest
import importlib
import pkgutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

import weft


def test_every_public_name_loads():
    assert sorted(weft.__all__) == list(weft.__all__)
    assert len(weft.__all__) <= 40
    assert set(weft.__all__) <= set(dir(weft))
    for name in weft.__all__:
        assert getattr(weft, name).__name__.removeprefix("weft.") == name
    assert callable(weft.reshard)
    with pytest.raises(AttributeError, match="its names are"):
        weft.nonsense  # noqa: B018


def test_packages_can_be_reached_without_importing_them():
    code = "import weft; print(weft.overlap.tune.__name__, weft.lab.Cluster.__name__, weft.reshard.Plan.__name__)"
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout.split() == ["tune", "Cluster", "Plan"]


def test_importing_weft_does_not_import_torch():
    code = "import sys, weft, weft.cli.app; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(weft.__path__, "weft.")
    if module.name not in {"weft.__main__", "weft._core"}
    and not (module.name.startswith("weft.vllm.") and find_spec("vllm") is None)
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0

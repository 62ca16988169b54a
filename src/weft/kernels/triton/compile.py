"""Compiles kernels for GPUs that need not be there, and says what each takes: the proof that they fit."""

from __future__ import annotations

import re
import subprocess
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from weft.kernels.triton.checks import INTERPRETED
from weft.kernels.triton.occupancy import ARCHS, blocks_at_once, occupancy
from weft.kernels.triton.variants import Variant


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes. `spilled` is the bytes of a thread's stack, which is where spills go."""

    kernel: str
    label: str
    arch: str
    is_default: bool
    warps: int
    registers: int
    spilled: int
    shared: int
    blocks: int
    occupancy: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Compiled:
    """A cubin, the PTX that it was assembled from, and what it takes."""

    ptx: str
    cubin: bytes
    resources: Resources


def compile_variant(variant: Variant, arch: str) -> Compiled:
    """Compiles for "sm80", "sm86", "sm89", "sm90" or "sm100"; Triton keeps the result in its cache."""
    if arch not in ARCHS:
        raise ValueError(f"got the architecture {arch!r}, expected one of {', '.join(ARCHS)}")
    if INTERPRETED:
        raise ValueError("kernels cannot be compiled where they are interpreted; unset TRITON_INTERPRET")
    source = ASTSource(
        variant.function, variant.signature, constexprs=variant.constants,
        attrs={(at,): [["tt.divisibility", 16]] for at in variant.aligned},
    )  # fmt: skip
    config = variant.config
    with warnings.catch_warnings():  # Triton announces a change of a default
        warnings.simplefilter("ignore")
        built = triton.compile(
            source, target=GPUTarget("cuda", int(arch[2:]), 32),
            options={"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True},
        )  # fmt: skip
    cubin: bytes = built.asm["cubin"]
    registers, stack = _usage(cubin)
    columns = getattr(built.metadata, "tmem_size", None) or 0
    blocks = blocks_at_once(
        arch, warps=config.warps, registers=registers, shared=built.metadata.shared, tensor_columns=columns
    )
    resources = Resources(
        variant.kernel, variant.label, arch, variant.is_default, config.warps, registers, stack, built.metadata.shared,
        blocks, occupancy(arch, blocks, config.warps),
    )  # fmt: skip
    return Compiled(built.asm["ptx"], cubin, resources)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread, as the cuobjdump that comes with Triton reads them."""
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", said)
    assert found, f"cuobjdump said nothing of registers: {said}"
    return int(found[1]), int(found[2]) + int(found[3])

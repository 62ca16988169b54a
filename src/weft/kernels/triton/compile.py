"""The proof that the kernels fit: every variant compiled for GPUs that need not be there, and what it takes.

`variants` lists every kernel with the types, options and block sizes it is launched with; `compile_variant` compiles
one, and says how many of its blocks fit on a multiprocessor at once, from the limits that NVIDIA publishes.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from weft.kernels.triton import launch
from weft.kernels.triton.attention import attention_grad_kv_kernel, attention_grad_q_kernel, attention_kernel
from weft.kernels.triton.launch import INTERPRETED
from weft.kernels.triton.matmul import matmul_kernel
from weft.kernels.triton.rows import gate_kernel, gather_kernel, norm_kernel, rotary_kernel, sum_kernel
from weft.kernels.triton.signals import WAITER_WARPS, tell_kernel, wait_kernel

_REGISTERS = 65_536
_REGISTERS_AT_ONCE = 256  # a warp gets registers in steps of this many
_RESERVED_SHARED = 1024  # of each block, for the system
_SHARED_AT_ONCE = 128
_TENSOR_COLUMNS = 512


@dataclass(frozen=True)
class Limits:
    """What a multiprocessor of a compute capability has; `spills` says that a default spills a little there."""

    warps: int
    blocks: int
    shared: int
    shared_of_block: int
    spills: bool = False

    @property
    def room(self) -> tuple[int, int, int, int]:
        """Blocks, warps, registers and bytes of shared memory, in the units of `room`."""
        return self.blocks, self.warps, _REGISTERS, self.shared


def room(*, warps: int, registers: int, shared: int) -> tuple[int, int, int, int]:
    """What one block takes of a multiprocessor's blocks, warps, registers and shared memory, as these are given out.

    >>> room(warps=8, registers=129, shared=1000)
    (1, 8, 34816, 2048)
    """
    of_warp = -(-max(registers, 1) * 32 // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE
    return 1, warps, of_warp * warps, -(-(shared + _RESERVED_SHARED) // _SHARED_AT_ONCE) * _SHARED_AT_ONCE


# The one list of targets. Where attention of half-precision heads of 128 spills 16 bytes, they are compiled when asked
# for: sizes that do not spill there spill on sm80, or give up the pipelining of loads.
ARCHS = {
    "sm80": Limits(warps=64, blocks=32, shared=164 << 10, shared_of_block=163 << 10),
    "sm86": Limits(warps=48, blocks=16, shared=100 << 10, shared_of_block=99 << 10, spills=True),
    "sm89": Limits(warps=48, blocks=24, shared=100 << 10, shared_of_block=99 << 10, spills=True),
    "sm90": Limits(warps=64, blocks=32, shared=228 << 10, shared_of_block=227 << 10),
    "sm100": Limits(warps=64, blocks=32, shared=228 << 10, shared_of_block=227 << 10),
}
TARGETS = tuple(name for name, limits in ARCHS.items() if not limits.spills)
"""Those that no default spills on: what is compiled unless others are asked for."""


def blocks_at_once(arch: str, *, warps: int, registers: int, shared: int, tensor_columns: int = 0) -> int:
    """The blocks of `warps` warps that run at once on a multiprocessor; 0 if not even one fits.

    >>> blocks_at_once("sm90", warps=8, registers=128, shared=98_304)
    2
    """
    limits = ARCHS[arch]
    if shared > limits.shared_of_block:
        return 0
    one = room(warps=warps, registers=registers, shared=shared)
    fits = [most // taken for most, taken in zip(limits.room, one, strict=True)]
    if tensor_columns:
        fits.append(_TENSOR_COLUMNS // tensor_columns)
    return min(fits)


def occupancy(arch: str, blocks: int, warps: int) -> float:
    """The share of the warps that a multiprocessor could hold."""
    return blocks * warps / ARCHS[arch].warps


TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
HEAD_WIDTHS = (64, 128, 256)
ROW_WIDTHS = (1024, 4096, 8192, 16_384)
_FLOATS = ("scale", "eps", "sign")


@dataclass(frozen=True, eq=False)
class Variant:
    """One compilation: `pointers` are those that are given, with their element types; the others in `absent` are None.

    >>> next(v for v in variants() if v.kernel == "wait").name
    'wait 32'
    """

    kernel: str
    label: str
    function: Any = field(repr=False)
    pointers: dict[str, str] = field(repr=False)
    config: launch.Config
    absent: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    is_default: bool = True

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.label}"

    @property
    def constants(self) -> dict[str, Any]:
        blocks = {k: v for k, v in self.config.blocks if k in self.function.arg_names}
        return {**dict.fromkeys(self.absent), **self.options, **blocks}

    @property
    def signature(self) -> dict[str, str]:
        """The type of every argument, as Triton writes it."""
        constants = self.constants
        return {name: "constexpr" if name in constants else self._type(name) for name in self.function.arg_names}

    def _type(self, name: str) -> str:
        if name in self.pointers:
            return f"*{self.pointers[name]}"
        return "fp32" if name in _FLOATS else "i64" if name == "limit_ns" else "i32"

    @property
    def aligned(self) -> list[int]:
        """Which arguments are multiples of 16, as addresses, widths and strides of real models are."""
        wanted = {*self.pointers, "N", "K", "D", "tile_n"}
        names = enumerate(self.function.arg_names)
        return [
            at for at, name in names if name not in self.constants and (name in wanted or name.startswith("stride"))
        ]


def variants() -> Iterator[Variant]:
    """All of them, kernel by kernel; the default configuration of each comes first."""
    for dtype, code in TYPES.items():
        yield from _matmuls(dtype, code)
    for dtype, code in TYPES.items():
        for width in HEAD_WIDTHS:
            yield from _attentions(dtype, code, width)
    for code in TYPES.values():
        yield from _norms(code)
        yield from _rows(code)
    threads = {"THREADS": 32 * WAITER_WARPS, "INTERPRET": False}
    pointers = dict.fromkeys(("counters", "values", "late"), "i32")
    yield Variant("tell", str(32 * WAITER_WARPS), tell_kernel, {"counters": "i32"}, launch.Config((), WAITER_WARPS))
    yield Variant("wait", str(32 * WAITER_WARPS), wait_kernel, pointers, launch.Config((), WAITER_WARPS), (), threads)


def _matmuls(dtype: torch.dtype, code: str) -> Iterator[Variant]:
    everything = {
        **dict.fromkeys(("x", "w", "bias", "residual", "pre", "out"), code),
        **dict.fromkeys(("x_rows", "places", "place_strides", "out_rows", "done_at"), "i64"),
        **dict.fromkeys(("order", "group_of", "done", "ready", "ready_steps", "late"), "i32"),
    }
    for number, config in enumerate(launch.MATMUL[dtype]):
        for use, given in MATMUL_USES.items():
            if number == 0 or use == "signals":
                yield _matmul(use, given, everything, code, config, number == 0 and use not in SPILL)
    if dtype != torch.float32:
        for use in ("plain", "owners"):
            yield _matmul(f"short {use}", MATMUL_USES[use], everything, code, launch.SHORT, True)


# What is given beside x, w and the flag, for each way in which the library launches the matmul; `bias`, `residual` and
# `pre` may also be missing: a kernel without them is a part of the one with them.
MATMUL_USES = {
    "signals": ("out", "bias", "residual", "order", "group_of", "done"),
    "plain": ("out", "bias", "residual"),
    "training": ("out", "bias", "pre"),
    "training and residual": ("out", "bias", "residual", "pre"),
    "ordered": ("out", "bias", "order", "group_of"),
    "gathered": ("out", "bias", "order", "group_of", "ready", "ready_steps"),
    "places": ("bias", "places", "place_strides", "order", "group_of", "done"),
    "owners": ("out_rows", "order", "group_of", "done_at"),
    "tiles wait": ("out", "bias", "order", "group_of", "ready"),
    "rows by address": ("x_rows", "bias", "places", "place_strides", "order", "group_of", "done_at"),
}

SPILL = ("training and residual",)
"""Launched with default block sizes, but not held to have no spills: in float16, 16 bytes on sm90 and 32 on sm100."""


def _matmul(
    use: str, given: tuple[str, ...], kinds: dict[str, str], code: str, config: launch.Config, is_default: bool
) -> Variant:
    there = {*given, "w", "late", *(() if "x_rows" in given else ("x",))}
    pointers = {name: kind for name, kind in kinds.items() if name in there}
    absent = tuple(name for name in kinds if name not in there)
    aligned = bool({"places", "out_rows"} & there)
    options = {"ACTIVATION": "gelu" if {"residual", "pre"} & there else None, "PRECISION": "ieee", "ALIGNED": aligned,
               "THREADS": 32 * config.warps, "INTERPRET": False}  # fmt: skip
    return Variant(
        "matmul", f"{use} {code} {config.name}", matmul_kernel, pointers, config, absent, options, is_default
    )


def _attentions(dtype: torch.dtype, code: str, width: int) -> Iterator[Variant]:
    tables = dict.fromkeys(("cu_q", "cu_k", "blocks"), "i32")
    passes = (
        ("attention", attention_kernel, ("q", "k", "v", "out"), ("lse",), launch.attention_forward(dtype, width)),
        ("attention_grad_q", attention_grad_q_kernel, ("dout", "q", "k", "v", "out", "dq"), ("lse", "delta"),
         launch.attention_grad_q(dtype, width)),
        ("attention_grad_kv", attention_grad_kv_kernel, ("dout", "q", "k", "v", "dk", "dv"), ("lse", "delta"),
         launch.attention_grad_kv(dtype, width)),
    )  # fmt: skip
    for kernel, function, tensors, statistics, choices in passes:
        for number, config in enumerate(choices):
            pointers = {**dict.fromkeys(tensors, code), **dict.fromkeys(statistics, "fp32"), **tables}
            label = f"{code} d{width} {config.name}"
            options = {"PRECISION": "ieee", "BLOCK_D": width}
            yield Variant(kernel, label, function, pointers, config, ("slopes",), options, number == 0)


def _norms(code: str) -> Iterator[Variant]:
    vectors = dict.fromkeys(("x", "bias", "residual", "weight", "beta", "total", "out"), code)
    pointers = vectors | dict.fromkeys(("mean", "rstd"), "fp32")
    absent = ("bias", "beta", "mean")
    rms = {k: v for k, v in pointers.items() if k not in absent}
    for width in ROW_WIDTHS:
        config = launch.rows(width)
        label = f"{code} {config.name}"
        yield Variant("norm", f"layer {label}", norm_kernel, pointers, config, (), {"RMS": False})
        yield Variant("norm", f"rms {label}", norm_kernel, rms, config, absent, {"RMS": True})


def _rows(code: str) -> Iterator[Variant]:
    strip, half = launch.STRIP, launch.rows(64)
    tables = {"first": code, "second": code, "third": code, "out": code}
    indices = dict.fromkeys(("first_index", "second_index", "third_index"), "i64")
    yield Variant("gather", f"{code} {strip.name}", gather_kernel, tables | indices, strip)
    one = {"out": code, "first": code, "first_index": "i64"}
    others = ("second", "second_index", "third", "third_index")
    yield Variant("gather", f"pack {code} {strip.name}", gather_kernel, one, strip, others)
    parts = {"parts": code, "out": code, "bias": code, "ready": "i32", "late": "i32"}
    threads = {"THREADS": 32 * strip.warps, "INTERPRET": False}
    yield Variant("sum", f"{code} {strip.name}", sum_kernel, parts, strip, (), threads)
    turned = {"x": code, "out": code, "cos": "fp32", "sin": "fp32", "positions": "i64"}
    yield Variant("rotary", f"{code} {half.name}", rotary_kernel, turned, half)
    gated = {"x": code, "out": code}
    yield Variant("gate", f"{code} {strip.name}", gate_kernel, gated, strip, (), {"ACTIVATION": "silu"})


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
class CompiledKernel:
    """A cubin, the PTX that it was assembled from, and what it takes."""

    ptx: str
    cubin: bytes
    resources: Resources


def compile_variant(variant: Variant, arch: str) -> CompiledKernel:
    """Compiles for one of `ARCHS`; Triton keeps the result in its cache."""
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
    return CompiledKernel(built.asm["ptx"], cubin, resources)


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

"""Every kernel with the types, options and block sizes it is launched with: what `weft kernels compile` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.kernels.triton import configs
from weft.kernels.triton.attention_forward import attention_kernel
from weft.kernels.triton.attention_grad_kv import attention_grad_kv_kernel
from weft.kernels.triton.attention_grad_q import attention_grad_q_kernel
from weft.kernels.triton.gate import gate_kernel
from weft.kernels.triton.gather import gather_kernel
from weft.kernels.triton.late import WAITER_WARPS
from weft.kernels.triton.matmul import matmul_kernel
from weft.kernels.triton.norm import norm_kernel
from weft.kernels.triton.rotary import rotary_kernel
from weft.kernels.triton.sums import sum_kernel
from weft.kernels.triton.tell import tell_kernel
from weft.kernels.triton.wait import wait_kernel

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
    config: configs.Config
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
        wanted = {*self.pointers, "N", "K", "D", "tile_n", "piece_cols"}
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
    yield Variant("tell", str(32 * WAITER_WARPS), tell_kernel, {"counters": "i32"}, configs.Config((), WAITER_WARPS))
    yield Variant("wait", str(32 * WAITER_WARPS), wait_kernel, pointers, configs.Config((), WAITER_WARPS), (), threads)


def _matmuls(dtype: torch.dtype, code: str) -> Iterator[Variant]:
    everything = {
        **dict.fromkeys(("x", "w", "bias", "residual", "pre", "out"), code),
        **dict.fromkeys(("x_rows", "places", "place_strides", "done_at"), "i64"),
        **dict.fromkeys(("order", "group_of", "done", "ready", "late"), "i32"),
    }
    uses = {
        "signals": ("x_rows", "pre", "places", "place_strides", "done_at", "ready"),
        "plain": ("x_rows", "pre", "places", "place_strides", "done_at", "ready", "order", "group_of", "done"),
        "gathered": ("x", "pre", "residual", "places", "place_strides", "done_at", "done"),
        "to peers": ("x_rows", "pre", "residual", "out", "done", "ready"),
    }
    for number, config in enumerate(configs.MATMUL[dtype]):
        for use, absent in uses.items():
            if number and use != "signals":
                continue
            options = {"ACTIVATION": "gelu" if use in ("signals", "plain") else None, "PRECISION": "ieee",
                       "THREADS": 32 * config.warps, "INTERPRET": False}  # fmt: skip
            pointers = {name: kind for name, kind in everything.items() if name not in absent}
            label = f"{use} {code} {config.name}"
            yield Variant("matmul", label, matmul_kernel, pointers, config, absent, options, number == 0)


def _attentions(dtype: torch.dtype, code: str, width: int) -> Iterator[Variant]:
    tables = dict.fromkeys(("cu_q", "cu_k", "blocks"), "i32")
    passes = (
        ("attention", attention_kernel, ("q", "k", "v", "out"), ("lse",), configs.attention_forward(dtype, width)),
        ("attention_grad_q", attention_grad_q_kernel, ("dout", "q", "k", "v", "out", "dq"), ("lse", "delta"),
         configs.attention_grad_q(dtype, width)),
        ("attention_grad_kv", attention_grad_kv_kernel, ("dout", "q", "k", "v", "dk", "dv"), ("lse", "delta"),
         configs.attention_grad_kv(dtype, width)),
    )  # fmt: skip
    for kernel, function, tensors, statistics, choices in passes:
        for number, config in enumerate(choices):
            pointers = {**dict.fromkeys(tensors, code), **dict.fromkeys(statistics, "fp32"), **tables}
            label = f"{code} d{width} {config.name}"
            options = {"PRECISION": "ieee", "BLOCK_D": width}
            yield Variant(kernel, label, function, pointers, config, ("slopes",), options, number == 0)


def _norms(code: str) -> Iterator[Variant]:
    vectors = dict.fromkeys(("x", "bias", "residual", "weight", "beta", "total", "out"), code)
    statistics, maps = dict.fromkeys(("mean", "rstd"), "fp32"), dict.fromkeys(("starts", "strides"), "i64")
    for width in ROW_WIDTHS:
        config = configs.rows(width)
        label = f"{code} {config.name}"
        pointers = vectors | statistics
        yield Variant("norm", f"layer {label}", norm_kernel, pointers, config, tuple(maps), {"RMS": False})
        absent = ("bias", "beta", "mean")
        restored = {k: v for k, v in (pointers | maps).items() if k not in absent}
        yield Variant("norm", f"rms restored {label}", norm_kernel, restored, config, absent, {"RMS": True})


def _rows(code: str) -> Iterator[Variant]:
    strip, half = configs.STRIP, configs.rows(64)
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

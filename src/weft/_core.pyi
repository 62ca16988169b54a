"""Types of the native module; see csrc/bindings.cpp."""

from typing import overload

class Kernels:
    @property
    def name(self) -> str: ...
    @property
    def panel(self) -> int: ...
    @property
    def strip(self) -> int: ...

class Schedule:
    @overload
    def __init__(self) -> None: ...
    @overload
    def __init__(
        self,
        tile_m: int,
        tile_n: int,
        order: int,
        group_of: int,
        group_size: int,
        done: int,
        ready: int,
        ready_rows: int,
        ready_value: int,
        timeout: float,
        x_rows: int,
        tile_out: int,
        tile_ld: int,
        /,
    ) -> None: ...

def cpu_features() -> list[str]: ...
def available_isas() -> list[str]: ...
def parallel_backend() -> str: ...
def kernels(isa: str = "") -> Kernels: ...
def packed_elements(kernels: Kernels, n: int, k: int, /) -> int: ...
def pack(
    kernels: Kernels, w: int, stride_n: int, stride_k: int, dtype: int, n: int, k: int, threads: int, packed: int, /
) -> None: ...
def unpack(kernels: Kernels, packed: int, dtype: int, n: int, k: int, threads: int, w: int, /) -> None: ...
def linear(
    kernels: Kernels,
    x: int,
    ld_x: int,
    packed: int,
    dtype: int,
    m: int,
    n: int,
    k: int,
    bias: int,
    activation: int,
    residual: int,
    ld_residual: int,
    pre: int,
    ld_pre: int,
    out: int,
    ld_out: int,
    threads: int,
    schedule: Schedule,
    /,
) -> int: ...
def fma_loop(kernels: Kernels, threads: int, rounds: int, /) -> float: ...
def counter_add(counter: int, value: int, /) -> None: ...
def counter_read(counter: int, /) -> int: ...
def counter_wait(counter: int, target: int, timeout: float, /) -> bool: ...

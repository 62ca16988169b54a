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
def sample(starts: int, bytes: int, count: int, /) -> int: ...
def advise_huge(start: int, bytes: int, /) -> None: ...
def counter_add(counter: int, value: int, /) -> None: ...
def counter_read(counter: int, /) -> int: ...
def counter_wait(counter: int, target: int, timeout: float, /) -> bool: ...
def counter_take(
    ready: int, target: int, timeout: float, source: int, into: int, nbytes: int, done: int, /
) -> bool: ...

Strided = tuple[int, int, int]  # address, stride of rows, stride of heads
Rows = tuple[int, int]  # address, stride of rows

class Attention:
    def __init__(
        self,
        q: Strided,
        k: Strided,
        v: Strided,
        out: Strided,
        dtype: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        total_q: int,
        scale: float,
        left: int,
        right: int,
        slopes: int,
        bias: int,
        reach: int,
        lse: int,
        seed: int,
        drop_below: int,
        kept_factor: float,
        /,
    ) -> None: ...

def attention(kernels: Kernels, job: Attention, cu_q: int, cu_k: int, count: int, threads: int, /) -> None: ...
def attention_at(
    kernels: Kernels, job: Attention, cu_q: int, k_start: int, k_len: int, count: int, threads: int, /
) -> None: ...
def attention_grad(
    kernels: Kernels,
    job: Attention,
    dout: Strided,
    dq: Strided,
    dk: Strided,
    dv: Strided,
    dbias: int,
    cu_q: int,
    cu_k: int,
    count: int,
    threads: int,
    /,
) -> None: ...
def norm(
    kernels: Kernels,
    dtype: int,
    rms: bool,
    x: Rows,
    x_bias: int,
    residual: Rows,
    weight: int,
    beta: int,
    eps: float,
    sum: Rows,
    out: Rows,
    mean: int,
    rstd: int,
    rows: int,
    width: int,
    heads: int,
    threads: int,
    /,
) -> None: ...
def gather(
    kernels: Kernels, dtype: int, tables: list[Strided], out: Rows, rows: int, width: int, threads: int, /
) -> None: ...
def rotary(
    kernels: Kernels,
    dtype: int,
    x: Rows,
    out: Rows,
    heads: int,
    head_dim: int,
    cos: int,
    sin: int,
    positions: int,
    sign: float,
    rows: int,
    threads: int,
    /,
) -> None: ...
def gate(
    kernels: Kernels,
    dtype: int,
    x: Rows,
    out: Rows,
    activation: int,
    rows: int,
    width: int,
    threads: int,
    gated: bool = True,
) -> None: ...

EXCHANGE_BANKS: int
EXCHANGE_BLOCK_BYTES: int

class Exchange:
    def __init__(self, blocks: list[int], data: list[int], bank_bytes: int, me: int, /) -> None: ...
    def bank(self, rank: int, number: int, /) -> int: ...
    def post(self, number: int, tag: int, /) -> None: ...
    def wait(self, number: int, tag: int, timeout: float, /) -> int: ...
    def sum(
        self,
        kernels: Kernels,
        number: int,
        tag: int,
        timeout: float,
        dtype: int,
        rows: int,
        width: int,
        bias: int,
        out: int,
        out_ld: int,
        threads: int,
        /,
    ) -> int: ...

def store_heads(
    source: int,
    source_row: int,
    to: int,
    to_head: int,
    place: int,
    heads: int,
    head_bytes: int,
    rows: int,
    threads: int,
    /,
) -> None: ...

WIRE_ANYBODY: int

def make_wire(
    fd: int,
    hosts: int,
    bytes_per_second: float,
    latency_seconds: float,
    chunk: int,
    staging: int,
    processes: int,
    /,
) -> None: ...
def why_unreadable(pid: int, address: int, /) -> str: ...

class CardMessage: ...

class Card:
    def __init__(self, wire: int, host: int, /) -> None: ...
    @property
    def reads_memory(self) -> bool: ...
    def open(self) -> int: ...
    def watch(self, endpoints: list[int], /) -> None: ...
    def host_of(self, endpoint: int, /) -> int: ...
    def carried(self) -> tuple[int, int]: ...
    def close(self, endpoint: int, /) -> None: ...
    def give_up(self, endpoint: int, /) -> None: ...
    def send(self, source: int, target: int, tag: int, address: int, bytes: int, /) -> CardMessage: ...
    def receive(self, source: int, target: int, tag: int, address: int, bytes: int, /) -> CardMessage: ...
    def is_over(self, message: CardMessage, /) -> bool: ...
    def wait(self, message: CardMessage, timeout: float, /) -> tuple[int, int, int]: ...

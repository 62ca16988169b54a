"""How many blocks of a kernel fit on a multiprocessor at once, from the limits that NVIDIA publishes."""

from __future__ import annotations

from dataclasses import dataclass

_REGISTERS = 65_536
_REGISTERS_AT_ONCE = 256  # a warp gets registers in steps of this many
_RESERVED_SHARED = 1024  # of each block, for the system
_SHARED_AT_ONCE = 128
_TENSOR_COLUMNS = 512


@dataclass(frozen=True)
class Limits:
    """What a multiprocessor of a compute capability has."""

    warps: int
    blocks: int
    shared: int
    shared_of_block: int


ARCHS = {
    "sm80": Limits(warps=64, blocks=32, shared=164 << 10, shared_of_block=163 << 10),
    "sm86": Limits(warps=48, blocks=16, shared=100 << 10, shared_of_block=99 << 10),
    "sm89": Limits(warps=48, blocks=24, shared=100 << 10, shared_of_block=99 << 10),
    "sm90": Limits(warps=64, blocks=32, shared=228 << 10, shared_of_block=227 << 10),
    "sm100": Limits(warps=64, blocks=32, shared=228 << 10, shared_of_block=227 << 10),
}


def blocks_at_once(arch: str, *, warps: int, registers: int, shared: int, tensor_columns: int = 0) -> int:
    """The blocks of `warps` warps that run at once on a multiprocessor; 0 if not even one fits.

    >>> blocks_at_once("sm90", warps=8, registers=128, shared=98_304)
    2
    """
    limits = ARCHS[arch]
    if shared > limits.shared_of_block:
        return 0
    of_warp = -(-max(registers, 1) * 32 // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE
    of_block = -(-(shared + _RESERVED_SHARED) // _SHARED_AT_ONCE) * _SHARED_AT_ONCE
    fits = [limits.blocks, limits.warps // warps, _REGISTERS // of_warp // warps, limits.shared // of_block]
    if tensor_columns:
        fits.append(_TENSOR_COLUMNS // tensor_columns)
    return min(fits)


def occupancy(arch: str, blocks: int, warps: int) -> float:
    """The share of the warps that a multiprocessor could hold."""
    return blocks * warps / ARCHS[arch].warps

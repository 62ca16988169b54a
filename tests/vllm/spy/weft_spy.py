"""A second plugin, for tests: it takes vLLM's communicator through shared memory away, which only some builds have.

vLLM falls back to gloo then, as it does on CPUs without AVX-512; and there weft puts its windows in place.
"""

from __future__ import annotations


def register() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False

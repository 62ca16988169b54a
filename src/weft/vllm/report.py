"""What was replaced in a loaded model, and what was left alone and why: one line for each kind."""

from __future__ import annotations

from collections import Counter

from torch import nn
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from weft.vllm.communicator import WindowCommunicator
from weft.vllm.matmul import PackedLinear
from weft.vllm.row import WindowRowParallelLinear

_NATIVE = "native matmul, weight packed"


def describe_model(model: nn.Module) -> list[str]:
    """The lines of the log: `replaced 8 QKVParallelLinear: native matmul, weight packed`."""
    verdicts: Counter[tuple[str, str, str]] = Counter()
    for layer in model.modules():
        if isinstance(layer, LinearBase | VocabParallelEmbedding):
            verdicts[_verdict(layer)] += 1
    lines = [
        f"{action} {count} {kind}: {detail}" for (action, kind, detail), count in sorted(verdicts.items(), reverse=True)
    ]
    return [*lines, _of_group()]


def _verdict(layer: nn.Module) -> tuple[str, str, str]:
    kind = "RowParallelLinear" if isinstance(layer, WindowRowParallelLinear) else type(layer).__name__
    method = getattr(layer, "cpu_linear", None)
    if not isinstance(method, PackedLinear):
        quantised = f"it is quantised ({type(getattr(layer, 'quant_method', None)).__name__})"
        return "left alone", kind, getattr(layer, "weft_left_alone", None) or quantised
    if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
        return "left alone", kind, "it looks up rows; packed when a head that is tied to it multiplies"
    if isinstance(layer, WindowRowParallelLinear):
        if layer.weft_fused():
            return "replaced", kind, f"matmul_all_reduce through windows, {_NATIVE}"
        if layer.reduce_results and layer.tp_size > 1:
            return "replaced", kind, f"{_NATIVE}; its all-reduce is left alone: {layer.weft_reason()}"
    return "replaced", kind, _NATIVE


def _of_group() -> str:
    group = get_tp_group()
    communicator = group.device_communicator
    if isinstance(communicator, WindowCommunicator) and communicator.lean is not None:
        return f"replaced collectives of {group.unique_name}: windows in place of gloo, {group.world_size} ranks"
    reason = getattr(communicator, "weft_left_alone", None) or "it has one rank"
    return f"left alone collectives of {group.unique_name}: {reason}"

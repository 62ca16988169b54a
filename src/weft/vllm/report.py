"""What was replaced in a loaded model, and what was left alone and why: one line for each kind."""

from __future__ import annotations

from collections import Counter

from torch import nn
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from weft.vllm.communicator import WindowCommunicator
from weft.vllm.matmul import PackedLinear, looks_up_rows
from weft.vllm.row import WindowRowParallelLinear

_NATIVE = "native matmul, weight packed"


def describe_model(model: nn.Module, *, adapters: bool = False) -> list[str]:
    """The lines of the log: `replaced 8 QKVParallelLinear: native matmul, weight packed`.

    `adapters` says that vLLM will put layers for adapters (LoRA) around them.
    """
    verdicts: Counter[tuple[str, str, str]] = Counter()
    for layer in model.modules():
        if isinstance(layer, LinearBase | VocabParallelEmbedding):
            verdicts[_verdict(layer, adapters)] += 1
        elif any(p.ndim > 1 for p in layer.parameters(recurse=False)):  # experts, torch's own linears, convolutions
            verdicts["left alone", type(layer).__name__, "it is not one of vLLM's linears"] += 1
    lines = [
        f"{action} {count} {kind}: {detail}" for (action, kind, detail), count in sorted(verdicts.items(), reverse=True)
    ]
    return [*lines, _of_group()]


def _verdict(layer: nn.Module, adapters: bool) -> tuple[str, str, str]:
    kind = "RowParallelLinear" if isinstance(layer, WindowRowParallelLinear) else type(layer).__name__
    if not isinstance(getattr(layer, "cpu_linear", None), PackedLinear):
        return "left alone", kind, getattr(layer, "weft_left_alone", None) or _unasked(layer)
    if looks_up_rows(layer):
        return "left alone", kind, "it looks up rows; packed when a head that is tied to it multiplies"
    if not isinstance(layer, WindowRowParallelLinear) or not layer.reduce_results or layer.tp_size == 1:
        return "replaced", kind, _NATIVE
    if not layer.weft_fused():
        return "replaced", kind, f"{_NATIVE}; its all-reduce is left alone: {layer.weft_reason()}"
    if adapters:
        return "replaced", kind, f"{_NATIVE}; adapters come between it and its all-reduce"
    return "replaced", kind, f"matmul_all_reduce through windows, {_NATIVE}"


def _unasked(layer: nn.Module) -> str:
    """Why vLLM did not ask for a matmul of this layer."""
    method = getattr(layer, "quant_method", None)
    if isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        return "vLLM does not pack it either"  # of multi-head latent attention it reads the weight itself
    return f"it is quantised ({type(method).__name__})"


def _of_group() -> str:
    group = get_tp_group()
    communicator = group.device_communicator
    if isinstance(communicator, WindowCommunicator) and communicator.lean is not None:
        return f"replaced collectives of {group.unique_name}: windows in place of gloo, {group.world_size} ranks"
    reason = getattr(communicator, "weft_left_alone", None) or "it has one rank"
    return f"left alone collectives of {group.unique_name}: {reason}"

"""What the tests ask of vLLM, in a process of its own: `python child.py PROGRAM FOLDER ANSWER`.

A process runs the same program with or without the plugin (`WEFT_VLLM`), and writes what it got as JSON. Engines live
in the process itself where they have one rank. They stay alive to its end: one that goes takes vLLM's groups with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import vllm
from references import NEW_TOKENS, prompts, scale_table
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams

Answer = dict[str, Any]
_alive: list[Any] = []


def _engine(folder: Path, **options: Any) -> Any:
    usual: dict[str, Any] = {
        "dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_batched_tokens": 2048,
        "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20, "enable_prefix_caching": False,
    }  # fmt: skip
    _alive.append(vllm.LLM(model=str(folder), **{**usual, **options}))
    return _alive[-1]


def _inputs() -> list[Any]:
    return [{"prompt_token_ids": prompt} for prompt in prompts()]


def _greedy(engine: Any, **options: Any) -> Answer:
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)
    outputs = [o.outputs[0] for o in engine.generate(_inputs(), sampling, use_tqdm=False, **options)]
    return {
        "tokens": [list(o.token_ids) for o in outputs],
        "logprobs": [[at[token].logprob for token, at in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs],
    }


def _embeddings(engine: Any) -> list[list[float]]:
    return [output.outputs.embedding for output in engine.embed(_inputs(), use_tqdm=False)]


# How often weft computes, in each process of an engine --------------------------------------------------------


def _start_counting(model: Any) -> None:
    from collections import Counter

    from weft.comm.host_collectives import HostGroup
    from weft.kernels import matmul

    counts: Counter[str] = Counter()
    run, add_up = matmul._run, HostGroup.add_up

    def counted_run(*args: Any, **kwargs: Any) -> None:
        counts["matmuls"] += 1
        run(*args, **kwargs)

    def counted_add_up(*args: Any, **kwargs: Any) -> None:
        counts["sums"] += 1
        add_up(*args, **kwargs)

    matmul._run, matmul.counts, HostGroup.add_up = counted_run, counts, counted_add_up


def _counted(model: Any) -> dict[str, int]:
    from weft.kernels import matmul

    counts = dict(matmul.counts)
    matmul.counts.clear()
    return counts


def _count_one_step(engine: Any, run: Callable[[], Any]) -> list[dict[str, int]]:
    """What each rank counts while `run` runs."""
    engine.apply_model(_start_counting)
    run()
    counts: list[dict[str, int]] = engine.apply_model(_counted)
    return counts


def _one_token(engine: Any) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=1)
    engine.generate([{"prompt_token_ids": [20, 30, 40]}], sampling, use_tqdm=False)


# Programs -----------------------------------------------------------------------------------------------------


def generation(folder: Path) -> Answer:
    """Chunks of a prefill, shared prefixes, sampling, beams; then a second engine, and other weights in the first."""
    first = _engine(
        folder / "llama", max_num_batched_tokens=64, enable_chunked_prefill=True, enable_prefix_caching=True
    )
    answer: Answer = {"greedy": _greedy(first), "again": _greedy(first)}
    scored = first.generate(_inputs()[:4], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    answer["prompt_logprobs"] = [[next(iter(at.values())).logprob for at in o.prompt_logprobs[1:]] for o in scored]
    beams = first.beam_search(_inputs()[:3], BeamSearchParams(beam_width=3, max_tokens=5))
    answer["beams"] = [[list(sequence.tokens) for sequence in output.sequences] for output in beams]
    answer["counts"] = _count_one_step(first, lambda: _one_token(first))
    second = _engine(folder / "llama_b")
    answer["second"] = _greedy(second)
    seeds = [SamplingParams(temperature=1.0, top_p=0.9, seed=i, n=2, max_tokens=8, ignore_eos=True) for i in range(6)]
    # vLLM for CPUs cannot seed a request whose prompt it reads in chunks
    sampled = second.generate(_inputs(), seeds, use_tqdm=False)
    answer["sampled"] = [[list(o.token_ids) for o in output.outputs] for output in sampled]
    answer["first, beside a second"] = _greedy(first)
    _reload(first, folder / "llama_b")
    answer["reloaded"] = _greedy(first)
    return answer


def _reload(engine: Any, folder: Path) -> None:
    engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    engine.reset_prefix_cache()


def weights(folder: Path) -> Answer:
    """A head that is tied to the embedding: reloaded, and written to; then weights that vLLM cannot take."""
    tied = _engine(folder / "tied")
    answer: Answer = {"tied": _greedy(tied)}
    _reload(tied, folder / "tied_b")
    answer["tied, reloaded"] = _greedy(tied)
    tied.apply_model(lambda model: scale_table(model.model.embed_tokens.weight))
    answer["tied, written to"] = _greedy(tied)
    try:
        tied.apply_model(_load_past_vllm)
        answer["loaded past vLLM"] = "taken"
    except AssertionError as error:
        answer["loaded past vLLM"] = str(error)
    tied.collective_rpc("sleep")
    tied.collective_rpc("wake_up")
    answer["tied, after a sleep"] = _greedy(tied)
    return answer


def _load_past_vllm(model: Any) -> None:
    """What trainers did before vLLM had `reload_weights`; its own matmuls have freed what this writes to."""
    model.load_weights([("model.layers.0.mlp.down_proj.weight", torch.zeros(128, 352))])


def kinds(folder: Path) -> Answer:
    """Adapters, quantised weights, other types."""
    adapted = _engine(folder / "llama", enable_lora=True, max_lora_rank=8)
    adapter = LoRARequest("adapter", 1, str(folder / "adapter"))
    return {
        "without adapter": _greedy(adapted),
        "adapter": _greedy(adapted, lora_request=adapter),
        "mixed": _greedy(adapted, lora_request=[adapter, None, adapter, None, None, adapter]),
        "adapter, counts": _count_one_step(adapted, lambda: _one_token(adapted)),
        "int8": _greedy(_engine(folder / "int8")),
        "bfloat16": _greedy(_engine(folder / "llama", dtype="bfloat16")),
        "float16": _greedy(_engine(folder / "llama", dtype="float16")),
    }


def pooling(folder: Path) -> Answer:
    """Encoders, and a decoder as an encoder."""
    answer: Answer = {}
    for name in ("bert", "modernbert", "llama"):
        engine = _engine(folder / name, runner="pooling")
        answer[name] = _embeddings(engine)
        answer[f"{name}, counts"] = _count_one_step(engine, lambda engine=engine: _embeddings(engine))
    classifier = _engine(folder / "classifier", runner="pooling")
    answer["classifier"] = [o.outputs.probs for o in classifier.classify(_inputs(), use_tqdm=False)]
    half = _engine(folder / "bert", runner="pooling", dtype="float16")
    answer["bert in float16"] = _embeddings(half)
    answer["bert in float16, counts"] = _count_one_step(half, lambda: _embeddings(half))
    return answer


def one_rank(folder: Path) -> Answer:
    return {program.__name__: program(folder) for program in (generation, weights, kinds, pooling)}


def two_ranks(folder: Path, *, compiled: bool = False) -> Answer:
    engine = _engine(folder / "llama", tensor_parallel_size=2, enforce_eager=not compiled)
    answer: Answer = {"greedy": _greedy(engine)}
    answer["counts"] = _count_one_step(engine, lambda: _one_token(engine))
    _reload(engine, folder / "llama_b")
    return {**answer, "reloaded": _greedy(engine)}


def two_ranks_compiled(folder: Path) -> Answer:
    return two_ranks(folder, compiled=True)


def two_ranks_kinds(folder: Path) -> Answer:
    adapted = _engine(folder / "llama", tensor_parallel_size=2, enable_lora=True, max_lora_rank=8)
    answer: Answer = {"adapter": _greedy(adapted, lora_request=LoRARequest("adapter", 1, str(folder / "adapter")))}
    encoder = _engine(folder / "bert", tensor_parallel_size=2, runner="pooling")
    answer["bert"] = _embeddings(encoder)
    answer["bert, counts"] = _count_one_step(encoder, lambda: _embeddings(encoder))
    return answer


if __name__ == "__main__":
    result = globals()[sys.argv[1]](Path(sys.argv[2]))
    Path(sys.argv[3]).write_text(json.dumps(result))

"""One vLLM engine as a process of its own, in the environment that has vLLM; `VllmEngine` starts it and asks.

It needs nothing of weft, so that the engine is as its own users have it.

It reads lines of JSON from standard input and answers each with one line on the descriptor that it is given; its
standard output is vLLM's log.

    {"model": DIR, "ranks": 2, "eager": true, ...}      once, first; answered when the model is loaded
    {"prompts": [[ids], ...], "new_tokens": 64}         answered with seconds and tokens
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from itertools import count
from typing import Any


def main() -> None:
    """Loads, then answers until the input ends."""
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as replies:
        engine = _load(json.loads(sys.stdin.readline()))
        print(json.dumps({"ready": True}), file=replies)
        numbers = count()
        for line in sys.stdin:
            request = json.loads(line)
            print(json.dumps(_generate(engine, request["prompts"], request["new_tokens"], numbers)), file=replies)


def _load(wanted: dict[str, Any]) -> Any:
    vllm: Any = import_module("vllm")
    return vllm.LLM(
        model=wanted["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        tensor_parallel_size=wanted["ranks"],
        enforce_eager=wanted["eager"],
        max_model_len=wanted["max_length"],
        max_num_batched_tokens=wanted["max_tokens"],
        max_num_seqs=64,
        enable_prefix_caching=False,
    ).llm_engine


def _generate(engine: Any, prompts: list[list[int]], new_tokens: int, numbers: Any) -> dict[str, Any]:
    """The tokens, and the seconds until every prompt had its first one, and from there to the end."""
    vllm: Any = import_module("vllm")
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    start = first = time.perf_counter()
    requests = [str(next(numbers)) for _ in prompts]
    for request, prompt in zip(requests, prompts, strict=True):
        engine.add_request(request, {"prompt_token_ids": prompt}, sampling)
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        before = len(tokens)
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        if before < len(tokens) == len(requests):
            first = time.perf_counter()
    end = time.perf_counter()
    return {"first_seconds": first - start, "rest_seconds": end - first, "tokens": [tokens[r] for r in requests]}


if __name__ == "__main__":
    main()

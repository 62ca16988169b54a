"""docs/architecture.md follows five calls from file to file: these are the files whose code they run."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from harness import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import weft
from weft.overlap.executor.context import context_of
from weft.overlap.plan import Op, OverlapPlan, Transport

ROOT = Path(weft.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
MOST = 15
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 99
}  # fmt: skip


def files_of(call: Callable[[], Any], repeats: int = 3) -> set[str]:
    """The files of weft that the last of some calls ran code of, on the caller's thread and those it started."""
    seen: set[str] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ROOT):
            seen.add(str(file.relative_to(ROOT)))

    threading.setprofile(note)  # of the threads that are started from now on
    for _ in range(repeats):
        seen.clear()
        sys.setprofile(note)
        call()
        sys.setprofile(None)
    threading.setprofile(None)
    return seen


def overlap() -> Callable[[], Any]:
    group = dist.group.WORLD
    assert group is not None
    x, w, hosts = torch.randn(64, 32), torch.randn(48, 32), context_of(group).hosts
    shape = OverlapPlan(Op.REDUCE_SCATTER, 64, 48, 32, "float32", hosts, Transport.MESSAGES, tile_m=8, groups=(1, 2))
    context_of(group).planner.use(shape)
    return lambda: weft.matmul_reduce_scatter(x, w, group=group)


def reshard() -> Callable[[], Any]:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(24.0).reshape(4, 6), mesh, [Shard(0)])
    return lambda: weft.reshard(x, mesh, [Shard(1)])


def pipeline() -> Callable[[], Any]:
    schedule = weft.schedule("eager-1f1b", stages=2, microbatches=4)
    stages = {dist.get_rank(): torch.nn.Linear(32, 32)}
    pipe = weft.Pipeline(stages, [0, 1], schedule, loss_fn=torch.nn.functional.mse_loss)
    return lambda: pipe.step(torch.randn(8, 32), torch.randn(8, 32))


def packed() -> Callable[[], Any]:
    model = weft.pack(transformers.BertModel(transformers.BertConfig(**SIZES)).eval())
    ids, mask = torch.tensor([[5, 6, 7], [9, 5, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    return torch.no_grad()(lambda: model(ids, attention_mask=mask))


def generate() -> Callable[[], Any]:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    shared = weft.parallelize(model, init_device_mesh("cpu", (2,)))
    return lambda: weft.generate(shared, [[5, 6, 7], [9]], max_new_tokens=3)


CALLS = {
    "weft.matmul_reduce_scatter": overlap, "weft.reshard": reshard, "Pipeline.step": pipeline,
    "weft.pack": packed, "weft.generate": generate,
}  # fmt: skip


def measured(name: str) -> list[str]:
    return sorted(files_of(CALLS[name]()))


def listed(name: str) -> list[str]:
    """The files under a call's heading, in order."""
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index(f"### `{name}") :].split("\n### ")[0].split("\n## ")[0]
    return re.findall(r"^\| `([a-z_/0-9]+\.py)` \|", section, flags=re.M)


def passed_over() -> tuple[str, ...]:
    """What the page says that it leaves out: values that are read, and doors that everybody goes through."""
    text = PAGE.read_text(encoding="utf-8")
    line = next(line for line in text.split("\n\n") if line.startswith("Left out of the tables"))
    return tuple(re.findall(r"`([a-z_/0-9.]+)`", line))


@pytest.mark.parametrize("name", CALLS)
def test_the_page_follows_the_call(name: str) -> None:
    ran, said = set(run_ranks(measured, 2, name, timeout=120.0)[0]), listed(name)
    assert len(said) <= MOST
    assert set(said) <= ran, "the page names files that do not run"
    rest = {file for file in ran - set(said) if not file.startswith(passed_over())}
    assert rest == set(), "files run that the page does not name"


if __name__ == "__main__":
    for each in CALLS:
        print(each, *run_ranks(measured, 2, each, timeout=120.0)[0], sep="\n  ")

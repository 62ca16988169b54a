"""What people run today, each as its own users would run it at its best, on one batch.

A peer is built for a model and a batch, and is then a function without arguments. One that is not installed, or cannot
run this, says so in its row: it is never left out in silence.
"""

from __future__ import annotations

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
from weft.bench.systems.packed import Padded
from weft.packed import pack

GROUP = 4  # texts of a sorted batch: a batch of 16 becomes four of similar length
MODES = ("padded", "sorted", "loop")
_SHAPES = 64  # at most, that one model is run with
Run = Callable[[], Any]
Call = Callable[[Tensor, Tensor], Any]  # ids and mask -> states


class Unavailable(Exception):
    """A peer that cannot take part; the message is what its row says."""


@dataclass(frozen=True)
class Peer:
    """`build(model, batch)` gives a function of any (ids, mask); `modes` are the ways in which it is run."""

    name: str
    build: Callable[[Any, Padded], Call]
    modes: tuple[str, ...] = MODES


def runs(peer: Peer, call: Call, batch: Padded, modes: Sequence[str]) -> dict[str, Run]:
    """The peer's functions by name: the name itself for padded, else "name mode"."""
    pieces = {"padded": [(batch.ids, batch.mask)], "sorted": list(_sorted(batch)), "loop": list(_single(batch))}
    chosen = {mode: pieces[mode] for mode in modes if mode in peer.modes}

    def run(parts: list[tuple[Tensor, Tensor]]) -> Run:
        return lambda: [call(ids, mask) for ids, mask in parts]

    return {peer.name if mode == "padded" else f"{peer.name} {mode}": run(parts) for mode, parts in chosen.items()}


def _sorted(batch: Padded) -> Iterator[tuple[Tensor, Tensor]]:
    order = sorted(range(len(batch.lengths)), key=lambda i: batch.lengths[i])
    for start in range(0, len(order), GROUP):
        rows = order[start : start + GROUP]
        longest = max(batch.lengths[i] for i in rows)
        yield batch.ids[rows, :longest].contiguous(), batch.mask[rows, :longest].contiguous()


def _single(batch: Padded) -> Iterator[tuple[Tensor, Tensor]]:
    for i, length in enumerate(batch.lengths):
        yield batch.ids[i : i + 1, :length].contiguous(), batch.mask[i : i + 1, :length].contiguous()


# ---- torch -----------------------------------------------------------------------------------------------------------


def weft_model(model: Any, batch: Padded) -> Call:
    fast = pack(model)
    return lambda ids, mask: fast(ids, attention_mask=mask).last_hidden_state


def hugging_face(attention: str) -> Callable[[Any, Padded], Call]:
    def build(model: Any, batch: Padded) -> Call:
        model.set_attn_implementation(attention)

        def call(ids: Tensor, mask: Tensor) -> Tensor:
            if model.config._attn_implementation != attention:
                model.set_attn_implementation(attention)
            states: Tensor = model(ids, attention_mask=None if bool(mask.all()) else mask).last_hidden_state
            return states

        return call

    return build


def compiled(model: Any, batch: Padded) -> Call:
    """Compiled for each shape by itself, with the weights as constants, which lets the compiler pack them."""
    model.set_attn_implementation("sdpa")
    compile_for_shapes(_SHAPES)
    fast = torch.compile(
        lambda ids, mask: model(ids, attention_mask=mask).last_hidden_state, options={"freezing": True}
    )
    return lambda ids, mask: fast(ids, mask)


def fast_path(model: Any, batch: Padded) -> Call:
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


def nested(model: Any, batch: Padded) -> Call:
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


def _imported(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise Unavailable("not installed") from error


class _Exported(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states: Tensor = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        return states


def onnxruntime(model: Any, batch: Padded) -> Call:
    """ONNX Runtime on the graph that its own optimizer for BERT makes."""
    ort, optimizer = _imported("onnxruntime"), _imported("onnxruntime.transformers.optimizer")
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


def openvino(model: Any, batch: Padded) -> Call:
    ov = _imported("openvino")
    model.set_attn_implementation("sdpa")
    example = {"input_ids": batch.ids, "attention_mask": batch.mask}
    converted = ov.convert_model(_Exported(model), example_input=example)
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    program = ov.compile_model(converted, "CPU", {**settings, "PERFORMANCE_HINT": "LATENCY"})
    return lambda ids, mask: torch.from_numpy(program([ids.numpy(), mask.numpy()])[0])


def ctranslate2(model: Any, batch: Padded) -> Call:
    """CTranslate2's BERT encoder, which leaves padding out of its linear layers."""
    ct2, transformers = _imported("ctranslate2"), _imported("transformers")

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

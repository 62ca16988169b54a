"""The same models as torch's own users write them, and cut them with `parallelize_module`.

Every block gathers its input and scatters its output over the sequence (Colwise, Rowwise, SequenceParallel); the loss
is torch's `loss_parallel`, which leaves the logits where they are. A padded batch is one call of causal SDPA, whose
padding, on the right, no real token sees; a packed one is a row of tokens with one call for each sequence, which is
faster than one call with a block-diagonal mask: SDPA on a CPU does not skip masked blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from weft.bench.systems.end_to_end import ModelSize


class TorchAttention(nn.Module):
    """Causal attention on x [B, S, width] over the heads that this rank has; `lengths` split a packed row."""

    def __init__(self, size: ModelSize, *, bias: bool) -> None:
        super().__init__()
        kv = size.kv_heads * size.head_dim
        self.head_dim, self.shared = size.head_dim, size.kv_heads < size.heads
        self.q, self.k = nn.Linear(size.width, size.width, bias=bias), nn.Linear(size.width, kv, bias=bias)
        self.v, self.o = nn.Linear(size.width, kv, bias=bias), nn.Linear(size.width, size.width, bias=bias)

    def forward(self, x: Tensor, turns: Tensor | None, lengths: Sequence[int] | None) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.q, self.k, self.v))
        if turns is not None:
            q, k = _rotate(q, turns), _rotate(k, turns)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if lengths is None:
            context = self.attend(q, k, v)
        else:
            parts = zip(*(part.split(list(lengths), dim=2) for part in (q, k, v)), strict=True)
            context = torch.cat([self.attend(*part) for part in parts], dim=2)
        return self.o(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Faster than keys and values that are repeated first, forward and backward.
        context: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.shared)
        return context


def _rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions: x [B, S, heads, d], turns [2, B or 1, S, 1, d]."""
    cos, sin = turns[0], turns[1]
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class TorchMlp(nn.Module):
    """SwiGLU with a gate, or GELU (tanh) without."""

    def __init__(self, size: ModelSize, *, bias: bool) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(size.width, size.mlp, bias=bias),
            nn.Linear(size.mlp, size.width, bias=bias),
        )
        self.gate = nn.Linear(size.width, size.mlp, bias=False) if size.family == "llama" else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(x), approximate="tanh") if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down(y)  # type: ignore[no-any-return]


class TorchBlock(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        bias = size.family == "gpt2"
        self.norm1, self.norm2 = _norm(size), _norm(size)
        self.attention, self.mlp = TorchAttention(size, bias=bias), TorchMlp(size, bias=bias)

    def forward(self, x: Tensor, turns: Tensor | None, lengths: Sequence[int] | None) -> Tensor:
        x = x + self.attention(self.norm1(x), turns, lengths)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


def _norm(size: ModelSize) -> nn.Module:
    return nn.RMSNorm(size.width, eps=1e-6) if size.family == "llama" else nn.LayerNorm(size.width, eps=1e-5)


class TorchTransformer(nn.Module):
    """ids, positions [B, S] -> logits [B, S, vocabulary], the vocabulary in parts where the model is cut."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.size = size
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.positions, size.width) if size.family == "gpt2" else None
        self.blocks = nn.ModuleList(TorchBlock(size) for _ in range(size.layers))
        self.norm = _norm(size)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        if size.family == "gpt2":
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor, positions: Tensor, *, lengths: Sequence[int] | None = None) -> Tensor:
        x = self.words(ids) if self.places is None else self.words(ids) + self.places(positions)
        turns = _turns(positions, self.size.head_dim) if self.places is None else None
        for block in self.blocks:
            x = block(x, turns, lengths)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def _turns(positions: Tensor, d: int) -> Tensor:
    """cos and sin [2, B, S, 1, d] of Llama's rotary positions, base 10,000."""
    frequencies = 10_000.0 ** (-torch.arange(0, d, 2, dtype=torch.float32) / d)
    angles = (positions[..., None].float() * frequencies).repeat(1, 1, 2)[:, :, None]
    return torch.stack((angles.cos(), angles.sin()))


def from_hf(model: Any, size: ModelSize) -> TorchTransformer:
    """The same function, with the weights of a Hugging Face model."""
    with torch.device("meta"):
        twin = TorchTransformer(size)
    pairs = _llama_names(size) if size.family == "llama" else _gpt2_names(size)
    theirs = model.state_dict()
    if size.family == "gpt2":
        theirs = _split_gpt2(theirs)
    twin.load_state_dict({ours: theirs[name].clone() for ours, name in pairs.items()}, assign=True)
    if size.family == "gpt2":
        twin.head.weight = twin.words.weight
    return twin.requires_grad_()


def _llama_names(size: ModelSize) -> dict[str, str]:
    names = {"words": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    layer = {f"attention.{x}": f"self_attn.{x}_proj" for x in "qkvo"}
    layer |= {f"mlp.{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    layer |= {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    for i in range(size.layers):
        names |= {f"blocks.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in layer.items()}
    return {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in names.items()}


def _gpt2_names(size: ModelSize) -> dict[str, str]:
    names = {"words.weight": "transformer.wte.weight", "places.weight": "transformer.wpe.weight"}
    names |= {"head.weight": "transformer.wte.weight"}
    names |= {f"norm.{kind}": f"transformer.ln_f.{kind}" for kind in ("weight", "bias")}
    layer = {f"attention.{x}": f"attn.{x}" for x in "qkv"} | {"attention.o": "attn.c_proj"}
    layer |= {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj", "norm1": "ln_1", "norm2": "ln_2"}
    for i in range(size.layers):
        for kind in ("weight", "bias"):
            names |= {f"blocks.{i}.{ours}.{kind}": f"transformer.h.{i}.{x}.{kind}" for ours, x in layer.items()}
    return names


def _split_gpt2(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """GPT-2's fused qkv in three, and its transposed weights as nn.Linear has them."""
    found = {}
    for name, tensor in state.items():
        matrix = tensor.t() if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else tensor
        if "c_attn" in name:
            for part, piece in zip("qkv", matrix.chunk(3), strict=True):
                found[name.replace("c_attn", part)] = piece.contiguous()
        else:
            found[name] = matrix.contiguous()
    return found


def parallelize(model: TorchTransformer, mesh: DeviceMesh) -> TorchTransformer:
    """Cuts the model over a mesh of one axis; every rank has all weights already, so that nothing is sent."""
    scatter = Shard(1)
    styles: dict[str, Any] = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=scatter),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=scatter, output_layouts=Shard(-1), use_local_output=False),
    }
    for i in range(model.size.layers):
        gather = PrepareModuleInput(
            input_layouts=(scatter, None, None), desired_input_layouts=(Replicate(), None, None)
        )
        column, row = ColwiseParallel(), RowwiseParallel(output_layouts=scatter)
        parts: dict[str, Any] = {"norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": gather}
        parts |= {f"attention.{x}": column for x in "qkv"} | {"attention.o": row}
        parts["mlp"] = PrepareModuleInput(input_layouts=scatter, desired_input_layouts=Replicate())
        parts |= {"mlp.up": column, "mlp.down": row}
        if model.size.family == "llama":
            parts["mlp.gate"] = column
        styles |= {f"blocks.{i}.{name}": style for name, style in parts.items()}
    parallelize_module(model, mesh, styles, src_data_rank=None)
    if model.places is not None:
        distribute_module(model.places, mesh, input_fn=_own_rows, output_fn=_local)
        model.head.weight = model.words.weight  # the styles have untied them
    return model


def _own_rows(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    """Each rank looks up the positions of its own rows only."""
    return (DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(1)]),)


def _local(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    return output.to_local()

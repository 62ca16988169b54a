"""GPT-2: pre-norm layers with causal attention; its linear weights are stored transposed."""

from __future__ import annotations

from typing import Any

from weft.errors import Unsupported
from weft.models.family import (
    Drops,
    Family,
    StageNames,
    activation_of,
    check_causal,
    decoder_heads,
    layer_norm,
    recomputes,
    table,
)
from weft.models.modules import is_of
from weft.models.options import Options
from weft.models.spec import Attention, Embedding, Layer, Mlp, NormOrder, Projection, Transformer


def describe_gpt2(model: Any) -> Transformer:
    """A `GPT2Model`; or a stage of one, whose `wte` or `ln_f` is None."""
    drops = Drops(model.modules())
    embedding = None if model.wte is None else _embedding(model, drops)
    for block in model.h:
        check_causal(model.config, block.attn)
    last = None if model.ln_f is None else layer_norm(model.ln_f)
    return Transformer(embedding, tuple(_layer(block, drops) for block in model.h), last)


def _embedding(model: Any, drops: Drops) -> Embedding:
    words, places = table(model.wte), table(model.wpe)
    return Embedding(
        (words[0], places[0]), ("input_ids", "position_ids"), None, drops.of(model.drop), words[1], (places[1],)
    )


def _layer(block: Any, drops: Drops) -> Layer:
    attention, mlp = block.attn, block.mlp
    return Layer(
        Attention(
            _conv1d(attention.c_attn), _conv1d(attention.c_proj), attention.num_heads, attention.num_heads,
            attention.head_dim, attention.scaling, right=0,
            dropout=drops.of_weights(attention, attention.attn_dropout),
        ),
        layer_norm(block.ln_1),
        Mlp(_conv1d(mlp.c_fc), _conv1d(mlp.c_proj), activation_of(mlp.act)),
        layer_norm(block.ln_2),
        NormOrder.PRE,
        attention_out_dropout=drops.of(attention.resid_dropout),
        mlp_out_dropout=drops.of(mlp.dropout),
        recomputes=recomputes(block),
    )  # fmt: skip


def _conv1d(module: Any) -> Projection:
    if not is_of(type(module), "transformers.pytorch_utils") or type(module).__name__ != "Conv1D":
        raise Unsupported(f"expected transformers' Conv1D, got {type(module).__name__}; merge adapters first")
    return Projection((module.weight,), (module.bias,), transposed=True)


_OPTIONS = Options(
    followed={
        "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "activation_function", "layer_norm_epsilon",
        "embd_pdrop", "attn_pdrop", "resid_pdrop", "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
    },
    idle={
        "reorder_and_upcast_attn",  # scores in float32, as weft has them anyway
        # of GPT2DoubleHeadsModel, which is none of the classes here
        "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    },
    fixed={"add_cross_attention": (False,)},
)  # fmt: skip

GPT2 = Family(
    "GPT2Model", describe_gpt2, "BaseModelOutputWithPastAndCrossAttentions", decoder_heads("GPT2", "LMHeadModel"),
    has_cache=True, on_ranks=True, options=_OPTIONS,
    stages=StageNames("transformer", "wte", "h", "ln_f", "lm_head", first=("wpe", "drop")),
)  # fmt: skip

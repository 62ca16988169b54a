"""The families, one row each: how a random config is drawn, and which of its classes has logits of words.

`weft.models.families.FAMILIES` decides which rows are tried. A new family joins by its row here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import transformers

from weft.models.families import FAMILIES
from weft.models.family import Family

PAD = 1  # MPNet knows no other
POSITIONS = 40  # tokens of a text, at most
ACTIVATIONS = (
    "gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh", "silu",
    "swish", "relu",
)  # fmt: skip
NARROWEST = 6  # even; a norm over one or two numbers gives signs: nothing behind it can be compared
Options = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A base model, its config class, whose options `draw` gives, and the class with logits of words, if there is one.

    `positions_from` is the position of a text's first token; `both_ways`: a decoder whose tokens see later ones.
    """

    base: str
    config: str
    words: str | None
    draw: Callable[[Random, int], Options]
    positions_from: int = 0
    both_ways: bool = False

    @property
    def family(self) -> Family:
        return next(family for family in FAMILIES if family.base == self.base)

    @property
    def generates(self) -> bool:
        return self.family.has_cache and not self.both_ways

    def random_config(self, r: Random, least: int = 1) -> Any:
        """A config; models made of it can be shared by `least` ranks."""
        return getattr(transformers, self.config)(**self.draw(r, least))


# ---- what many have in common ----------------------------------------------------------------------------------------


def some(r: Random) -> bool:
    return r.random() < 0.5


def dropout(r: Random) -> float:
    return r.choice((0.0, 0.1, 0.3))


def eps(r: Random) -> float:
    return r.choice((1e-12, 1e-6, 1e-5, 1e-3))


def activation(r: Random) -> str:
    return r.choice(sorted(ACTIVATIONS))


def common(r: Random, least: int) -> Options:
    """Of all: words, layers, and an MLP that may be narrower than the model, of any odd or even size."""
    return {
        "vocab_size": r.randint(30, 99), "num_hidden_layers": r.randint(1, 3), "intermediate_size": r.randint(5, 60),
        "pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": 3,
    }  # fmt: skip


def heads_of_queries(r: Random, least: int, *, even: bool = False) -> Options:
    """Heads that fill the width of the model, as encoders have them."""
    heads = r.randint(least, 5)
    size = r.randint(-(-NARROWEST // heads), 20)
    return {"num_attention_heads": heads, "hidden_size": heads * (2 * size if even else size)}


def grouped_heads(r: Random, least: int) -> Options:
    """Heads of keys that serve several of queries, of a size of their own."""
    kv, groups, size = r.randint(least, 3), r.choice((1, 2, 3)), 2 * r.randint(1, 12)
    heads = kv * groups
    return {
        "num_key_value_heads": kv, "num_attention_heads": heads, "head_dim": size,
        "hidden_size": heads * r.randint(-(-NARROWEST // heads), 12),
    }  # fmt: skip


def rope(r: Random) -> Options:
    kind = r.choice(("default", "linear", "llama3", "yarn"))
    found: Options = {"rope_type": kind, "rope_theta": r.choice((100.0, 1e4, 1e6))}
    if kind != "default":
        found["factor"] = r.choice((2.0, 8.0))
    if kind in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = 16
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return found


def ropes_by_kind(r: Random) -> Options:
    return {kind: rope(r) for kind in ("sliding_attention", "full_attention")}


def kinds_of_layers(r: Random, layers: int) -> list[str]:
    return [r.choice(("sliding_attention", "full_attention")) for _ in range(layers)]


# ---- one function a family -------------------------------------------------------------------------------------------


def bert(r: Random, least: int) -> Options:
    return common(r, least) | heads_of_queries(r, least) | {
        "max_position_embeddings": POSITIONS + PAD + 1, "hidden_act": activation(r), "layer_norm_eps": eps(r),
        "type_vocab_size": r.randint(1, 3), "hidden_dropout_prob": dropout(r),
        "attention_probs_dropout_prob": dropout(r), "tie_word_embeddings": some(r),
    }  # fmt: skip


def electra(r: Random, least: int) -> Options:
    found = bert(r, least)
    return found | {"embedding_size": r.choice((found["hidden_size"], r.randint(NARROWEST, 40)))}


def mpnet(r: Random, least: int) -> Options:
    found = bert(r, least)
    del found["type_vocab_size"]
    return found | {"relative_attention_num_buckets": r.choice((32, 40))}  # its code counts 32, whatever this says


def nomic(r: Random, least: int) -> Options:
    found = bert(r, least)
    del found["tie_word_embeddings"]
    return found | {"head_dim": 2 * r.randint(1, 10), "rope_parameters": rope(r)}


def distilbert(r: Random, least: int) -> Options:
    size = heads_of_queries(r, least)
    return {
        "vocab_size": r.randint(30, 99), "dim": size["hidden_size"], "n_heads": size["num_attention_heads"],
        "n_layers": r.randint(1, 3), "hidden_dim": r.randint(5, 60), "max_position_embeddings": POSITIONS,
        "pad_token_id": PAD, "activation": activation(r), "dropout": dropout(r), "attention_dropout": dropout(r),
        "sinusoidal_pos_embds": some(r), "tie_word_embeddings": some(r),
    }  # fmt: skip


def modernbert(r: Random, least: int) -> Options:
    found = common(r, least) | heads_of_queries(r, least, even=True)
    return found | {
        "cls_token_id": 2, "sep_token_id": 3, "local_attention": 2 * r.randint(1, 8), "norm_eps": eps(r),
        "hidden_activation": activation(r), "norm_bias": some(r), "attention_bias": some(r), "mlp_bias": some(r),
        "attention_dropout": dropout(r), "mlp_dropout": dropout(r), "embedding_dropout": dropout(r),
        "decoder_bias": some(r), "classifier_bias": some(r), "classifier_activation": activation(r),
        "layer_types": kinds_of_layers(r, found["num_hidden_layers"]), "rope_parameters": ropes_by_kind(r),
        "tie_word_embeddings": some(r), "max_position_embeddings": POSITIONS,
    }  # fmt: skip


def gpt2(r: Random, least: int) -> Options:
    size = heads_of_queries(r, least)
    return {
        "vocab_size": r.randint(30, 99), "n_embd": size["hidden_size"], "n_head": size["num_attention_heads"],
        "n_layer": r.randint(1, 3), "n_inner": r.choice((None, r.randint(5, 60))), "n_positions": POSITIONS,
        "pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": 3, "activation_function": activation(r),
        "layer_norm_epsilon": eps(r), "embd_pdrop": dropout(r), "attn_pdrop": dropout(r), "resid_pdrop": dropout(r),
        "scale_attn_weights": r.random() < 0.8, "scale_attn_by_inverse_layer_idx": some(r),
        "reorder_and_upcast_attn": some(r), "tie_word_embeddings": some(r),
    }  # fmt: skip


def rotary_decoder(r: Random, least: int) -> Options:
    return common(r, least) | grouped_heads(r, least) | {
        "max_position_embeddings": POSITIONS, "hidden_act": activation(r), "rms_norm_eps": eps(r),
        "rope_parameters": rope(r), "attention_dropout": dropout(r), "tie_word_embeddings": some(r),
    }  # fmt: skip


def llama(r: Random, least: int) -> Options:
    return rotary_decoder(r, least) | {"attention_bias": some(r), "mlp_bias": some(r)}


def mistral(r: Random, least: int) -> Options:
    return rotary_decoder(r, least) | {"sliding_window": r.choice((None, 1, 3, 8))}


def qwen2(r: Random, least: int) -> Options:
    found = rotary_decoder(r, least)
    found["hidden_size"] = found["num_attention_heads"] * found.pop("head_dim")
    return found | _windows(r, found)


def with_norms_of_heads(r: Random, least: int) -> Options:
    found = rotary_decoder(r, least)
    return found | {"head_dim": max(found["head_dim"], NARROWEST)}


def qwen3(r: Random, least: int) -> Options:
    found = with_norms_of_heads(r, least)
    return found | {"attention_bias": some(r)} | _windows(r, found)


def _windows(r: Random, found: Options) -> Options:
    if some(r):
        return {}
    layers = found["num_hidden_layers"]
    chosen = r.choice(({"max_window_layers": r.randint(0, layers)}, {"layer_types": kinds_of_layers(r, layers)}))
    return {"use_sliding_window": True, "sliding_window": r.randint(1, 8)} | chosen


def gemma3(r: Random, least: int) -> Options:
    return _gemma3(r, least) | {"final_logit_softcapping": r.choice((None, 3.0, 30.0))}


def _gemma3(r: Random, least: int) -> Options:
    found = with_norms_of_heads(r, least)
    del found["hidden_act"]
    return found | {
        "hidden_activation": activation(r), "attention_bias": some(r), "query_pre_attn_scalar": r.randint(1, 40),
        "sliding_window": r.randint(1, 8), "layer_types": kinds_of_layers(r, found["num_hidden_layers"]),
        "rope_parameters": ropes_by_kind(r),
    }  # fmt: skip


def gemma3_both_ways(r: Random, least: int) -> Options:
    return _gemma3(r, least) | {"use_bidirectional_attention": True}


def t5(r: Random, least: int) -> Options:
    return {
        "vocab_size": r.randint(30, 99), "d_model": r.randint(NARROWEST, 60), "d_kv": r.randint(1, 20),
        "d_ff": r.randint(5, 60),
        "num_layers": r.randint(1, 3), "num_heads": r.randint(least, 5), "pad_token_id": PAD,
        "relative_attention_num_buckets": 2 * r.randint(2, 16), "relative_attention_max_distance": r.randint(20, 40),
        "layer_norm_epsilon": eps(r), "dropout_rate": dropout(r),
        "feed_forward_proj": r.choice(("relu", "gelu", "gated-gelu", "gated-silu")),
    }  # fmt: skip


def eurobert(r: Random, least: int) -> Options:
    return llama(r, least) | {"mask_token_id": 4}


_ROWS = (
    Row("BertModel", "BertConfig", "BertForMaskedLM", bert),
    Row("RobertaModel", "RobertaConfig", "RobertaForMaskedLM", bert, PAD + 1),
    Row("XLMRobertaModel", "XLMRobertaConfig", "XLMRobertaForMaskedLM", bert, PAD + 1),
    Row("CamembertModel", "CamembertConfig", "CamembertForMaskedLM", bert, PAD + 1),
    Row("ElectraModel", "ElectraConfig", "ElectraForMaskedLM", electra),
    Row("MPNetModel", "MPNetConfig", "MPNetForMaskedLM", mpnet, PAD + 1),
    Row("NomicBertModel", "NomicBertConfig", "NomicBertForMaskedLM", nomic),
    Row("DistilBertModel", "DistilBertConfig", "DistilBertForMaskedLM", distilbert),
    Row("ModernBertModel", "ModernBertConfig", "ModernBertForMaskedLM", modernbert),
    Row("EuroBertModel", "EuroBertConfig", "EuroBertForMaskedLM", eurobert),
    Row("T5EncoderModel", "T5Config", None, t5),
    Row("GPT2Model", "GPT2Config", "GPT2LMHeadModel", gpt2),
    Row("LlamaModel", "LlamaConfig", "LlamaForCausalLM", llama),
    Row("MistralModel", "MistralConfig", "MistralForCausalLM", mistral),
    Row("Qwen2Model", "Qwen2Config", "Qwen2ForCausalLM", qwen2),
    Row("Qwen3Model", "Qwen3Config", "Qwen3ForCausalLM", qwen3),
    Row("Gemma3TextModel", "Gemma3TextConfig", "Gemma3ForCausalLM", gemma3),
    Row("Gemma3TextModel", "Gemma3TextConfig", None, gemma3_both_ways, both_ways=True),
)
_BASES = {family.base for family in FAMILIES}
ROWS = {f"{row.base}, both ways" if row.both_ways else row.base: row for row in _ROWS if row.base in _BASES}

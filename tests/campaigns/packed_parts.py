"""What the campaign of packed models is made of: small random models, random batches, and surgery on the modules."""

from __future__ import annotations

import copy
import io
import pickle
from random import Random
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY, POSITIONS = 61, 40
TOKENS, ROW, SPAN = "tokens", "row", "span"
LABELS = {
    "MaskedLM": TOKENS, "CausalLM": TOKENS, "LMHeadModel": TOKENS, "TokenClassification": TOKENS,
    "SequenceClassification": ROW, "QuestionAnswering": SPAN, "Model": None,
}  # fmt: skip
_ENCODER = ("Model", "ForMaskedLM", "ForTokenClassification", "ForSequenceClassification", "ForQuestionAnswering")
HEADS = {
    "Bert": _ENCODER, "Roberta": _ENCODER, "DistilBert": _ENCODER, "ModernBert": _ENCODER,
    "GPT2": ("Model", "LMHeadModel", *_ENCODER[2:]), "Llama": ("Model", "ForCausalLM", *_ENCODER[2:]),
}  # fmt: skip
DECODERS = ("GPT2", "Llama")


def config_of(r: Random, family: str) -> Any:
    """A small configuration with random options."""
    heads = r.choice([1, 2, 4])
    width = heads * r.choice([4, 8, 16])
    inner, layers, pad = r.choice([8, 24, 40]), r.choice([1, 2]), r.choice([0, 1, 3])
    acts = ("gelu", "gelu_new", "relu", "silu", "gelu_pytorch_tanh", "gelu_python")
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS, "pad_token_id": pad,
        "num_labels": r.choice([1, 2, 3]), "problem_type": None,
    }  # fmt: skip
    size = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner}
    if family in ("Bert", "Roberta"):
        kind = transformers.BertConfig if family == "Bert" else transformers.RobertaConfig
        return kind(**common, **size, hidden_act=r.choice(acts), type_vocab_size=r.choice([1, 2]))
    if family == "DistilBert":
        common["num_labels"] = 2
        return transformers.DistilBertConfig(
            **common, dim=width, n_layers=layers, n_heads=heads, hidden_dim=inner, activation=r.choice(acts[:3]),
            sinusoidal_pos_embds=r.random() < 0.2,
        )  # fmt: skip
    if family == "ModernBert":
        special = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 2)
        return transformers.ModernBertConfig(
            **common, **size, **special, local_attention=r.choice([2, 4, 16]), hidden_activation=r.choice(acts[:4]),
            global_attn_every_n_layers=r.choice([1, 2]), norm_bias=r.random() < 0.5, mlp_bias=r.random() < 0.5,
            attention_bias=r.random() < 0.5, classifier_pooling=r.choice(["cls", "mean"]),
        )  # fmt: skip
    if family == "GPT2":
        del common["max_position_embeddings"]
        return transformers.GPT2Config(
            **common, n_positions=POSITIONS, n_embd=width, n_layer=layers, n_head=heads, n_inner=inner, bos_token_id=2,
            eos_token_id=2, activation_function=r.choice(acts), scale_attn_weights=r.random() < 0.8,
            scale_attn_by_inverse_layer_idx=r.random() < 0.3,
        )  # fmt: skip
    rope: dict[str, Any] = r.choice([
        {"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 16},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 20},
    ])  # fmt: skip
    return transformers.LlamaConfig(
        **common, **size, num_key_value_heads=r.choice([h for h in (1, 2, 4) if heads % h == 0]),
        head_dim=r.choice([None, 4, 8]) or width // heads, hidden_act=r.choice(acts[:4]),
        attention_bias=r.random() < 0.3, mlp_bias=r.random() < 0.3, tie_word_embeddings=r.random() < 0.5,
        rope_parameters={**rope, "rope_theta": 100.0}, use_cache=r.random() < 0.5,
    )  # fmt: skip


def build(r: Random, family: str, head: str) -> Any:
    """A model in eval mode that drops nothing, with weights large enough for every part of it to matter."""
    torch.manual_seed(r.randrange(2**31))
    config = config_of(r, family)
    if head == "ForQuestionAnswering":
        config.num_labels = 2
    config._attn_implementation = r.choice(["eager", "sdpa"])
    model = getattr(transformers, family + head)(config).eval()
    for p in model.parameters():
        nn.init.normal_(p, 0.0 if p.dim() > 1 else 0.5, 0.3 if p.dim() > 1 else 0.2)
    no_dropout(model)
    return model


def no_dropout(model: nn.Module) -> None:
    """No two programs draw the same dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if "attention_dropout" in module.__dict__:
            module.attention_dropout = 0.0  # type: ignore[assignment]


def base_of(model: Any) -> Any:
    return model if model.base_model is model else model.base_model


def layers_of(model: Any) -> nn.ModuleList:
    return next(m for m in base_of(model).modules() if isinstance(m, nn.ModuleList))


def mask_of(r: Random, rows: int, columns: int) -> torch.Tensor | None:
    """Padding on the right, on the left, holes, rows without a token, or none at all."""
    kind = r.choice(["none", "ones", "right", "right", "left", "any"])
    if kind == "none":
        return None
    lengths = torch.tensor([r.choice([0, 1, columns, *range(1, columns + 1)]) for _ in range(rows)])
    mask = torch.arange(columns)[None] < lengths[:, None]
    if kind == "ones":
        mask[:] = True
    elif kind == "left":
        mask = mask.flip(1)
    elif kind == "any":
        mask = torch.tensor([[r.random() < 0.6 for _ in range(columns)] for _ in range(rows)])
    return mask.to(r.choice([torch.int64, torch.bool, torch.float32]))


def call_of(r: Random, family: str, head: str, model: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """The arguments of a random call, and which tokens are real [rows, columns]."""
    rows, columns = r.choice([1, 1, 2, 3]), r.choice([1, 2, 5, 9, 14])
    mask = mask_of(r, rows, columns)
    real = torch.ones(rows, columns, dtype=torch.bool) if mask is None else mask != 0
    ids = torch.randint(4 if r.random() < 0.8 else 0, VOCABULARY, (rows, columns))
    if r.random() < 0.8:
        ids = ids.masked_fill(~real, model.config.pad_token_id)
    arguments: dict[str, Any] = {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}
    if r.random() < 0.2 and not (family == "ModernBert" and head == "ForQuestionAnswering"):
        arguments["inputs_embeds"] = model.get_input_embeddings()(arguments.pop("input_ids")).detach()
    if family in ("Bert", "Roberta") and r.random() < 0.4:
        arguments["token_type_ids"] = torch.randint(0, model.config.type_vocab_size, (rows, columns))
    if r.random() < 0.35:
        arguments["position_ids"] = positions_of(r, rows, columns, real)
    if r.random() < 0.2:
        arguments["output_hidden_states"] = True
    if r.random() < 0.2:
        arguments["return_dict"] = False
    if family in DECODERS and r.random() < 0.5:
        arguments["use_cache"] = False
    add_labels(r, arguments, head, model, real)
    return arguments, real


def told_apart(family: str, model: Any, call: dict[str, Any]) -> dict[str, Any]:
    """The same call for an encoder of Hugging Face, which takes a row for one text whatever its positions say: a mask
    of 4 dims keeps texts apart."""
    positions = call.get("position_ids")
    if family in DECODERS or positions is None or "attention_mask" in call:
        return dict(call)
    rows, columns = (call["input_ids"] if "input_ids" in call else call["inputs_embeds"]).shape[:2]
    starts = torch.nn.functional.pad(positions.expand(rows, columns).diff(dim=1) <= 0, (1, 0))
    if not bool(starts.any()):
        return dict(call)
    texts, at = starts.cumsum(1), torch.arange(columns)
    seen = (texts[:, :, None] == texts[:, None, :])[:, None]
    zeros = torch.zeros(seen.shape, dtype=model.dtype)
    least = torch.finfo(model.dtype).min
    mask: Any = zeros.masked_fill(~seen, least)
    if family == "ModernBert":
        near = (at[:, None] - at[None]).abs() <= model.config.sliding_window
        mask = {"full_attention": mask, "sliding_attention": zeros.masked_fill(~(seen & near), least)}
    return {**call, "attention_mask": mask}


def positions_of(r: Random, rows: int, columns: int, real: torch.Tensor) -> torch.Tensor:
    """Positions that rise by one, that jump, that count real tokens, or that restart."""
    kind = r.choice(["rise", "jump", "count", "restart", "restart"])
    if kind == "count":
        return (real.long().cumsum(1) - 1).clamp(min=0)
    if kind == "restart":
        starts = torch.tensor([[r.random() < 0.3 for _ in range(columns)] for _ in range(rows)])
        starts[:, 0] = True
        at = torch.arange(columns).expand(rows, -1)
        return at - (at * starts).cummax(1).values
    steps = torch.ones(rows if r.random() < 0.7 else 1, columns, dtype=torch.int64)
    if kind == "jump":
        steps += (torch.rand(steps.shape) < 0.2).long()
    return steps.cumsum(1) - 1 + r.choice([0, 0, 3])


def add_labels(r: Random, arguments: dict[str, Any], head: str, model: Any, real: torch.Tensor) -> None:
    kind, rows = LABELS[head.removeprefix("For")], real.shape[0]
    if kind is None or r.random() < 0.3:
        return
    if kind is SPAN:
        arguments["start_positions"] = torch.randint(0, real.shape[1], (rows,))
        arguments["end_positions"] = torch.randint(0, real.shape[1], (rows,))
        return
    labels = model.config.num_labels if kind is ROW or "Token" in head else VOCABULARY
    if kind is TOKENS:
        found = torch.randint(0, labels, real.shape)
        hidden = ~real | (torch.rand(real.shape) < 0.3)
        if r.random() < 0.9:
            hidden[:, 1:] |= ~real[:, :-1]
        arguments["labels"] = found.masked_fill(hidden, -100)
        if "position_ids" in arguments and r.random() < 0.8:  # texts in a row: none predicts the next one's start
            steps = arguments["position_ids"].expand(real.shape).diff(dim=1)
            arguments["labels"][:, 1:].masked_fill_(steps != 1, -100)
        return
    model.config.problem_type = None
    if labels == 1:
        arguments["labels"] = torch.randn(rows)
    elif r.random() < 0.3:
        arguments["labels"] = torch.randint(0, 2, (rows, labels)).float()
    else:
        arguments["labels"] = torch.randint(0, labels, (rows,))


# ---- surgery ---------------------------------------------------------------------------------------------------------


class Lora(nn.Module):
    """A linear with an adapter around it, as adapters are written."""

    def __init__(self, inner: nn.Module, outputs: int, inputs: int) -> None:
        super().__init__()
        self.inner = inner
        self.a, self.b = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x) + x @ self.a.t() @ self.b.t()
        return y


def linears(model: Any) -> list[tuple[nn.Module, str, nn.Module]]:
    """The linears inside of the layers: (parent, name, module)."""
    return [
        (parent, name, child)
        for parent in layers_of(model).modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear or type(child).__name__ == "Conv1D"
    ]


def optimiser_of(r: Random, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    kind, options = r.choice([
        (torch.optim.SGD, {}), (torch.optim.SGD, {"foreach": True}), (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}), (torch.optim.AdamW, {}),
    ])  # fmt: skip
    return kind(parameters, lr=0.02, **options)  # type: ignore[arg-type, no-any-return]


def copied(r: Random, packed: Any) -> Any:
    """Another object that must behave alike."""
    kind = r.choice(["deepcopy", "pickle", "torch.save", "copy"])
    if kind == "deepcopy":
        return copy.deepcopy(packed)
    if kind == "pickle":
        return pickle.loads(pickle.dumps(packed))
    if kind == "copy":
        return copy.copy(packed)
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    return torch.load(file, weights_only=False)

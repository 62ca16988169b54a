"""Scores of texts and pairs: theirs within rounding, and the same bits alone and in any batch."""

import json

import pytest
import torch
import transformers
from embed_folders import folder, tokenizer, write
from packed_models import build
from tokenizers import processors

from weft.jobs.embed import Scorer, is_scorer
from weft.jobs.embed.recipe import NotPlain
from weft.jobs.embed.scorer import ScoredTokens

TEXTS = ["a", "The Fox", "", "Hello World " * 3, "long " * 40, "a[SEP]b", "nul\0byte", "A b C d E f G h", "x" * 9]
PAIRS = [(TEXTS[i], TEXTS[(3 * i + 2) % len(TEXTS)]) for i in range(len(TEXTS))]
FAMILIES = ["Bert", "Roberta", "DistilBert", "ModernBert", "GPT2", "Llama"]


def words(*, types=True):
    """A tokenizer that tells the texts of a pair apart."""
    names = ["input_ids", "token_type_ids", "attention_mask"] if types else ["input_ids", "attention_mask"]
    made = tokenizer(model_input_names=names)
    pair = f"[CLS] $A [SEP] $B:{int(types)} [SEP]:{int(types)}"
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", pair, [("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


def classifier(path, family="Bert", *, labels=1, names=None, **options):
    model = build(family, "ForSequenceClassification", num_labels=labels, **options)
    model.config.id2label = {i: names[i] if names else f"LABEL_{i}" for i in range(labels)}
    model.save_pretrained(path)
    words(types=family == "Bert").save_pretrained(path)
    return path


def theirs(path, inputs):
    """Logits by transformers' own model, one input at a time."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    own = transformers.AutoTokenizer.from_pretrained(path)
    rows = []
    for one in inputs:  # as a batch: a call with an empty second text would take it for none
        found = own([one], truncation=True, max_length=60, return_tensors="pt")
        with torch.no_grad():
            rows.append(model(**found).logits)
    return torch.cat(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_theirs_and_bits_do_not_depend_on_the_batch(tmp_path, family):
    path = classifier(tmp_path, family, labels=3)
    scorer = Scorer(path)
    inputs = [*TEXTS, *PAIRS]
    ids = scorer.tokenize(inputs)
    assert max(map(len, ids)) == 60
    together = scorer.score(ids)
    assert together.dtype == torch.float32
    assert together.shape == (len(inputs), 3)
    torch.testing.assert_close(together, theirs(path, inputs), atol=1e-5, rtol=1e-5)
    alone = torch.cat([scorer.score([one]) for one in ids])
    assert torch.equal(alone, together)
    backwards = scorer.score(ids[::-1]).flip(0)
    assert torch.equal(backwards, together)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if before > 1 else 2)
        assert torch.equal(scorer.score(ids), together)
    finally:
        torch.set_num_threads(before)


def test_a_mean_of_all_tokens_is_taken_alone(tmp_path):
    path = classifier(tmp_path, "ModernBert", labels=2, classifier_pooling="mean")
    scorer = Scorer(path)
    ids = scorer.tokenize(TEXTS)
    together = scorer.score(ids)
    torch.testing.assert_close(together, theirs(path, TEXTS), atol=1e-5, rtol=1e-5)
    assert torch.equal(torch.cat([scorer.score([one]) for one in ids]), together)


def test_types_of_a_pair_matter(tmp_path):
    scorer = Scorer(classifier(tmp_path))
    (pair,) = scorer.tokenize([("ab", "cd")])
    assert pair.types == [0, 0, 0, 0, 1, 1, 1]
    assert len(pair) == 7
    plain = type(pair)(pair.ids, [0] * 7)
    assert not torch.equal(scorer.score([pair]), scorer.score([plain]))


@pytest.mark.parametrize("labels", [1, 3])
def test_scores_are_those_of_a_cross_encoder(tmp_path, labels):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    plain = classifier(tmp_path / "plain", labels=labels)
    model = sentence_transformers.CrossEncoder(str(plain), device="cpu")
    model.save_pretrained(str(tmp_path / "cross"))
    scorer = Scorer(tmp_path / "cross")
    assert is_scorer(tmp_path / "cross")
    expected = torch.from_numpy(model.predict(PAIRS)).view(-1, labels)
    found = scorer.activate(scorer.score(scorer.tokenize(PAIRS)))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert scorer.max_length == model.max_seq_length


@pytest.mark.parametrize(
    ("config", "labels", "expected"),
    [
        ({}, 1, "Sigmoid"),
        ({}, 3, "Softmax"),
        ({"problem_type": "multi_label_classification"}, 3, "Sigmoid"),
        ({"problem_type": "regression"}, 1, "Identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, 1, "Identity"),
        ({"sentence_transformers": {"version": "4.1"}}, 3, "Identity"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}, 1, "Tanh"),
    ],
)
def test_the_folder_says_what_becomes_of_logits(tmp_path, config, labels, expected):
    path = classifier(tmp_path, labels=labels)
    saved = json.loads((path / "config.json").read_text())
    write(path / "config.json", {**saved, **config})
    scorer = Scorer(path)
    assert scorer.activation == expected
    logits = torch.linspace(-3, 3, 37 * labels).view(37, labels)
    wanted = {"Sigmoid": torch.sigmoid, "Softmax": lambda x: x.softmax(-1), "Identity": lambda x: x, "Tanh": torch.tanh}
    found = scorer.activate(logits)
    torch.testing.assert_close(found, wanted[expected](logits))
    assert torch.equal(torch.cat([scorer.activate(row[None]) for row in logits]), found)


def test_prompt_of_the_folder_goes_before_the_first_text(tmp_path):
    path = classifier(tmp_path)
    about = {"model_type": "CrossEncoder", "prompts": {"rank": "q: "}, "default_prompt_name": "rank"}
    write(path / "config_sentence_transformers.json", about)
    (found,) = Scorer(path).tokenize([("a", "b")])
    write(path / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})
    (expected,) = Scorer(path).tokenize([("q: a", "b")])
    assert found == expected


def test_bfloat16_keeps_its_bits(tmp_path):
    scorer = Scorer(classifier(tmp_path, labels=2), dtype="bfloat16")
    ids = scorer.tokenize(PAIRS)
    assert torch.equal(torch.cat([scorer.score([one]) for one in ids]), scorer.score(ids))
    assert scorer.identity()["dtype"] == "bfloat16"


def test_labels_and_identity(tmp_path):
    path = classifier(tmp_path / "one", labels=2, names=["bad", "good"])
    scorer = Scorer(path, max_length=20)
    assert scorer.labels == ["bad", "good"]
    assert max(map(len, scorer.tokenize(TEXTS))) == 20
    other = Scorer(classifier(tmp_path / "two", labels=2, names=["bad", "good"], seed=1), max_length=20)
    assert scorer.identity() != other.identity()
    assert scorer.identity() == Scorer(path, max_length=20).identity()
    assert scorer.score([]).shape == (0, 2)
    assert scorer.activate(scorer.score([])).shape == (0, 2)


def test_what_no_scorer_is(tmp_path):
    embeds = folder(tmp_path / "embeds", config={"model_type": "SentenceTransformer"})
    assert not is_scorer(embeds)
    with pytest.raises(ValueError, match="holds a SentenceTransformer, expected a CrossEncoder"):
        Scorer(embeds)
    plain = folder(tmp_path / "plain", plain=True)
    with pytest.raises(ValueError, match="holds a BertModel, expected a class that ends in ForSequenceClassification"):
        Scorer(plain)
    path = classifier(tmp_path / "classifier")
    with pytest.raises(ValueError, match="expected at least 4: special tokens are counted"):
        Scorer(path, max_length=3)
    with pytest.raises(ValueError, match="80 positions"):
        Scorer(path, max_length=81)
    about = {"model_type": "CrossEncoder", "activation_fn": "somebody.Own"}
    write(path / "config_sentence_transformers.json", about)
    with pytest.raises(NotPlain, match=r"somebody\.Own"):
        Scorer(path)
    write(path / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})
    with pytest.raises(ValueError, match="without tokens"):
        Scorer(path).score([ScoredTokens([], [])])


def test_weights_that_are_missing_are_no_random_numbers(tmp_path):
    from safetensors.torch import load_file, save_file

    path = classifier(tmp_path)
    weights = load_file(path / "model.safetensors")
    save_file({n: w for n, w in weights.items() if "classifier" not in n}, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks weights of its BertForSequenceClassification: classifier\.bias"):
        Scorer(path)

"""Every route: what it answers, and how it refuses."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from servers import Serving, serving

from weft.jobs.embed import Encoder
from weft.jobs.embed.scorer import Scorer
from weft.jobs.serve.models import ServedModel


def vectors(folder: Path, texts: list[str], **options: Any) -> np.ndarray:
    encoder = Encoder(folder, **options)
    return encoder.embed(encoder.tokenize(texts)).numpy()


def test_embeddings_of_openai(server: Serving, folders: dict[str, Path]) -> None:
    answer = server.post("/v1/embeddings", {"input": ["the fox", "a"], "model": "unit"})
    content = answer.json()
    assert answer.status_code == 200
    assert (content["object"], content["model"]) == ("list", "unit")
    assert [row["index"] for row in content["data"]] == [0, 1]
    assert content["usage"] == {"prompt_tokens": 11, "total_tokens": 11}  # letters, [CLS] and [SEP] of each
    assert answer.headers["x-compute-tokens"] == "11"
    assert answer.headers["x-compute-characters"] == "8"
    for name in ("compute", "total", "tokenization", "queue", "inference"):
        assert answer.headers[f"x-{name}-time"].isdigit()
    rows = np.array([row["embedding"] for row in content["data"]], np.float32)
    assert rows.tobytes() == vectors(folders["unit"], ["the fox", "a"]).tobytes()


def test_ids_are_taken_as_they_are(server: Serving, folders: dict[str, Path]) -> None:
    encoder = Encoder(folders["unit"])
    ids = encoder.tokenize(["the fox", "a"])
    wanted = [row.tobytes() for row in encoder.embed(ids).numpy()]
    for given, rows in ((ids[0], wanted[:1]), (ids, wanted)):
        found = server.post("/v1/embeddings", {"input": given, "encoding_format": "base64"}).json()["data"]
        assert [base64.b64decode(row["embedding"]) for row in found] == rows
    found = server.post("/embed", {"inputs": [ids[0], "a"]}).json()  # TEI takes both in one request
    assert [np.array(row, np.float32).tobytes() for row in found] == wanted


@pytest.mark.parametrize("name", ["unit", "plain"])
def test_dimensions_keep_the_first_and_the_length(server: Serving, folders: dict[str, Path], name: str) -> None:
    whole = vectors(folders[name], ["words"])[0]
    cut = whole[:7] / np.linalg.norm(whole[:7]) if name == "unit" else whole[:7]
    found = server.post("/v1/embeddings", {"input": "words", "dimensions": 7, "model": name}).json()["data"][0]
    np.testing.assert_allclose(found["embedding"], cut, rtol=1e-5)
    all_of_it = server.post("/v1/embeddings", {"input": "words", "dimensions": len(whole), "model": name}).json()
    assert np.array(all_of_it["data"][0]["embedding"], np.float32).tobytes() == whole.tobytes()
    assert server.post("/v1/embeddings", {"input": "a", "dimensions": len(whole) + 1, "model": name}).status_code == 400


def test_normalize_of_tei(server: Serving, folders: dict[str, Path]) -> None:
    raw = vectors(folders["plain"], ["words"])[0]
    found = server.post("/embed", {"inputs": "words", "model": "plain"}).json()[0]
    np.testing.assert_allclose(found, raw / np.linalg.norm(raw), rtol=1e-5)
    unit = vectors(folders["unit"], ["words"])[0]
    assert np.array(server.post("/embed", {"inputs": "words"}).json()[0], np.float32).tobytes() == unit.tobytes()
    before = np.array(server.post("/embed", {"inputs": "words", "normalize": False}).json()[0], np.float32)
    assert abs(float(np.linalg.norm(before)) - 1) > 0.01
    np.testing.assert_allclose(before / np.linalg.norm(before), unit, rtol=1e-4, atol=1e-6)


def test_prompts_by_their_names(server: Serving, folders: dict[str, Path]) -> None:
    wanted = vectors(folders["plain"], ["words"], prompt_name="query")[0]
    body = {"inputs": "words", "model": "plain", "normalize": None, "prompt_name": "query"}
    assert np.array(server.post("/embed", body).json()[0], np.float32).tobytes() == wanted.tobytes()
    refused = server.post("/embed", {**body, "prompt_name": "none"})
    assert (refused.status_code, refused.json()["error_type"]) == (422, "Validation")
    assert "'query'" in refused.json()["error"]


def test_long_texts_are_cut_or_refused(
    server: Serving, models: dict[str, ServedModel], folders: dict[str, Path]
) -> None:
    text = "ab" * 29 + "cdefghijkl" * 7
    refused = server.post("/embed", {"inputs": text})
    assert refused.status_code == 413
    assert refused.json()["error_type"] == "Validation"
    assert "must have less than 60 tokens. Given: 130" in refused.json()["error"]
    assert server.post("/v1/embeddings", {"input": text}).status_code == 413
    cut = {"truncate": True}
    right = server.post("/embed", {"inputs": text, **cut}).json()[0]
    assert right == server.post("/embed", {"inputs": "ab" * 29}).json()[0]
    left = server.post("/embed", {"inputs": text, **cut, "truncation_direction": "Left"}).json()[0]
    assert left == server.post("/embed", {"inputs": text[-58:]}).json()[0] != right
    np.testing.assert_array_equal(np.array(right, np.float32), vectors(folders["unit"], [text])[0])
    with serving(models, auto_truncate=True) as other:
        assert other.post("/v1/embeddings", {"input": text}).json()["data"][0]["embedding"] == right
        assert other.post("/embed", {"inputs": text, "truncate": False}).status_code == 413
    ids = [5] * 61
    assert server.post("/embed", {"inputs": ids}).status_code == 413
    assert server.post("/embed", {"inputs": ids, **cut}).json() == server.post("/embed", {"inputs": ids[:60]}).json()


def test_tokens_of_a_text_and_back(server: Serving) -> None:
    found = server.post("/tokenize", {"inputs": "The é"}).json()[0]
    assert [token["text"] for token in found] == ["[CLS]", "T", "h", "e", "é", "[SEP]"]
    assert [(t["start"], t["stop"]) for t in found] == [(None, None), (0, 1), (1, 2), (2, 3), (4, 5), (None, None)]
    assert [t["special"] for t in found] == [True, False, False, False, False, True]
    bare = server.post("/tokenize", {"inputs": ["ab" * 500], "add_special_tokens": False}).json()[0]
    assert len(bare) == 1000  # never cut
    prompted = server.post("/tokenize", {"inputs": "a", "prompt_name": "query", "model": "unit"}).json()[0]
    assert len(prompted) == len("query:a") + 2
    ids = [token["id"] for token in found]
    assert server.post("/decode", {"ids": ids}).json() == server.post("/decode", {"ids": [ids[1:4]]}).json()
    assert "[CLS]" in server.post("/decode", {"ids": ids, "skip_special_tokens": False}).json()[0]
    assert server.post("/decode", {"ids": [10**6]}).status_code == 422
    assert server.post("/decode", {"ids": []}).status_code == 400


def test_similarity(server: Serving, folders: dict[str, Path]) -> None:
    body = {"inputs": {"source_sentence": "ab", "sentences": ["ab", "xyz"]}}
    rows = vectors(folders["unit"], ["ab", "xyz"])
    np.testing.assert_allclose(server.post("/similarity", body).json(), rows @ rows[0], rtol=1e-5)
    body["parameters"] = {"prompt_name": "query", "truncate": True}  # type: ignore[assignment]
    rows = vectors(folders["unit"], ["ab", "xyz"], prompt_name="query")
    np.testing.assert_allclose(server.post("/similarity", body).json(), rows @ rows[0], rtol=1e-5)


def test_ranks_and_their_two_dialects(server: Serving, folders: dict[str, Path]) -> None:
    scorer, texts = Scorer(folders["ranker"]), ["one", "another", "third"]
    logits = scorer.score(scorer.tokenize([("query", text) for text in texts]))
    scores = scorer.activate(logits)[:, 0].numpy()
    order = sorted(range(3), key=lambda i: -scores[i])
    found = server.post("/rerank", {"query": "query", "texts": texts, "return_text": True}).json()
    assert [row["index"] for row in found] == order
    assert [row["text"] for row in found] == [texts[i] for i in order]
    np.testing.assert_array_equal(np.array([row["score"] for row in found], np.float32), scores[order])
    for path, version in (("/v1/rerank", "1"), ("/v2/rerank", "2")):
        body = {"query": "query", "documents": ["one", {"text": "another"}, "third"], "top_n": 2, "model": "ranker"}
        content = server.post(path, {**body, "return_documents": True}).json()
        assert [row["index"] for row in content["results"]] == order[:2]
        assert [row["document"]["text"] for row in content["results"]] == [texts[i] for i in order[:2]]
        assert [np.float32(row["relevance_score"]) for row in content["results"]] == [scores[i] for i in order[:2]]
        assert content["meta"]["api_version"]["version"] == version
        assert content["usage"]["total_tokens"] == int(sum(len(t) + len("query") for t in texts))
        assert "document" not in server.post(path, body).json()["results"][0]
    assert server.post("/v2/rerank", {"query": "q", "documents": []}).json() == {
        "message": "`documents` cannot be empty"
    }


def test_predictions(server: Serving, folders: dict[str, Path]) -> None:
    scorer = Scorer(folders["classifier"])
    for given, inputs in (("words", "words"), (["one", "two"], ("one", "two")), (["one"], "one")):
        wanted = scorer.activate(scorer.score(scorer.tokenize([inputs])))[0].numpy()  # type: ignore[list-item]
        found = server.post("/predict", {"inputs": given, "model": "classifier"}).json()
        assert [row["score"] for row in found] == sorted((row["score"] for row in found), reverse=True)
        assert {row["label"]: np.float32(row["score"]) for row in found} == dict(
            zip(scorer.labels, wanted, strict=True)
        )
    batch = server.post("/predict", {"inputs": [["one"], ["one", "two"]], "model": "classifier"}).json()
    assert [len(row) for row in batch] == [3, 3]
    raw = server.post("/predict", {"inputs": "words", "model": "classifier", "raw_scores": True}).json()
    logits = scorer.score(scorer.tokenize(["words"]))[0].numpy()
    assert sorted(np.float32(row["score"]) for row in raw) == sorted(logits)


SAID = {
    "/embed": ({"inputs": "a", "model": "ranker"}, "model is not an embedding model"),
    "/embed_all": ({"inputs": "a", "model": "classifier"}, "model is not a model with a vector for each token"),
    "/embed_sparse": ({"inputs": "a", "model": "unit"}, "model is not an embedding model with sparse vectors"),
    "/predict": ({"inputs": "a", "model": "unit"}, "model is not a classifier model"),
    "/rerank": ({"query": "a", "texts": ["b"], "model": "classifier"}, "model is not a re-ranker model"),
}


@pytest.mark.parametrize("path", SAID)
def test_a_model_of_another_kind(server: Serving, path: str) -> None:
    body, message = SAID[path]
    answer = server.post(path, body)
    assert (answer.status_code, answer.json()) == (424, {"error": message, "error_type": "Backend"})


def test_a_model_of_another_kind_for_openai_and_cohere(server: Serving) -> None:
    answer = server.post("/v1/embeddings", {"input": "a", "model": "ranker"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (424, "server_error")
    answer = server.post("/v1/rerank", {"query": "a", "documents": ["b"], "model": "unit"})
    assert (answer.status_code, answer.json()) == (424, {"message": "model is not a re-ranker model"})


def test_unknown_models_and_routes(server: Serving) -> None:
    answer = server.post("/v1/embeddings", {"input": "a", "model": "gpt"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert server.post("/embed", {"inputs": "a", "model": "gpt"}).json()["error_type"] == "Validation"
    assert server.get("/nowhere").status_code == 404
    assert "message" in server.get("/v1/nowhere").json()["error"]
    answer = server.get("/embed")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def test_what_the_server_is(server: Serving) -> None:
    listed = server.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["unit", "plain", "ranker", "classifier"]
    info = server.get("/info").json()
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (info["max_input_length"], info["max_client_batch_size"], info["model_dtype"]) == (60, 32, "float32")
    assert info["model_sha"] == server.service.models["unit"].identity()["model"]["weights"]
    kinds = {model["model_id"]: next(iter(model["model_type"])) for model in info["models"]}
    assert kinds == {"unit": "embedding", "plain": "embedding", "ranker": "reranker", "classifier": "classifier"}
    for path in ("/health", "/ping", "/ready"):
        assert (server.get(path).status_code, server.get(path).content) == (200, b"")


def test_metrics_are_teis_and_can_be_read(models: dict[str, ServedModel]) -> None:
    with serving(models) as server:
        server.post("/embed", {"inputs": ["a", "bc"]})
        server.post("/embed", {"inputs": "a"})
        server.post("/rerank", {"query": "a", "texts": ["b"]})
        server.post("/embed", {"inputs": []})
        text = server.get("/metrics").text
    found = {
        (sample.name.removesuffix("_total"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["te_request_count", "batch"] == 2
    assert found["te_request_count", "single"] == 1
    assert found["te_request_success", "batch"] == 2
    assert found["te_request_failure", "empty"] == 1
    assert (found["te_embed_count",], found["te_embed_success",], found["te_predict_success",]) == (3, 3, 1)
    assert found["weft_tokens",] == 3 + 4 + 3 + 2  # a pair has no special tokens here
    assert found["te_batch_next_size_sum",] == 4
    assert found["te_request_duration_count",] == 3
    assert found["te_request_duration_bucket", "+Inf"] == 3
    assert found["te_queue_size",] == found["weft_requests_in_flight",] == 0
    assert "# TYPE te_request_count counter" in text
    names = {"te_request_tokenization_duration", "te_request_queue_duration", "te_request_inference_duration"}
    assert names <= {name.removesuffix("_sum") for (name, *_) in found}

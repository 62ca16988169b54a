"""TEI's routes (text-embeddings-inference): embeddings, predictions, ranks, tokens, and what the server is."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from weft.jobs.serve.errors import Dialect, Problem, RequestError
from weft.jobs.serve.http.routes import HttpRoutes, answered
from weft.jobs.serve.http.schemas import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    EmbedSparseRequest,
    LabelScore,
    PredictRequest,
    RankRow,
    RankTextsRequest,
    ServerInfo,
    SimilarityParameters,
    SimilarityRequest,
    SparseValue,
    TeiErrorAnswer,
    TokenizeRequest,
    TokenRow,
    TruncationFields,
)
from weft.jobs.serve.models import Ask, Given, ServedModel, Task
from weft.jobs.serve.service import Answer, TextService
from weft.jobs.serve.tokens import Direction

routes = HttpRoutes(Dialect.TEI, TeiErrorAnswer, tag="TEI")


@routes.post("/embed", EmbedRequest, list[list[float]])
async def embed(service: TextService, request: Request, body: EmbedRequest) -> Response:
    """A vector for each text, of length 1 unless `normalize` is false."""
    wishes = {"normalize": body.normalize, "dimensions": body.dimensions}
    answer = await _embedded(service, request, body, Task.EMBED, wishes)
    return answered(answer.results, answer)


@routes.post("/embed_all", EmbedAllRequest, list[list[list[float]]])
async def embed_all(service: TextService, request: Request, body: EmbedAllRequest) -> Response:
    """A vector for each token of each text: last hidden states, or what a model of several vectors gives."""
    answer = await _embedded(service, request, body, Task.TOKENS, {})
    return answered([_contiguous(rows) for rows in answer.results], answer)


@routes.post("/embed_sparse", EmbedSparseRequest, list[list[SparseValue]])
async def embed_sparse(service: TextService, request: Request, body: EmbedSparseRequest) -> Response:
    """A sparse vector for each text: the places that are not 0, ascending, and their values."""
    answer = await _embedded(service, request, body, Task.SPARSE, {})
    rows = [
        [{"index": i, "value": v} for i, v in zip(indices.tolist(), values, strict=True)]
        for indices, values in answer.results
    ]
    return answered(rows, answer)


async def _embedded(
    service: TextService, request: Request, body: EmbedAllRequest, task: Task, wishes: dict[str, Any]
) -> Answer:
    given, method = _inputs(service, body.inputs)
    truncate, direction = _truncation(service, body)
    ask = Ask(task, body.prompt_name, truncate, direction, **wishes)
    return await service.compute(request, service.model(body.model, task), given, ask, method=method)


def _inputs(service: TextService, given: str | Sequence[Any]) -> tuple[Sequence[Given], str]:
    """Texts or ids, and whether the request was for one or for a batch."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given], "single"
    service.check_size(len(given))
    if any(not isinstance(one, str) and not len(one) for one in given):
        raise RequestError(Problem.EMPTY, "`inputs` cannot contain a list without ids")
    return given, "batch"


def _truncation(service: TextService, body: TruncationFields) -> tuple[bool, Direction]:
    side = body.truncation_direction
    direction: Direction = None if side is None else "left" if side.lower() == "left" else "right"
    return service.options.auto_truncate if body.truncate is None else body.truncate, direction


@routes.post("/similarity", SimilarityRequest, list[float])
async def similarity(service: TextService, request: Request, body: SimilarityRequest) -> Response:
    """The cosine of the source sentence with each of the others."""
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    if not body.inputs.sentences:
        raise RequestError(Problem.EMPTY, "`inputs.sentences` cannot be empty")
    service.check_size(len(body.inputs.sentences))
    parameters = body.parameters or SimilarityParameters()
    truncate, direction = _truncation(service, parameters)
    ask = Ask(Task.EMBED, parameters.prompt_name, truncate, direction, normalize=True)
    answer = await service.compute(request, service.model(body.model, Task.EMBED), texts, ask)
    rows = np.stack(answer.results)
    # Each by itself: a matmul's bits would depend on how many there are.
    return answered(np.array([np.dot(rows[0], row) for row in rows[1:]], np.float32), answer)


@routes.post("/predict", PredictRequest, list[LabelScore] | list[list[LabelScore]])
async def predict(service: TextService, request: Request, body: PredictRequest) -> Response:
    """The score of each label, the highest first, of a text, a pair, or a batch of these."""
    given: Any = body.inputs
    is_batch = isinstance(given, list) and (not given or isinstance(given[0], list))
    texts = [_one_or_pair(one) for one in (given if is_batch else [given])]
    if is_batch:
        service.check_size(len(texts))
    model = service.model(body.model, Task.PREDICT)
    truncate, direction = _truncation(service, body)
    ask = Ask(Task.PREDICT, truncate=truncate, direction=direction, raw_scores=body.raw_scores)
    answer = await service.compute(request, model, texts, ask, method="batch" if is_batch else "single")
    found = [_predictions(model, scores) for scores in answer.results]
    return answered(found if is_batch else found[0], answer)


def _one_or_pair(given: str | list[str]) -> Given:
    if isinstance(given, str):
        return given
    return (given[0], given[1]) if len(given) == 2 else given[0]


def _predictions(model: ServedModel, scores: Sequence[np.float32]) -> list[dict[str, Any]]:
    rows = [{"score": score, "label": label} for score, label in zip(scores, model.labels, strict=True)]
    return sorted(rows, key=lambda row: -float(row["score"]))


@routes.post("/rerank", RankTextsRequest, list[RankRow])
async def rank(service: TextService, request: Request, body: RankTextsRequest) -> Response:
    """The texts by how well they fit the query, the best first. `raw_scores` are those before the activation."""
    if not body.texts:
        raise RequestError(Problem.EMPTY, "`texts` cannot be empty")
    service.check_size(len(body.texts), "texts")
    truncate, direction = _truncation(service, body)
    ask = Ask(Task.RERANK, truncate=truncate, direction=direction, raw_scores=body.raw_scores)
    pairs = [(body.query, text) for text in body.texts]
    answer = await service.compute(request, service.model(body.model, Task.RERANK), pairs, ask)
    rows: list[dict[str, Any]] = [{"index": i, "score": answer.results[i][0]} for i in by_score(answer)]
    if body.return_text:
        rows = [{**row, "text": body.texts[row["index"]]} for row in rows]
    return answered(rows, answer)


def by_score(answer: Answer) -> list[int]:
    """Indices, the highest score first; equal ones in the order in which they came."""
    return sorted(range(len(answer.results)), key=lambda i: -float(answer.results[i][0]))


@routes.post("/tokenize", TokenizeRequest, list[list[TokenRow]])
async def tokenize(service: TextService, request: Request, body: TokenizeRequest) -> Response:
    """The tokens of each text, and where they are in it."""
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    service.check_size(len(texts))
    service.figures.count("te_tokenize_count", by=len(texts))
    model = service.model(body.model)
    prompt = model.prompt_of(body.prompt_name) if body.prompt_name is not None else ""
    tokenizer = model.tokenizer()

    def all_tokens() -> bytes:
        rows = [tokenizer.tokens(prompt + text, special=body.add_special_tokens) for text in texts]
        return orjson.dumps(rows)

    return Response(await service.in_pool(all_tokens), media_type="application/json")


@routes.post("/decode", DecodeRequest, list[str])
async def decode(service: TextService, request: Request, body: DecodeRequest) -> Response:
    """What ids say."""
    ids: Any = body.ids
    several = [ids] if ids and isinstance(ids[0], int) else ids
    service.check_size(len(several), "ids")
    tokenizer = service.model(body.model).tokenizer()

    def all_texts() -> bytes:
        return orjson.dumps([tokenizer.text(each, skip_special=body.skip_special_tokens) for each in several])

    return Response(await service.in_pool(all_texts), media_type="application/json")


@routes.get("/info", ServerInfo)
async def info(service: TextService, request: Request) -> Response:
    """What is served, and within which limits."""
    options = service.options
    models = [_about(model) for model in service.models.values()]
    content = {
        **models[0],
        "max_concurrent_requests": options.max_concurrent_requests,
        "max_batch_tokens": options.max_batch_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": options.max_client_batch_size,
        "auto_truncate": options.auto_truncate,
        "tokenization_workers": service.tokenizing_threads,
        "version": metadata.version("weft"),
        "sha": None,
        "docker_label": None,
        "models": models,
    }
    return Response(orjson.dumps(content), media_type="application/json")


def _about(model: ServedModel) -> dict[str, Any]:
    """A model as TEI has it, and what it can do."""
    kind: dict[str, Any]
    if Task.PREDICT in model.tasks:
        labels = {"id2label": {str(i): v for i, v in enumerate(model.labels)}}
        labels["label2id"] = {v: i for i, v in enumerate(model.labels)}  # type: ignore[misc]
        kind = {"reranker" if Task.RERANK in model.tasks else "classifier": labels}
    else:
        kind = {"embedding": {"pooling": model.pooling}}
    return {
        "model_id": model.name,
        "model_sha": model.sha,
        "model_dtype": model.dtype,
        "model_type": kind,
        "max_input_length": model.max_length,
        "tasks": sorted(task.name.lower() for task in model.tasks),
    }


def _contiguous(rows: Any) -> Any:
    return np.ascontiguousarray(rows)

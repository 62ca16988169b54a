"""The routes of Cohere and Jina: `POST /v1/rerank` and `POST /v2/rerank`, alike but for one default.

Cohere's first version and Jina return the documents on request (Jina unless told not to; nobody reads them without
asking), its second version never does by itself. Scores are what the folder's activation makes of logits.
"""

from __future__ import annotations

import uuid

from starlette.requests import Request
from starlette.responses import Response

from weft.jobs.serve.errors import Dialect, Problem, RequestError
from weft.jobs.serve.http.routes import HttpRoutes, answered
from weft.jobs.serve.http.schemas import CohereErrorAnswer, RerankAnswer, RerankRequest
from weft.jobs.serve.http.tei import by_score
from weft.jobs.serve.models import Ask, Task
from weft.jobs.serve.service import TextService

routes = HttpRoutes(Dialect.COHERE, CohereErrorAnswer, tag="Cohere and Jina")


@routes.post("/v1/rerank", RerankRequest, RerankAnswer, also=("/v2/rerank",))
async def rerank(service: TextService, request: Request, body: RerankRequest) -> Response:
    """The documents by how well they fit the query, the best first, `top_n` of them."""
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    if not texts:
        raise RequestError(Problem.EMPTY, "`documents` cannot be empty", param="documents")
    if body.max_tokens_per_doc is not None:
        message = "max_tokens_per_doc is not supported: query and document are cut to the model's length together"
        raise RequestError(Problem.FIELDS, message, param="max_tokens_per_doc")
    service.check_size(len(texts), "documents")
    pairs = [(body.query, text) for text in texts]
    model = service.model(body.model, Task.RERANK)
    answer = await service.compute(request, model, pairs, Ask(Task.RERANK, truncate=True))
    results = []
    for i in by_score(answer)[: body.top_n]:
        row = {"index": i, "relevance_score": answer.results[i][0]}
        results.append({**row, "document": {"text": texts[i]}} if body.return_documents else row)
    tokens = answer.figures.tokens
    version = "2" if request.url.path.startswith("/v2") else "1"
    content = {
        "id": str(uuid.uuid4()),
        "model": model.name,
        "results": results,
        "meta": {"api_version": {"version": version}, "tokens": {"input_tokens": tokens}},
        "usage": {"total_tokens": tokens},
    }
    return answered(content, answer)

"""The bodies of requests and answers, with the fields of OpenAI, TEI, Cohere and Jina."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

TokenId = Annotated[int, Field(ge=0, lt=2**32)]


class RequestBody(BaseModel):
    """Types are not converted, fields that are not known are passed over, as those servers do."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class AnswerBody(BaseModel):
    """Only documents what an answer has: answers are written without it."""

    model_config = ConfigDict(protected_namespaces=())


# ---- OpenAI ----------------------------------------------------------------------------------------------------------


class EmbeddingsRequest(RequestBody):
    """`POST /v1/embeddings`. Ids are the model's own, special tokens included."""

    input: str | list[str] | list[TokenId] | list[list[TokenId]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None


class EmbeddingRow(AnswerBody):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(AnswerBody):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(AnswerBody):
    object: Literal["list"]
    data: list[EmbeddingRow]
    model: str
    usage: Usage


class ModelCard(AnswerBody):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelsAnswer(AnswerBody):
    object: Literal["list"]
    data: list[ModelCard]


class OpenAIErrorFields(AnswerBody):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorAnswer(AnswerBody):
    error: OpenAIErrorFields


# ---- TEI -------------------------------------------------------------------------------------------------------------

OneInput = str | list[TokenId]
Inputs = str | list[OneInput] | list[TokenId]


class TruncationFields(RequestBody):
    """What requests have that may be cut. Without `truncate` the server's `--auto-truncate` counts."""

    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None
    model: str | None = None


class EmbedAllRequest(TruncationFields):
    """`POST /embed_all` and `POST /embed_sparse`. `prompt_name` is one of the model's prompts."""

    inputs: Inputs
    prompt_name: str | None = None


class EmbedSparseRequest(EmbedAllRequest):
    pass


class EmbedRequest(EmbedAllRequest):
    """`POST /embed`. With `normalize` rows have length 1, without it they are as before; null is as the folder says."""

    normalize: bool | None = True
    dimensions: int | None = Field(None, ge=1)


class SparseValue(AnswerBody):
    index: int
    value: float


PairOfTexts = Annotated[list[str], Field(min_length=2, max_length=2)]
OneOrTwo = Annotated[list[str], Field(min_length=1, max_length=2)]


class PredictRequest(TruncationFields):
    """`POST /predict`: a text, a pair, or a batch of lists that hold a text or a pair."""

    inputs: str | PairOfTexts | Annotated[list[str], Field(min_length=1, max_length=1)] | list[OneOrTwo]
    raw_scores: bool = False


class LabelScore(AnswerBody):
    score: float
    label: str


class RankTextsRequest(TruncationFields):
    """`POST /rerank` of TEI."""

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False


class RankRow(AnswerBody):
    index: int
    score: float
    text: str | None = None


class SimilarityInput(RequestBody):
    source_sentence: str
    sentences: list[str]


class SimilarityParameters(TruncationFields):
    prompt_name: str | None = None


class SimilarityRequest(RequestBody):
    """`POST /similarity`: the cosine of the source with each sentence."""

    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None
    model: str | None = None


class TokenizeRequest(RequestBody):
    """`POST /tokenize`. Texts are never cut here."""

    inputs: str | list[str]
    add_special_tokens: bool = True
    prompt_name: str | None = None
    model: str | None = None


class TokenRow(AnswerBody):
    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class DecodeRequest(RequestBody):
    """`POST /decode`."""

    ids: list[TokenId] | list[list[TokenId]]
    skip_special_tokens: bool = True
    model: str | None = None


class ServerInfo(AnswerBody):
    """`GET /info`, of the first model; `models` has the others, too."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_type: dict[str, object]
    max_concurrent_requests: int
    max_input_length: int | None
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None
    models: list[dict[str, object]]


class TeiErrorAnswer(AnswerBody):
    error: str
    error_type: str


# ---- Cohere and Jina -------------------------------------------------------------------------------------------------


class DocumentFields(RequestBody):
    text: str


class RerankRequest(RequestBody):
    """`POST /v1/rerank` and `POST /v2/rerank`. Documents are cut where they are too long, as Cohere does."""

    query: str
    documents: list[str | DocumentFields]
    model: str | None = None
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = Field(None, ge=1)


class RerankedDocument(AnswerBody):
    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class RerankUsage(AnswerBody):
    total_tokens: int


class RerankAnswer(AnswerBody):
    id: str
    model: str
    results: list[RerankedDocument]
    meta: dict[str, object]
    usage: RerankUsage


class CohereErrorAnswer(AnswerBody):
    message: str

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

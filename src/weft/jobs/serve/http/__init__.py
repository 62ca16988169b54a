"""The routes: Starlette serves them, FastAPI writes their document.

app       all routes as one application, and its OpenAPI document
protocol  connections that say nothing, or for ever
routes    what all routes have in common: the key, the body, errors in the words of their dialect
schemas   the bodies of requests and answers
openai    `/v1/embeddings`, `/v1/models`
tei       `/embed`, `/embed_all`, `/embed_sparse`, `/predict`, `/rerank`, `/similarity`, `/tokenize`, `/decode`, `/info`
cohere    `/v1/rerank`, `/v2/rerank`
pages     `/health`, `/ready`, `/metrics`, `/stats`, `/docs`, and `/`, which shows it live (page.html, docs.html)
"""

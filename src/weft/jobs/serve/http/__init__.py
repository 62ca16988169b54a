"""The routes, over FastAPI.

app      all routes as one application; health, readiness, metrics, documents and the page
routes   what all routes have in common: the key, the body, errors in the words of their dialect
schemas  the bodies of requests and answers
openai   `/v1/embeddings`, `/v1/models`
"""

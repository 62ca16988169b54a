"""`weft serve`: embeddings, reranking and classification over HTTP, without padding.

options  what is asked, checked
models   what a folder can do, and how
tokens   texts to tokens as a request asks
queue    what waits, and what goes into the next batch
engine   the thread that computes
service  a request's way through a worker
board    figures of all workers, in memory that they share
errors   why a request gets no answer, in the words of three dialects
workers  processes that share a port, and the one that watches them
http/    the routes
"""

from weft.jobs.serve.options import ModelChoice, ServeOptions
from weft.jobs.serve.workers import serve

__all__ = ["ModelChoice", "ServeOptions", "serve"]

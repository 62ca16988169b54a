"""Servers of embeddings under load, for `weft bench serve`.

workload                   folders of models, texts of 16 to 512 tokens, and the requests made of them
client                     requests over HTTP: so many at a time, or at random times, and how long each took
rates                      the most requests a second that a server answers within a p99; arrivals; slopes
processes                  servers as processes of their own, stopped while others have their turn
lineup                     the servers that can run a model, checked, then loaded in turns
alone                      weft's server by itself: overhead, saturation, overload, many requests
commands                   the whole command `weft embed`
sentence_transformers_app  the program of one: sentence-transformers behind FastAPI, with a batching queue
"""

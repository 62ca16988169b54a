"""What people run from a shell.

embed/  texts in, embeddings out
serve/  the same over HTTP
train/  a training run on tensor x pipeline x data parallel ranks
"""

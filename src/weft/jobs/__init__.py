"""What people run from a shell.

texts/  what jobs on texts have in common: records in, rows out
embed/  texts in, embeddings or scores out
serve/  the same over HTTP
train/  a training run on tensor x pipeline x data parallel ranks
"""

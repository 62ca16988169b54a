"""How a described model is computed: one executor for inference, on one rank or many, and the same layers in training.

parts        each rank's part of a model, as values
memory       what a program holds between calls: packed weights, tables, buffers, the cache
call         one call: its inputs, what it hands out, and the checks before addresses go to the native core
exchange     messages between ranks: agreement, sums, rows, columns, embedded words
passes       `RankProgram`, and one pass through the layers, alone or with the ranks of one host
network      the same pass with ranks on several hosts, on the overlapped matmuls
training     the layers as differentiable ops
generation   `weft.generate`, and how a token is chosen
"""

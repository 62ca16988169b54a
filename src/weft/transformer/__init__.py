"""How a described model is computed: one executor for inference, on one rank or many, and the same layers in training.

parts        each rank's part of a model, as values
memory       what a program holds between calls: packed weights, tables, buffers, the cache
call         one call: its inputs, what it hands out, and the checks before addresses go to the native core
exchange     messages between ranks: agreement, sums, rows, columns, embedded words
passes       one pass through the layers, alone or with the ranks of one host
program      `RankProgram`: inference on one rank or many, ready to run
network      the same pass with ranks on several hosts, on the overlapped matmuls
training     the layers as differentiable ops
sampling     how a token is chosen: rules, draws, log-probabilities
requests     one request for text: its options, checked; its state, its result
steps        requests that run together: slots of a cache, one pass a step
generation   `weft.generate` and `weft.Generator`
"""

"""How a described model is computed: one executor for inference, on one rank or many, and the same layers in training.

ranks        what one rank computes with, and how the tokens of a call lie on the ranks
exchange     messages between ranks: agreement, rows, columns, embedded words
memory       what a program holds between calls: packed weights, tables, buffers, the cache of keys and values
call         one call: its inputs, what it hands out, and the checks before addresses go to the native core
host_wire    sums and gathers among the ranks of one host, through shared memory
passes       one pass through the layers, alone or with the ranks of one host
network      the same pass with ranks on several hosts, on the overlapped matmuls
program      `RankProgram`: weights packed once, then calls
training     the layers as differentiable ops
sampling     the next token, from logits whose columns ranks share
generation   `weft.generate`
"""

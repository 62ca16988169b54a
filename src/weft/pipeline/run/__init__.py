"""Training steps.

api        `weft.Pipeline`
setup      what it is given, checked and put into shape
microbatch a batch as micro-batches, and random numbers that do not depend on the schedule
stage      forward and backward passes of one stage
split      a backward pass in two parts
runtime    one step of a schedule on one rank
reference  the same step in one process, without a pipeline
"""

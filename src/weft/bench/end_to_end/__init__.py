"""A tensor-parallel transformer trained, prefilled and decoded by weft, against torch, Hugging Face and vLLM.

run      the benchmark: its places in turn
cases    models as numbers, and which rows there are
inputs   batches, prompts and models with random weights
measure  the systems, each a function that all ranks call
lab      what the ranks of a lab run: calibration, systems in turns, a trace
rows     ratios, bounds and the figures that the README quotes
"""

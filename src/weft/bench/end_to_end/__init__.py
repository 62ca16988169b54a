"""A tensor-parallel transformer trained, prefilled and decoded by weft, against torch, Hugging Face and vLLM.

run    the benchmark: places in turn, and the rows and figures made of them
lab    what the ranks of a place run: systems in turns, a trace, calibration
cases  models as numbers, which rows there are, batches and prompts
"""

"""Models in stages, for the examples and the benchmarks."""

from weft.pipeline.models.gpt import GPTConfig, gpt_stage, parallelize_gpt
from weft.pipeline.models.utransformer import UConfig, u_graph, u_stage

__all__ = ["GPTConfig", "UConfig", "gpt_stage", "parallelize_gpt", "u_graph", "u_stage"]

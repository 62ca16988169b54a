"""Tensor-parallel transformers with every promise on: `weft.parallelize`."""

"""Prefill and decoding on the ranks of a group: `weft.generate`, and what `model.generate()` runs on."""

"""The command line: one file a command. `weft --help` starts without torch; a command imports it when it runs.

app      the commands and how their errors are shown; doctor, bench, lab check and trace show are short enough for it
doctor   what this machine has
demo     `weft demo`: every promise in one table
embed    `weft embed`
kernels  `weft kernels compile`
plan     `weft plan reshard` and `weft plan pipeline`
scale    `weft predict` and `weft simulate`: declared GPUs
train    `weft train-demo`
tune     `weft tune`
"""

from weft.cli.app import main

__all__ = ["main"]

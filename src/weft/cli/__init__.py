"""The command line. `weft --help` starts without torch; a command imports it when it runs.

app      the program; doctor, bench, demo and trace show are short enough for it
doctor   what this machine has
demo     every promise in one table
embed    `weft embed`
kernels  `weft kernels compile`
lab      `weft lab check`, `weft tune` and `weft train-demo`: what starts a lab
plan     `weft plan reshard` and `weft plan pipeline`
scale    `weft predict` and `weft simulate`: declared GPUs
output   what commands share: output files, the terminal
"""

from weft.cli.app import main

__all__ = ["main"]

"""The command line. `weft --help` starts without torch; a command imports it when it runs.

app      the program; bench, demo, kernels compile and trace show are short enough for it
doctor   what this machine has
embed    `weft embed`
lab      `weft lab check`, `weft tune` and `weft train-demo`: what starts a lab
paper    `weft plan reshard`, `weft plan pipeline`, `weft predict` and `weft simulate`: what needs no machine
serve    `weft serve`
"""

from weft.cli.app import main

__all__ = ["main"]

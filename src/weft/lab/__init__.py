"""A cluster of network namespaces with real, rate-limited links, on one machine.

cluster  `Cluster`: the caller's side
zygote   the lab's own processes, which fork the ranks and watch them
command  `Command`: any program on a host, torchrun too, next to the ranks
rank     one rank's process; the values that it, the zygote and the caller send each other
linux    namespaces, and the wires between them: what to tell `ip` and `tc`, and whether this machine can
card     DMA cards: messages between the ranks' memories, at the pace of a modelled wire
backend  torch.distributed on such cards: the process group, `collectives` its algorithms, `works` what calls give back
check    do the links carry what was asked of them?
"""

from weft.lab.check import check
from weft.lab.cluster import Cluster
from weft.lab.command import Command
from weft.lab.rank import Rank

__all__ = ["Cluster", "Command", "Rank", "check"]

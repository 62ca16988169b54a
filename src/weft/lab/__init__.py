"""A cluster of network namespaces with real, rate-limited links, on one machine.

cluster  `Cluster`: the caller's side
spec     what a lab is asked to be, and how a run ended: values
zygote   the lab's own processes, which fork the ranks and watch them
rank     one rank's process
network  the wires: what to tell `ip` and `tc`, and whether this machine can
linux    the few system calls that Python has no name for
check    do the links carry what was asked of them?
"""

from weft.lab.check import check
from weft.lab.cluster import Cluster
from weft.lab.rank import Rank

__all__ = ["Cluster", "Rank", "check"]

"""A cluster of network namespaces with real, rate-limited links, on one machine."""

from weft.lab.check import check
from weft.lab.cluster import Cluster
from weft.lab.rank import Rank

__all__ = ["Cluster", "Rank", "check"]

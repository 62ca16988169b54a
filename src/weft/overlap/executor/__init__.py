"""Runs overlapped matmuls on a CPU: all of the I/O of `weft.overlap`. It has one function for each kind of call.

call       what calls of all kinds have in common: request, plan, agreement, messages; and who runs a call
outgoing   matmuls whose output travels: `matmul_scatter`, `matmul_scatter_rows`
incoming   matmuls whose input travels: `gather_matmul`, `gather_rows_matmul`
short      both for short calls: one message each way, on the caller's thread
sums       what ranks have computed, added up in order
context    what is kept for a process group, and how its ranks agree before a call
planner    the plans of a group: speeds measured, plans chosen by rank 0, told to all
resources  what is made once and used again: shared buffers, packed weights, worker threads
"""

from weft.overlap.executor.incoming import gather_matmul, gather_rows_matmul
from weft.overlap.executor.outgoing import matmul_scatter, matmul_scatter_rows

__all__ = ["gather_matmul", "gather_rows_matmul", "matmul_scatter", "matmul_scatter_rows"]

"""Runs overlapped matmuls on a CPU: all of the I/O of `weft.overlap`.

calls     one function for each kind of call; which executor a tensor has
context   what is kept for a process group, and how its ranks agree before a call
planner   the plans of a group: measured, chosen by rank 0, told to all
resources  what is made once and used again: shared buffers, packed weights, worker threads
call      what a call of either kind has: deadline, trace and messages
outgoing  a matmul whose output travels; incoming: one whose input travels
"""

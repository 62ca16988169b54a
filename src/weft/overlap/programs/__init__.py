"""From a plan to what each rank does. Pure values: the executor runs them, the simulator times them.

outgoing  matmuls whose output travels: reduce-scatter, all-reduce, all-to-all
incoming  matmuls whose input travels: all-gather, and the way back of all-to-all
"""

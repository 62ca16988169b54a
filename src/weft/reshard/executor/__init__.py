"""Carries out a reshard plan: all of the I/O of `weft.reshard`.

executor  one plan, run again and again with the same memory; one move as the user asks for it, and its handle
workers   one run: the threads that receive, send and copy
script    what one rank does in a plan, in order (pure)
parts     chunks as slices of local tensors (pure)
staging   memory for chunks under way, bounded, and what the ranks of a host share of it
"""

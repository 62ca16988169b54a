"""Carries out a reshard plan: all of the I/O of `weft.reshard`.

job       one move of some tensors as the user asks for it: planned, checked, carried out; its handle
executor  one plan, run again and again with the same memory
workers   one run: the threads that receive, send and copy
script    what one rank does in a plan, in order (pure)
parts     chunks as slices of local tensors (pure)
staging   memory for chunks under way, bounded, and what the ranks of a host share of it
"""

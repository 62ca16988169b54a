"""Carries out a reshard plan: all of the I/O of `weft.reshard`.

job       one move of some tensors on one rank: planned, checked, carried out
executor  the bytes of a plan, from the first to the last
script    what one rank does, in order (pure); parts: chunks as slices of local tensors (pure)
lanes     the threads that send, receive and copy
staging   memory for chunks under way, bounded
"""

"""How tensors get from stage to stage.

placing   where stages live and how tensors lie between them (pure)
routes    which transfers follow each other on the same way, and what is said about a tensor before it comes (pure)
connections  process groups of their own, so that nothing waits behind a long message
links     what a rank has to do with others, and what it keeps from step to step
channel   the tensors of one route, one after the other; memory that ranks of a host share for it
exchange  all transfers of one rank in one step
threads   threads, how they wait for each other, and memory for what arrives
failure   how a failure becomes known to all ranks, and how a step ends
"""

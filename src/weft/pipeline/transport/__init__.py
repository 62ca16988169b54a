"""How tensors get from stage to stage: on a route, in one of its channels, as a message.

routes       which routes tensors take, where stages live and how tensors lie at both ends (pure)
connections  process groups of their own, and what is said there before a tensor comes
channels     the tensors of a route, one after the other; what a rank keeps for that from step to step
exchange     all transfers of one rank in one step
threads      who runs a job, how threads wait for each other, and memory for what arrives
failure      how a failure becomes known to all ranks
"""

"""How tensors get from stage to stage: on a route, in one of its channels, as a message.

routes       which routes tensors take, where stages live and how tensors lie at both ends (pure)
connections  process groups of their own, and a store where failures are told
channels     the tensors of a route, one after the other; what a rank keeps for that from step to step
exchange     all transfers of one rank in one step, and the headers that announce them
threads      who runs a job, how threads wait for each other, and memory for what arrives
"""

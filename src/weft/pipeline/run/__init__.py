"""Training steps.

api        `weft.Pipeline`
step       one step of a schedule on one rank
microbatch what each stage is given for each micro-batch
stage      forward and backward passes of one stage
clip       the norm of all stages' gradients
split      a backward pass in two parts
"""

"""What a step will do, without running it. Pure.

costs     what a step is made of: seconds of work and of transfers; which tensors must get from rank to rank
lowered   a schedule with its sends and receives, as a value and as text
lower     how it is made: actions and transfers run on a clock
simulate  the timeline of a step, and what no order can beat
"""

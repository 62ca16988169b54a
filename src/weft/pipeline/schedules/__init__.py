"""What each rank does, in which order, and how long that takes. Pure: values, without a process group or a device.

graph       actions, the tensors between stages, and what must come before what
schedule    a schedule of actions: its checks, its text
generators  from a name and sizes to a schedule
vees        those with two stages on each rank, in the shape of a V
search      the shortest step within a memory limit
costs       seconds of work and of transfers; which tensors must get from rank to rank
lowered     a schedule with its sends and receives, as a value and as text
lower       how it is made: actions and transfers run on a clock
simulate    the timeline of a step, and what no order can beat
"""

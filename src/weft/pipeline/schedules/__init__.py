"""What each rank computes, in which order: values, without transfers or time.

schedule    actions, and a schedule of them
generators  from a name and sizes to a schedule
graph       which tensors go from which stage to which
text        schedules as text and as torch's CSV, and whether ranks would wait for each other in a circle
"""

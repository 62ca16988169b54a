"""What each rank computes, in which order: values, without transfers or time.

graph       actions, the tensors between stages, and what must come before what
schedule    a schedule of actions: its checks, its text
generators  from a name and sizes to a schedule
"""

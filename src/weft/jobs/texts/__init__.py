"""Records in, rows out: what jobs on texts have in common. They can be stopped at any time, and go on.

readers  texts from files and pipes
batches  records to batches of tokens; inputs that came by lately are not computed again
flow     threads that work ahead of a loop, and behind it
formats  the bytes of outputs
writers  rows to files, with a journal
parts    every n-th text of a job, and how such parts become one output
"""

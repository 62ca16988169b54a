"""What parallel models read and write: weights in slices, whole models, checkpoints.

load               `load_sharded`: each rank reads its slices of safetensors files
save               `save_model`: whole tensors into safetensors files, a few at a time
checkpoint         `save_checkpoint` and `load_checkpoint`: model, optimiser and step, whole or not there
checkpoint_folder  a directory of checkpoints: names, locks, renames
shards             the tensors of a model, memory for this rank's shards, errors that all ranks raise together
"""

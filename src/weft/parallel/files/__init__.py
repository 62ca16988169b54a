"""What parallel models read and write: weights in slices, whole models, checkpoints."""

"""Training in FP8, measured: a log of what the tensors of a training run would lose, and training that loses it."""

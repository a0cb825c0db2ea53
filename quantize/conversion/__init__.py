"""Convert a checkpoint to FP8 by the names and shapes of its tensors, without data, a model or its class."""

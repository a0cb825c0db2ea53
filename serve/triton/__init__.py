"""Writes the Triton model repository of a run: configuration, model, image, and the plain engine beside it."""

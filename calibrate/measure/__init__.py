"""Measure a model's tensors while it runs, in memory or layer by layer: exact histograms, amax, second moments."""

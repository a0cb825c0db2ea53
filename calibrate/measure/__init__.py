"""Measure tensors while the model runs, in memory or layer by layer: exact histograms, and the sums beside them."""

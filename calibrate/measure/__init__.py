"""What is measured while the model runs: exact histograms and second moments, in memory or layer by layer, and the
statistics they add up to.
"""

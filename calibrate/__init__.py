"""Measures: text to windows of tokens, and the exact statistics of the float model on them. Knows nothing of FP8."""

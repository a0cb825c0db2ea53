"""Measures: text to windows of tokens, and the exact statistics of the float model on them. Knows nothing of FP8.

`text` makes windows, `model` reads a checkpoint, `measure` runs one on the other, `ranks` lets several machines do so.
"""

"""Calibration: windows of tokens from text, and exact statistics of the float model on them; independent of FP8.

`text` makes windows, `checkpoint` reads files, `model` builds the model, `measure` runs it on the windows, `ranks`
connects several processes, and `input` opens untrusted files.
"""

"""Measures: text to windows of tokens, and the exact statistics of the float model on them. Knows nothing of FP8.

`text` makes windows, `checkpoint` reads files, `model` makes a model of them, `measure` runs it on the windows, `ranks`
lets several machines do so; `input` is how all of them open what others wrote.
"""

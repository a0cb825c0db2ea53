"""Cut text into windows of tokens, and measure exact statistics of the float model on them. Nothing here depends on
FP8.

`text` makes windows, `checkpoint` reads files, `model` makes a model of them, `measure` runs it on the windows, `ranks`
spreads that over several machines; `input` opens untrusted files for all of them.
"""

"""Reads FP8 checkpoints in the forms that others write: from config.json and the headers, with NumPy and no torch.

`declared` says how the configuration has each module quantized, `read` which tensor is whose codes and scale.
"""

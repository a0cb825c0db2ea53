"""Reads FP8 checkpoints: that of a run, and those of others, from config.json and the headers.

`run_checkpoint`, `quantization_config`, `module_patterns` and `fp8_tensors` need no torch: serving hosts use them.
"""

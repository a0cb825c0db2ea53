"""Reads FP8 checkpoints, of runs and of other exporters, from config.json and the headers.

`run_checkpoint`, `quantization_config`, `module_patterns` and `fp8_tensors` need no torch: serving hosts use them.
"""

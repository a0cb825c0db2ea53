"""Hugging Face model to ONNX to engine.

`modules` replaces what cannot be traced, `graph` traces and writes, `lint` checks, `engine` builds and proves; all of
them read graphs by `onnx_file`.
"""

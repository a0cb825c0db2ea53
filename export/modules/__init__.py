"""Modules that replace a model's own before it is traced to a plain ONNX graph. Needs torch."""

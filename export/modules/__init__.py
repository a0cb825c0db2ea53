"""Modules that take the place of a model's own, so that tracing it gives a plain ONNX graph. Needs torch."""

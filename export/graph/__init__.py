"""Trace a model to ONNX, and edit the traced graph. All modules but `weight_scale_form` and `reuse` need torch."""

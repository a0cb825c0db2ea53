"""Model to ONNX: the trace and the passes over it. All but `weight_scale_form` and `reuse` needs torch."""

"""What takes the place of a model's modules so that tracing it gives a plain ONNX graph. Needs torch."""

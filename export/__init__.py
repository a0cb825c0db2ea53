"""Hugging Face model to ONNX to engine. Only `graph` needs torch; only `engine` imports TensorRT."""

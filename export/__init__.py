"""Hugging Face model to ONNX to engine: `graph`, `lint`, `engine`, in that order; `names` says what all call a node."""

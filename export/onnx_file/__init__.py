"""An ONNX file, read within bounds and indexed, whoever wrote it; and what fp8q calls the nodes of its own."""

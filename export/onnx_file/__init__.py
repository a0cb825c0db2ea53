"""Read and index ONNX files within bounds, whoever wrote them; and the names of fp8q's own nodes."""

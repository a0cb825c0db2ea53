"""Model to ONNX: what takes the place of its modules, the trace, the passes over it.

The only room of export that needs torch.
"""

"""Runs and deploys: sessions over ONNX Runtime and TensorRT, the generation loop, the Triton model repository."""

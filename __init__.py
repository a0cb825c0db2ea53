"""fp8q: from a Hugging Face checkpoint to a proven FP8 TensorRT engine. The public functions are in `fp8q.api`."""

__version__ = "0.2.0"

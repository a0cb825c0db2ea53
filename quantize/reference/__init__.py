"""The FP8 model as a torch module: it computes what an FP8 tensor core computes."""

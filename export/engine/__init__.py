"""Build engines from graphs, read their programs, and prove what they run. The only room that imports TensorRT."""

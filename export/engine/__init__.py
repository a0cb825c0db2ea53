"""Graph to engine: built, read again as a program, and proven. The only room that imports TensorRT."""

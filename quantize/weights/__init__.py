"""The scales and codes of weights: rounded to nearest, by GPTQ, or layer by layer on what quantized layers feed."""

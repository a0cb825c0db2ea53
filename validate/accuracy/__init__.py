"""The same tokens through every runtime, compared: perplexity, divergence, and what made a number none."""

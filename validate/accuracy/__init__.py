"""Compare runtimes on the same tokens: perplexity, divergence, and what made a number none."""

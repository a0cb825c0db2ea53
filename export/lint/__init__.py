"""Any FP8 graph against numbered rules, as a file: no torch, no GPU, no weight read."""

"""lm-eval's tasks on BF16 and FP8: the harness asked, its answers kept, and both models' answers paired."""

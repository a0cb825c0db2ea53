"""Needles: a sentence hidden in a long prompt and asked for at its end, which BF16 and FP8 have to find again."""

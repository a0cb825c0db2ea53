"""Check FP8 checkpoints of any exporter for faults that loaders do not report; without torch."""

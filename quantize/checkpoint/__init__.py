"""Writes the checkpoint of a run with its model card, and the BF16 and INT8 checkpoints that FP8 is compared with."""

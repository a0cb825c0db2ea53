"""Writes the checkpoint of a run, with its model card; and those that FP8 is compared with."""

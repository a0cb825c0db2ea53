"""Holds an FP8 checkpoint against rules, anyone's: what loaders would take wrong in silence, without torch."""

"""Generates from a run in this process: opens its session, and reads the chat template beside its model."""

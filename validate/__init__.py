"""Proves: the same tokens through every runtime, compared, and shown to somebody."""

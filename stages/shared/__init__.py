"""Shared by the stages: sources, texts, adapters, notes, the record of a stage, and opening a run."""

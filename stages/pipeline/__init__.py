"""The stages as values, the definition of a stage, and their common parts: notes, locks, checks of extras."""

"""The type of a stage, all stages as values, and their common steps: notes, locks, and checks for an extra."""

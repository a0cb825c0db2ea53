"""Every stage as a value, what a stage is, and what all of them do: note, lock, ask for an extra."""

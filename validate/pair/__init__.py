"""Compare two checkpoints of one model, whoever made them: how far apart they are, in which modules, and why."""

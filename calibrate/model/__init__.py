"""A checkpoint, read: which files, whether they make a model, its modules, and its weights, a layer at a time."""

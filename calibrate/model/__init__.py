"""A checkpoint's model: whether its files make one, its modules, and its weights, a layer at a time."""

"""A checkpoint, read: which files, whether they make a model, and its modules and weights, one layer at a time where
memory holds no more.
"""

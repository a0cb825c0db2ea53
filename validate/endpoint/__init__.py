"""Asks a server or a checkpoint for log-probabilities, and judges whether it is the model that was validated."""

"""Small random checkpoints."""

from ...architectures import random_checkpoint

__all__ = ["random_checkpoint"]  # a fixture

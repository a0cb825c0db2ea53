"""Decides: formats, clips, scales, which modules, and the checkpoint that holds them.

The only folder that knows E4M3. `forms` reads the checkpoints that others have quantized.
"""

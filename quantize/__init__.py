"""Decides: formats, clips, scales, which modules, and the checkpoint that holds them. The only folder that knows E4M3.

`codes` has the formats, `scales` and `weights` choose, `checkpoint` writes, `reference` computes with what was written;
`reading` reads FP8 checkpoints, those of others too, and `lint` holds them against rules.
"""

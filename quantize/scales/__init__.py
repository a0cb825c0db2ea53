"""The choice of scales: where to clip, which GEMMs run in FP8, and what `scales.json` says of each tensor."""

"""The stability checklist of `fp8q doctor RUN`: a verdict for everything that is known to go wrong, before it does.

limits    at which value a check is to be watched, or bad, and why
verdict   what a check says, and the document of all
remedies  the commands that help
stored    checks of the run's files alone: saturation, underflow, scales, jumps
watching  what the float model does on a few windows: norms, attention, tokens of the cache
beside    where BF16 and FP8 part, run beside each other
text      loops in greedy text
"""

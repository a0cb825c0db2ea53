"""Say what stands out in a run, and what helps: the findings of `fp8q inspect`, the stability checklist of `fp8q doctor
RUN`.

findings            what stands out in the statistics, ranked; the two what-ifs
certificate         whether the calibration text is enough
expert_coverage     which experts saw the calibration text
limits              at which value a check is to be watched, or bad, and why
checkup             what a check says, and the document of all
remedies            the commands that help
scale_checks        checks of the run's files alone: saturation, underflow, scales, jumps
activation_watch    what the float model does on a few windows: norms, attention, tokens of the cache
hidden_states       where BF16 and FP8 part, run beside each other
loops               loops in greedy text
model_checks        what the last three saw, as verdicts
"""

"""Advice on a run: the outliers of `fp8q inspect`, and the stability checklist of `fp8q doctor RUN`.

criteria            the register of both: name, text and limits of every check
findings            outliers in the statistics, ranked; the two what-ifs
certificate         the evidence that the calibration text is enough
expert_coverage     the tokens that each expert saw of the calibration text
checkup             the verdict of a check, the command that helps, the document of all and its tables
scale_checks        checks of the run's files alone: saturation, underflow, scales, jumps
activation_watch    the float model on a few windows: norms, attention, tokens of the cache
hidden_states       the layer where BF16 and FP8 diverge, on the same windows
loops               loops in greedy text
model_checks        verdicts on the results of the last three
"""

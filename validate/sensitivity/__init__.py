"""Find the tensor that the loss comes from: the KL that each causes when it alone is quantized, in FP32 arithmetic.

site_quantizers   what can be quantized alone (each weight, distinct activation, cache tensor), and what it loses
gradients         one pass forward and back that predicts the KL of all of them
layerwise         the same of a model that memory does not hold, decoder layer by decoder layer
single_site       the KL of one of them, measured
document          a tensor, named (`Site`), and `sensitivity.json`
"""

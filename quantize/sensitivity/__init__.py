"""Find the tensor that the loss comes from: the KL that each causes when it alone is quantized, in FP32 arithmetic.

site_quantizers   the sites (each weight, distinct activation, cache tensor), and the error that each makes
gradients         one pass forward and back that predicts the KL of all of them
layerwise         this prediction for a model larger than memory, decoder layer by decoder layer
single_site       the KL of one of them, measured
document          a tensor, named (`Site`), and `sensitivity.json`
"""

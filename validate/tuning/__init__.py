"""Decide what to do about the loss: the cheapest mix of one term, tails, two terms and BF16, of rounding and of the
cache's form.

choices     what can be chosen, what it costs where it is served, and what a mix is
frontier    the cheapest choices within a budget, and those of every budget
candidates  the scales and codes of all choices, and the model as a mix has it
gradients   one pass forward and back that predicts what each choice loses
joint       what mixes lose together, measured, and how the prediction is corrected by it
solve       the mix that a budget leads to, in the corrected prediction
document    `tune.json`
"""

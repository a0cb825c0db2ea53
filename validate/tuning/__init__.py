"""Decide what to do about the loss: the cheapest mix of one term, a tail, two terms and BF16, of rounding and of the
cache's form.

choices     the choices, their cost where they are served, and a mix of them
frontier    the cheapest choices within a budget, and those of every budget
candidates  the scales and codes of all choices, and the model as a mix has it
gradients   one pass forward and back that predicts the loss of each choice
joint       the measured loss of mixes, which corrects the prediction
solve       the cheapest mix within a budget, by the corrected prediction
document    `tune.json`
"""

"""Decide what to do about the loss: the cheapest mix of the forms of inputs, of rounding and of the cache's form.

`fp8q tune` and the search of `fp8q run` have one list of choices, one solver and one search, and differ in what
predicts a loss and in what measures it.

choices      the choices, their cost where they are served, and a mix of them
solve        the cheapest mix within a budget, and those of every budget
search       the cheapest mix within an aim, by losses that are measured in turn
joint        the measured loss of a mix
candidates   of `tune`: the scales and codes of all choices, and the model as a mix has it
gradients    of `tune`: one pass forward and back that predicts the loss of each choice
document     `tune.json`
form_search  of `run`: the losses that `sensitivity` predicts as those of choices, and the options of a mix
form_choice  `forms.json`
"""

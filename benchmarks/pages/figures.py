"""The figures within sentences of docs: name -> the text, from results, as `tables` puts it between its markers."""

from collections.abc import Callable, Mapping

from markdown import load


def tail_operations() -> str:
    """Operations that a tail of 64 adds to a prompt of 2,048 tokens, over those of one term."""
    ratio = load("tail_cost")["results"]["tail of 64"]["operations_ratio"]
    return f"{100 * (ratio - 1):.0f} %"


FIGURES: Mapping[str, Callable[[], str]] = {make.__name__: make for make in (tail_operations,)}

"""The figures within sentences of docs: name -> the text, from results, as `tables` puts it between its markers."""

from collections.abc import Callable, Mapping

from markdown import load


def tail_operations() -> str:
    """Operations that a tail of 64 adds to a prompt of 2,048 tokens, over those of one term."""
    ratio = load("tail_cost")["results"]["tail of 64"]["operations_ratio"]
    return f"{100 * (ratio - 1):.0f} %"


def runtimes_apart() -> str:
    """The largest difference of perplexity between reference and ONNX Runtime, of the model with heads of 8."""
    forms = [found["perplexity"] for found in load("architectures")["results"]["stories260k"].values()]
    return f"{max(abs(found['onnxruntime'] / found['reference'] - 1) for found in forms):.1%}".replace("%", " %")


def two_terms_apart() -> str:
    """The largest mean KL of ONNX Runtime from the exact reference in two terms, of all architectures tried."""
    results = load("unseen_architectures")["results"].values()
    largest = max(found["two_terms"]["kl_nats"] for found in results if "two_terms" in found)
    return f"{largest:.1e} nats".replace("e-0", "e-")


FIGURES: Mapping[str, Callable[[], str]] = {
    make.__name__: make for make in (tail_operations, runtimes_apart, two_terms_apart)
}

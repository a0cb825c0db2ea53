"""The figures within sentences of docs: name -> the text, from results, as `tables` puts it between its markers."""

from collections.abc import Callable, Iterable, Mapping

from markdown import load


def _percent(shares: Iterable[float]) -> str:
    """Return the range of shares, in whole percent."""
    ordered = sorted(shares)
    return f"{100 * ordered[0]:.0f} to {100 * ordered[-1]:.0f} %"


def values_of_products() -> str:
    """KL of an FP8 cache of values alone, as a share of that of all products, over the models."""
    models = load("kv_cache")["kl_mean_nats_times_1e6"].values()
    return _percent(found["V"] / found["for comparison: all W8A8 products, cache wide"] for found in models)


def keys_over_values() -> str:
    """KL of an FP8 cache of keys alone over that of values alone, over the models but stories260k (heads of 8)."""
    models = load("kv_cache")["kl_mean_nats_times_1e6"]
    ratios = sorted(found["K"] / found["V"] for name, found in models.items() if name != "stories260k")
    return f"{ratios[0]:.1f} to {ratios[-1]:.1f}"


def sequential_below_gptq() -> str:
    """How much less KL `sequential` leaves than `gptq`, with activations of one term, over the models."""
    models = load("weight_rounding")["results"].values()
    rows = [found["one_term_over_whole_weight"] for found in models]
    return _percent(1 - row["mse, sequential"] / row["mse, gptq"] for row in rows)


def sequential_below_gptq_alone() -> str:
    """How much less KL `sequential` leaves than `gptq`, with exact activations, over the models."""
    models = load("weight_rounding")["results"].values()
    rows = [found["kl_mean_micronats"] for found in models]
    return _percent(1 - row["mse, sequential"] / row["mse, gptq"] for row in rows)


def harm_in_order() -> str:
    """The largest ratio of harmful windows that follow in a text to those that the certificate predicts."""
    models = load("certificate")["results"].values()
    rates = [rates["harmful"] for found in models for rates in found["by_windows"].values()]
    return f"{max(each['happened_in_order'] / each['told'] for each in rates if each['told']):.1f}"


def exceeds_in_order() -> str:
    """The largest ratio of windows beyond the clip, in the order of a text, to those that the certificate predicts."""
    models = load("certificate")["results"].values()
    rates = [rates["exceeds"] for found in models for rates in found["by_windows"].values()]
    return f"{max(each['happened_in_order'] / each['told'] for each in rates if each['told']):.1f}"


FIGURES: Mapping[str, Callable[[], str]] = {
    make.__name__: make
    for make in (
        values_of_products,
        keys_over_values,
        sequential_below_gptq,
        sequential_below_gptq_alone,
        harm_in_order,
        exceeds_in_order,
    )
}

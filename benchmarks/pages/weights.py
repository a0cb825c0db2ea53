"""The tables of docs/weights.md: what choosing and rounding weights gives, and takes."""

from markdown import MEGABYTE, Figures, gigabytes, load, table


def weight_mse() -> str:
    """The search for weight scales beside ModelOpt's, by threads."""
    rows = [
        [
            str(found["threads"]),
            f"{found['ours_s']:.3f} s",
            f"{found['modelopt_s']:.2f} s",
            f"{found['ratio']:.0f}",
            f"{found['cpu_ratio']:.0f}",
            f"{found['error_ratio']:.3f}",
            f"{found['ceiling_s']:.3f} s",
        ]
        for found in load("weight_mse")["results"]
    ]
    head = ["threads", "ours", "ModelOpt", "ratio", "the same in processor time", "error, ours over ModelOpt's"]
    return table([*head, "one read of the weights"], rows)


def weight_rounding() -> str:
    """KL with activations of one term, relative to one amax scale for the whole weight."""
    models = load("weight_rounding")["results"]
    names = ("amax, nearest", "mse, nearest", "amax, gptq", "mse, gptq", "mse, sequential", "lossless weights")
    rows = [
        [_step(name), *(f"{found['one_term_over_whole_weight'][name]:.2f}" for found in models.values())]
        for name in names
    ]
    return table(["weights", *(_sized(name, found) for name, found in models.items())], rows)


def weights_alone() -> str:
    """KL of each step of rounding where nothing but weights is quantized."""
    models = load("weight_rounding")["results"]
    steps = ("nearest", "one after the other", "in falling order", "gptq", "sequential")
    rows = [
        [_step(name), *(_short(found["kl_mean_micronats"][name]) for found in models.values())]
        for name in ("amax, nearest", "amax, gptq", *(f"mse, {step}" for step in steps))
    ]
    return table(["weights", *(_sized(name, found) for name, found in models.items())], rows)


def weight_seconds() -> str:
    """What rounding takes."""
    models = load("weight_rounding")["results"]
    measuring = [
        [f"measuring for `{rounding}`", *(_short(found["measure_s"][rounding]) for found in models.values())]
        for rounding in ("nearest", "gptq")
    ]
    rounding = [
        [f"rounding, {_step(name)}", *(_short(found["seconds"][name]) for found in models.values())]
        for name in ("mse, nearest", "mse, gptq", "mse, sequential")
    ]
    return table(["seconds", *(_sized(name, found) for name, found in models.items())], [*measuring, *rounding])


def weight_shapes() -> str:
    """What one matrix takes by `gptq`."""
    rows = [
        [
            "[{}, {}]".format(*shape.split("x")),
            f"{found['factor_s']:.0f} s",
            f"{found['round_s']:.0f} s",
            gigabytes(found["moments_bytes"]),
            gigabytes(found["peak_bytes_more"]),
        ]
        for shape, found in load("weight_rounding")["shapes"].items()
    ]
    return table(["weight [out, in]", "factoring H", "rounding", "H", "memory besides weight and H"], rows)


def sequential_memory() -> str:
    """What `--stream --weight-rounding sequential` takes, by the number of layers."""
    result = load("memory_sequential")
    rows = [
        [
            str(found["layers"]),
            gigabytes(found["checkpoint_bytes"]),
            *(gigabytes(found["stages"][stage]["peak_anonymous_bytes"]) for stage in ("start", "measure", "quantize")),
            f"{found['stages']['quantize']['seconds'] / found['layers']:.0f}",
        ]
        for found in result["checkpoints"]
    ]
    head = ["layers", "checkpoint", "peak: start", "measuring", "rounding and writing", "seconds a layer"]
    return table(head, rows)


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}"


def _step(name: str) -> str:
    method, comma, step = name.partition(", ")
    if not comma:
        return "not rounded at all: the floor"
    return f"`{method}`, {step if ' ' in step else f'`{step}`'}"


def _sized(name: str, found: Figures) -> str:
    return f"{name} ({found['parameters'] / MEGABYTE:.1f} M)"


TABLES = (
    weight_mse,
    weight_rounding,
    weights_alone,
    weight_seconds,
    weight_shapes,
    sequential_memory,
)

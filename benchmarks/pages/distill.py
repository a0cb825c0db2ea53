"""The tables of docs/distill.md: KL before and after learning, ModelOpt's beside it, and the memory of `--stream`."""

from collections.abc import Sequence

from markdown import gigabytes, load, table

RESULTS = ("distill_most", "distill", "distill_ways")
PEERS = ("distill_peer", "distill_peer_others")


def distill() -> str:
    """KL before and after learning, on the model's domain and on another, the row of most text first."""
    return _learned(RESULTS)


def distill_options() -> str:
    """The same with scales that learn and with rounded gradients."""
    return _learned(("distill_options",))


def _learned(names: Sequence[str]) -> str:
    rows = []
    for result in map(load, names):
        for model, ways in result["results"].items():
            for way, found in ways.items():
                cells = [f"{found[when][text]:.0f}" for text in found["before"] for when in ("before", "after")]
                rows.append([f"{model}, {way}", *cells, f"{found['tokens']:,}", f"{found['seconds'] / 60:.0f}"])
    head = [f"{text}, {when}" for text in ("own domain", "Wikipedia") for when in ("before", "after")]
    return table(["", *head, "tokens", "minutes"], rows)


def distill_peer() -> str:
    """KL before and after learning the same text: ModelOpt's distillation, and fp8q's by form."""
    rows = [
        [
            f"{model}: {name}",
            "nearest rounding" if name.startswith("ModelOpt") else "`sequential` rounding",
            f"{found['before']:.0f}",
            f"{found['after']:.0f}",
            f"{found['after'] / found['before'] - 1:+.1%}",
        ]
        for result in map(load, PEERS)
        for model, ways in result["results"].items()
        for name, found in ways.items()
    ]
    return table(["", "begins at", "before", "after", "change"], rows)


def distill_memory() -> str:
    """The peaks of calibrating and of learning layer by layer."""
    rows = []
    for found in load("distill_memory")["checkpoints"]:
        peaks = (found["stages"][stage]["peak_anonymous_bytes"] for stage in ("calibrate", "distill"))
        rows.append([str(found["layers"]), *(gigabytes(peak) for peak in peaks), f"{found['ratio']:.2f}"])
    return table(["layers", "`calibrate --stream`, `sequential`", "`distill --stream`", "ratio"], rows)


TABLES = (distill, distill_memory)
DECISION_TABLES = (distill_peer, distill_options)

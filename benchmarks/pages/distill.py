"""The tables of docs/distill.md: KL before and after learning, ModelOpt's beside it, and the memory of `--stream`."""

from markdown import gigabytes, load, table


def distill() -> str:
    """KL before and after learning, on the model's domain and on another."""
    rows = []
    for name, forms in load("distill")["results"].items():
        for form, found in forms.items():
            cells = [f"{found[when][text]:.0f}" for text in found["before"] for when in ("before", "after")]
            steps, seconds = found["held_out"][-1][0], found["seconds"]
            rows.append([f"{name}, {form}", *cells, f"{found['tokens']:,}", f"{steps}", f"{seconds / 60:.0f}"])
    texts = {"own": "own domain", "other": "Wikipedia"}
    head = [f"{texts[text]}, {when}" for text in found["before"] for when in ("before", "after")]
    return table(["", *head, "tokens", "steps", "minutes"], rows)


def distill_peer() -> str:
    """KL before and after learning the same text: ModelOpt's distillation, and fp8q's by form."""
    rows = [
        [
            name,
            begins,
            f"{found['before']:.0f}",
            f"{found['after']:.0f}",
            f"{found['after'] / found['before'] - 1:+.1%}",
        ]
        for name, found in load("distill_peer")["results"]["demo"].items()
        for begins in ["nearest rounding" if name.startswith("ModelOpt") else "`sequential` rounding"]
    ]
    return table(["", "begins at", "before", "after", "change"], rows)


def distill_memory() -> str:
    """The peaks of calibrating and of learning layer by layer."""
    rows = []
    for found in load("distill_memory")["checkpoints"]:
        peaks = (found["stages"][stage]["peak_anonymous_bytes"] for stage in ("calibrate", "distill"))
        rows.append([str(found["layers"]), *(gigabytes(peak) for peak in peaks), f"{found['ratio']:.2f}"])
    return table(["layers", "`calibrate --stream`, `sequential`", "`distill --stream`", "ratio"], rows)


TABLES = (distill, distill_peer, distill_memory)

"""Which servers of another model does `fp8q compare` call the validated one, where that is SmolLM2-135M?

    python benchmarks/wrong_models.py [--folder build/real] [--windows 4] [--context 96] [--save wrong_models]

Judges the servers of `tests/validate/endpoint/wrong_models.py`, whose test holds them on the demo: some sixty of other
models (the final norm's sign, swapped layers, another tokenizer, a cache in FP8 …) and a dozen implementations of the
validated one, with inputs in two codes and in one. The ceiling: no other model passes, and every implementation does.
Those of `NEAR` may pass: a server of the validated model can be as far from it, and the verdict says so. The text is
the demo's. Needs the checkpoint that `make real` makes. Prints one JSON line, and each verdict to standard error; exit
status 1 where another model passes that is not near, or an implementation does not.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models import DEMO
from real_checkpoints import FOLDER, checkpoint
from result import arguments, described, publish

from fp8q.tests.validate.endpoint.wrong_models import NEAR, RIGHT, Variant, World, compared, wrong_models
from fp8q.validate.endpoint.judgement import Judged

MODEL = "smollm2"
#: Number of codes of an input -> its name in the result.
CODES = {2: "two codes", 1: "one code"}
Row = dict[str, Any]


def row_of(judged: Judged) -> Row:
    """Return the verdict, the KL from the nearest validated runtime in nats, and the least KL that would not pass."""
    distances = [row.kl_nats.mean for row in judged.runtimes if row.validated and row.kl_nats]
    return {
        "verdict": judged.verdict,
        "passes": compared(judged).passes,
        "kl_nats": min(distances),
        "noticed_kl_nats": judged.noticed.kl_nats if judged.noticed else None,
    }


def rows_of(world: World, variants: Mapping[str, Variant]) -> dict[str, Row]:
    """Judge each of `variants`: name -> row."""
    rows = {}
    for name, variant in variants.items():
        rows[name] = row_of(world.judged(variant))
        print(f"{CODES[world.terms]}, {name}: {rows[name]}", file=sys.stderr, flush=True)
    return rows


def wrong_verdicts(terms: int, other: Mapping[str, Row], right: Mapping[str, Row]) -> list[str]:
    """Name the other models that pass and are not `NEAR`, and the implementations that do not pass."""
    passing = [name for name, row in other.items() if row["passes"] and name not in NEAR[terms]]
    return passing + [name for name, row in right.items() if not row["passes"]]


def main() -> int:
    """Judge all servers, and publish the result."""
    parser = arguments(__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where `make real` leaves its checkpoints")
    parser.add_argument("--windows", type=int, default=4, help="of the demo's text")
    parser.add_argument("--context", type=int, default=96, help="tokens of a window")
    asked = parser.parse_args()
    head = described("wrong_models")
    text = (DEMO / "evaluation.txt").read_text(encoding="utf-8")
    results, wrong = {}, []
    for terms, name in CODES.items():
        world = World(checkpoint(MODEL, asked.folder), text, terms, windows=asked.windows, length=asked.context)
        other, right = rows_of(world, wrong_models(world)), rows_of(world, RIGHT)
        results[name] = {"other": other, "right": right}
        wrong += [f"{name}: {verdict}" for verdict in wrong_verdicts(terms, other, right)]
    figures = {"model": MODEL, "windows": asked.windows, "context": asked.context, "results": results}
    return publish(head, figures | {"wrong": wrong, "passed": not wrong}, asked.save)


if __name__ == "__main__":
    sys.exit(main())

"""Hide sentences in long prompts, and count those that FP8 finds again, beside BF16.

    python benchmarks/needles.py [MODEL=CALIBRATION,EVALUATION …] [--lengths 1024,4096] [--trials 2]
        [--accumulator fp22] [--sums 1024] [--samples 64] [--context 256] [--save needles]

The model of `examples/needles` has 4,096 positions, and was trained to find such sentences; each length has `--trials`
needles at each of five depths. Asked are BF16, FP8 and FP8 with its cache, in one term and in two; then, in one term
with attention in FP8 too (`fp8q export --attention fp8`), one needle for each depth of prompts of `--sums` tokens, with
sums of codes in FP32 and in a tensor core's accumulator, which take minutes for prompts of 4,096. Prints one JSON line;
exit status 1 where BF16 finds fewer than nine of ten needles of the longest prompts: FP8 shows nothing then.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from models import DEMO, ModelTexts, model_arguments
from result import ROOT, described, publish

from fp8q.api import CalibrateOptions, ExportOptions, ValidateOptions, calibrate, export
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import Accumulator, Terms
from fp8q.stages.needles import ask_needles
from fp8q.stages.pipeline.stage import Notes
from fp8q.validate.needles.document import needle_rows

NEEDLES = ModelTexts(
    str(ROOT / "examples" / "needles" / "checkpoint"), str(DEMO / "calibration.txt"), str(DEMO / "evaluation.txt")
)
FORMS: dict[str, Terms] = {"one term": 1, "two terms": 2}
#: The form whose attention is asked in FP8 too.
ADDED = "one term"
LEAST_SHARE = 0.9


def rows(run: Run, lengths: tuple[int, ...], trials: int, accumulator: Accumulator | None) -> list[dict[str, Any]]:
    """The rows of `run`: runtime, length, needles found by depth, and the answers' log-probability."""
    options = ValidateOptions(needles=lengths, needle_trials=trials, accumulator=accumulator)
    return [row.model_dump(exclude_none=True) for row in needle_rows(ask_needles(run, Notes(SILENT), options))]


def measure(texts: ModelTexts, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Form -> the rows of its needles."""
    found, lengths = dict[str, list[dict[str, Any]]](), tuple(options.lengths)
    with tempfile.TemporaryDirectory() as directory:
        for form, terms in FORMS.items():
            chosen = CalibrateOptions(
                samples=options.samples, seq_len=options.context, activation_terms=terms, kv_cache="fp8"
            )
            run = calibrate(texts.directory, texts.data, Path(directory) / form, texts.eval_data, chosen)
            found[form] = rows(run, lengths, options.trials, None)
            if form == ADDED:
                export(run.root, ExportOptions(attention="fp8"))
                found[f"{form}, attention in FP8"] = rows(run, (options.sums,), 1, options.accumulator)
            print(f"{texts.name}: {found}", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Measure, judge, print."""
    parser = model_arguments(__doc__, context=256, samples=64, trials=2, sums=1024)
    parser.add_argument("--lengths", type=lambda text: sorted(map(int, text.split(","))), default=[1024, 4096])
    parser.add_argument("--accumulator", choices=("fp22", "two-level"), default="fp22")
    options = parser.parse_args()
    head = described("needles")
    results = {texts.name: measure(texts, options) for texts in options.models or [NEEDLES]}
    longest = [
        row["all"]
        for forms in results.values()
        for row in forms[ADDED]
        if row["runtime"] == "bf16" and row["length"] == options.lengths[-1]
    ]
    passed = all(cell["right"] >= LEAST_SHARE * cell["needles"] for cell in longest)
    figures = {
        name: getattr(options, name) for name in ("samples", "context", "trials", "lengths", "accumulator", "sums")
    }
    return publish(head, {**figures, "results": results, "passed": passed}, options.save)


if __name__ == "__main__":
    sys.exit(main())

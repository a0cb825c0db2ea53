"""How much memory `fp8q validate` takes: no more than the largest of its runtimes takes alone.

    python benchmarks/validate_memory.py [--context 512]

Calibrates the demo, and validates it in processes of their own: each runtime by itself, then all of them in one call.
The peak is that of anonymous memory (`synthetic`) from when the stage begins. The ceiling is the largest single
runtime's; the libraries that the process has imported before it begins are in both, 0.3 GB of them. By themselves
runtimes are compared with nothing, and libraries keep some of what each first use made: the call with all of them may
take a fifth more. Prints one JSON line; exit status 1 where it takes more than that.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from shutil import copytree

from result import arguments, described, publish
from synthetic import DEMO, sampled

from fp8q.api import CalibrateOptions, ValidateOptions, calibrate, validate

RUNTIMES = ("bf16", "fp32", "reference", "onnxruntime")
TOLERANCE = 1.2


def measured(run: str, runtimes: str, context: int) -> None:
    """What the measured process does: names the stage when its libraries are there, and says what it found."""
    print("start", flush=True)
    import onnxruntime
    import transformers

    assert onnxruntime.__version__
    assert transformers.__version__
    print("validate", flush=True)
    validate(Path(run), options=ValidateOptions(tuple(runtimes.split(",")), context))


def taken(folder: Path, runtimes: str, context: int) -> dict[str, float]:
    """Peak bytes and seconds of a process that validates a fresh copy of the run with `runtimes`."""
    run = copytree(folder / "run", folder / runtimes)
    return sampled(__file__, ["--context", str(context), "--child", str(run), runtimes])["validate"]


def main() -> int:
    """Measure, print, and say by the exit status whether the limit was met."""
    parser = arguments(__doc__)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        run, runtimes = asked.child
        measured(run, runtimes, asked.context)
        return 0
    head = described("validate_memory")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        texts = [str(DEMO / name) for name in ("calibration.txt", "evaluation.txt")]
        calibrate(str(DEMO / "checkpoint"), texts[0], folder / "run", texts[1], CalibrateOptions())
        found = {runtime: taken(folder, runtime, asked.context) for runtime in RUNTIMES}
        together = taken(folder, ",".join(RUNTIMES), asked.context)
        tokens = json.loads((folder / ",".join(RUNTIMES) / "accuracy.json").read_bytes())["protocol"]["tokens"]
    ceiling = max(alone["peak_anonymous_bytes"] for alone in found.values())
    result = {
        "tokens": tokens,
        "context": asked.context,
        "runtimes": found,
        "together": together,
        "ceiling_bytes": ceiling,
        "limit_bytes": round(TOLERANCE * ceiling),
        "passed": together["peak_anonymous_bytes"] <= TOLERANCE * ceiling,
    }
    return publish(head, result, asked.save)


if __name__ == "__main__":
    sys.exit(main())

"""What calibrating, converting and comparing LLMs that people know takes: memory, time, and the same codes both ways.

    python benchmarks/real_sizes.py [smollm2 gemma3 qwen_coder] [--samples 4] [--seq-len 256]
        [--windows 10] [--context 64] [--commands PATTERN] [--folder build/real]

Each command is a process of its own, on WikiText-2's validation text: `fp8q convert`, `fp8q calibrate` layer by layer
and in memory, and `fp8q compare --stream` of the original with the converted checkpoint, on few windows of the test
text. Where `--commands` asks for it, `fp8q calibrate --preset exact --for vllm` both ways too. The peak is that of
anonymous memory; processor time is of all threads, and tells more than seconds on a machine that does something else as
well. Both ways of calibrating by the defaults must write the same bytes of weights and the same scales. The floor of
calibrating in memory is the checkpoint, which stands beside the peak. Prints one JSON line; exit status 1 where a peak
exceeds its limit or the two ways differ.
"""

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from convert import measured
from models import SHARED
from real_checkpoints import FOLDER, MODELS, checkpoint
from result import arguments, described, publish

#: Command -> the most anonymous memory that it may take, in bytes.
LIMIT_BYTES = {
    "convert": 1e9, "calibrate --stream": 3e9, "calibrate": 6e9, "compare --stream": 3e9,
    "--preset exact --stream": 3e9, "--preset exact": 6e9,
}  # fmt: skip
#: The commands that are run unless others are named: rounding the 1.5B by GPTQ takes 20 minutes each way.
QUICK = "^(?!.*exact)"
#: What a stock server computes best: weights alone in FP8, by GPTQ with first tokens, the costliest in BF16.
EXACT = ("--preset", "exact", "--for", "vllm")
#: Exit statuses that say that a command did its work: `compare` ends with 3 where the checkpoint loses more than its
#: limits, which is nothing about sizes.
GOOD = (0, 3)
#: Files of a run that both ways of calibrating must write alike.
SAME = ("model/*.safetensors", "scales.json")


def commands(model: Path, folder: Path, asked: argparse.Namespace) -> dict[str, list[str]]:
    """Command of `LIMIT_BYTES` -> the words behind `fp8q`, which write into `folder`."""
    windows = ["--samples", str(asked.samples), "--seq-len", str(asked.seq_len)]
    calibrate = ["calibrate", str(model), "--data", asked.data, "--eval-data", asked.eval_data, *windows, "--no-graph"]
    evaluation = ["--data", asked.eval_data, "--context", str(asked.context)]
    evaluation += ["--max-tokens", str(asked.windows * asked.context)]
    converted = str(folder / "converted")
    return {
        "convert": ["convert", str(model), "--out", converted],
        "calibrate --stream": [*calibrate, "--stream", "--out", str(folder / "streamed")],
        "calibrate": [*calibrate, "--no-stream", "--out", str(folder / "whole")],
        "compare --stream": [
            "compare", str(model), "--model", converted, *evaluation, "--stream", "--out", str(folder / "comparison")
        ],
        "--preset exact --stream": [*calibrate, *EXACT, "--stream", "--out", str(folder / "exact, streamed")],
        "--preset exact": [*calibrate, *EXACT, "--no-stream", "--out", str(folder / "exact")],
    }  # fmt: skip


def measure(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Run the commands on a model: their figures, what both ways of calibrating differ in, and the distance found."""
    model = checkpoint(name, asked.folder)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=asked.folder) as scratch:
        folder = Path(scratch)
        for command, words in commands(model, folder, asked).items():
            if not re.search(asked.commands, command):
                continue
            print(f"{name}: {command} …", file=sys.stderr, flush=True)
            figures[command] = measured([sys.executable, "-m", "fp8q", *words], good=GOOD)
            print(figures[command], file=sys.stderr, flush=True)
        result: dict[str, Any] = {"checkpoint_bytes": size, "commands": figures}
        if {"calibrate", "calibrate --stream"} <= figures.keys():
            result["differing"] = differing_files(folder / "streamed", folder / "whole")
        if "compare --stream" in figures:
            comparison = json.loads((folder / "comparison" / "comparison.json").read_bytes())
            result["converted"] = {key: comparison[key] for key in ("kl_nats", "flips", "verdict")}
    return result


def differing_files(one: Path, other: Path) -> list[str]:
    """The files of `SAME` that two runs do not have alike."""
    names = {str(file.relative_to(run)) for run in (one, other) for name in SAME for file in run.glob(name)}
    assert names, f"{one}: has no file of {SAME}"
    return sorted(name for name in names if not same_bytes(one / name, other / name))


def same_bytes(one: Path, other: Path) -> bool:
    """Compare two files piece by piece; one that is not there is like no other."""
    if not (one.is_file() and other.is_file()):
        return False
    with one.open("rb") as first, other.open("rb") as second:
        while piece := first.read(1 << 22):
            if piece != second.read(len(piece)):
                return False
        return not second.read(1)


def missed(results: dict[str, dict[str, Any]]) -> list[str]:
    """The limits that are exceeded, and the files that differ, one line each."""
    lines = []
    for name, result in results.items():
        for command, figures in result["commands"].items():
            peak, limit = figures["peak_anonymous_bytes"], LIMIT_BYTES[command]
            if peak > limit:
                lines.append(f"{name}: {command}: {peak / 1e9:.2f} GB, over {limit / 1e9:g} GB")
        differing = result.get("differing", [])
        lines += [f"{name}: {file} differs between calibrate and calibrate --stream" for file in differing]
    return lines


def main() -> int:
    """Measure, print, judge."""
    parser = arguments(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(MODELS)}; all without")
    parser.add_argument("--commands", default=QUICK, metavar="PATTERN", help="a regular expression of those to run")
    parser.add_argument("--samples", type=int, default=4, help="windows to calibrate on")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=10, help="windows to compare on, at least ten")
    parser.add_argument("--context", type=int, default=64, help="tokens of a window to compare on")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--data", default=str(SHARED / "data" / "wikitext-2-raw-valid.txt"))
    parser.add_argument("--eval-data", default=str(SHARED / "data" / "wikitext-2-raw-test.txt"))
    asked = parser.parse_args()
    if unknown := [name for name in asked.models if name not in MODELS]:
        parser.error(f"{unknown[0]}: is no model here; there are {', '.join(MODELS)}")
    head = described("real_sizes")
    results = {name: measure(name, asked) for name in asked.models or MODELS}
    lines = missed(results)
    figures = {key: vars(asked)[key] for key in ("samples", "seq_len", "windows", "context")}
    return publish(head, {**figures, "results": results, "missed": lines, "passed": not lines}, asked.save)


if __name__ == "__main__":
    sys.exit(main())
